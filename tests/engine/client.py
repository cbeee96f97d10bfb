"""What a user's program does: the official OpenAI client, stream and not, with the answer's headers kept."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import openai

T = TypeVar("T")

#: A 28,000-token prompt that waits behind others on two noisy cores.
ANSWER_MAX_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How one call ended. `error` is the error object of the body or of the stream, empty where it was served."""

    status: int
    headers: Mapping[str, str]
    text: str = ""
    prompt_tokens: int | None = None
    error: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_served(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def pool(self) -> str | None:
        return self.headers.get("x-router-pool")

    @property
    def counted_tokens(self) -> int:
        """The router's own count of the prompt."""
        return int(self.headers["x-router-prompt-tokens"])

    @property
    def is_counted_exactly(self) -> bool:
        return self.headers.get("x-router-prompt-tokens-exact") == "true"


@asynccontextmanager
async def openai_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client that never tries again by itself: what the router does must show."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ANSWER_MAX_S) as client:
        yield client


async def chat(client: openai.AsyncOpenAI, body: Mapping[str, Any]) -> Answer:
    """Send one chat completion. Fields that the client has no name for go as they are. Never raises for an error that
    an HTTP answer or a stream tells of."""
    rest = {name: value for name, value in body.items() if name not in ("model", "messages", "stream")}
    try:
        if body.get("stream"):
            return await _chat_stream(client, body, rest)
        raw = await client.chat.completions.with_raw_response.create(
            model=body["model"], messages=body["messages"], extra_body=rest
        )
    except openai.APIStatusError as error:
        return _refused(error)
    completion = raw.parse()
    usage = completion.usage
    return Answer(
        raw.status_code,
        raw.headers,
        completion.choices[0].message.content or "",
        None if usage is None else usage.prompt_tokens,
    )


async def _chat_stream(client: openai.AsyncOpenAI, body: Mapping[str, Any], rest: Mapping[str, Any]) -> Answer:
    raw = await client.chat.completions.with_raw_response.create(
        model=body["model"],
        messages=body["messages"],
        stream=True,
        extra_body={"stream_options": {"include_usage": True}, **rest},
    )
    text, prompt_tokens = "", None
    try:
        async with raw.parse() as chunks:
            async for chunk in chunks:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                prompt_tokens = chunk.usage.prompt_tokens if chunk.usage else prompt_tokens
    except openai.APIError as error:
        told = error.body if isinstance(error.body, dict) else {"message": str(error)}
        return Answer(raw.status_code, raw.headers, text, prompt_tokens, told)
    return Answer(raw.status_code, raw.headers, text, prompt_tokens)


def _refused(error: openai.APIStatusError) -> Answer:
    told = error.body if isinstance(error.body, dict) else {"message": error.message}
    return Answer(error.status_code, error.response.headers, error=told)


async def chats(url: str, bodies: Sequence[Mapping[str, Any]], *, at_once: int) -> list[Answer]:
    """Send all of `bodies`, at most `at_once` at a time; the answers in the order of the bodies."""
    async with openai_client(url) as client:
        return await gather_bounded((chat(client, body) for body in bodies), at_once)


async def gather_bounded(calls: Iterable[Awaitable[T]], at_once: int) -> list[T]:
    """The results in the order of the calls."""
    places = asyncio.Semaphore(at_once)

    async def one(call: Awaitable[T]) -> T:
        async with places:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))
