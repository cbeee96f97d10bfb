"""The client's side of one call: its leaving, and what is sent to it.

How long a client may take to read is the connection's to say (`inbound`); here it ends the call. What a client sends is
`upload.py`'s.
"""

from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote

import msgspec
from starlette.types import Message, Scope, Send

from router.errors import ApiError, ErrorShape
from router.http.exchange import EXTENSION, Exchange
from router.request import Endpoint, RequestRecord

Headers = Iterable[tuple[bytes, bytes]]

#: Endpoints whose streams end with `data: [DONE]`.
_ENDS_WITH_DONE = frozenset({Endpoint.CHAT.value, Endpoint.COMPLETIONS.value})


_REQUEST_LINES = b"\r\n%b: %%b\r\n%b: %%.0f%%b" % (b"x-request-id", b"x-router-queue-wait-ms")
_COUNT_LINES = b"\r\n%b: %%d\r\n%b: %%b" % (b"x-router-prompt-tokens", b"x-router-prompt-tokens-exact")


class ClientLeft(ConnectionError):
    """The client closed its connection, or stopped reading or sending."""


def watch(exchange: Exchange | None) -> None:
    """If the client leaves (closes, resets, or stops reading) before it has its whole answer, its task is cancelled
    from now on: `was_cut` tells. Costs no task: the connection calls. Where the connection is none of the router's own
    (another ASGI server), nobody watches.

    Raises: `ClientLeft` where it is gone already.
    """
    if exchange is not None:
        if exchange.is_gone:
            raise ClientLeft
        exchange.is_watched = True


def was_cut(exchange: Exchange | None) -> bool:
    """Whether the cancellation that ended the work means that the client left. It is over then; another one (shutdown)
    stays pending and goes on."""
    return exchange is not None and exchange.is_cut and exchange.task is not None and exchange.task.uncancel() == 0


class Reply(msgspec.Struct, eq=False):
    """What goes to the client. `started` tells whether the status is out, after which an error is only an event of a
    stream; `finished`, whether all of it is. All of it raises `ClientLeft` where the client is gone.

    `exchange`: the request's own end of the connection, where it is one of the router's: what is to be fast goes there,
    past ASGI."""

    _send: Send
    _record: RequestRecord
    shape: ErrorShape
    _exchange: Exchange | None = None
    started: bool = False
    finished: bool = False
    _is_stream: bool = False

    async def start(self, status: int, headers: Headers, first: bytes = b"", *, is_stream: bool = False) -> None:
        """Status and headers, with the router's own added, and the `first` bytes, in one write."""
        record, exchange = self._record, self._exchange
        record.status = status
        record.bytes_out += len(first)
        self._is_stream = is_stream
        self.started = True
        if exchange is None:
            pairs = [*headers, *router_headers(record)]
            await self._out({"type": "http.response.start", "status": status, "headers": pairs})
            if first:
                await self._out({"type": "http.response.body", "body": first, "more_body": True})
            return
        try:
            await self.room()
            exchange.begin(status, headers, router_lines(record), first)
        except OSError:
            raise ClientLeft from None

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer, in one write; its length is added to the headers."""
        record, exchange = self._record, self._exchange
        record.status = status
        record.bytes_out += len(body)
        self.started = self.finished = True
        if exchange is None:
            pairs = [*headers, (b"content-length", b"%d" % len(body)), *router_headers(record)]
            await self._out({"type": "http.response.start", "status": status, "headers": pairs})
            await self._out({"type": "http.response.body", "body": body, "more_body": False})
            return
        try:
            lines = router_lines(record)
            while not exchange.answer(status, headers, lines, body):
                await exchange.drain()
        except OSError:
            raise ClientLeft from None

    @property
    def has_room(self) -> bool:
        """Whether the client takes what comes, as far as is known."""
        return self._exchange is None or self._exchange.has_room

    async def room(self) -> None:
        """Wait until the client takes more."""
        exchange = self._exchange
        if exchange is not None and not exchange.has_room:
            await exchange.drain()

    @property
    def can_put(self) -> bool:
        """Whether `put` may be called: the connection is the router's and the client takes what comes."""
        return self._exchange is not None and self._exchange.has_room

    def put(self, chunk: bytes) -> bool:
        """`write` without waiting; False: the client is slow, and only `write` is right until `can_put`."""
        assert self._exchange is not None
        self._record.bytes_out += len(chunk)
        try:
            return self._exchange.put(chunk)
        except OSError:
            raise ClientLeft from None

    async def write(self, chunk: bytes) -> None:
        if self._exchange is None:
            self._record.bytes_out += len(chunk)
            await self._out({"type": "http.response.body", "body": chunk, "more_body": True})
        else:
            await self.room()
            self.put(chunk)

    async def end(self, chunk: bytes = b"") -> None:
        self._record.bytes_out += len(chunk)
        self.finished = True
        await self._out({"type": "http.response.body", "body": chunk, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """A whole error answer, or one last event where a stream has begun.

        A plain answer that has begun stays as it is: the server closes the connection of an unfinished one, so that
        half a body cannot pass for a whole one.
        """
        self._record.error_code = error.code
        if self.finished or (self.started and not self._is_stream):
            return
        if self.started:
            await self.end(error.event(self.shape) + self._end_mark())
            return
        headers = [(name.encode(), value.encode("latin-1")) for name, value in error.response_headers().items()]
        await self.whole(error.status, headers, error.body(self.shape))

    def _end_mark(self) -> bytes:
        """vLLM ends a stream with `[DONE]` after an error event too, and clients wait for it."""
        return b"data: [DONE]\n\n" if self._record.endpoint in _ENDS_WITH_DONE else b""

    async def _out(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:
            # ASGI's word for a client that is gone.
            raise ClientLeft from None


def exchange_of(scope: Scope) -> Exchange | None:
    """The request's own end of the connection; None under another server than the router's."""
    found: Exchange | None = scope.get("extensions", {}).get(EXTENSION)
    return found


def router_headers(record: RequestRecord) -> list[tuple[bytes, bytes]]:
    """What the router says about its decision; only what is known. Names are percent-encoded where they are not
    plain ASCII."""
    lines = router_lines(record).split(b"\r\n")[1:]
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]


def router_lines(record: RequestRecord) -> bytes:
    """The same as lines of a head, a line end before each."""
    wait_ms = record.queue_wait_s * 1000 if record.queue_wait_s else 0
    way = _way_lines(record.pool, record.engine, record.relay, record.reason)
    lines = _REQUEST_LINES % (record.request_id.encode(), wait_ms, way)
    count = record.count
    if count is None:
        return lines
    return lines + _COUNT_LINES % (count.prompt_tokens, b"true" if count.exact else b"false")


@lru_cache(maxsize=1024)
def _way_lines(pool: str, engine: str | None, relay: str | None, reason: str) -> bytes:
    """The way a request took: there are few, and they come again with every answer."""
    names = (
        (b"x-router-pool", None if pool == "none" else pool),
        (b"x-router-engine", engine),
        (b"x-router-relay", relay),
        (b"x-router-reason", None if reason == "none" else reason),
    )
    return b"".join(b"\r\n%b: %b" % (key, in_ascii(name).encode()) for key, name in names if name is not None)


def in_ascii(name: str) -> str:
    """A name as it can stand in a header: percent-encoded where it is not plain ASCII."""
    return quote(name, safe=" !#$&'()*+,/:;=?@[]-._~")
