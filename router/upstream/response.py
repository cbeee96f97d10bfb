"""An engine's answer while it arrives: what has come of it, who waits for more, and how it ends.

The connection puts in, one reader takes out. It ends once: whole, failed, or closed by its reader. No bytes are parsed
and no socket is touched here.
"""

import asyncio
import math
from typing import Literal, Protocol

from router.upstream.api import UpstreamError, UpstreamLost, UpstreamTimeout
from router.upstream.headers import first


class Line(Protocol):
    """What an answer asks of the connection that it comes over."""

    loop: asyncio.AbstractEventLoop
    #: When the wait under way is over, on the loop's clock; infinite while nobody waits.
    deadline_s: float

    def wait_until(self, deadline_s: float) -> None:
        """Fail the answer at `deadline_s`, unless `deadline_s` is set to infinity before."""

    def was_read(self) -> None:
        """All that had come was read."""

    def drop(self) -> None:
        """Abort the connection."""


class WireResponse:
    """`api.UpstreamResponse` of an engine. What `api.UpstreamResponse` does not name is the connection's to set."""

    __slots__ = (
        "_deadline_s",
        "_first_byte_s",
        "_idle_s",
        "error",
        "headers",
        "is_whole",
        "pieces",
        "status",
        "waiter",
        "wire",
    )

    def __init__(self, wire: Line, deadline_s: float, first_byte_s: float, idle_s: float) -> None:
        """`deadline_s`: when `first_byte_s` is over, on the loop's clock."""
        #: 0 until the head is here.
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        #: Of the body, not yet read.
        self.pieces: list[bytes] = []
        self.is_whole = False
        self.error: UpstreamError | None = None
        self.waiter: asyncio.Future[None] | None = None
        #: None once nothing more can come.
        self.wire: Line | None = wire
        #: When the first byte of the body is late; infinite once it was read.
        self._deadline_s = deadline_s
        self._first_byte_s = first_byte_s
        self._idle_s = idle_s

    def header(self, name: bytes) -> bytes | None:
        return first(self.headers, name)

    async def read(self) -> bytes:
        pieces = self.pieces
        while not pieces:
            if self.is_whole:
                return b""
            await self.news()
        self._deadline_s = math.inf
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self.wire is not None:
            self.wire.was_read()
        return body

    async def news(self) -> None:
        """Wait until something has come, or a part of a large request has left. Raises what `read` raises."""
        wire = self.wire
        if wire is None:
            assert self.error is not None, "an answer without a connection is whole or has failed"
            raise self.error
        loop = wire.loop
        self.waiter = waiter = loop.create_future()
        deadline_s = self._deadline_s
        wire.wait_until(loop.time() + self._idle_s if deadline_s == math.inf else deadline_s)
        try:
            await waiter
        finally:
            self.waiter = None
            # Of a whole answer the connection may be somebody else's by now.
            if self.wire is not None:
                wire.deadline_s = math.inf
        if self.error is not None and not self.pieces:
            raise self.error

    def close(self) -> None:
        if self.pieces or self.wire is not None:
            self.pieces.clear()
            self.is_whole = False
            self.fail(UpstreamLost("the answer was closed before its end"))

    def fail(self, error: UpstreamError) -> None:
        """Nothing more comes; what is here can still be read."""
        self.error = error
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.drop()
        self.wake()

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def late(self) -> UpstreamTimeout:
        """The error for the limit that has passed."""
        phase: Literal["first_byte", "idle"] = "idle" if self._deadline_s == math.inf else "first_byte"
        return UpstreamTimeout(phase, self._idle_s if phase == "idle" else self._first_byte_s)
