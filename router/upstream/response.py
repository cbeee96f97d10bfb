"""An engine's answer while it arrives: what has come of it, who waits for more, and how it ends.

The connection puts in, one reader takes out, or has it handed over as it comes. It ends once: whole, failed, or closed
by its reader. No bytes are parsed and no socket is touched here.
"""

import asyncio
import math
from typing import Literal, Protocol

from router.upstream.api import Take, UpstreamError, UpstreamLost, UpstreamTimeout
from router.upstream.headers import first


class Line(Protocol):
    """What an answer asks of the connection that it comes over."""

    loop: asyncio.AbstractEventLoop
    #: When the wait under way is over, on the loop's clock; infinite while nobody waits.
    deadline_s: float

    def wait_until(self, deadline_s: float) -> None:
        """Read on, and fail the answer at `deadline_s`, unless `deadline_s` is set to infinity before."""

    def was_read(self, deadline_s: float) -> None:
        """All that had come was read. As `wait_until` from now on; infinite: nobody waits."""

    def hold(self) -> None:
        """Take nothing more from the other side until `wait_until` or `was_read`."""

    def drop(self) -> None:
        """Abort the connection."""


class WireResponse:
    """`api.UpstreamResponse` of an engine. What `api.UpstreamResponse` does not name is the connection's to set."""

    __slots__ = (
        "_deadline_s",
        "_first_byte_s",
        "_has_room",
        "_idle_s",
        "_raised",
        "_take",
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
        #: To whom the body is pushed as it comes; None while it is not.
        self._take: Take | None = None
        #: What it said last.
        self._has_room = True
        #: What `_take` raised, for who waits.
        self._raised: Exception | None = None

    def header(self, name: bytes) -> bytes | None:
        return first(self.headers, name)

    async def read(self) -> bytes:
        while not self.pieces:
            if self.is_whole:
                return b""
            await self.news()
        if self.wire is not None:
            self.wire.was_read(math.inf)
        return self._all_here()

    def whole(self) -> bytes | None:
        if not self.is_whole or self._deadline_s == math.inf:
            return None
        self._deadline_s = math.inf
        body = b"".join(self.pieces)
        self.pieces.clear()
        return body

    async def forward(self, take: Take) -> None:
        while self.pieces or not self.is_whole:
            if self.pieces:
                # Came before, or together with the end.
                self._has_room = take(await self.read())
            else:
                await self._pushed(take)
            if not self._has_room:
                return

    async def _pushed(self, take: Take) -> None:
        """Wait until pushing is over: at the end, or because of `take`."""
        self._take = take
        try:
            await self.news()
        finally:
            self._take = None
        if self._raised is not None:
            raise self._raised

    def _all_here(self) -> bytes:
        self._deadline_s = math.inf
        body = b"".join(self.pieces)
        self.pieces.clear()
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

    def came(self) -> None:
        """There are pieces: push them, or wake who waits for them."""
        take, waiter, wire = self._take, self.waiter, self.wire
        if take is None:
            self.wake()
        elif waiter is not None and not waiter.done() and wire is not None:
            # Where it is done the reader was cancelled, or is about to hear of an end: the bytes stay.
            wire.was_read(wire.loop.time() + self._idle_s)
            try:
                self._has_room = take(self._all_here())
            except Exception as error:  # noqa: BLE001  # raised again where it is waited for: here is only the loop
                self._raised, self._has_room = error, False
            if not self._has_room:
                self._take = None
                wire.hold()
                self.wake()

    def hold(self) -> None:
        if self.wire is not None:
            self.wire.hold()

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
