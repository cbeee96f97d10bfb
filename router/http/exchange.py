"""One request and its answer on a client's connection, as ASGI 3 has them: `receive` and `send`; and, for an
application that knows whose connection it is, `answer`, `begin` and `put`, which need no messages and no waiting.

Rules:
- The head of an answer of known length is written together with its first bytes. That of a stream goes out at once,
  with what there is of its body.
- A client that holds its body back (`Expect`) is asked for it when the application asks, and not before.
- Once the client is gone, `receive` says so, `send` raises, and a task that is watched is cancelled.

Time is the connection's: it ends what takes too long and says so here. Nothing here knows routes, keys or models.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState

from router.errors import ApiError
from router.http.heads import CONTROLS, FIELDS, STATUS_LINES, new_field

log = logging.getLogger(__name__)

#: Where in `scope["extensions"]` the `Exchange` of a request stands.
EXTENSION = "router.exchange"

_GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
#: These are written here, whatever the application says in them.
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection"})
#: Statuses whose answers have no body. Source: RFC 9112, 6.3.
_NO_CONTENT = 204
_BODILESS = frozenset({_NO_CONTENT, 304})


class Line(Protocol):
    """What an exchange needs of its connection."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    is_write_paused: bool
    is_read_paused: bool
    server_state: ServerState

    def awaits_body(self) -> None:
        """The application waits for more of the body."""

    def awaits_reader(self) -> None:
        """It waits for the client to take what was written."""

    def resume_reading(self) -> None: ...

    def answered(self, exchange: "Exchange") -> None:
        """All of the answer is written."""


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer."""

    _line: Line
    _is_bodiless: bool
    _speaks_1_0: bool
    _expects_go_on: bool
    keep_alive: bool
    #: Pieces of the body that came and were not taken yet.
    parts: list[bytes] = []
    unread_bytes: int = 0
    more_body: bool = True
    #: Whether the application had the last piece of the body.
    _is_told: bool = False
    #: Why the body is not waited for any longer.
    late: ApiError | None = None
    #: The head that is to go out with the first bytes.
    _head: bytes = b""
    #: Of an answer of known length, what is still to come.
    _left_bytes: int | None = None
    _is_chunked: bool = False
    is_started: bool = False
    is_complete: bool = False
    is_gone: bool = False
    task: asyncio.Task[None] | None = None
    #: Whether the task is to be cancelled if the client leaves before it has its whole answer; and that it was.
    is_watched: bool = False
    is_cut: bool = False
    #: Who waits for something to change.
    waiters: list[asyncio.Future[None]] = []

    async def run(self, app: ASGIApp, scope: Scope, tasks: set[asyncio.Task[None]]) -> None:
        """The call, in a task of its own that stands in `tasks` until it is over."""
        try:
            await app(scope, self.receive, self.send)
            if not (self.is_complete or self._is_lost):
                if self.late is None:
                    log.error("the call ended without a whole answer")
                self._give_up()
        except Exception as error:
            # The one boundary: a bug of ours must end as an answer and in the log.
            if not (self._is_lost and isinstance(error, ConnectionError)):
                log.exception("the call failed")
            self._give_up()
        except BaseException:
            self._line.transport.close()
            raise
        finally:
            # Not as a callback of the task, which costs a turn of the loop: a task that is cancelled before it began
            # stays in the set, and only a server that stops for good does that.
            if self.task is not None:
                tasks.discard(self.task)
                self.task = None

    # -- the application's side ------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """ASGI's: the next piece of the body, or that there is nobody to send one."""
        while True:
            if self.is_gone or self.is_complete or self.late is not None:
                return {"type": "http.disconnect"}
            if self.parts or not (self.more_body or self._is_told):
                break
            if self._expects_go_on:
                self._expects_go_on = False
                self._line.transport.write(_GO_ON)
            if self.more_body:
                self._line.awaits_body()
            await self._wait()
        return {"type": "http.request", "body": self._take(), "more_body": self.more_body}

    def whole_body(self) -> bytes | None:
        """The body if all of it is here already and came in one piece; else None, and nothing is taken."""
        parts = self.parts
        if self.more_body or len(parts) != 1 or self._is_told or self.is_gone or self._line.is_read_paused:
            return None
        self.unread_bytes = 0
        self._is_told = True
        self._expects_go_on = False
        return parts.pop()

    def _take(self) -> bytes:
        parts = self.parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self.unread_bytes = 0
        self._is_told = not self.more_body
        # A client that sends without being asked need not be asked any more.
        self._expects_go_on = False
        if self._line.is_read_paused:
            self._line.resume_reading()
        return body

    async def send(self, message: Message) -> None:
        """ASGI's. Raises: `ConnectionResetError` if the client is gone, `RuntimeError` for a message out of place."""
        line = self._line
        if line.is_write_paused:
            await self.drain()
        if self.is_gone or line.transport.is_closing():
            raise ConnectionResetError
        kind = message["type"]
        if not self.is_started:
            if kind != "http.response.start":
                raise RuntimeError(f"an answer begins with 'http.response.start', not with {kind!r}")
            self._start(message["status"], message.get("headers", ()))
        elif kind != "http.response.body" or self.is_complete:
            raise RuntimeError(f"{kind!r} has no place in an answer that {'ended' if self.is_complete else 'began'}")
        else:
            self._write(message.get("body", b""), more_body=message.get("more_body", False))

    @property
    def has_room(self) -> bool:
        """Whether the client takes what is written; where it does not, only `send` waits for it."""
        return not self._line.is_write_paused

    async def drain(self) -> None:
        """Wait for `has_room`, or for the client's end."""
        while self._line.is_write_paused and not self.is_gone:
            self._line.awaits_reader()
            await self._wait()

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], lines: bytes, body: bytes) -> bool:
        """A whole answer in one write; its length is added. `lines`: more of its head, ready-made, a line end before
        each. False: nothing is written, since the client has yet to take what was; `drain`, and try again. Raises: as
        `send`."""
        line = self._line
        transport = line.transport
        if self.is_gone or transport.is_closing():
            raise ConnectionResetError
        if self.is_started:
            raise RuntimeError("a whole answer has no place in one that began")
        if line.is_write_paused:
            return False
        self._left_bytes = len(body)
        head = self._begin(status, headers, lines)
        transport.write(head if self._is_bodiless else head + body)
        self._left_bytes = 0
        self._complete()
        return True

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], lines: bytes, body: bytes) -> None:
        """The head and the first bytes of an answer that goes on, in one write; otherwise as `answer`."""
        if self.is_gone or self._line.transport.is_closing():
            raise ConnectionResetError
        if self.is_started:
            raise RuntimeError("an answer that has begun cannot begin again")
        self._head = self._begin(status, headers, lines)
        self._write(body, more_body=True)

    def put(self, body: bytes) -> bool:
        """Write a piece of an answer that has begun; tells whether there is room for another. Raises: as `send`."""
        line = self._line
        transport = line.transport
        if self.is_gone or transport.is_closing():
            raise ConnectionResetError
        if self._is_chunked and body:
            transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        else:
            self._write(body, more_body=True)
        return not line.is_write_paused

    # -- the connection's side -------------------------------------------------------------------------------------

    @property
    def is_out(self) -> bool:
        """Whether the client has, or may have, some of the answer."""
        return self.is_started and not self._head

    @property
    def is_all_out(self) -> bool:
        """Whether the client can know that it has the whole answer, though the call is not over."""
        return self.is_out and self._left_bytes == 0

    @property
    def _is_lost(self) -> bool:
        """Whether writing has no sense any more; a transport may be closed some turns of the loop before it says so."""
        return self.is_gone or self._line.transport.is_closing()

    def wake(self) -> None:
        """Something changed that `receive` or `send` may wait for."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def lose(self) -> None:
        """The client is gone, or will get nothing more."""
        self.is_gone = True
        if self.is_watched and self.task is not None:
            self.is_watched = False
            self.is_cut = True
            self.task.cancel()
        self.wake()

    async def _wait(self) -> None:
        waiter = self._line.loop.create_future()
        self.waiters.append(waiter)
        try:
            await waiter
        finally:
            self.waiters.remove(waiter)

    # -- the answer on the wire ------------------------------------------------------------------------------------

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._head = self._begin(status, headers, b"")
        if self._left_bytes is None and not self._is_bodiless:
            self._write(b"", more_body=True)

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], lines: bytes) -> bytes:
        """The whole head; from here on the answer has begun. What `headers` say of the framing is noted, and written at
        the head's end."""
        parts: list[bytes] = []
        for name, value in headers:
            field = FIELDS.get(name)
            if field is not None:
                parts.append(field + value)
            elif name == b"content-length" and self._left_bytes is None:
                self._left_bytes = int(value)
            elif name.lower() in _FRAMING:
                self._note_framing(name.lower(), value)
            else:
                parts.append(new_field(name.lower()) + value)
        fields = b"".join(parts)
        if len(fields) - len(fields.translate(None, CONTROLS)) != 2 * len(parts):
            raise RuntimeError("a header's value has a control character in it")
        self.is_started = True
        if self._expects_go_on:
            # Whether the body still comes is the client's choice, so a next request could not be told from it.
            self.keep_alive = False
        if status in _BODILESS:
            self._is_bodiless = True
            if status == _NO_CONTENT:
                self._left_bytes = None
        if self._left_bytes is not None:
            framing = b"\r\ncontent-length: %d" % self._left_bytes
        elif self._is_bodiless:
            framing = b""
        elif self._speaks_1_0:
            framing, self.keep_alive = b"", False
        else:
            framing, self._is_chunked = b"\r\ntransfer-encoding: chunked", True
        end = b"\r\n\r\n" if self.keep_alive else b"\r\nconnection: close\r\n\r\n"
        first = STATUS_LINES.of(status, self._line.server_state.default_headers)
        return b"".join((first, fields, lines, framing, end))

    def _note_framing(self, name: bytes, value: bytes) -> None:
        """What else the application says of the framing, which is written once all of it is known."""
        if name == b"content-length":
            if self._left_bytes not in (None, int(value)):
                raise RuntimeError("two lengths for one answer")
            self._left_bytes = int(value)
        elif name == b"connection" and b"close" in value.lower():
            self.keep_alive = False

    def _write(self, body: bytes, *, more_body: bool) -> None:
        if self._is_bodiless:
            data = b""
        elif self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more_body:
                data += _LAST_CHUNK
        else:
            data = body
            if self._left_bytes is not None:
                self._left_bytes -= len(body)
                if self._left_bytes < 0 or (self._left_bytes > 0 and not more_body):
                    raise RuntimeError("the answer's body and its content-length differ")
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self._line.transport.write(data)
        if not more_body:
            self._complete()

    def _complete(self) -> None:
        self.is_complete = True
        self.is_watched = False
        if self.waiters:
            self.wake()
        self._line.answered(self)

    def _give_up(self) -> None:
        """An error for an answer, or the end of the connection where some of another is out already."""
        if self.is_complete or self._is_lost:
            return
        if self.is_out or self.late is not None:
            self._line.transport.close()
            return
        error = ApiError(500, "internal_error", "The router failed on this request; see its log.")
        self.is_started, self._head, self._left_bytes = False, b"", None
        headers = [(name.encode(), value.encode()) for name, value in error.response_headers().items()]
        body = error.body()
        self.keep_alive = False
        self._start(error.status, [*headers, (b"content-length", b"%d" % len(body))])
        self._write(body, more_body=False)
