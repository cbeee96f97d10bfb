"""The walk of one inference call: match, parse, count, classify, admit, send, stream, finish.

Nothing else is here: each step's work is done where the step lives. What a step takes is given back by the `with` it
stands in; how the call ended is decided in one place, and one `RequestRecord` says it.
"""

import asyncio
import logging

from starlette.types import Receive, Scope, Send

from router.errors import ApiError
from router.flow.answer import Answer
from router.flow.job import Job, Refusal
from router.flow.outgoing import client_headers
from router.flow.unreported import probable_tokens
from router.http.client import ClientLeft, ClientWatch, Reply, exchange_of
from router.http.exchange import Exchange
from router.http.head import HEAD, Head
from router.http.parsing import LIGHT_ENDPOINTS, parse
from router.http.responses import locate
from router.http.service import ModelService, RouterState
from router.http.sizing import Sized, size_up
from router.http.stream import send_answer
from router.http.upload import Body
from router.observe.log import log_request
from router.observe.metrics import UNKNOWN
from router.policy.classify import Reason
from router.policy.outcome import Outcome
from router.request import Endpoint, RequestRecord
from router.upstream.relay import HOP_HEADER, hop_refusal, may_relay

log = logging.getLogger(__name__)

_HOPS = HOP_HEADER.encode()
_COMPLETED = Outcome.COMPLETED

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
        state.metrics.arrived()
        task = state.enter()
        try:
            await self._walk(scope, receive, exchange, head, reply, record)
        except ClientLeft:
            record.outcome = _left(record)
        except Refusal as refusal:
            record.outcome = refusal.outcome
            await _try_to_say(reply, refusal.error)
        except ApiError as error:
            record.outcome = _OUTCOMES.get(error.code) or _OUTCOMES.get(error.status, Outcome.REFUSED_INVALID)
            await _try_to_say(reply, error)
        except asyncio.CancelledError:
            if not state.draining:
                raise
            # The grace is over: the client is told, and the task has nothing left to do.
            record.outcome = Outcome.REFUSED_SHUTDOWN
            await _try_to_say(reply, _stopping("before the answer was complete"))
        except Exception:
            # The one boundary: a bug of ours must end as an answer and an outcome, and in the log.
            log.exception("request %s failed inside the router", record.request_id)
            record.outcome = Outcome.INTERNAL_ERROR
            await _try_to_say(reply, ApiError(500, "internal_error", "The router failed on this request; see its log."))
        finally:
            state.leave(task)
            record.ended_at_s = state.clock.now_s()
            if record.outcome is None:
                # Cancelled from outside: the server is stopping for good.
                record.outcome = _left(record)
            state.metrics.finish(record)
            log_request(record)

    async def _walk(
        self,
        scope: Scope,
        receive: Receive,
        exchange: Exchange | None,
        head: Head,
        reply: Reply,
        record: RequestRecord,
    ) -> None:
        """Match, parse, count, classify, admit, send, stream; what was learned is the finish."""
        state = self._state
        if head.key is not None:
            record.tenant = head.key.tenant
        if state.draining:
            raise _stopping("taking new requests")
        is_relayable = _HOPS not in head.fields or self._check_hops(head.text(_HOPS))
        with Body(scope, receive, exchange, max_bytes=self._body_max_bytes, budget=state.buffers) as body:
            raw = await body.read()
            record.bytes_in = len(raw)
            with ClientWatch(exchange, reply):
                path: str = scope["path"]
                if scope["query_string"]:
                    path = f"{path}?{scope['query_string'].decode('latin-1')}"
                request = parse(self._endpoint, path, head, raw)
                record.stream = request.stream
                record.model = UNKNOWN
                service = state.models.find(request.model)
                record.model = service.config.name

                # The one engine that keeps the conversation, if any does.
                only = None
                if request.previous_response_id is not None:
                    only = await locate(service, request.previous_response_id)
                headers = client_headers(scope["headers"], may_set=head.may_set)
                place_id = state.new_place_id()
                if self._is_light:
                    answer = await service.flow.send_light(Job(place_id, request, headers, only, is_relayable), record)
                    with answer:
                        await send_answer(answer, reply, record)
                    return
                sized = await size_up(service, request, head.key, record)
                record.request_class = sized.request_class
                record.reason = sized.reason if only is None else Reason.PINNED
                job = Job(
                    place_id, request, headers, only, is_relayable, sized.request_class, sized.demand, sized.edits
                )
                answer = await service.flow.send(job, record)
                with answer:
                    await send_answer(answer, reply, record)
                _learn(service, sized, answer, record)

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


async def _try_to_say(reply: Reply, error: ApiError) -> None:
    """Tell the client; it may be gone by now, which changes nothing."""
    try:
        await reply.fail(error)
    except ClientLeft:
        pass
