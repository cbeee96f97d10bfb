"""A request's body: read, unpacked and held, within the bounds of one request and of the process.

How long a client may take to send it is the connection's to say (`inbound`); here it ends the call. What the body means
is for `parsing`.
"""

import asyncio
from collections.abc import Mapping

from starlette.types import Receive

from router.errors import ApiError
from router.http.client import ClientLeft, Headers
from router.http.exchange import Exchange
from router.http.inflate import Inflater, check_coding

#: Steps of a compressed body in one turn of the event loop: some 2 ms.
_STEPS_A_TURN = 8


class BufferBudget:
    """Bytes that this process holds at once: request bodies, and what waits for clients that do not read. Taking is
    refused past the bound, never delayed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Raises: `ApiError` 429 where the bound would be passed; nothing is taken then."""
        if self.used_bytes + size_bytes > self._max_bytes:
            raise ApiError(
                429,
                "request_buffers_full",
                f"The router already holds {self.used_bytes:,} of at most {self._max_bytes:,} bytes of requests and "
                "answers. Send the request again later.",
                retry_after_s=2,
            )
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes


async def read_body(
    receive: Receive,
    fields: Mapping[bytes, bytes],
    headers: Headers,
    exchange: Exchange | None,
    max_bytes: int,
    budget: BufferBudget,
) -> bytes:
    """The whole body of a request, without its compression; at once where it came together with the head, whose
    `fields` are those of `headers` by name. Its length is taken from `budget`, and the caller's to give back.
    `exchange`: as for `Reply`.

    Raises: `ApiError` 413 past `max_bytes` (before reading, where the length is declared), 415 for a compression that
    is not read, 400 for a broken one, 429 past the budget, 408 where it stops coming or never ends; `ClientLeft` if it
    ends early. Nothing is taken then.
    """
    if exchange is not None and b"content-encoding" not in fields:
        body = exchange.whole_body()
        if body is not None:
            if len(body) > max_bytes:
                raise _too_large(f"{len(body):,}", max_bytes)
            budget.take(len(body))
            return body
    upload = _Upload(receive, headers, exchange, max_bytes, budget)
    try:
        return await upload.read()
    except BaseException:
        budget.give_back(upload.taken_bytes)
        raise


class _Upload:
    """A body that comes in pieces or compressed. `taken_bytes`: what of it is held."""

    def __init__(
        self, receive: Receive, headers: Headers, exchange: Exchange | None, max_bytes: int, budget: BufferBudget
    ) -> None:
        self._receive = receive
        self._headers = headers
        self._exchange = exchange
        self._max_bytes = max_bytes
        self._budget = budget
        self.taken_bytes = 0

    async def read(self) -> bytes:
        """See `read_body`."""
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
        if self.taken_bytes + len(part) > self._max_bytes:
            raise _too_large(f"more than {self._max_bytes:,}", self._max_bytes)
        self._budget.take(len(part))
        self.taken_bytes += len(part)

    def _check_headers(self) -> bool:
        """Whether the body is compressed, of one that may be read at all."""
        codings: list[bytes] = []
        for name, value in self._headers:
            if name == b"content-length":
                if value.isdigit() and int(value) > self._max_bytes:
                    raise _too_large(f"{int(value):,}", self._max_bytes)
            elif name == b"content-encoding":
                codings.append(value)
        return bool(codings) and check_coding(b", ".join(codings))

    def _cut_off(self) -> Exception:
        exchange = self._exchange
        return ClientLeft() if exchange is None or exchange.late is None else exchange.late


def _too_large(size: str, max_bytes: int) -> ApiError:
    return ApiError(
        413,
        "request_too_large",
        f"The body has {size} bytes; the limit is {max_bytes:,}. Send less, or raise server.body_max_bytes.",
    )
