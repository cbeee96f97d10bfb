"""Requests written byte by byte, for what no HTTP client would send."""

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self


class Wire:
    """One TCP connection to the router."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        fields = (line.partition(":") for line in lines[1:])
        return int(lines[0].split(" ")[1]), {name.lower(): value.strip() for name, _, value in fields}

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next whole answer, of either framing."""
        status, headers = await self.head()
        if "content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))
        body = bytearray()
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return status, headers, bytes(body)

    async def rest(self) -> bytes:
        """Everything until the router closes."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    def reset(self) -> None:
        self.writer.transport.abort()


async def exchange(port: int, data: bytes) -> bytes:
    """Send and read until the router closes; the request has to ask for that, or be unfit."""
    async with Wire(port) as wire:
        await wire.send(data)
        return await wire.rest()


def request(
    target: str, body: bytes = b"", *, method: str = "POST", headers: Iterable[str] = (), host: str = "router"
) -> bytes:
    """A whole request with its length; `headers` are lines without their end."""
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
    if body:
        lines.append("content-type: application/json")
    return "\r\n".join([*lines, *headers, "", ""]).encode("utf-8") + body
