"""A relay's answer over httpx while it arrives, and the one connection that it comes over.

The owner gets the connection back once: kept where the answer was read to its end, closed in any other case. Bytes of
the body pass undecoded. What goes wrong is told in our words.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import httpx

from router.upstream.api import ReadOnly, UpstreamError, UpstreamLost, UpstreamTimeout
from router.upstream.headers import first, returned_headers

#: Closing is an abort of the socket and takes no time; this bounds a TLS library that disagrees.
CLOSE_WAIT_S = 2.0


class WireOwner(Protocol):
    """Whose connection it is."""

    def let_go(
        self, raw: httpx.Response, wire: "HttpxWire", pending: asyncio.Task[bytes] | None, *, is_read: bool
    ) -> asyncio.Task[None]:
        """The answer is done with, read to its end or not; `pending` is a read of it that is under way. Once an
        answer."""
        ...


class HttpxWire:
    """One connection: a transport of its own, because a shared pool of httpx forgets a connection, with its socket
    open, when a request is cancelled right after connecting."""

    __slots__ = ("_sockets", "idle_since_s", "transport")

    def __init__(self, transport: httpx.AsyncHTTPTransport) -> None:
        self.transport = transport
        self.idle_since_s = 0.0
        #: What was connected and is not yet the transport's own: a TLS handshake may be cancelled in between.
        self._sockets: list[Any] = []

    async def trace(self, event: str, info: dict[str, Any]) -> None:
        """httpx tells of its steps; all but a new socket is ignored."""
        if event in ("connection.connect_tcp.complete", "connection.connect_unix_socket.complete"):
            self._sockets = [info["return_value"]]

    async def drop(self) -> None:
        """Close the socket, in whatever state the exchange on it is."""
        sockets, self._sockets = self._sockets, []
        for socket in sockets:
            await socket.aclose()
        await self.transport.aclose()


class HttpxResponse(ReadOnly):
    """`api.UpstreamResponse` over httpx. Holds one connection of its upstream until it is closed or read to its end."""

    def __init__(
        self,
        owner: WireOwner,
        raw: httpx.Response,
        wire: HttpxWire,
        deadline_s: float,
        first_byte_s: float,
        idle_s: float,
    ) -> None:
        assert isinstance(raw.stream, httpx.AsyncByteStream)
        self._owner = owner
        self._raw = raw
        self._wire = wire
        self._body = raw.stream.__aiter__()
        self._first_byte_deadline_s = deadline_s
        self._first_byte_s = first_byte_s
        self._idle_s = idle_s
        #: A read that outlives a caller who was cancelled: httpx loses what is cancelled.
        self._pending: asyncio.Task[bytes] | None = None
        self._is_begun = False
        self._is_read = False
        self._closing: asyncio.Task[None] | None = None
        self._error: UpstreamError | None = None
        self.status = raw.status_code
        self.headers = returned_headers(raw.headers.raw)

    def header(self, name: bytes) -> bytes | None:
        return first(self.headers, name)

    async def read(self) -> bytes:
        """See `api.UpstreamResponse`."""
        if self._error is not None:
            raise self._error
        if self._is_read:
            return b""
        loop = asyncio.get_running_loop()
        phase: Literal["first_byte", "idle"] = "idle" if self._is_begun else "first_byte"
        limit_s = self._idle_s if self._is_begun else self._first_byte_s
        left_s = self._idle_s if self._is_begun else max(0.0, self._first_byte_deadline_s - loop.time())
        if self._pending is None:
            self._pending = loop.create_task(_next_of(self._body))
        pending = self._pending
        done, _ = await asyncio.wait({pending}, timeout=left_s)
        if not done:
            raise self._failed(UpstreamTimeout(phase, limit_s))
        self._pending = None
        if pending.cancelled():
            raise self._failed(UpstreamLost("the answer was closed before its end"))
        error = pending.exception()
        if isinstance(error, httpx.TransportError):
            raise self._failed(UpstreamLost(as_text(error))) from error
        if error is not None:
            raise error
        chunk = pending.result()
        self._is_begun = True
        if not chunk:
            self._is_read = True
            # The connection is back for the next request when the end is known.
            await asyncio.wait({self._close()}, timeout=CLOSE_WAIT_S)
        return chunk

    def close(self) -> None:
        """See `api.UpstreamResponse`."""
        self._close()

    def _close(self) -> asyncio.Task[None]:
        if self._closing is None:
            if not self._is_read and self._error is None:
                self._error = UpstreamLost("the answer was closed before its end")
            self._closing = self._owner.let_go(self._raw, self._wire, self._pending, is_read=self._is_read)
        return self._closing

    def _failed(self, error: UpstreamError) -> UpstreamError:
        self._error = self._error or error
        self.close()
        return self._error


async def _next_of(body: AsyncIterator[bytes]) -> bytes:
    """The next piece that holds anything; empty at the end."""
    async for chunk in body:
        if chunk:
            return chunk
    return b""


def as_text(error: httpx.TransportError) -> str:
    """Names the exception: several of httpx's have an empty text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
