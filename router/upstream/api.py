"""What the flow asks of anything that answers HTTP for us: an engine or a relay.

Sockets and httpx stop behind this. Every failure is one of the exceptions here. They say what was seen; whether the
request can have started, and may be sent again, is for `policy/retry.py`.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

#: Takes a piece of a body; False: no more for now.
Take = Callable[[bytes], bool]

#: Lower-case names, values as they were on the wire; repeated fields stay apart.
Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """The other side failed us."""


class ConnectFailed(UpstreamError):
    """No connection: refused, unreachable, TLS failure or connect timeout. Nothing was sent."""


class ConnectTimedOut(ConnectFailed):
    """No connection within the limit: unreachable, or too busy to accept."""


class NoConnectionToGive(ConnectFailed):
    """No connection for a reason of our own: it says nothing about the other side's health."""


class ConnectionsBusy(NoConnectionToGive):
    """All connections that this engine may have are in use."""


class SocketsExhausted(NoConnectionToGive):
    """This process or machine has no file, port or memory left for a socket."""


class UpstreamLost(UpstreamError):
    """The connection broke after the request began to be sent: before or amid the answer."""


class UpstreamTimeout(UpstreamError):
    """Silence: no first byte, or no further byte, within the limit. `phase` says which."""

    def __init__(self, phase: Literal["first_byte", "idle"], limit_s: float) -> None:
        super().__init__(f"no byte within {limit_s:g} s ({phase})")
        self.phase: Literal["first_byte", "idle"] = phase
        self.limit_s = limit_s


class UpstreamRequest(msgspec.Struct, frozen=True, gc=False):
    """One call as it goes out. `path` starts with a slash and carries the query string. `host`, `content-length` and
    the other side's own key are added by the connection, which also leaves out what may not be forwarded."""

    method: str
    path: str
    headers: Headers = ()
    body: bytes = b""


class UpstreamResponse(Protocol):
    """An answer whose status and headers are here and whose body may still be coming.

    Whoever opened it owns it and closes it. One reader at a time.
    """

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers:
        """Hop-by-hop fields and cookies are gone."""
        ...

    def header(self, name: bytes) -> bytes | None:
        """The first value of `name` (lower case), or None."""
        ...

    async def read(self) -> bytes:
        """What has come of the body since the last read, undecoded; waits for at least one byte; b"" at its clean end.

        Cancelled, it loses no byte. Until the first body byte the limit is `first_byte_s` (vLLM sends a stream's
        headers before the prefill), then `idle_s`; it runs only while a byte is waited for.
        Raises: `UpstreamLost`, `UpstreamTimeout`; what came before is read first.
        """
        ...

    def whole(self) -> bytes | None:
        """All of the body, where all of it is here and nothing of it was read; else None, and nothing is read."""
        ...

    async def forward(self, take: Take) -> None:
        """Hand every piece to `take` in the moment in which it comes, until the clean end or until `take` says False;
        which of the two it was, and what comes then, `read` tells. Limits and errors are those of `read`; what `take`
        raises is raised here. Cancelled, nothing more is handed over and no byte is lost."""
        ...

    def hold(self) -> None:
        """Take nothing more from the other side until the next `read` or `forward`; for a reader that has no room."""
        ...

    def close(self) -> None:
        """Idempotent, at any time, also while a `read` waits, which then raises. Never raises. Unless the whole answer
        has arrived the socket is closed, never used again: that is the only way an engine hears of an abort. Read to
        its clean end, an answer need not be closed."""
        ...


class ReadOnly:
    """What an answer does that can only be read piece by piece."""

    def whole(self) -> bytes | None:
        return None

    async def read(self) -> bytes:
        raise NotImplementedError

    def hold(self) -> None:
        """It reads nothing that is not asked for."""

    async def forward(self, take: Take) -> None:
        while (piece := await self.read()) and take(piece):
            pass


class Upstream(Protocol):
    """Something that takes an `UpstreamRequest`."""

    async def open(
        self, request: UpstreamRequest, *, connect_s: float, first_byte_s: float, idle_s: float
    ) -> UpstreamResponse:
        """Send and return once status and headers are here.

        Raises: `ConnectFailed`, `UpstreamLost`, `UpstreamTimeout("first_byte", ...)`.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection, used ones too. Idempotent."""
        ...
