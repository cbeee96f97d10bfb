"""HTTP to one relay, over httpx, which this file and `httpx_response.py` alone know on the path of a request.

Rules of this file:
- Direct: no proxy but the configured one, nothing from the environment, no redirect, no cookie, no retry.
- Bytes of the body pass undecoded, both ways.
- An answer that was not read to its end closes its socket.
- Closing takes httpx an await and `close` is synchronous: a task of ours does it. It keeps the connection's place until
  it is done, so there are never more of them than connections, and `aclose` waits for them.
- Foreign exceptions are translated here, once.

A request that was lost may have started: see `connection.py`.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx

from router.config.model import Secret
from router.errors import bad_request
from router.upstream.api import (
    ConnectFailed,
    ConnectionsBusy,
    ConnectTimedOut,
    UpstreamLost,
    UpstreamRequest,
    UpstreamTimeout,
)
from router.upstream.headers import own_headers, sendable
from router.upstream.httpx_response import CLOSE_WAIT_S, HttpxResponse, HttpxWire, as_text

#: Shorter than the keep-alive of the servers that are known to close early.
KEEPALIVE_EXPIRY_S = 4.0
CONNECTIONS_MAX = 512

#: httpx refuses longer URLs.
_PATH_MAX_BYTES = 60_000

#: Every printable ASCII character is left as the client wrote it.
_PATH_SAFE = "".join(chr(code) for code in range(0x21, 0x7F))


class HttpxUpstream:
    """`api.Upstream` over httpx. Owns its connections and the tasks that close them."""

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        api_key: Secret | None,
        proxy: Secret | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """`base_url` is `http://`, `https://` or `unix:///path/of.sock`; a final `/v1` is not doubled.

        Raises: `ValueError` for a URL or proxy that cannot be used.
        """
        self.name = name
        self._own_headers = own_headers(None if api_key is None else api_key.reveal())
        self._base, socket_path = _base_url(name, base_url)
        is_tls = self._base.scheme == "https" or proxy is not None
        # Loading the certificates takes tens of milliseconds: once, and not at all for plain HTTP.
        self._ssl = httpx.create_ssl_context(verify=is_tls, trust_env=False)
        self._proxy = None if proxy is None else proxy.reveal()
        self._socket_path = socket_path
        self._places = asyncio.Semaphore(connections_max)
        #: Oldest first.
        self._idle: deque[HttpxWire] = deque()
        self._busy: set[HttpxWire] = set()
        #: Set while anything is idle.
        self._expiry: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        try:
            self._new_wire()
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            # The message of the library may quote the URL, and with it a password.
            raise ValueError(f"{name}: the proxy cannot be used ({type(error).__name__})") from None

    async def open(
        self, request: UpstreamRequest, *, connect_s: float, first_byte_s: float, idle_s: float
    ) -> HttpxResponse:
        """See `api.Upstream`. Raises also `ConnectionsBusy` where no connection came free within `connect_s`, and
        `ApiError` for a path that no URL can hold."""
        outgoing = self._outgoing(request, connect_s)
        await self._take_place(connect_s)
        wire = self._take_wire()
        outgoing.extensions["trace"] = wire.trace
        deadline_s = asyncio.get_running_loop().time() + first_byte_s
        try:
            async with asyncio.timeout_at(deadline_s):
                raw = await wire.transport.handle_async_request(outgoing)
        except BaseException as error:
            self._let_go(wire.drop(), wire)
            if isinstance(error, TimeoutError):
                raise UpstreamTimeout("first_byte", first_byte_s) from error
            if isinstance(error, httpx.TransportError):
                raise _translated(error) from error
            raise
        return HttpxResponse(self, raw, wire, deadline_s, first_byte_s, idle_s)

    async def aclose(self) -> None:
        """Close every connection, used ones too. Idempotent."""
        self._is_closed = True
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for wire in (*self._idle, *self._busy):
            self._close_later(wire.drop())
        self._idle.clear()
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=CLOSE_WAIT_S)

    def let_go(
        self, raw: httpx.Response, wire: HttpxWire, pending: asyncio.Task[bytes] | None, *, is_read: bool
    ) -> asyncio.Task[None]:
        """An answer is done with: keep its connection where it was read to the end, else close it. Once per answer.
        `pending` is a read of it that is under way."""
        return self._let_go(self._settle(raw, wire, pending, is_read=is_read), wire)

    def _let_go(self, close: Coroutine[Any, Any, None], wire: HttpxWire) -> asyncio.Task[None]:
        self._busy.discard(wire)
        task = self._close_later(close)
        task.add_done_callback(lambda _: self._places.release())
        return task

    async def _settle(
        self, raw: httpx.Response, wire: HttpxWire, pending: asyncio.Task[bytes] | None, *, is_read: bool
    ) -> None:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})
            if not pending.cancelled():
                pending.exception()  # seen, so that the loop does not report it
        if not is_read:
            await wire.drop()
        await raw.aclose()
        if self._is_closed:
            await wire.drop()
        elif is_read:
            wire.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(wire)
            self._expire_later()

    def _new_wire(self) -> HttpxWire:
        transport = httpx.AsyncHTTPTransport(
            verify=self._ssl,
            trust_env=False,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=KEEPALIVE_EXPIRY_S),
            proxy=self._proxy,
            uds=self._socket_path,
        )
        return HttpxWire(transport)

    def _take_wire(self) -> HttpxWire:
        """The connection used last, as it is the likeliest to be open still."""
        self._close_expired()
        wire = self._idle.pop() if self._idle else self._new_wire()
        self._busy.add(wire)
        return wire

    def _close_expired(self) -> None:
        now_s = asyncio.get_running_loop().time()
        while self._idle and self._idle[0].idle_since_s + KEEPALIVE_EXPIRY_S <= now_s:
            self._close_later(self._idle.popleft().drop())

    def _expire_later(self) -> None:
        """Come for the oldest idle connection in time. A timer that is set stays: at worst it comes in vain, once."""
        if self._idle and self._expiry is None:
            oldest_s = self._idle[0].idle_since_s
            self._expiry = asyncio.get_running_loop().call_at(oldest_s + KEEPALIVE_EXPIRY_S, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._close_expired()
        self._expire_later()

    def _outgoing(self, request: UpstreamRequest, connect_s: float) -> httpx.Request:
        path = quote(request.path.encode("utf-8", "surrogateescape"), safe=_PATH_SAFE)
        if len(path) > _PATH_MAX_BYTES:
            raise bad_request(f"the path has {len(path)} bytes, more than the {_PATH_MAX_BYTES} that can be forwarded")
        prefix = self._base.path.rstrip("/")
        if prefix.endswith("/v1") and path.startswith("/v1/"):
            path = path.removeprefix("/v1")
        return httpx.Request(
            request.method,
            self._base.copy_with(raw_path=(prefix + path).encode()),
            headers=[*self._own_headers, *sendable(request.headers)],
            content=request.body,
            extensions={"timeout": {"connect": connect_s, "read": None, "write": None, "pool": None}},
        )

    async def _take_place(self, connect_s: float) -> None:
        try:
            async with asyncio.timeout(connect_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise ConnectionsBusy(f"{self.name}: no free connection within {connect_s:g} s") from error

    def _close_later(self, close: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Close in a task of our own, so that the caller's cancellation cannot stop it half-way."""
        task = asyncio.get_running_loop().create_task(_quietly(close))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task


async def _quietly(close: Coroutine[Any, Any, None]) -> None:
    """A connection that cannot be closed properly is gone just the same."""
    with suppress(httpx.HTTPError, OSError):
        await close


def _base_url(name: str, base_url: str) -> tuple[httpx.URL, str | None]:
    """The URL that paths are put behind, and the Unix socket where it is one."""
    if base_url.startswith("unix://"):
        return httpx.URL("http://localhost"), base_url.removeprefix("unix://")
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{name}: the URL cannot be read: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{name}: the URL must start with http://, https:// or unix:// and name a host")
    if url.userinfo or url.query or url.fragment:
        raise ValueError(f"{name}: the URL must be a plain base; give credentials as api_key")
    return url, None


def _translated(error: httpx.TransportError) -> ConnectFailed | UpstreamLost:
    """What went wrong before the status was here, in our words."""
    if isinstance(error, httpx.ConnectTimeout):
        return ConnectTimedOut(as_text(error))
    if isinstance(error, httpx.ConnectError | httpx.ProxyError | httpx.UnsupportedProtocol):
        return ConnectFailed(as_text(error))
    return UpstreamLost(as_text(error))
