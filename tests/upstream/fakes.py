"""Servers that do exactly what a test scripts, on real sockets and ports that the kernel chose."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from router.upstream.api import UpstreamResponse

T = TypeVar("T")

#: A bound on a hung test, not a measurement.
GUARD_S = 20.0

#: What the tests run on; the fixture `each_loop` changes it.
new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run the body of a test, bounded."""

    async def bounded() -> T:
        async with asyncio.timeout(GUARD_S):
            return await test

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(bounded())


async def rest_of(response: UpstreamResponse) -> bytes:
    """The body from here to its end."""
    parts: list[bytes] = []
    while part := await response.read():
        parts.append(part)
    return b"".join(parts)


async def read(response: UpstreamResponse) -> bytes:
    """The whole body; the response is closed afterwards."""
    try:
        return await rest_of(response)
    finally:
        response.close()


@dataclass
class SeenRequest:
    """One request as its bytes arrived."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class Connection:
    """One accepted connection, for a script to play on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader = reader
        self.writer = writer
        #: 1 for the first connection of the server.
        self.number = number

    async def request(self) -> SeenRequest | None:
        """The next request, or None where the client has closed."""
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        line, *rest = head.strip().split("\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (field.partition(":") for field in rest)]
        size = sum(int(value) for name, value in headers if name == "content-length")
        return SeenRequest(line, headers, await self.reader.readexactly(size))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def closed(self) -> None:
        """Returns once the client has closed or reset."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass

    def reset(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Connection], Awaitable[None]]


class RawServer:
    """Runs `script` for each connection; `async with` starts and stops it."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.connections = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "RawServer":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._script(Connection(reader, writer, self.connections))
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


def answer(body: bytes, *, status: int = 200, headers: str = "content-type: application/json\r\n") -> bytes:
    """A complete answer with its length."""
    return f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def piece(data: bytes) -> bytes:
    """One chunk of a chunked body; an empty one ends it."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def serve(handler: Callable[[SeenRequest], bytes | Awaitable[bytes]]) -> Script:
    """A script that answers one request after the other on a kept connection."""

    async def script(connection: Connection) -> None:
        while (request := await connection.request()) is not None:
            said = handler(request)
            await connection.send(said if isinstance(said, bytes) else await said)

    return script


@dataclass
class FakeEngine:
    """What the routes of an engine answer; a test changes the fields while it runs. An event not yet set holds the
    answer back."""

    version: str = "0.32.0"
    names: tuple[str, ...] = ("m",)
    max_model_len: int = 4096
    capacity_tokens: int = 1000
    health_status: int = 200
    metrics: bytes | None = None
    completion: bytes = b'{"choices":[{"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":1}}'
    completion_status: int = 200
    missing: frozenset[str] = frozenset()
    health_gate: asyncio.Event | None = None
    seen: list[SeenRequest] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def script(self) -> Script:
        return serve(self.handle)

    async def handle(self, request: SeenRequest) -> bytes:
        self.seen.append(request)
        self.news.set()
        path = request.path
        if path in self.missing:
            return answer(b'{"detail":"Not Found"}', status=404)
        if path == "/health":
            if self.health_gate is not None:
                await self.health_gate.wait()
            return answer(b"", status=self.health_status)
        if path == "/version":
            return answer(json.dumps({"version": self.version}).encode())
        if path == "/v1/models":
            cards = [{"id": name, "max_model_len": self.max_model_len} for name in self.names]
            return answer(json.dumps({"object": "list", "data": cards}).encode())
        if path == "/metrics":
            page = f'vllm:cache_config_info{{engine="0",kv_cache_size_tokens="{self.capacity_tokens}"}} 1.0\n'.encode()
            return answer(page if self.metrics is None else self.metrics, headers="content-type: text/plain\r\n")
        return answer(self.completion, status=self.completion_status)

    def asked(self, path: str) -> int:
        return sum(request.path == path for request in self.seen)

    async def asked_again(self, path: str, more: int) -> None:
        """Returns once `path` was asked for `more` times from now on."""
        goal = self.asked(path) + more
        while self.asked(path) < goal:
            self.news.clear()
            await self.news.wait()
