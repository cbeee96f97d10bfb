"""The walk of one inference call: match, parse, count, classify, admit, send, stream, finish.

Nothing else is here: each step's work is done where the step lives. What the steps take is given back on every path,
the answer first, then the body's bytes, before a client is told of an error; how a call that was broken off ended is
decided in one place, and one `RequestRecord` says it.
"""

import asyncio
import logging

from starlette.types import Receive, Scope, Send

from router.errors import ApiError
from router.flow.answer import Answer
from router.flow.job import Job, Refusal
from router.flow.outgoing import client_headers
from router.flow.unreported import probable_tokens
from router.http.client import ClientLeft, Reply, exchange_of, was_cut, watch
from router.http.decoding import LARGE_BYTES
from router.http.exchange import Exchange
from router.http.head import HEAD, Head
from router.http.parsing import LIGHT_ENDPOINTS, parse, read_large
from router.http.responses import locate
from router.http.service import ModelService, RouterState
from router.http.sizing import Sized, size_up
from router.http.stream import send_answer
from router.http.upload import read_body
from router.observe.log import log_request
from router.observe.metrics import UNKNOWN
from router.policy.classify import Reason
from router.policy.outcome import Outcome
from router.request import Endpoint, RequestRecord
from router.upstream.relay import HOP_HEADER, hop_refusal, may_relay

log = logging.getLogger(__name__)

_HOPS = HOP_HEADER.encode()
_COMPLETED = Outcome.COMPLETED
_PINNED = Reason.PINNED

#: The outcome of a refusal of ours, by its code or, failing that, its status.
_OUTCOMES = {
    "context_length_exceeded": Outcome.REFUSED_TOO_LONG,
    "shutting_down": Outcome.REFUSED_SHUTDOWN,
    "relay_loop": Outcome.REFUSED_NO_ENGINE,
    "request_buffers_full": Outcome.REFUSED_ROUTER_FULL,
    "upload_timeout": Outcome.CLIENT_LEFT_UPLOAD,
    401: Outcome.REFUSED_UNAUTHENTICATED,
    404: Outcome.REFUSED_NOT_FOUND,
    413: Outcome.REFUSED_TOO_LARGE,
}


class Inference:
    """The ASGI app of one inference endpoint. The scope holds a `Head`."""

    def __init__(self, state: RouterState, endpoint: Endpoint) -> None:
        self._state = state
        self._endpoint = endpoint
        self._label = endpoint.value
        self._shape = endpoint.error_shape
        self._is_light = endpoint in LIGHT_ENDPOINTS
        self._body_max_bytes = state.config.server.body_max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The walk, and its one ending."""
        state = self._state
        head: Head = scope[HEAD]
        record = RequestRecord(head.request_id, state.clock.now_s(), self._label)
        exchange = exchange_of(scope)
        reply = Reply(send, record, self._shape, exchange)
        task = asyncio.current_task() if exchange is None else exchange.task
        assert task is not None, "an ASGI call runs in a task"
        state.metrics.arrived()
        state.tasks.add(task)
        raw = b""
        try:
            if head.key is not None:
                record.tenant = head.key.tenant
            if state.draining:
                raise _stopping("taking new requests")
            is_relayable = _HOPS not in head.fields or self._check_hops(head.text(_HOPS))
            raw = await read_body(receive, head.fields, scope["headers"], exchange, self._body_max_bytes, state.buffers)
            record.bytes_in = len(raw)
            watch(exchange)
            path: str = scope["path"]
            if scope["query_string"]:
                path = f"{path}?{scope['query_string'].decode('latin-1')}"
            read = None if len(raw) < LARGE_BYTES else await read_large(self._endpoint, head, raw)
            request = parse(self._endpoint, path, head, raw, read)
            if read is not None:
                # Of a large body each step takes its time.
                await asyncio.sleep(0)
            record.stream = request.stream
            record.model = UNKNOWN
            service = state.models.by_name.get(request.model) or state.models.find(request.model)
            record.model = service.config.name

            # The one engine that keeps the conversation, if any does.
            only = None
            if request.previous_response_id is not None:
                only = await locate(service, request.previous_response_id)
            headers = client_headers(scope["headers"], may_set=head.may_set)
            place_id = f"{state.process_id}-{next(state.place_numbers)}"
            if self._is_light:
                sized = None
                answer = await service.flow.send_light(Job(place_id, request, headers, only, is_relayable), record)
            else:
                sized = await size_up(service, request, head.key, record)
                if read is not None:
                    await asyncio.sleep(0)
                record.request_class = sized.request_class
                record.reason = sized.reason if only is None else _PINNED
                job = Job(
                    place_id, request, headers, only, is_relayable, sized.request_class, sized.demand, sized.edits
                )
                answer = await service.flow.send(job, record)
            try:
                await send_answer(answer, reply, record)
            finally:
                answer.close()
            if sized is not None:
                _learn(service, sized, answer, record)
            state.buffers.give_back(len(raw))
        except BaseException as error:
            # Before anything is awaited.
            state.buffers.give_back(len(raw))
            if not await self._end_early(error, exchange, reply, record):
                raise
        finally:
            state.tasks.discard(task)
            if state.draining and not state.tasks:
                state.idle.set()
            record.ended_at_s = state.clock.now_s()
            if record.outcome is None:
                # Cancelled from outside: the server is stopping for good.
                record.outcome = _left(record)
            state.metrics.finish(record)
            log_request(record)

    async def _end_early(
        self, error: BaseException, exchange: Exchange | None, reply: Reply, record: RequestRecord
    ) -> bool:
        """Decide the outcome of a call that `error` broke off, and tell the client. False: the error goes on."""
        if exchange is not None:
            exchange.is_watched = False
        told: ApiError | None = None
        if isinstance(error, ClientLeft) or (isinstance(error, asyncio.CancelledError) and was_cut(exchange)):
            record.outcome = _left(record)
        elif isinstance(error, Refusal):
            record.outcome = error.outcome
            told = error.error
        elif isinstance(error, ApiError):
            record.outcome = _OUTCOMES.get(error.code) or _OUTCOMES.get(error.status, Outcome.REFUSED_INVALID)
            told = error
        elif isinstance(error, asyncio.CancelledError) and self._state.draining:
            # The grace is over: the client is told, and the task has nothing left to do.
            record.outcome = Outcome.REFUSED_SHUTDOWN
            told = _stopping("before the answer was complete")
        elif isinstance(error, Exception):
            # The one boundary: a bug of ours must end as an answer and an outcome, and in the log.
            log.error("request %s failed inside the router", record.request_id, exc_info=error)
            record.outcome = Outcome.INTERNAL_ERROR
            told = ApiError(500, "internal_error", "The router failed on this request; see its log.")
        else:
            return False
        if told is not None:
            try:
                await reply.fail(told)
            except ClientLeft:
                pass  # which changes nothing
        return True

    def _check_hops(self, hops: str | None) -> bool:
        """Whether a request that passed these routers may be relayed.

        Raises: `ApiError` 503 for one that came round.
        """
        loop = hop_refusal(hops, self._state.router_id)
        if loop is not None:
            self._state.metrics.loop_stops.inc()
            raise ApiError(503, "relay_loop", f"Not taken: {loop}.", retry_after_s=30)
        return may_relay(hops)


def _learn(service: ModelService, sized: Sized, answer: Answer, record: RequestRecord) -> None:
    """What an engine of ours really counted and produced; a relay has another tokenizer. Where nobody says, an
    estimate is metered."""
    if record.outcome is not _COMPLETED:
        return
    if record.prompt_tokens_used is None:
        record.completion_tokens_estimated = probable_tokens(answer, service.counter, sized.request_class)
        return
    if record.engine is None:
        return
    service.counter.learn(sized.count, record.prompt_tokens_used, sized.request_class)
    if record.completion_tokens_used:
        service.outputs[sized.request_class].note(record.completion_tokens_used // sized.demand.sequences)


def _stopping(when: str) -> ApiError:
    return ApiError(
        503,
        "shutting_down",
        f"This router stopped {when}. Send the request again; another one takes it.",
        retry_after_s=5,
    )


def _left(record: RequestRecord) -> Outcome:
    """In which phase the client left."""
    if record.first_token_at_s is not None:
        return Outcome.CLIENT_LEFT_STREAMING
    if record.sent_at_s is not None:
        return Outcome.CLIENT_LEFT_PREFILL
    return Outcome.CLIENT_LEFT_WAITING if record.bytes_in else Outcome.CLIENT_LEFT_UPLOAD
