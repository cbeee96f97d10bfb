"""One connection of a client, before its request has a route: how long, how large, how many, and in what order.

uvicorn's protocol parses and speaks. Added here are the bounds that it lacks: a head has to be complete in time and
within a size, a connection has one request at a time, and what cannot be served is answered in the standard shape.

Rules:
- While a call is under way its connection is read on, so that the client's leaving is seen. What comes meanwhile is
  thrown away and the connection closed after the answer: a client that pipelines sends again what was not answered.
- After a refusal nothing more is taken from the connection. It is read a little longer, because a socket that is
  closed over unread bytes is reset, and the answer lost with it.

Nothing here knows routes, keys or models; a refusal made here is in no metric.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router.errors import ApiError

log = logging.getLogger(__name__)

#: Time for some connections to end.
_FULL_RETRY_AFTER_S = 5


class InboundProtocol(HttpToolsProtocol):
    """One connection. The class's settings are the limits; the configuration's `limit_concurrency` is how many
    connections there may be."""

    #: From the connection, or from the first byte of a later request, to the end of its headers.
    #: Precedent: Apache's `RequestReadTimeout header` begins at 20, HAProxy's examples have 10.
    head_s = 10.0
    #: Request line and headers, and likewise what comes in place of a body's bytes (trailers, chunk extensions).
    #: Precedents: nginx 32 KiB, uvicorn's h11 and Go 64 KiB and 1 MiB.
    head_max_bytes = 64 * 1024
    #: For the rest of a body whose request is already answered.
    rest_s = 30.0
    #: How long a refused connection is still read.
    linger_s = 2.0
    #: What one connection may send for nothing.
    discard_max_bytes = 8 * 2**20

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # The base class would refuse in plain text.
        self._connections_max, self.limit_concurrency = self.limit_concurrency, None
        self._timer: asyncio.TimerHandle | None = None
        #: Between a request's first byte, which is no line end, and the end of its headers.
        self._in_head = False
        #: Between the end of a request's headers and its own end.
        self._in_body = False
        #: Whatever comes is thrown away.
        self._is_deaf = False
        self._discarded_bytes = 0
        #: Bytes since the last that were of use: of the head that is coming, or around a body's chunks.
        self._loose_bytes = 0
        #: The next request's first bytes, of a client that had its whole answer before the call was over.
        self._early = b""

    # -- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class
        super().connection_made(transport)
        self._set_timer(self.head_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._discard(data)
        elif not self._in_body and self._is_answering():
            self._meet_early(data)
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._loose_bytes += len(data)
        super().data_received(data)
        if self._is_deaf:
            return
        if self._loose_bytes > self.head_max_bytes:
            self._refuse(self._head_too_large())
        elif not self._in_body and not self._is_answering() and self._timer is None:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._in_body:
            self._set_timer(self.rest_s, self.transport.close)
        elif self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    # -- what the parser finds ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_answering():
            self._go_deaf()
        else:
            self._in_head = True
            super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_deaf:
            return
        if self._loose_bytes > self.head_max_bytes and self._head_bytes() > self.head_max_bytes:
            self._refuse(self._head_too_large())
            return
        self._loose_bytes = 0
        self._stop_timer()
        if self._connections_max is not None and self._connections() >= self._connections_max:
            self._refuse(_too_many(self._connections_max))
            return
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        # Trailers go to a list that nobody reads, not among the headers.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            self._loose_bytes = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_deaf:
            return
        self._in_body = False
        self._loose_bytes = 0
        self._stop_timer()
        super().on_message_complete()
        if self.parser.should_upgrade():
            # No upgrade is offered, and the parser takes what follows, a body even, for another protocol's.
            self._go_deaf()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # the base class's signature
        """The base class's word for bytes that are no HTTP."""
        if self._is_deaf:
            return
        if not self._in_body and self._is_answering():
            # They came after a whole request, which gets its answer.
            self._go_deaf()
            return
        self._refuse(ApiError(400, "malformed_request", "What came is no well-formed HTTP request. Mend it."))

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait_for_head(self) -> None:
        """Between two requests: the deadline of one that has begun, or the time that an idle connection may stay."""
        if self._loose_bytes:
            self._set_timer(self.head_s, self._head_is_late)
        else:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _head_is_late(self) -> None:
        # A client that has asked for nothing would take an error for the answer to what it asks next.
        if self._in_head:
            text = f"The request's headers were not complete within {self.head_s:g} s. Send it again."
            self._refuse(ApiError(408, "request_headers_timeout", text))
        else:
            self.transport.close()

    def _set_timer(self, after_s: float, act: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(after_s, act)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- not taking --------------------------------------------------------------------------------------------------

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _meet_early(self, data: bytes) -> None:
        """Bytes that come after a whole request and before its call is over."""
        cycle = self.cycle
        if cycle.response_started and cycle.chunked_encoding is False and cycle.expected_content_length == 0:
            # All of the answer is out, so this is no pipelining, only a client that is faster than we are.
            self._early += data
            self.flow.pause_reading()
            return
        self._go_deaf()
        self._discard(data)

    def _go_deaf(self) -> None:
        self._is_deaf = True
        if self._is_answering():
            self.cycle.keep_alive = False

    def _discard(self, data: bytes) -> None:
        self._discarded_bytes += len(data)
        if self._discarded_bytes > self.discard_max_bytes:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, unless this request already has (some of) an answer, and end the connection."""
        self._is_deaf = True
        self._stop_timer()
        is_answered = self._in_body and self.cycle.response_started
        if self._is_answering():
            # The call hears that its client is gone; what it says from now on goes nowhere.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if is_answered or self.transport.is_closing():
            self.transport.close()
            return
        self.transport.write(self._answer(error))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._set_timer(self.linger_s, self.transport.abort)

    def _answer(self, error: ApiError) -> bytes:
        request_id = "req-" + secrets.token_hex(12)
        log.info("refused before its route: request %s, %s", request_id, error)
        body = error.body()
        headers = {
            **error.response_headers(),
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": request_id,
        }
        pairs = [
            *self.server_state.default_headers,
            *((name.encode(), value.encode()) for name, value in headers.items()),
        ]
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines.extend(name + b": " + value for name, value in pairs)
        return b"\r\n".join([*lines, b"", body])

    def _connections(self) -> int:
        return max(len(self.connections), len(self.tasks))

    def _head_bytes(self) -> int:
        """Of the head that the parser has just completed, save spaces and line ends that say nothing."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _head_too_large(self) -> ApiError:
        return ApiError(
            431,
            "request_headers_too_large",
            f"The request line and headers are more than {self.head_max_bytes:,} bytes. Send less of them.",
        )


def _too_many(connections_max: int) -> ApiError:
    return ApiError(
        503,
        "too_many_connections",
        f"The router has {connections_max:,} connections and takes no more (server.connections_max). Try again.",
        retry_after_s=_FULL_RETRY_AFTER_S,
    )
