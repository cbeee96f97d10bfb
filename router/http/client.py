"""The client's side of one call: its body, its leaving, and what is sent to it.

Every wait for the client has a bound: a body that does not come, a reader that does not read.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from urllib.parse import quote

from starlette.types import Message, Receive, Scope, Send

from router.errors import ApiError, ErrorShape
from router.request import Endpoint, RequestRecord

#: A client that sends no byte of its body for so long is given up.
_UPLOAD_IDLE_S = 60.0
#: And one whose whole body takes longer than this, and a second more for so many bytes that came. Precedent: Apache's
#: `RequestReadTimeout body=20,MinRate=500`.
_UPLOAD_S = 60.0
_UPLOAD_MIN_BYTES_PER_S = 10_000
#: A client that reads no byte for so long is given up; its engine is told by closing.
_WRITE_STALL_S = 300.0
#: How uvloop ends its error of a write to a connection that is already closed; it has no type of its own.
_CLOSED_TRANSPORT = "; the handler is closed"

#: Endpoints whose streams end with `data: [DONE]`.
_ENDS_WITH_DONE = frozenset({Endpoint.CHAT.value, Endpoint.COMPLETIONS.value})


class ClientLeft(Exception):
    """The client closed its connection, or stopped reading or sending."""


class BufferBudget:
    """Bytes of request bodies that this process holds at once. Taking is refused past the bound, never delayed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Raises: `ApiError` 503 where the bound would be passed; nothing is taken then."""
        if self.used_bytes + size_bytes > self._max_bytes:
            raise ApiError(
                503,
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

    def __init__(self, scope: Scope, receive: Receive, *, max_bytes: int, budget: BufferBudget) -> None:
        scope["router.receive"] = receive
        self._headers = scope["headers"]
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
        """The whole body.

        Raises: `ApiError` 413 past the limit (before reading, where the length is declared), 415 for a compressed body,
        503 past the budget, 408 where it stops coming or never ends; `ClientLeft` if it ends early.
        """
        self._check_headers()
        parts: list[bytes] = []
        loop = asyncio.get_running_loop()
        begun_at_s = loop.time()
        while True:
            allowed_s = _UPLOAD_S + self._taken_bytes / _UPLOAD_MIN_BYTES_PER_S
            limit_at_s = min(loop.time() + _UPLOAD_IDLE_S, begun_at_s + allowed_s)
            try:
                async with asyncio.timeout_at(limit_at_s):
                    message = await self._receive()
            except TimeoutError:
                raise self._too_slow(loop.time() - begun_at_s) from None
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            if self._taken_bytes + len(part) > self._max_bytes:
                raise self._too_large(f"more than {self._max_bytes:,}")
            self._budget.take(len(part))
            self._taken_bytes += len(part)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_headers(self) -> None:
        for name, value in self._headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                raise self._too_large(f"{int(value):,}")
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise ApiError(
                    415,
                    "unsupported_content_encoding",
                    f"The body is compressed ({value.decode('latin-1')[:40]!r}); send it uncompressed.",
                )

    def _too_slow(self, taken_s: float) -> ApiError:
        return ApiError(
            408,
            "upload_timeout",
            f"{self._taken_bytes:,} bytes of the body came in {taken_s:.0f} s; the request was given up. A body may "
            f"pause for {_UPLOAD_IDLE_S:g} s and take {_UPLOAD_S:g} s, and a second more for each "
            f"{_UPLOAD_MIN_BYTES_PER_S:,} bytes.",
            headers={"connection": "close"},
        )

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            "request_too_large",
            f"The body has {size} bytes; the limit is {self._max_bytes:,}. Send less, or raise server.body_max_bytes.",
        )


class ClientWatch:
    """`with` around the work for a client whose body is read: if it leaves, the work is cancelled and
    `ClientLeft` is raised in its place. A client that has its whole answer cannot leave any more."""

    def __init__(self, scope: Scope, reply: "Reply") -> None:
        self._receive: Receive = scope["router.receive"]
        self._reply = reply
        self._left = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a watch belongs to a task"
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._left:
            # Our own cancellation; another one (shutdown) stays pending and goes on.
            others = self._task.uncancel()
            if others == 0 and (kind is None or issubclass(kind, asyncio.CancelledError)):
                raise ClientLeft from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # The server says the same at the end of a whole answer; what is left to do then is ours.
        if not self._reply.finished:
            self._left = True
            self._task.cancel()


class Reply:
    """What goes to the client. `started` tells whether the status is out, after which an error is only an event of a
    stream; `finished`, whether all of it is."""

    def __init__(self, send: Send, record: RequestRecord, shape: ErrorShape) -> None:
        self._send = send
        self._record = record
        self.shape = shape
        self.started = False
        self.finished = False
        self._is_stream = False

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]], *, is_stream: bool = False) -> None:
        """Status and headers, with the router's own added."""
        self._record.status = status
        self._is_stream = is_stream
        pairs = list(headers)
        pairs.extend((name.encode(), value.encode()) for name, value in router_headers(self._record).items())
        self.started = True
        await self._bounded({"type": "http.response.start", "status": status, "headers": pairs})

    async def whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole answer; `headers` tell its length."""
        await self.start(status, headers)
        await self.end(body)

    async def write(self, chunk: bytes) -> None:
        self._record.bytes_out += len(chunk)
        await self._bounded({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, chunk: bytes = b"") -> None:
        self._record.bytes_out += len(chunk)
        self.finished = True
        await self._bounded({"type": "http.response.body", "body": chunk, "more_body": False})

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
        body = error.body(self.shape)
        headers = {**error.response_headers(), "content-length": str(len(body))}
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.whole(error.status, pairs, body)

    def _end_mark(self) -> bytes:
        """vLLM ends a stream with `[DONE]` after an error event too, and clients wait for it."""
        return b"data: [DONE]\n\n" if self._record.endpoint in _ENDS_WITH_DONE else b""

    async def _bounded(self, message: Message) -> None:
        try:
            async with asyncio.timeout(_WRITE_STALL_S):
                await self._send(message)
        except OSError:
            # `TimeoutError` is one. The others are ASGI's word for a client that is gone.
            raise ClientLeft from None
        except RuntimeError as error:
            if not str(error).endswith(_CLOSED_TRANSPORT):
                raise
            raise ClientLeft from None


def router_headers(record: RequestRecord) -> dict[str, str]:
    """What the router says about its decision; only what is known. Names are percent-encoded where they are not
    plain ASCII."""
    headers = {"x-request-id": record.request_id, "x-router-queue-wait-ms": f"{record.queue_wait_s * 1000:.0f}"}
    if record.pool != "none":
        headers["x-router-pool"] = record.pool
    if record.engine is not None:
        headers["x-router-engine"] = in_ascii(record.engine)
    if record.relay is not None:
        headers["x-router-relay"] = in_ascii(record.relay)
    if record.reason != "none":
        headers["x-router-reason"] = record.reason
    if record.count is not None:
        headers["x-router-prompt-tokens"] = str(record.count.prompt_tokens)
        headers["x-router-prompt-tokens-exact"] = "true" if record.count.exact else "false"
    return headers


def in_ascii(name: str) -> str:
    """A name as it can stand in a header: percent-encoded where it is not plain ASCII."""
    return quote(name, safe=" !#$&'()*+,/:;=?@[]-._~")
