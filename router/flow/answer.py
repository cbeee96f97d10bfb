"""One upstream answer on its way to the client: what its first event says, then its bytes, metered as they pass.

An `Answer` owns the upstream response and the lease. `with` gives both back on every path, synchronously, the lease
first. Bytes go through untouched, save that the one usage chunk we asked for and the client did not is taken out again.
Nothing is invented: no finish reason, no usage, no `[DONE]`.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Self

from router.flow.lease import Lease
from router.flow.target import Target
from router.policy.outcome import Outcome
from router.request import ParsedRequest, RequestRecord
from router.upstream.api import Headers, Take, UpstreamError, UpstreamResponse, UpstreamTimeout
from router.upstream.sse import Event, EventSplitter, FirstEvent, UsageReader, first_event_kind, is_usage_only, usage_of

#: What may come before the first token (comments, role-only chunks) and is held back with it.
_PREFACE_MAX_BYTES = 256 * 1024
#: Lines of a stream that are looked at in one turn of the loop, since each can cost a microsecond or two: of a chunk
#: that has more, as no engine sends, so many bytes.
_PORTION = 4 * 1024
_DONE = b"data: [DONE]"
_LAST_DONE = _DONE + b"\n\n"

_COMPLETED = Outcome.COMPLETED


class Answer:
    """`status` and `headers` go to the client as they are. `preface`: bytes that are ready to be sent. `is_whole`: they
    are all there is."""

    __slots__ = (
        "_added_usage_option",
        "_first_byte_s",
        "_grows",
        "_meter",
        "_splitter",
        "_target",
        "_unseen",
        "_whole",
        "headers",
        "is_stream",
        "is_whole",
        "lease",
        "on_cut",
        "outcome",
        "output_events",
        "preface",
        "record",
        "request",
        "response",
        "status",
        "target",
    )

    def __init__(
        self,
        response: UpstreamResponse,
        request: ParsedRequest,
        record: RequestRecord,
        target: Target,
        lease: Lease | None,
        first_byte_s: float,
        is_stream: bool,
    ) -> None:
        """`first_byte_s` bounds the wait for the first token of a stream, which comments do not end."""
        self.status = response.status
        self.headers: Headers = response.headers
        self.is_stream = is_stream
        self.is_whole = False
        self.preface = b""
        #: How this ends if nothing else happens.
        self.outcome = _COMPLETED
        self.response = response
        self.request = request
        self.record = record
        self.lease = lease
        self.on_cut: Callable[[], None] | None = target.on_cut
        #: Whom to tell what becomes of this.
        self.target = target
        self._first_byte_s = first_byte_s
        #: Of a plain answer: all of it where it came as a whole; else it is metered as it passes.
        self._whole = b""
        self._meter: UsageReader | None = UsageReader(request.endpoint) if is_stream else None
        self._splitter = EventSplitter() if is_stream else None
        #: Of a stream, what has come and waits for the next turn of the loop.
        self._unseen = b""
        #: Of a stream, what came with data from the first token on, `[DONE]` left out: about as many as tokens.
        self.output_events = 0
        #: An answer without a cap is charged as it grows.
        self._grows = lease is not None and not lease.demand.output_is_capped
        self._added_usage_option = is_stream and not request.asked_include_usage and "stream_options" in request.edits

    def __enter__(self) -> Self:
        return self

    def close(self, *_: object) -> None:
        """Give back the lease, then the socket. Idempotent."""
        if self.lease is not None:
            self.lease.release()
        if self._whole:
            usage = usage_of(self._whole, self.request.endpoint)
            self._whole = b""
        else:
            usage = self._meter.usage if self._meter is not None else None
        if usage is not None:
            self.record.prompt_tokens_used = usage.prompt_tokens
            self.record.completion_tokens_used = usage.completion_tokens
        if not self.is_whole:
            self.response.close()

    __exit__ = close

    async def read(self) -> bytes:
        """The next bytes for the client, the preface first; b"" at the end. Cancelled, it loses no byte.

        Raises: `UpstreamError` if the upstream fails amid its answer; `outcome` is set before.
        """
        if self.preface:
            return self.take_preface()
        try:
            while not self.is_whole:
                chunk = await self._next()
                if chunk:
                    out = self._pass_on(chunk)
                else:
                    self.is_whole = True
                    out = self._flush()
                if out:
                    return out
        except UpstreamError as error:
            self._note_cut(error)
            raise
        return b""

    def take_preface(self) -> bytes:
        """What was read before; `read` goes on behind it."""
        preface, self.preface = self.preface, b""
        return preface

    def hold(self) -> None:
        """Have the engine wait until `read` or `forward` is called again."""
        self.response.hold()

    async def forward(self, take: Take) -> None:
        """Hand the client's bytes to `take` as soon as they come, until the end, until `take` says False or until there
        is more than can be looked at in one turn: then `read` goes on. Raises: as `read`, and what `take` raises."""

        def pass_on(chunk: bytes) -> bool:
            out = self._pass_on(chunk)
            goes_on = take(out) if out else True
            return goes_on and not self._unseen

        if self._unseen:
            return
        try:
            await self.response.forward(pass_on)
        except UpstreamError as error:
            self._note_cut(error)
            raise

    async def read_first_event(self, *, commit_after_s: float) -> FirstEvent | None:
        """Read a stream up to its first token, an error, an abort or its end; what was read is then the `preface`.

        None if `commit_after_s` passed, or too much came, without any of these: then the headers have to go out.
        Raises: `UpstreamError`.
        """
        assert self._splitter is not None
        held: list[bytes] = []
        held_bytes = 0
        found: FirstEvent | None = None
        try:
            async with asyncio.timeout(commit_after_s):
                while found is None and held_bytes < _PREFACE_MAX_BYTES:
                    chunk = self._portion(await self._next())
                    held_bytes += len(chunk)
                    self.is_whole = not chunk
                    for event in self._splitter.feed(chunk) if chunk else self._splitter.flush():
                        if found is None and event.kind == "data":
                            meaning = first_event_kind(event)
                            if meaning.has_output:
                                self.saw_output()
                            if meaning.kind != "data" or meaning.has_output:
                                found = meaning
                        held.append(self._event(event))
                    if not chunk and found is None:
                        found = FirstEvent("done")
        except TimeoutError:
            pass
        self.preface = b"".join(held)
        return found

    async def read_whole(self, max_bytes: int) -> bytes | None:
        """Wait for a plain answer, to be given to `take_whole`. None where it has more than `max_bytes`: what has come
        is then the `preface`."""
        parts: list[bytes] = []
        size = 0
        while size < max_bytes:
            chunk = await self.response.read()
            if not chunk:
                return b"".join(parts)
            parts.append(chunk)
            size += len(chunk)
        self.preface = b"".join(parts)
        self._see_plain(self.preface)
        return None

    def take_whole(self, body: bytes) -> None:
        """`body` is all of a plain answer. The engine is done with it, so its place goes back before the client has
        it."""
        self.is_whole = True
        self.preface = self._whole = body
        self.record.first_token_at_s = self.target.clock.now_s()
        if self.target.on_output is not None:
            self.target.on_output()
        if self.lease is not None:
            self.lease.release(is_answered=True)
            self.lease = None

    def replace(self, status: int, body: bytes) -> None:
        """Another answer goes to the client instead: an error in JSON. What is left of this one is not read."""
        self.close()
        self.status = status
        self.headers = ((b"content-type", b"application/json"),)
        self.is_stream = False
        self.is_whole = True
        self.preface = body
        self.outcome = Outcome.CLIENT_ERROR

    def saw_output(self) -> None:
        """The first generated token is here."""
        if self.record.first_token_at_s is None:
            self.record.first_token_at_s = self.target.clock.now_s()
            if self.target.on_output is not None:
                self.target.on_output()
            if self.lease is not None:
                self.lease.first_token()

    async def _next(self) -> bytes:
        """What comes next, looked at or not."""
        if not self._unseen:
            return await self.response.read()
        await asyncio.sleep(0)
        chunk, self._unseen = self._unseen, b""
        return chunk

    def _portion(self, chunk: bytes) -> bytes:
        """As much of `chunk` as one turn of the loop can look at; the rest is `_unseen`."""
        if len(chunk) > _PORTION and chunk.count(b"\n") + chunk.count(b"\r") > _PORTION:
            self._unseen = chunk[_PORTION:]
            return chunk[:_PORTION]
        return chunk

    def _pass_on(self, chunk: bytes) -> bytes:
        """Meter `chunk`; the bytes of it that are ready for the client."""
        if self._splitter is None:
            self._see_plain(chunk)
            return chunk
        if self.record.first_token_at_s is None:
            out = self._events(self._splitter.feed(self._portion(chunk)))
            if self.record.first_token_at_s is None:
                self._check_first_token_in_time()
            return out
        plain = self._splitter.split_plain(chunk)
        if plain is None:
            return self._events(self._splitter.feed(self._portion(chunk)))
        self._grow(plain - chunk.endswith(_LAST_DONE))
        return chunk

    def _see_plain(self, chunk: bytes) -> None:
        if self._meter is None:
            self._meter = UsageReader(self.request.endpoint)
        self._meter.see_body_tail(chunk)

    def _flush(self) -> bytes:
        return b"" if self._splitter is None else self._events(self._splitter.flush())

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join([self._event(event) for event in events])

    def _event(self, event: Event) -> bytes:
        """Look at one event; what of it goes to the client."""
        raw, meter = event.raw, self._meter
        assert meter is not None, "a stream has one from its start"
        if event.kind != "data":
            meter.see(event)
            return raw
        if self.record.first_token_at_s is None and first_event_kind(event).has_output:
            self.saw_output()
        if b'"usage"' in raw:
            meter.see(event)
            if self._added_usage_option and is_usage_only(event):
                return b""
        if (b'"error"' in raw or b'"abort"' in raw) and first_event_kind(event).kind in ("error", "abort"):
            self.outcome = Outcome.ENGINE_LOST_STREAMING
        if self.record.first_token_at_s is not None and not raw.startswith(_DONE):
            self._grow(1)
        return raw

    def _grow(self, events: int) -> None:
        """An event is about one token; an answer without a cap is charged as it grows."""
        self.output_events += events
        if self._grows and self.lease is not None:
            self.lease.produced(self.output_events)

    def _note_cut(self, error: UpstreamError) -> None:
        late = isinstance(error, UpstreamTimeout)
        self.outcome = Outcome.ENGINE_TIMEOUT_STREAMING if late else Outcome.ENGINE_LOST_STREAMING
        if self.on_cut is not None:
            self.on_cut()

    def _check_first_token_in_time(self) -> None:
        """Comments show that the engine lives, not that it will ever answer."""
        sent_at_s = self.record.sent_at_s
        if sent_at_s is not None and self.target.clock.now_s() - sent_at_s > self._first_byte_s:
            raise UpstreamTimeout("first_byte", self._first_byte_s)
