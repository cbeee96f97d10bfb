"""One connection to an engine: bytes out, bytes in, and when it may be used again.

Rules of this file:
- One request at a time. A connection is used again only if the answer came whole, framed by its length or in chunks,
  the request was sent whole, and not a byte came that nobody asked for. In any other case it is aborted, at once: that
  is how an engine hears that nobody listens any more.
- What the other side sends is bounded: bytes that are not of a body (heads, trailers, chunk extensions) by
  `BARREN_MAX_BYTES`, the body that nobody has read yet by `UNREAD_MAX_BYTES` and one read of the socket more, after
  which the socket itself is not read and TCP holds the engine back. Nor is it while the one to whom the body is pushed
  has no room.
- What the other side said before it closed counts also where it was our write that found it closed: an engine that
  refuses a large request unread is heard. Not over TLS, where what the kernel has still to give is no plain text.
- An answer that nobody asked for is told from the next one only by coming before that one is asked for: HTTP/1.1 has no
  numbers. What lies in the socket by then closes the connection; nothing guards against what comes later.
- Bytes of a body pass undecoded. An answer whose framing is in doubt is no answer (RFC 9112, 6.3).
- Time is kept by one alarm for each connection: in steady traffic no timer is made or cancelled for a request.

It must never know which other connections there are, nor what a request or an answer means. How an answer is read while
it arrives is `response.py`.
"""

import asyncio
import math
import os
import select
import socket
from typing import Protocol, cast

import httptools

from router.alarm import Alarm
from router.upstream.api import Headers, UpstreamLost
from router.upstream.headers import NEVER_RETURNED, first, named_in_connection
from router.upstream.response import WireResponse

#: Precedent: nginx refuses heads of 4 to 32 kB by default, httpx of 100 kB.
BARREN_MAX_BYTES = 64 << 10
UNREAD_MAX_BYTES = 64 << 10
#: Bodies up to here go out with their head in one write.
JOINED_MAX_BYTES = 64 << 10
#: Larger ones in pieces of this size, the next when the one before has left this process.
_PIECE_BYTES = 256 << 10

_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})


class WireOwner(Protocol):
    """Who is told, once each, what becomes of a connection that is in use or idle."""

    def keep(self, wire: "Wire") -> None:
        """The answer is whole; the connection can take another request."""

    def forget(self, wire: "Wire") -> None:
        """The connection is gone."""


class Wire(Alarm, asyncio.Protocol):
    """A connection; made before it is connected. Given to whoever owns it when connected, to be asked one request after
    the other."""

    __slots__ = (
        "_barren_bytes",
        "_fd",
        "_is_at_end",
        "_is_chunked",
        "_is_head_only",
        "_is_in_head",
        "_is_paused",
        "_is_sending",
        "_may_stay",
        "_named",
        "_owner",
        "_parser",
        "_poll",
        "_refusal",
        "_response",
        "_transport",
        "_unread_bytes",
        "_writes_wait",
        "idle_since_s",
        "is_dropped",
    )

    def __init__(self, owner: WireOwner, loop: asyncio.AbstractEventLoop) -> None:
        #: The deadline is that of the wait under way.
        super().__init__(loop)
        self.idle_since_s = 0.0
        self.is_dropped = False
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._poll: select.poll | None = None
        #: Of a socket that can be read past the transport; below 0 where there is none.
        self._fd = -1
        self._response: WireResponse | None = None
        #: Since the last byte that was of a body or ended a head.
        self._barren_bytes = 0
        self._unread_bytes = 0
        self._is_paused = False
        self._is_sending = False
        self._writes_wait = False
        # What the parser has met of the answer under way.
        self._is_in_head = True
        self._is_at_end = False
        self._is_chunked = False
        self._is_head_only = False
        self._may_stay = False
        self._named: bytes | None = None
        #: Why it is no answer, where it was us who stopped the parser.
        self._refusal: str | None = None

    # -- for the owner ----------------------------------------------------------------------------------------------

    def is_usable(self) -> bool:
        """Whether the idle connection is still what it was. A close by the other side that the loop has not told of yet
        lies in the socket, and so do bytes that nobody asked for."""
        if self.is_dropped or self._transport is None or self._transport.is_closing():
            return False
        return self._poll is None or not self._poll.poll(0)

    def ask(self, data: bytes, *, is_head_only: bool, first_byte_s: float, idle_s: float) -> WireResponse:
        """Write a request, or the head of one whose body `send_large` writes. Its first-byte limit runs from here."""
        assert self._response is None, "one request at a time"
        # Where there was an answer before, it was whole: nothing else of it is left.
        self._is_in_head, self._is_at_end, self._is_chunked, self._named = True, False, False, None
        self._is_head_only = is_head_only
        self._barren_bytes = self._unread_bytes = 0
        self._response = response = WireResponse(self, self.loop.time() + first_byte_s, first_byte_s, idle_s)
        assert self._transport is not None
        self._transport.write(data)
        return response

    async def send_large(self, response: WireResponse, body: bytes) -> None:
        """Write a large body at the pace of the other side. Returns early where it answers before it
        has read everything: the answer counts, and the connection is then of no more use.

        Raises: what `UpstreamResponse.read` raises.
        """
        assert self._transport is not None
        self._is_sending = True
        view = memoryview(body)
        for at in range(0, len(body), _PIECE_BYTES):
            # One that is closing has failed and is about to say so.
            while (self._writes_wait or self._transport.is_closing()) and not response.status:
                await response.news()
            if response.status or response.wire is None:
                return
            self._transport.write(view[at : at + _PIECE_BYTES])
        self._is_sending = False

    def drop(self) -> None:
        """Abort the connection, in whatever state it is. Idempotent."""
        if self.is_dropped:
            return
        self.is_dropped = True
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()
        response, self._response = self._response, None
        self._owner.forget(self)
        if response is not None and response.wire is not None:
            response.fail(UpstreamLost("the connection was closed on our side"))

    # -- for the answer ---------------------------------------------------------------------------------------------

    def wait_until(self, deadline_s: float) -> None:
        """Somebody waits; the answer is late at `deadline_s`, unless that is set to infinity before."""
        self.deadline_s = deadline_s
        if self._is_paused:
            self._read_on()
        if deadline_s < self._rings_at_s:
            self._ring_at(deadline_s)

    def was_read(self, deadline_s: float) -> None:
        """All that had come was read; more of it is late at `deadline_s`."""
        self._unread_bytes = 0
        self.deadline_s = deadline_s
        if deadline_s < self._rings_at_s:
            self._ring_at(deadline_s)
        if self._is_paused:
            self._read_on()

    def hold(self) -> None:
        """There is no room for more: the socket is not read until somebody waits or has read."""
        if not (self._is_paused or self.is_dropped):
            self._is_paused = True
            assert self._transport is not None
            self._transport.pause_reading()

    def _read_on(self) -> None:
        self._is_paused = False
        assert self._transport is not None
        self._transport.resume_reading()

    def _came(self) -> None:
        if self._response is not None:
            self._response.fail(self._response.late())

    # -- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.is_dropped:
            self._transport.abort()
            return
        its_socket = transport.get_extra_info("socket")
        if its_socket is not None:
            if its_socket.family != socket.AF_UNIX:
                its_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._poll = select.poll()
            self._poll.register(its_socket.fileno(), select.POLLIN)
            if transport.get_extra_info("sslcontext") is None:
                self._fd = its_socket.fileno()

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            # Nobody asked.
            self.drop()
            return
        size_bytes = len(data)
        self._barren_bytes += size_bytes
        self._unread_bytes += size_bytes
        had_head = response.status
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._refusal is None and isinstance(error, httptools.HttpParserCallbackError):
                raise  # a fault of ours
            self._may_stay = False
            if not self._is_at_end:
                response.fail(UpstreamLost(f"no answer in HTTP/1.1: {self._refusal or error}"))
                return
        if self._is_at_end:
            self._end(response)
        elif self._barren_bytes > BARREN_MAX_BYTES:
            response.fail(UpstreamLost(f"more than {BARREN_MAX_BYTES:,} bytes of head, trailers or chunk extensions"))
        else:
            if response.pieces:
                response.came()
            elif not had_head and response.status:
                response.wake()
            # Also where a reader waits: a loop may read the socket many times before it runs a task.
            if self._unread_bytes > UNREAD_MAX_BYTES:
                self.hold()

    def eof_received(self) -> None:
        self._closed(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self._response is not None and self._fd >= 0:
            self._take_unread()
        self._closed(exc)

    def pause_writing(self) -> None:
        self._writes_wait = True

    def resume_writing(self) -> None:
        self._writes_wait = False
        if self._is_sending and self._response is not None:
            self._response.wake()

    def _closed(self, exc: Exception | None) -> None:
        response = self._response
        if response is not None:
            if response.status and exc is None and self._ends_by_closing(response.headers):
                self._may_stay = False
                self._end(response)
                return
            when = "amid its answer" if response.status else "before it answered"
            why = "" if exc is None else f" ({type(exc).__name__}: {exc})"
            response.fail(UpstreamLost(f"the other side closed the connection {when}{why}"))
        self.drop()

    def _take_unread(self) -> None:
        """Take in what came and was not read when a write failed. The socket is closed only after `connection_lost`."""
        while self._response is not None and self._unread_bytes <= UNREAD_MAX_BYTES:
            try:
                data = os.read(self._fd, UNREAD_MAX_BYTES)
            except OSError:
                return
            if not data:
                return
            self.data_received(data)

    def _ends_by_closing(self, headers: Headers) -> bool:
        """Whether the end of the connection is the end of the body (RFC 9112, 6.3, case 8)."""
        return not self._is_chunked and first(headers, b"content-length") is None

    def _end(self, response: WireResponse) -> None:
        """The answer is whole."""
        if self._is_head_only:
            # The parser cannot be told that a length without a body is right; what it took for one is none.
            response.pieces.clear()
            self._may_stay = False
        assert self._transport is not None
        self._response = None
        self.deadline_s = math.inf
        response.is_whole = True
        response.wire = None
        if not self._may_stay or self._is_sending or self._transport.get_write_buffer_size():
            self.drop()
        else:
            if self._is_paused:
                self._read_on()
            self._owner.keep(self)
        response.wake()

    # -- httptools --------------------------------------------------------------------------------------------------

    def _refuse(self, why: str) -> httptools.HttpParserError:
        """What to raise to stop the parser, which tells only that it was stopped."""
        self._refusal = why
        return httptools.HttpParserError(why)

    def on_message_begin(self) -> None:
        if self._is_at_end:
            raise self._refuse("bytes after the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer
        assert self._response is not None
        name = name.lower()
        if name not in NEVER_RETURNED:
            self._response.headers.append((name, value))
        elif name == b"transfer-encoding":
            if self._is_chunked or value.strip().lower() != b"chunked":
                raise self._refuse("a transfer coding that is not chunked")
            self._is_chunked = True
        elif name == b"connection" and value.lower() not in _PLAIN_CONNECTION:
            self._named = value if self._named is None else self._named + b"," + value

    def on_headers_complete(self) -> None:
        response = self._response
        assert response is not None
        status: int = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise self._refuse("it switched to a protocol that nobody asked for")
            response.headers.clear()
            self._is_chunked, self._named = False, None
            return
        self._is_in_head = False
        self._barren_bytes = 0
        self._may_stay = self._parser.should_keep_alive()
        if self._named is not None:
            named = named_in_connection((self._named,))
            response.headers = [pair for pair in response.headers if pair[0] not in named]
        response.status = status
        if self._is_head_only:
            self._is_at_end = True

    def on_body(self, data: bytes) -> None:
        self._barren_bytes = 0
        assert self._response is not None
        self._response.pieces.append(data)

    def on_message_complete(self) -> None:
        self._is_at_end = not self._is_in_head
