"""HTTP/1.1 to one engine: its kept connections, and how a request is written.

Rules of this file:
- Direct: no proxy, nothing from the environment but the system's own certificates, no redirect, no cookie, no retry.
- Each engine has its own connections and its own limit, so a silent engine takes nothing from another. The connection
  used last is taken first; the others grow idle and are closed.
- A place among the connections belongs to a `Wire` from before it connects until it is idle or gone.

A request that was lost may have started, also on a kept connection that the engine closed in the same moment: no byte
tells whether it was read before the close, and an inference call is not idempotent (RFC 9110, 9.2.2), so it may not be
sent again by itself (RFC 9112, 9.3.1). What to do about it is `policy/retry.py`. Here that race is made rare instead:
idle connections are closed after 4 s, before vLLM's 5 s, and a kept one is looked at for a close right before use.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from router.config.model import Secret
from router.errors import bad_request
from router.upstream.address import PATH_SAFE, Address
from router.upstream.api import (
    ConnectFailed,
    ConnectionsBusy,
    ConnectTimedOut,
    SocketsExhausted,
    UpstreamRequest,
)
from router.upstream.headers import header_lines, own_headers
from router.upstream.response import WireResponse
from router.upstream.wire import JOINED_MAX_BYTES, Wire

#: vLLM closes an idle connection after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE).
KEEPALIVE_EXPIRY_S = 4.0
CONNECTIONS_MAX = 512
#: Besides requests that have a seat on the engine: probes, and calls that only tokenize.
_CONNECTIONS_SPARE = 64

#: vLLM's server refuses longer request lines.
_PATH_MAX_BYTES = 60_000
#: Ready-made request lines; clients use a handful of paths, and no query string of theirs fills memory.
_LINES_MAX = 64
_LINE_MAX_BYTES = 256
_WITHOUT_BODY = frozenset({"GET", "HEAD"})

_NO_SOCKET = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

#: Connects a protocol that the given function makes, or raises `OSError`. The seam for tests: whatever transport the
#: protocol is given, it uses.
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]]


def connections_for(seats: int) -> int:
    """How many connections an engine needs that works on `seats` requests at a time: what has a seat never waits for a
    connection."""
    return max(CONNECTIONS_MAX, seats + _CONNECTIONS_SPARE)


class EngineUpstream:
    """`api.Upstream` for one engine. Owns its connections."""

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        api_key: Secret | None,
        connections_max: int = CONNECTIONS_MAX,
        connect: Connect | None = None,
    ) -> None:
        """`base_url` is `http://`, `https://` or `unix:///path/of.sock`; a final `/v1` is not doubled. `connect` takes
        the place of the connecting to it.

        Raises: `ValueError` for a URL that cannot be used.
        """
        self.name = name
        address = Address(name, base_url)
        self._connect = connect or address.connect
        self._prefix = address.path
        own = [(b"host", address.host_header), *own_headers(None if api_key is None else api_key.reveal())]
        self._own_lines = b"".join([b"\r\n%b: %b" % pair for pair in own])
        #: By method and path.
        self._request_lines: dict[tuple[str, str], bytes] = {}
        #: Connections that may still be taken or made.
        self._places_free = connections_max
        #: Who waits for a place, in the order in which they came.
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._busy: set[Wire] = set()
        #: Idle for the longest first.
        self._idle: list[Wire] = []
        #: Set while anything is idle.
        self._expiry: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def open(
        self, request: UpstreamRequest, *, connect_s: float, first_byte_s: float, idle_s: float
    ) -> WireResponse:
        """See `api.Upstream`. `first_byte_s` runs from sending to the first byte of the body: vLLM sends its headers
        before the prefill. Raises also `ConnectionsBusy` where no connection came free within `connect_s`,
        `SocketsExhausted`, and `ApiError` for a path that no URL can hold."""
        method, path, body = request.method, request.path, request.body
        line = self._request_lines.get((method, path)) or self._request_line(method, path)
        # A call without a body says nothing of its length.
        length = b"\r\ncontent-length: %d" % len(body) if body or method not in _WITHOUT_BODY else b""
        head = b"%b%b%b%b\r\n\r\n" % (line, self._own_lines, header_lines(request.headers), length)
        if self._places_free and not self._waiters:
            self._places_free -= 1
        else:
            await self._wait_for_place(connect_s)
        wire = self._take() or await self._connected(connect_s)
        is_joined = len(body) <= JOINED_MAX_BYTES
        response: WireResponse | None = None
        try:
            response = wire.ask(
                head + body if is_joined else head,
                is_head_only=method == "HEAD",
                first_byte_s=first_byte_s,
                idle_s=idle_s,
            )
            if not is_joined:
                await wire.send_large(response, body)
            while not response.status:
                await response.news()
        except BaseException:
            if response is None:
                wire.drop()
            else:
                response.close()
            raise
        return response

    async def aclose(self) -> None:
        """See `api.Upstream`."""
        self._is_closed = True
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for wire in (*self._idle, *self._busy):
            wire.drop()
        # A loop closes the sockets of aborted connections in its next round.
        await asyncio.sleep(0)

    # -- wire.WireOwner ---------------------------------------------------------------------------------------------

    def keep(self, wire: Wire) -> None:
        self._busy.discard(wire)
        if self._waiters:
            self._free_place()
        else:
            self._places_free += 1
        wire.idle_since_s = wire.loop.time()
        self._idle.append(wire)
        if self._expiry is None:
            self._expire_later()

    def forget(self, wire: Wire) -> None:
        if wire in self._busy:
            self._busy.discard(wire)
            self._free_place()
        elif wire in self._idle:
            self._idle.remove(wire)

    # -- connections ------------------------------------------------------------------------------------------------

    def _free_place(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                # The place passes on without ever being free: whoever comes now cannot overtake.
                waiter.set_result(None)
                return
        self._places_free += 1

    async def _wait_for_place(self, connect_s: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(connect_s):
                await waiter
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.done() and not waiter.cancelled():
                # It was given in the moment of leaving.
                self._free_place()
            if isinstance(error, TimeoutError):
                raise ConnectionsBusy(f"{self.name}: no free connection within {connect_s:g} s") from error
            raise

    def _take(self) -> Wire | None:
        """A kept connection, now busy. The last is the likeliest to be open still."""
        idle = self._idle
        while idle:
            wire = idle.pop()
            # In neither list while it is looked at: dropping it takes no place back.
            if wire.idle_since_s + KEEPALIVE_EXPIRY_S > wire.loop.time() and wire.is_usable():
                self._busy.add(wire)
                return wire
            wire.drop()
        return None

    async def _connected(self, connect_s: float) -> Wire:
        """A new connection, busy from the start; on failure the place is back."""
        wire = Wire(self, asyncio.get_running_loop())
        self._busy.add(wire)
        try:
            if self._is_closed:
                raise ConnectFailed(f"{self.name}: closed")
            async with asyncio.timeout(connect_s):
                await self._connect(lambda: wire)
            if wire.is_dropped:
                raise ConnectFailed(f"{self.name}: the connection was closed as soon as it was made")
        except BaseException as error:
            wire.drop()
            if isinstance(error, TimeoutError):
                raise ConnectTimedOut(f"no connection within {connect_s:g} s") from error
            if isinstance(error, OSError):
                raise _translated(error) from error
            raise
        return wire

    def _expire_later(self) -> None:
        """Come for the oldest idle connection in time. A timer that is set stays: at worst it comes in vain, once."""
        if self._idle and not self._is_closed:
            oldest = self._idle[0]
            self._expiry = oldest.loop.call_at(oldest.idle_since_s + KEEPALIVE_EXPIRY_S, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now_s = asyncio.get_running_loop().time()
        for wire in [wire for wire in self._idle if wire.idle_since_s + KEEPALIVE_EXPIRY_S <= now_s]:
            wire.drop()
        self._expire_later()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _request_line(self, method: str, path: str) -> bytes:
        target = quote(path.encode("utf-8", "surrogateescape"), safe=PATH_SAFE)
        if len(target) > _PATH_MAX_BYTES:
            raise bad_request(f"the path has {len(target)} bytes; at most {_PATH_MAX_BYTES} can be forwarded")
        if self._prefix.endswith("/v1") and target.startswith("/v1/"):
            target = target.removeprefix("/v1")
        line = f"{method} {self._prefix}{target} HTTP/1.1".encode()
        if len(line) <= _LINE_MAX_BYTES and len(self._request_lines) < _LINES_MAX:
            self._request_lines[method, path] = line
        return line


def _translated(error: OSError) -> ConnectFailed:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return SocketsExhausted(text) if error.errno in _NO_SOCKET else ConnectFailed(text)
