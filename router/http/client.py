"""The client's side of one call: its body, its leaving, and what is sent to it.

How long a client may take, to send or to read, is the connection's to say (`inbound`); here it ends the call.
"""

import asyncio
from collections.abc import Iterable
from functools import lru_cache
from types import TracebackType
from typing import Self
from urllib.parse import quote

from starlette.types import Message, Receive, Scope, Send

from router.errors import ApiError, ErrorShape
from router.http.exchange import EXTENSION, Exchange
from router.http.inflate import Inflater, check_coding
from router.request import Endpoint, RequestRecord

Headers = Iterable[tuple[bytes, bytes]]

#: Steps of a compressed body in one turn of the event loop: some 2 ms.
_STEPS_A_TURN = 8

#: Endpoints whose streams end with `data: [DONE]`.
_ENDS_WITH_DONE = frozenset({Endpoint.CHAT.value, Endpoint.COMPLETIONS.value})


class ClientLeft(ConnectionError):
    """The client closed its connection, or stopped reading or sending."""


class BufferBudget:
    """Bytes of request bodies that this process holds at once. Taking is refused past the bound, never delayed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Raises: `ApiError` 429 where the bound would be passed; nothing is taken then."""
        if self.used_bytes + size_bytes > self._max_bytes:
            raise ApiError(
                429,
                "request_buffers_full",
                f"The router already holds {self.used_bytes:,} of at most {self._max_bytes:,} bytes of request bodies. "
                "Send the request again later.",
                retry_after_s=2,
            )
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes


class Body:
    """A request body being read and held; `with` gives its bytes back to the budget."""

    __slots__ = ("_budget", "_max_bytes", "_receive", "_scope", "_taken_bytes")

    def __init__(self, scope: Scope, receive: Receive, *, max_bytes: int, budget: BufferBudget) -> None:
        self._scope = scope
        self._receive = receive
        self._max_bytes = max_bytes
        self._budget = budget
        self._taken_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give_back(self._taken_bytes)
        self._taken_bytes = 0

    async def read(self) -> bytes:
        """The whole body, without its compression; at once where it came together with the headers.

        Raises: `ApiError` 413 past the limit (before reading, where the length is declared), 415 for a compression that
        is not read, 400 for a broken one, 429 past the budget, 408 where it stops coming or never ends; `ClientLeft`
        if it ends early.
        """
        inflater = Inflater() if self._check_headers() else None
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise self._cut_off()
            part: bytes = message.get("body", b"")
            is_last = not message.get("more_body", False)
            if inflater is not None:
                await self._inflate(inflater, part, parts)
            else:
                self._take(part)
                if is_last and not parts:
                    return part
                parts.append(part)
            if is_last:
                break
        if inflater is not None:
            inflater.end()
        return b"".join(parts)

    async def _inflate(self, inflater: Inflater, part: bytes, parts: list[bytes]) -> None:
        for step, plain in enumerate(inflater.feed(part), start=1):
            self._take(plain)
            parts.append(plain)
            if step % _STEPS_A_TURN == 0:
                # Others have their turn; a thread would only wait for the same cores.
                await asyncio.sleep(0)

    def _take(self, part: bytes) -> None:
        if self._taken_bytes + len(part) > self._max_bytes:
            raise self._too_large(f"more than {self._max_bytes:,}")
        self._budget.take(len(part))
        self._taken_bytes += len(part)

    def _check_headers(self) -> bool:
        """Whether the body is compressed, of one that may be read at all."""
        codings: list[bytes] = []
        for name, value in self._scope["headers"]:
            if name == b"content-length":
                if value.isdigit() and int(value) > self._max_bytes:
                    raise self._too_large(f"{int(value):,}")
            elif name == b"content-encoding":
                codings.append(value)
        return bool(codings) and check_coding(b", ".join(codings))

    def _cut_off(self) -> Exception:
        exchange = exchange_of(self._scope)
        return ClientLeft() if exchange is None or exchange.late is None else exchange.late

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            "request_too_large",
            f"The body has {size} bytes; the limit is {self._max_bytes:,}. Send less, or raise server.body_max_bytes.",
        )


class ClientWatch:
    """`with` around the work for a client: if it leaves (closes, resets, or stops reading) before it has its whole
    answer, the task is cancelled and `ClientLeft` raised in its place. Costs no task: the connection calls.

    A cancellation from elsewhere stays one. Where the connection is none of the router's own (another ASGI server),
    nobody watches.
    """

    __slots__ = ("_exchange", "_left", "_reply", "_task")

    def __init__(self, scope: Scope, reply: "Reply") -> None:
        self._exchange = exchange_of(scope)
        self._reply = reply
        self._left = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a watch belongs to a task"
        self._task = task
        if self._exchange is not None:
            if self._exchange.is_gone:
                raise ClientLeft
            self._exchange.watch(self._leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._exchange is not None:
            self._exchange.watch(None)
        if self._left:
            # Our own cancellation; another one (shutdown) stays pending and goes on.
            others = self._task.uncancel()
            if others == 0 and (kind is None or issubclass(kind, asyncio.CancelledError)):
                raise ClientLeft from error

    def _leave(self) -> None:
        # A client that has its whole answer cannot leave any more; what is left to do then is ours.
        if not self._reply.finished:
            self._left = True
            self._task.cancel()


class Reply:
    """What goes to the client. `started` tells whether the status is out, after which an error is only an event of a
    stream; `finished`, whether all of it is. All of it raises `ClientLeft` where the client is gone."""

    __slots__ = ("_is_stream", "_record", "_send", "finished", "shape", "started")

    def __init__(self, send: Send, record: RequestRecord, shape: ErrorShape) -> None:
        self._send = send
        self._record = record
        self.shape = shape
        self.started = False
        self.finished = False
        self._is_stream = False

    async def start(self, status: int, headers: Headers, *, is_stream: bool = False) -> None:
        """Status and headers, with the router's own added."""
        self._record.status = status
        self._is_stream = is_stream
        self.started = True
        pairs = [*headers, *router_headers(self._record)]
        await self._out({"type": "http.response.start", "status": status, "headers": pairs})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer, in one write; its length is added to the headers."""
        self._record.status = status
        self._record.bytes_out += len(body)
        self.started = self.finished = True
        pairs = [*headers, (b"content-length", b"%d" % len(body)), *router_headers(self._record)]
        await self._out({"type": "http.response.start", "status": status, "headers": pairs})
        await self._out({"type": "http.response.body", "body": body, "more_body": False})

    async def write(self, chunk: bytes) -> None:
        self._record.bytes_out += len(chunk)
        await self._out({"type": "http.response.body", "body": chunk, "more_body": True})

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
    wait_ms = b"%.0f" % (record.queue_wait_s * 1000) if record.queue_wait_s else b"0"
    headers = [(b"x-request-id", record.request_id.encode()), (b"x-router-queue-wait-ms", wait_ms)]
    if record.pool != "none":
        headers.append((b"x-router-pool", _written(record.pool)))
    if record.engine is not None:
        headers.append((b"x-router-engine", _written(record.engine)))
    if record.relay is not None:
        headers.append((b"x-router-relay", _written(record.relay)))
    if record.reason != "none":
        headers.append((b"x-router-reason", _written(record.reason)))
    if record.count is not None:
        headers.append((b"x-router-prompt-tokens", b"%d" % record.count.prompt_tokens))
        headers.append((b"x-router-prompt-tokens-exact", b"true" if record.count.exact else b"false"))
    return headers


@lru_cache(maxsize=1024)
def _written(name: str) -> bytes:
    """Pools, engines, relays and reasons are few and come again with every answer."""
    return in_ascii(name).encode()


def in_ascii(name: str) -> str:
    """A name as it can stand in a header: percent-encoded where it is not plain ASCII."""
    return quote(name, safe=" !#$&'()*+,/:;=?@[]-._~")
