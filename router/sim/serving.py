"""One inference call on the simulated server, from its body to the last byte of its answer.

The call owns its sequences: they are aborted in the tick in which the client's leaving is seen, and on every other way
out. Faults are decided once, when the body is here. Order, as in vLLM: key, body, model, lengths, queue limit; the
headers of a stream go out before the prefill, its first event comes with its first token.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from router.request import Endpoint
from router.sim.answer_items import shape_of
from router.sim.answers import DONE, Said, Shape, Usage, embeddings
from router.sim.calls import Call, parse_body, parse_call
from router.sim.engine import EngineBusy, TokenEvent
from router.sim.faults import FaultKind, RequestFaults
from router.sim.log import LogEntry
from router.sim.pacing import Generation
from router.sim.refusals import Refusal, busy, engine_failed
from router.sim.state import SimState
from router.sim.wire import drop_connection
from router.sim.writing import AnswerCut, AnswerStalls, AnswerWriter


class _ClientLeft(Exception):
    """The connection closed before the answer was complete."""


class Inference:
    """The ASGI app behind one inference route."""

    def __init__(self, endpoint: Endpoint, state: SimState) -> None:
        self._endpoint = endpoint
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        request = Request(scope, receive)
        headers = dict(request.headers)
        entry = state.log.begin(self._endpoint.value, request.url.path, headers)
        state.in_flight += 1
        try:
            body = await request.body()
            state.log.keep_body(entry, body)
            is_authorized = state.is_authorized(headers)
            faults = state.board.decide() if is_authorized else RequestFaults({})
            entry.faults = tuple(faults.values)
            exchange = _Exchange(self._endpoint, state, entry, faults, AnswerWriter(send, entry, faults))
            if FaultKind.SILENT in faults:
                await _until_gone(receive)
                raise _ClientLeft
            if FaultKind.DROP in faults:
                entry.aborted = True
                await drop_connection(scope, receive, reset=False)
                return
            await exchange.run(body, headers, receive, is_authorized=is_authorized)
        except (ClientDisconnect, _ClientLeft):
            entry.aborted = True
        except AnswerCut:
            entry.aborted = True
            await drop_connection(scope, receive, reset=True)
        finally:
            state.in_flight -= 1


class _Exchange:
    """One call with all that belongs to it."""

    def __init__(
        self, endpoint: Endpoint, state: SimState, entry: LogEntry, faults: RequestFaults, writer: AnswerWriter
    ) -> None:
        self._endpoint = endpoint
        self._state = state
        self._entry = entry
        self._faults = faults
        self._writer = writer
        self._arrived_at_s = state.clock.now_s()

    async def run(self, body: bytes, headers: dict[str, str], receive: Receive, *, is_authorized: bool) -> None:
        """Answer, or refuse. Raises: `_ClientLeft`, `AnswerCut`."""
        options = self._state.options
        try:
            if not is_authorized:
                raise Refusal(401, "Incorrect API key provided.", type="Unauthorized")
            self._refuse_by_fault()
            fields = parse_body(body, headers.get("content-type", ""))
            call = parse_call(self._endpoint, fields, headers, options)
            await self._answer(call, receive)
        except EngineBusy:
            await self._refuse(busy())
        except Refusal as refusal:
            await self._refuse(refusal)

    async def _answer(self, call: Call, receive: Receive) -> None:
        state, writer = self._state, self._writer
        stamp = state.stamp(call)
        self._note(call, stamp.id)
        if FaultKind.STREAM_ERROR in self._faults:
            await self._fail_inside(call)
            return
        if self._endpoint is Endpoint.EMBEDDINGS:
            async with _watched(state.generation(call), receive) as watch:
                await self._prefill(watch)
                await self._unless_stalled(watch, writer.whole(embeddings(call, stamp, state.options)))
            return
        shape = shape_of(call, stamp, state.options)
        if FaultKind.ABORT in self._faults:
            await self._abort_at_once(call, shape)
            return
        async with _watched(state.generation(call), receive) as watch:
            if call.stream:
                await writer.begin_stream()
            await self._unless_stalled(watch, self._generate(call, shape, watch))
        state.series.observe_end(state.clock.now_s() - self._arrived_at_s)

    async def _generate(self, call: Call, shape: Shape, watch: "_Watch") -> None:
        state, writer = self._state, self._writer
        texts: list[list[str]] = [[] for _ in range(call.sequences)]
        reasons = ["stop"] * call.sequences
        usage = Usage(call.prompt_tokens, 0)
        while not watch.generation.is_finished:
            index, token = await self._next_token(watch)
            if self._entry.output_tokens == 0:
                state.series.observe_first_token(state.clock.now_s() - self._arrived_at_s)
                await watch.pause(self._faults.value(FaultKind.FIRST_TOKEN_DELAY))
            # A model that stops of itself spends its last token on saying so.
            text = "" if token.finish_reason == "stop" else state.word(index, token.output_tokens)
            texts[index].append(text)
            reasons[index] = token.finish_reason or reasons[index]
            self._entry.output_tokens += 1
            usage = Usage(call.prompt_tokens, self._entry.output_tokens)
            if call.stream:
                await writer.events(shape.token(index, text, token.finish_reason, usage))
        self._entry.finish_reason = reasons[0]
        if call.stream:
            await writer.events(shape.closing(usage))
            await writer.end()
            return
        said = [Said("".join(words), reason) for words, reason in zip(texts, reasons, strict=True)]
        await writer.whole(shape.whole(said, usage))

    async def _next_token(self, watch: "_Watch") -> tuple[int, TokenEvent]:
        """Wait for a token; comments go out meanwhile where the server is set to send them."""
        interval_s = self._state.options.sse_keep_alive_s
        is_kept_alive = interval_s > 0 and self._endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS)
        while True:
            try:
                async with asyncio.timeout(interval_s if is_kept_alive and self._writer.has_begun else None):
                    item = await watch.generation.next()
            except TimeoutError:
                await self._writer.comment("keep-alive")
                continue
            if item is None:
                raise _ClientLeft
            return item

    async def _prefill(self, watch: "_Watch") -> None:
        while not watch.generation.is_finished:
            await self._next_token(watch)
        await watch.pause(self._faults.value(FaultKind.FIRST_TOKEN_DELAY))
        self._entry.finish_reason = "stop"

    async def _unless_stalled(self, watch: "_Watch", answering: Coroutine[Any, Any, None]) -> None:
        try:
            await answering
        except AnswerStalls:
            await watch.gone.wait()
            raise _ClientLeft from None

    async def _abort_at_once(self, call: Call, shape: Shape) -> None:
        """200 with nothing said, as vLLM answers while it shuts down."""
        usage = Usage(call.prompt_tokens, 0)
        self._entry.finish_reason = "abort"
        if not call.stream:
            await self._writer.whole(shape.whole([Said("", "abort")] * call.sequences, usage))
            return
        await self._writer.begin_stream()
        for index in range(call.sequences):
            await self._writer.events(shape.token(index, "", "abort", usage))
        await self._writer.events(shape.closing(usage))
        await self._writer.end()

    async def _fail_inside(self, call: Call) -> None:
        """The engine fails after the stream's headers went out: the error is its first event."""
        status = int(self._faults.value(FaultKind.STREAM_ERROR)) or 503
        refusal = engine_failed(status)
        if not call.stream:
            raise refusal
        await self._writer.begin_stream()
        ending = [] if self._endpoint is Endpoint.MESSAGES else [DONE]
        await self._writer.events([refusal.event(self._endpoint, self._state.options), *ending])
        await self._writer.end()

    def _refuse_by_fault(self) -> None:
        if FaultKind.REJECT_429 in self._faults:
            text = "Rate limit reached. Please try again later."
            after_s = self._faults.value(FaultKind.REJECT_429)
            raise Refusal(429, text, type="RateLimitError", retry_after_s=after_s)
        if FaultKind.REJECT_503 in self._faults:
            raise busy()
        if FaultKind.ERROR_500 in self._faults or not self._state.task.is_alive:
            raise engine_failed(500)

    async def _refuse(self, refusal: Refusal) -> None:
        content = refusal.content(self._endpoint, self._state.options)
        await self._writer.json(refusal.status, content, refusal.headers)

    def _note(self, call: Call, answer_id: str) -> None:
        entry = self._entry
        entry.id = answer_id
        entry.model = call.fields.get("model")
        entry.prompt_tokens = call.prompt_tokens
        entry.max_tokens = call.max_tokens
        entry.stream = call.stream
        entry.priority = call.priority


class _Watch:
    """A generation and the news of its client's leaving."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.gone = asyncio.Event()

    async def pause(self, delay_s: float) -> None:
        """Let time pass, unless the client goes. Raises: `_ClientLeft`."""
        if delay_s <= 0:
            return
        try:
            async with asyncio.timeout(delay_s):
                await self.gone.wait()
        except TimeoutError:
            return
        raise _ClientLeft

    async def look(self, receive: Receive) -> None:
        """Abort the sequences in the tick in which the client's leaving is known."""
        await _until_gone(receive)
        self.generation.close()
        self.gone.set()
        self.generation.wake()


@asynccontextmanager
async def _watched(generation: Generation, receive: Receive) -> AsyncIterator[_Watch]:
    """Owns `generation` and the task that looks out for its client."""
    watch = _Watch(generation)
    looking = asyncio.create_task(watch.look(receive), name="sim-watch")
    try:
        yield watch
    finally:
        generation.close()
        looking.cancel()
        await asyncio.wait({looking})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
