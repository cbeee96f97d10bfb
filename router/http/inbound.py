"""The requests of one connection: how long they may take to come, how large, how many, and in what order.

uvicorn accepts and counts the connections and httptools parses; what runs for each request is here and in `exchange`.
The bounds: a head has to be complete in time and within a size, a body has to come on, a connection has one request at
a time, and what cannot be served is answered in the standard shape.

Rules:
- While a call is under way its connection is read on, so that the client's leaving is seen. What comes meanwhile is
  thrown away and the connection closed after the answer: a client that pipelines sends again what was not answered.
- A connection waits for one thing at a time, and has one deadline for it.

Where there are more connections than there may be, some that hold no call end (`crowd`); where none can, what comes on
the connections beyond is refused, save on the open paths.

Nothing here knows keys, models, or other routes than the open ones; a refusal made here is in no metric.
"""

import asyncio
import contextlib
import logging
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from router.alarm import NEVER, TICK_S
from router.http import doorstep
from router.http.crowd import RECENT_S, YOUNG_S, Use, make_room
from router.http.exchange import EXTENSION, Exchange
from router.http.framing import NO_TARGET, fault_of, new_parser, split_target, without_upgrade
from router.http.line import ClientLine
from router.http.pace import UploadPace
from router.http.upload import BufferBudget

log = logging.getLogger(__name__)

#: Bytes of a body that are held for an application that does not take them; then the socket is not read. As uvicorn.
_UNREAD_MAX_BYTES = 64 * 1024
_ASGI = {"version": "3.0", "spec_version": "2.4"}


class InboundProtocol(ClientLine):
    """One connection. The class's settings are the limits; the configuration's `limit_concurrency` is how many
    connections there may be."""

    #: From the connection, or from the first byte of a later request, to the end of its headers.
    #: Precedent: Apache's `RequestReadTimeout header` begins at 20, HAProxy's examples have 10.
    head_s = 10.0
    #: Request line and headers, and likewise what comes in place of a body's bytes (trailers, chunk extensions).
    #: Precedents: nginx 32 KiB, uvicorn's h11 and Go 64 KiB and 1 MiB.
    head_max_bytes = 64 * 1024
    #: A client that sends no byte of its body for so long is given up.
    upload_idle_s = 60.0
    #: And one whose whole body takes longer than this, and a second more for so many bytes that came. Precedent:
    #: Apache's `RequestReadTimeout body=20,MinRate=500`.
    upload_s = 60.0
    upload_min_bytes_per_s = 10_000
    #: For the rest of a body whose request is already answered.
    rest_s = 30.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        #: Between a request's first byte, which is no line end, and the end of its headers.
        self._in_head = False
        #: Between two requests; the deadline is the one for keeping the connection.
        self._is_idle = False
        #: Bytes since the last that were of use: of the head that is coming, or around a body's chunks.
        self._loose_bytes = 0
        #: Of a body that is waited for.
        self._upload: UploadPace | None = None
        #: Bytes of the body that came.
        self._body_bytes = 0
        #: Lines of the head that name one.
        self._hosts = 0
        #: Accepted beyond `limit_concurrency`, and there was no room to be made.
        self._is_beyond = False
        #: The next request's first bytes, of a client that had its whole answer before the call was over.
        self._early = b""

    # -- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class
        # Told apart here: of many that come at once, those before the limit are served.
        self.connections.add(self)
        self.transport = transport
        self.server = get_local_addr(transport)
        self.client = get_remote_addr(transport)
        self.scheme = "https" if is_ssl(transport) else "http"
        self._deadline.set(self.head_s, self._head_is_late)
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) > limit:
            make_room(self.connections, self, limit, self.loop.time())  # type: ignore[arg-type]  # all are of this class
            self._is_beyond = len(self.connections) > limit

    def may_end(self, now_s: float) -> tuple[Use, float] | None:
        """See `crowd.Guest`."""
        transport = self.transport
        if self._exchange is not None or transport.is_closing() or transport.get_write_buffer_size():
            return None
        due_s = self._deadline.deadline_s
        if self._is_deaf:
            return Use.SILENT, due_s
        if self._in_head or self._in_body:
            return Use.SENDING, due_s
        if self._is_idle:
            return Use.RECENT if due_s - now_s > self.timeout_keep_alive - RECENT_S else Use.IDLE, due_s
        return Use.YOUNG if due_s - now_s > self.head_s - YOUNG_S else Use.SILENT, due_s

    def make_way(self) -> None:
        """See `crowd.Guest`."""
        # It is lost in the loop's next turn only, and counts no longer.
        self.connections.discard(self)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._discard(data)
            return
        if self._exchange is not None and not self._in_body:
            self._meet_early(data, self._exchange)
            return
        self._loose_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._malformed(error)
        # The usual end: a whole request came in one piece, and its call is under way.
        if (self._exchange is None or self._in_body) and not self._is_deaf:
            self._meet_part()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """A whole head has come that asks for another protocol, and `rest` after it: read it as though it did not."""
        if self._is_deaf:
            return
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(doorstep.malformed())
            return
        head = without_upgrade(method, self.url, self.parser.get_http_version(), self.headers)
        self.parser = new_parser(self)
        # One more with such a wish in what comes after it is pipelined, and not served.
        with contextlib.suppress(httptools.HttpParserUpgrade):
            self.parser.feed_data(head + rest)

    def _meet_part(self) -> None:
        """The request is not complete yet, or answered before it was."""
        exchange = self._exchange
        if self._loose_bytes > self.head_max_bytes:
            self._refuse(doorstep.head_too_large(self.head_max_bytes))
        elif self._in_body:
            if self._upload is not None:
                self._upload.came(self.loop.time())
            if exchange is None or not exchange.parts:
                return
            exchange.wake()
            if exchange.unread_bytes > _UNREAD_MAX_BYTES and not self.is_read_paused:
                # Though it is waited for: several reads of the socket may come before the waiting task has its turn.
                self.pause_reading()
        elif not self._loose_bytes:
            # The rest of a body whose answer is out: the connection waits for its next request.
            self._is_idle = True
            self._deadline.set(self.timeout_keep_alive, self.transport.close)
            if self.is_write_paused:
                self.pause_reading()
        elif self._is_idle:
            self._is_idle = False
            self._deadline.set(self.head_s, self._head_is_late)

    # -- what the parser finds ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._exchange is not None:
            self._go_deaf()
            return
        self._in_head = True
        self.url = b""
        self.headers = []
        self._hosts = 0
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"host":
            self._hosts += 1
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_deaf:
            return
        if self._loose_bytes > self.head_max_bytes and self._head_bytes() > self.head_max_bytes:
            self._refuse(doorstep.head_too_large(self.head_max_bytes))
            return
        parser = self.parser
        if parser.should_upgrade():
            # `_ignore_upgrade` follows.
            return
        version = parser.get_http_version()
        if (self._hosts != 1 or version != "1.1") and (fault := fault_of(version, self._hosts)) is not None:
            self._refuse(fault)
            return
        if self._is_beyond and self._stays_out():
            self._refuse(doorstep.too_many(len(self.connections)))
            return
        self._loose_bytes = self._body_bytes = 0
        self._deadline.deadline_s = NEVER
        self._upload = None
        method = parser.get_method().decode("ascii")
        path, raw_path, query = split_target(self.url)
        is_head = method == "HEAD"
        speaks_1_0 = version == "1.0"
        expects_go_on = self.expect_100_continue and not speaks_1_0
        keep_alive = not speaks_1_0 and parser.should_keep_alive()
        exchange = Exchange(self, is_head, speaks_1_0, expects_go_on, keep_alive)
        scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": method,
            "root_path": "",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
            "extensions": {EXTENSION: exchange},
        }
        self._exchange = exchange
        exchange.task = task = self.loop.create_task(exchange.run(self.app, scope, self.tasks))
        self.tasks.add(task)
        self._in_head = self._is_idle = False
        self._in_body = True
        # Trailers go to a list that nobody reads, not among the headers.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        if self._is_deaf:
            return
        self._loose_bytes = 0
        exchange = self._exchange
        if exchange is not None:
            self._body_bytes += len(body)
            exchange.unread_bytes += len(body)
            exchange.parts.append(body)

    def on_message_complete(self) -> None:
        if self._is_deaf:
            return
        self._in_body = False
        self._loose_bytes = 0
        exchange = self._exchange
        if exchange is not None:
            self._deadline.deadline_s = NEVER
            exchange.more_body = False
            if exchange.waiters:
                exchange.wake()

    def _malformed(self, error: Exception) -> None:
        if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(error.__context__, NO_TARGET):
            # What the parser found was well-formed; a bug of ours must be in the log.
            log.error("a request could not be taken", exc_info=error)
        if self._is_deaf:
            return
        if self._exchange is not None and not self._in_body:
            # The bytes that are no HTTP came after a whole request, which gets its answer.
            self._go_deaf()
            return
        self._refuse(doorstep.malformed())

    # -- what an exchange asks ---------------------------------------------------------------------------------------

    def awaits_body(self) -> None:
        """From now on the client has to send."""
        if self._upload is None:
            self._upload = UploadPace(self.loop.time(), self.upload_idle_s, self.upload_s, self.upload_min_bytes_per_s)
        else:
            self._upload.came(self.loop.time())
        self._look_at_upload()

    def answered(self, exchange: Exchange) -> None:
        """All of the answer is written; the connection waits for its next request, or ends."""
        self._exchange = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.is_read_paused:
            self.resume_reading()
        if not exchange.keep_alive:
            if self._in_body or self._is_deaf:
                self._linger()
            else:
                self.transport.close()
        elif self._in_body:
            self._deadline.set(self.rest_s, self.transport.close)
        else:
            self._is_idle = True
            self._deadline.set(self.timeout_keep_alive, self.transport.close)
            if self.is_write_paused:
                # Who does not read answers cannot ask for more of them.
                self.pause_reading()
            elif self._early:
                self._meet_next()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_idle and self.is_read_paused:
            self.resume_reading()
            if self._early:
                self._meet_next()

    def _meet_next(self) -> None:
        """What came of the next request before its turn."""
        early, self._early = self._early, b""
        self.data_received(early)

    def _head_is_late(self) -> None:
        # A client that has asked for nothing would take an error for the answer to what it asks next.
        if self._in_head:
            self._refuse(doorstep.head_too_late(self.head_s))
        else:
            self.transport.close()

    def _look_at_upload(self) -> None:
        exchange, upload = self._exchange, self._upload
        if exchange is None or upload is None:
            return
        now_s = self.loop.time()
        left_s = upload.left_s(now_s, self._body_bytes)
        if left_s > TICK_S:
            self._deadline.set(left_s, self._look_at_upload)
        else:
            exchange.late = upload.too_slow(now_s, self._body_bytes)
            exchange.wake()

    # -- not taking --------------------------------------------------------------------------------------------------

    def _meet_early(self, data: bytes, exchange: Exchange) -> None:
        """Bytes that come after a whole request and before its call is over."""
        if exchange.is_all_out:
            # This is no pipelining, only a client that is faster than we are.
            self._early += data
            self.pause_reading()
            return
        self._go_deaf()
        self._discard(data)

    def _stays_out(self) -> bool:
        """Whether a request on a connection beyond the bound is refused: not where others have ended since."""
        limit = self.limit_concurrency
        self._is_beyond = limit is not None and len(self.connections) > limit
        return self._is_beyond and split_target(self.url)[0] not in doorstep.OPEN_PATHS

    def _head_bytes(self) -> int:
        """Of the head that the parser has just completed, save spaces and line ends that say nothing."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)


def counting_in(buffers: BufferBudget) -> type[InboundProtocol]:
    """The protocol of a process whose held bytes are counted in `buffers`."""
    return type("Inbound", (InboundProtocol,), {"buffers": buffers})
