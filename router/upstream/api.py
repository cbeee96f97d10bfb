"""What the flow asks of anything that answers HTTP for us: an engine or a relay.

httpx and sockets stop behind this. Every failure is one of the exceptions here. They say what was seen; whether the
request can have started, and may be sent again, is for `policy/retry.py`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol


class UpstreamError(Exception):
    """The other side failed us."""


class ConnectFailed(UpstreamError):
    """No connection: refused, unreachable, TLS failure or connect timeout. Nothing was sent."""


class UpstreamLost(UpstreamError):
    """The connection broke after the request began to be sent: before or amid the answer."""


class UpstreamTimeout(UpstreamError):
    """Silence: no first byte, or no further byte, within the limit. `phase` says which."""

    def __init__(self, phase: Literal["first_byte", "idle"], limit_s: float) -> None:
        super().__init__(f"no byte within {limit_s:g} s ({phase})")
        self.phase: Literal["first_byte", "idle"] = phase
        self.limit_s = limit_s


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One call as it goes out. `path` starts with a slash and carries the query string. Names in `headers` are lower
    case; `host`, `content-length` and the other side's own key are added by the connection."""

    method: str
    path: str
    headers: Sequence[tuple[str, str]] = field(default_factory=tuple)
    body: bytes = b""


class UpstreamResponse(Protocol):
    """An answer whose status and headers are here and whose body may still be coming.

    Whoever opened it owns it and closes it: `aclose` is idempotent, and unless the body was read to its end it closes
    the socket too, since that is the only way an engine hears of an abort.
    """

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Lower-case names; hop-by-hop fields are gone."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, undecoded. Raises `UpstreamLost` or `UpstreamTimeout`.

        Until the first body byte the limit is `first_byte_s` (vLLM sends a stream's headers before the prefill), then
        `idle_s` between bytes.
        """
        ...

    async def aclose(self) -> None: ...


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
        """Close every pooled connection. Idempotent."""
        ...
