"""One upstream answer on its way to the client: what its first event says, then its bytes, metered as they pass.

An `Answer` owns the upstream response and the lease. `async with` gives both back on every path; the lease first, and
synchronously. Bytes go through untouched, save that the one usage chunk we asked for and the client did not is taken
out again. Nothing is invented: no finish reason, no usage, no `[DONE]`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from router.clock import Clock
from router.flow.lease import Lease
from router.policy.outcome import Outcome
from router.request import ParsedRequest, RequestRecord
from router.upstream.api import UpstreamError, UpstreamResponse, UpstreamTimeout
from router.upstream.sse import Event, EventSplitter, FirstEvent, UsageReader, first_event_kind, is_usage_only

#: What may come before the first token (comments, role-only chunks) and is held back with it.
_PREFACE_MAX_BYTES = 256 * 1024


class Chunks:
    """The upstream's chunks, with a read that can be waited for in portions: a wait that ends early loses nothing."""

    def __init__(self, response: UpstreamResponse) -> None:
        self._chunks: AsyncIterator[bytes] = response.chunks()
        self._pending: asyncio.Task[bytes | None] | None = None

    async def next(self, *, within_s: float | None = None) -> bytes | None:
        """The next chunk, None at the end.

        Raises: `TimeoutError` if it did not come within `within_s` (ask again for it), `UpstreamError`.
        """
        if self._pending is None and within_s is None:
            return await anext(self._chunks, None)
        if self._pending is None:
            self._pending = asyncio.ensure_future(_next_of(self._chunks))
        done, _ = await asyncio.wait({self._pending}, timeout=within_s)
        if not done:
            raise TimeoutError
        task, self._pending = self._pending, None
        return task.result()

    async def stop(self) -> None:
        """End a read that is still under way."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait({self._pending})
            if not self._pending.cancelled():
                self._pending.exception()  # seen, so that the loop does not report it
            self._pending = None


async def _next_of(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


@dataclass(slots=True)
class Answer:
    """`status` and `headers` go to the client as they are. `preface`: bytes that are ready to be sent."""

    status: int
    headers: Mapping[str, str]
    is_stream: bool
    response: UpstreamResponse
    chunks: Chunks | None
    request: ParsedRequest
    record: RequestRecord
    clock: Clock
    lease: Lease | None = None
    preface: bytes = b""
    #: How this ends if nothing else happens.
    outcome: Outcome = Outcome.COMPLETED
    first_byte_s: float = 600.0
    #: Told of the first generated token, and when the upstream fails amid its answer.
    on_output: Callable[[], None] | None = None
    on_cut: Callable[[], None] | None = None
    meter: UsageReader = field(init=False)
    splitter: EventSplitter = field(default_factory=EventSplitter)
    _output_events: int = 0

    def __post_init__(self) -> None:
        self.meter = UsageReader(self.request.endpoint.value)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give back the lease, then the socket. Idempotent."""
        if self.lease is not None:
            self.lease.release()
        usage = self.meter.usage
        if usage is not None:
            self.record.prompt_tokens_used = usage.prompt_tokens
            self.record.completion_tokens_used = usage.completion_tokens
        await self.close_response()

    async def close_response(self) -> None:
        """Give back the socket alone. Idempotent."""
        try:
            if self.chunks is not None:
                await self.chunks.stop()
        finally:
            await self.response.aclose()

    async def body(self) -> AsyncIterator[bytes]:
        """What the client gets, piece by piece; empty pieces are left out.

        Raises: `UpstreamError` if the upstream fails amid its answer; `outcome` is set before.
        """
        if self.preface:
            yield self.preface
        if self.chunks is None:
            return
        try:
            while (chunk := await self.chunks.next()) is not None:
                out = self.pass_on(chunk)
                if out:
                    yield out
                self._check_first_token_in_time()
        except UpstreamError as error:
            late = isinstance(error, UpstreamTimeout)
            self.outcome = Outcome.ENGINE_TIMEOUT_STREAMING if late else Outcome.ENGINE_LOST_STREAMING
            if self.on_cut is not None:
                self.on_cut()
            raise
        if self.is_stream:
            tail = self._flush()
            if tail:
                yield tail

    async def read_first_event(self, *, commit_after_s: float) -> FirstEvent | None:
        """Read a stream up to its first token, an error, an abort or its end; what was read is then the `preface`.

        None if `commit_after_s` passed, or too much came, without any of these: then the headers have to go out.
        Raises: `UpstreamError`.
        """
        assert self.chunks is not None
        held: list[bytes] = []
        held_bytes = 0
        deadline_s = self.clock.now_s() + commit_after_s
        found: FirstEvent | None = None
        while found is None and held_bytes < _PREFACE_MAX_BYTES:
            try:
                chunk = await self.chunks.next(within_s=max(0.0, deadline_s - self.clock.now_s()))
            except TimeoutError:
                break
            held_bytes += len(chunk or b"")
            for event in self.splitter.flush() if chunk is None else self.splitter.feed(chunk):
                if found is None and event.kind == "data":
                    kind = first_event_kind(event)
                    found = kind if kind.kind != "data" or kind.has_output else None
                held.append(self._event(event))
            if chunk is None and found is None:
                found = FirstEvent("done")
        self.preface = b"".join(held)
        return found

    def pass_on(self, chunk: bytes) -> bytes:
        """Meter `chunk`; the bytes of it that are ready for the client."""
        if not self.is_stream:
            self.meter.see_body_tail(chunk)
            return chunk
        return b"".join([self._event(event) for event in self.splitter.feed(chunk)])

    def saw_output(self) -> None:
        """The first generated token is here."""
        if self.record.first_token_at_s is None:
            self.record.first_token_at_s = self.clock.now_s()
            if self.on_output is not None:
                self.on_output()
            if self.lease is not None:
                self.lease.first_token()

    def _flush(self) -> bytes:
        return b"".join([self._event(event) for event in self.splitter.flush()])

    def _event(self, event: Event) -> bytes:
        if event.is_comment or event.kind == "opaque":
            self.meter.see(event)
            return event.raw
        raw = event.raw
        if self.record.first_token_at_s is None and first_event_kind(event).has_output:
            self.saw_output()
        if b'"usage"' in raw:
            self.meter.see(event)
            if not self.request.asked_include_usage and self._added_usage_option and is_usage_only(event):
                return b""
        if (b'"error"' in raw or b'"abort"' in raw) and first_event_kind(event).kind in ("error", "abort"):
            self.outcome = Outcome.ENGINE_LOST_STREAMING
        self._grow()
        return raw

    @property
    def _added_usage_option(self) -> bool:
        return "stream_options" in self.request.edits

    def _grow(self) -> None:
        """An event is about one token; an uncapped answer is charged as it grows."""
        self._output_events += 1
        if self.lease is not None and not self.lease.demand.output_is_capped:
            self.lease.produced(self._output_events)

    def _check_first_token_in_time(self) -> None:
        """Comments show that the engine lives, not that it will ever answer."""
        sent_at_s = self.record.sent_at_s
        if not self.is_stream or self.record.first_token_at_s is not None or sent_at_s is None:
            return
        if self.clock.now_s() - sent_at_s > self.first_byte_s:
            raise UpstreamTimeout("first_byte", self.first_byte_s)
