"""A fake engine that does what it is told when it is told: its answers wait at given points until they are let go.

Used where the order of things is what is shown, not their time: the second token of a stream is not written before
somebody says so, an answer is not begun before its prefill is over. HTTP/1.1, one answer a connection.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

__all__ = ["HeldEngine", "Plot", "event", "held_engine"]

_MODELS = {"object": "list", "data": [{"id": "mock", "object": "model", "max_model_len": 262_144}]}
_BODY_MAX_BYTES = 64 << 20

#: What becomes of one chat: given its fields and a way to write.
Plot = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(content: str | None, finish_reason: str | None = None) -> bytes:
    """One event of a chat completion's stream; None for the content is the last of its choices."""
    choice = {"index": 0, "delta": {} if content is None else {"content": content}, "finish_reason": finish_reason}
    said = {"id": "held", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": [choice]}
    return f"data: {json.dumps(said)}\n\n".encode()


def whole(text: str) -> bytes:
    """A plain answer."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choices = [{"index": 0, "message": message, "text": text, "finish_reason": "stop"}]
    return json.dumps({"id": "held", "object": "chat.completion", "choices": choices, "usage": usage}).encode()


class HeldEngine:
    """A listening engine; `held_engine` owns it. Whatever its plots do, its health and its answers to the router's own
    requests for one token are good."""

    def __init__(self, plot: Plot) -> None:
        self.port = 0
        self.chats = 0
        self._plot = plot
        self._running: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return "a"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the other side left, which is its right
        except asyncio.CancelledError:
            pass  # by `aclose`, and nobody waits for this task; asyncio's streams would print it as a failure
        finally:
            self._running.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        length = int(fields.get("content-length", "0"))
        assert length <= _BODY_MAX_BYTES
        body = await reader.readexactly(length)
        path = head[0].split(" ")[1]
        if path == "/v1/chat/completions":
            self.chats += 1
            await self._plot(json.loads(body), writer)
            return
        known = {"/version": {"version": "0.32.0"}, "/v1/models": _MODELS}
        write_whole(writer, whole("1") if body else json.dumps(known.get(path, {})).encode())
        await writer.drain()

    async def aclose(self) -> None:
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)


def write_head(writer: asyncio.StreamWriter) -> None:
    """The head of a stream; it ends with its connection."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n")


def write_whole(writer: asyncio.StreamWriter, body: bytes) -> None:
    """A plain answer of JSON."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
    writer.write(head.encode() + b"\r\n\r\n" + body)


@contextlib.asynccontextmanager
async def held_engine(plot: Plot) -> AsyncIterator[HeldEngine]:
    """Listening on a port of the kernel's choice until the block ends; then whatever it still does is cut off."""
    engine = HeldEngine(plot)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.port = int(server.sockets[0].getsockname()[1])
    try:
        yield engine
    finally:
        server.close()
        await engine.aclose()
