"""An outside OpenAI-compatible provider: the second place for requests that our own engines cannot take.

Rules: our own key and the provider's own model name; of the client's headers only those in `_SENT`; a proxy only where
the configuration names one; calls pass the circuit breaker; a request that has passed one router is not relayed by a
second. When to relay is never decided here.
"""

import msgspec

from router.clock import Clock
from router.config.model import RelayConfig
from router.policy.breaker import Breaker, Ending, Permit
from router.upstream.api import (
    ConnectFailed,
    Headers,
    NoConnectionToGive,
    ReadOnly,
    UpstreamError,
    UpstreamRequest,
    UpstreamResponse,
)
from router.upstream.headers import first
from router.upstream.httpx_call import HttpxUpstream
from router.upstream.partial import read_partly

#: Ids of the routers that have relayed a request, oldest first, with commas between.
HOP_HEADER = "x-router-hop"

CONNECTIONS_MAX = 256

_HOP_HEADER = HOP_HEADER.encode()
_SENT = frozenset({b"accept", b"anthropic-beta", b"anthropic-version", b"content-type", b"openai-beta"})
_RETURNED = frozenset({b"cache-control", b"content-encoding", b"content-length", b"content-type", b"retry-after"})
#: Refusals that are no client's mistake: our key, our spending, our rate.
_OURS = frozenset({401, 402, 403, 429})
#: How much of a refusal is read to see what was refused, and for how long.
_REFUSAL_MAX_BYTES = 64 << 10
_REFUSAL_S = 10.0


class RelayUnavailable(ConnectFailed):
    """The breaker is open: nothing was sent."""


def hop_refusal(header: str | None, router_id: str) -> str | None:
    """Why a request that arrives with this `x-router-hop` must not be taken, or None.

    One hop is another router's relay and is served; two, or our own id, are a loop.
    """
    hops = _hops(header)
    if router_id in hops:
        return "this router relayed the request to itself: remove the relay that points back at it"
    if len(hops) > 1:
        return f"the request has passed {len(hops)} routers; at most 1 may relay it"
    return None


def may_relay(header: str | None) -> bool:
    """Whether a request that arrived with this `x-router-hop` may be relayed: only if no router has done so yet."""
    return not _hops(header)


def _hops(header: str | None) -> list[str]:
    return [hop for part in (header or "").split(",") if (hop := part.strip())]


class Relay:
    """`api.Upstream` for one relay. Owns its connections."""

    def __init__(self, config: RelayConfig, clock: Clock, *, router_id: str = "router") -> None:
        """`router_id` is the same in all processes of one router.

        Raises: `ValueError` for a URL or proxy that cannot be used.
        """
        self.config = config
        self._clock = clock
        self._router_id = router_id
        self._breaker = Breaker(config.breaker_failures, config.breaker_open_s)
        self._upstream = HttpxUpstream(
            config.name, config.url, api_key=config.api_key, proxy=config.proxy, connections_max=CONNECTIONS_MAX
        )
        self._refuses_stream_options = False

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def can_try(self) -> bool:
        """Whether `open` would send anything now."""
        return self._breaker.can_admit(self._clock.now_s())

    @property
    def retry_after_s(self) -> float:
        """Seconds until the breaker lets a trial through."""
        return self._breaker.retry_after_s(self._clock.now_s())

    def model_for(self, name: str) -> str | None:
        """The provider's name of our model `name`, or None where it is not relayed."""
        return self.config.models.get(name)

    async def open(
        self, request: UpstreamRequest, *, connect_s: float, first_byte_s: float, idle_s: float
    ) -> UpstreamResponse:
        """See `api.Upstream`. Raises also `RelayUnavailable` while the breaker is open.

        Where the provider refuses `stream_options` with a 400, the request is sent once more without them, and they are
        left out from then on.
        """
        permit = self._breaker.admit(self._clock.now_s())
        if permit is None:
            raise RelayUnavailable(f"{self.name}: circuit breaker open for {self.retry_after_s:.1f} s more")
        call = _Call(self._breaker, permit, self._clock)
        try:
            response = await self._open(request, connect_s, first_byte_s, idle_s)
        except NoConnectionToGive:
            call.end(Ending.IGNORED)
            raise
        except UpstreamError:
            call.end(Ending.FAILURE)
            raise
        except BaseException:
            call.end(Ending.IGNORED)
            raise
        if response.status in _OURS or response.status >= 500:
            call.end(Ending.FAILURE)
        elif response.status >= 400:
            call.end(Ending.IGNORED)
        return RelayResponse(response, call)

    async def aclose(self) -> None:
        await self._upstream.aclose()

    async def _open(
        self, request: UpstreamRequest, connect_s: float, first_byte_s: float, idle_s: float
    ) -> UpstreamResponse:
        request = msgspec.structs.replace(request, headers=self._headers(request))
        has_options = b'"stream_options"' in request.body
        if has_options and self._refuses_stream_options:
            request = msgspec.structs.replace(request, body=_without_stream_options(request.body))
            has_options = False
        response: UpstreamResponse = await self._upstream.open(
            request, connect_s=connect_s, first_byte_s=first_byte_s, idle_s=idle_s
        )
        if not has_options or response.status not in (400, 422):
            return response
        try:
            refusal = await read_partly(response, _REFUSAL_MAX_BYTES, _REFUSAL_S)
        finally:
            response.close()
        if b"stream_options" not in refusal:
            headers = [pair for pair in response.headers if pair[0] != b"content-length"]
            return _Read(response.status, headers, refusal)
        self._refuses_stream_options = True
        request = msgspec.structs.replace(request, body=_without_stream_options(request.body))
        return await self._upstream.open(request, connect_s=connect_s, first_byte_s=first_byte_s, idle_s=idle_s)

    def _headers(self, request: UpstreamRequest) -> Headers:
        hops = [value for name, value in request.headers if name == _HOP_HEADER]
        safe = [pair for pair in request.headers if pair[0] in _SENT]
        return (*safe, (_HOP_HEADER, b", ".join([*hops, self._router_id.encode()])))


class RelayResponse(ReadOnly):
    """`api.UpstreamResponse` of a relay: the safe headers only, and one ending for the breaker.

    A trial counts as a success at its first byte, since others wait for it; any other call when its body ends.
    """

    def __init__(self, inner: UpstreamResponse, call: "_Call") -> None:
        self._inner = inner
        self._call = call
        self._is_begun = False
        self.status = inner.status
        self.headers = [pair for pair in inner.headers if pair[0] in _RETURNED]

    def header(self, name: bytes) -> bytes | None:
        return first(self.headers, name)

    async def read(self) -> bytes:
        """See `api.UpstreamResponse`."""
        try:
            chunk = await self._inner.read()
        except UpstreamError:
            self._call.end(Ending.FAILURE)
            raise
        is_first, self._is_begun = not self._is_begun, True
        if not chunk or (is_first and self._call.is_trial):
            self._call.end(Ending.SUCCESS)
        return chunk

    def close(self) -> None:
        """See `api.UpstreamResponse`. A call that is left before its first byte proves nothing."""
        self._call.end(Ending.SUCCESS if self._is_begun else Ending.IGNORED)
        self._inner.close()


class _Call:
    """A permit of the breaker, given back once."""

    __slots__ = ("_breaker", "_clock", "_permit")

    def __init__(self, breaker: Breaker, permit: Permit, clock: Clock) -> None:
        self._breaker = breaker
        self._permit = permit
        self._clock = clock

    @property
    def is_trial(self) -> bool:
        return self._permit.is_trial

    def end(self, ending: Ending) -> None:
        self._breaker.end(self._permit, ending, self._clock.now_s())


class _Read(ReadOnly):
    """An answer whose body was read already."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    def header(self, name: bytes) -> bytes | None:
        return first(self.headers, name)

    async def read(self) -> bytes:
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """The connection went back when the body was read."""


def _without_stream_options(body: bytes) -> bytes:
    """The same JSON object less its `stream_options`; everything else byte for byte."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return body
    fields.pop("stream_options", None)
    return msgspec.json.encode(fields)
