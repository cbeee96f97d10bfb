"""Clients that behave as people's programs do: they wait so long and no longer, read a stream to its end, hang up.

They say what they got in one word, and how long it took; what a word means is decided here and nowhere else.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

__all__ = ["Answer", "ask", "chat", "client"]

OK, FAILED, REFUSED, BROKEN, GAVE_UP = "ok", "engine_failed", "refused", "broken", "gave_up"


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request ended.

    `word`: `ok`; `engine_failed`, an engine's failure was passed on (5xx but 503, or an error event in a stream);
    `refused` (429, 503); `broken`, the connection or the stream was cut; `gave_up`, the client's patience ended.
    """

    word: str
    status: int
    waited_s: float
    detail: str = ""


def chat(text: str = "Hello.", *, is_stream: bool = False, max_tokens: int = 4, model: str = "mock") -> dict[str, Any]:
    """The body of a chat completion request."""
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": is_stream}


@contextlib.asynccontextmanager
async def client(connections: int) -> AsyncIterator[httpx.AsyncClient]:
    """For requests to this machine; the environment's proxies are not used, and only `ask` has a limit of time."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as http:
        yield http


async def ask(http: httpx.AsyncClient, url: str, body: dict[str, Any], *, patience_s: float) -> Answer:
    """POST `body` as a chat and read the answer to its end, for at most `patience_s`. Never raises."""
    began_s = time.monotonic()
    status = 0
    try:
        async with asyncio.timeout(patience_s), http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            status = answer.status_code
            said = (await answer.aread()).decode(errors="replace")
        word, detail = _judge(status, said, is_stream=body["stream"])
    except TimeoutError:
        word, detail = GAVE_UP, f"after {patience_s:g} s"
    except httpx.HTTPError as error:
        word, detail = BROKEN, type(error).__name__
    return Answer(word, status, time.monotonic() - began_s, detail)


def _judge(status: int, said: str, *, is_stream: bool) -> tuple[str, str]:
    if status in (429, 503):
        return REFUSED, said[:200]
    if status != 200:
        return FAILED, said[:200]
    if not is_stream:
        return (OK, "") if "choices" in said else (BROKEN, said[:200])
    events = [line.removeprefix("data:").strip() for line in said.splitlines() if line.startswith("data:")]
    errors = [event for event in events if event != "[DONE]" and "error" in json.loads(event)]
    if errors:
        return FAILED, errors[0][:200]
    return (OK, "") if events and events[-1] == "[DONE]" else (BROKEN, "the stream ended without [DONE]")
