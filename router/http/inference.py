"""The walk of one inference call: match, parse, count, classify, admit, send, stream, finish.

Nothing else is here: each step's work is done where the step lives. What a step takes is given back by the `with` it
stands in; how the call ended is decided in one place, and one `RequestRecord` says it.
"""

import asyncio
import itertools
import logging
from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from router.config.model import KeyConfig
from router.errors import ApiError
from router.flow.job import Job, Refusal
from router.flow.outgoing import client_headers
from router.http.client import Body, ClientLeft, ClientWatch, Reply
from router.http.parsing import LIGHT_ENDPOINTS, Incoming, parse
from router.http.responses import locate
from router.http.service import ModelService, RouterState
from router.http.sizing import Sized, size_up
from router.http.stream import send_answer
from router.observe.log import log_request
from router.policy.classify import Reason
from router.policy.outcome import Outcome
from router.request import Endpoint, ParsedRequest, RequestRecord
from router.upstream.relay import HOP_HEADER, hop_refusal, may_relay

log = logging.getLogger(__name__)

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
    """Makes the ASGI app of each inference endpoint."""

    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._ids = itertools.count(1)

    def route(self, endpoint: Endpoint) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(endpoint, scope, receive, send)

        return app

    async def _serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """The walk, and its one ending."""
        state = self._state
        record = RequestRecord(scope["state"]["request_id"], state.clock.now_s(), endpoint=endpoint.value)
        reply = Reply(send, record, endpoint.error_shape)
        state.metrics.arrivals.inc()
        state.enter()
        try:
            await self._walk(endpoint, scope, receive, reply, record)
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
            state.leave()
            self._finish(record)

    async def _walk(
        self, endpoint: Endpoint, scope: Scope, receive: Receive, reply: Reply, record: RequestRecord
    ) -> None:
        state = self._state
        key: KeyConfig | None = scope["state"]["key"]
        record.tenant = key.tenant if key is not None else "none"
        may_set = key.may_set if key is not None else frozenset({"class"})
        if state.draining:
            raise _stopping("taking new requests")
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        hops = headers.get(HOP_HEADER.encode())
        loop = hop_refusal(hops, state.router_id)
        if loop is not None:
            state.metrics.loop_stops.inc()
            raise ApiError(503, "relay_loop", f"Not taken: {loop}.", retry_after_s=30)

        with Body(scope, receive, max_bytes=state.config.server.body_max_bytes, budget=state.buffers) as body:
            raw = await body.read()
            record.bytes_in = len(raw)
            with ClientWatch(scope, reply):
                request = parse(
                    Incoming(
                        request_id=record.request_id,
                        endpoint=endpoint,
                        path=_target(scope),
                        content_type=headers.get(b"content-type", ""),
                        body=raw,
                        hint_header=headers.get(b"x-router-class"),
                        may_set=may_set,
                    )
                )
                record.stream = request.stream
                record.model = state.label_of(request.model)
                service = state.models.find(request.model)
                record.model = service.config.name
                job = Job(
                    place_id=f"{state.process_id}-{next(self._ids)}",
                    request=request,
                    headers=client_headers(scope["headers"], may_set=may_set),
                    only=await _home(service, request),
                    may_relay=may_relay(hops),
                )
                await self._answer(service, job, key, reply, record)

    async def _answer(
        self, service: ModelService, job: Job, key: KeyConfig | None, reply: Reply, record: RequestRecord
    ) -> None:
        if job.request.endpoint in LIGHT_ENDPOINTS:
            answer = await service.flow.send_light(job, record)
            async with answer:
                await send_answer(answer, reply, record)
            return
        sized = await size_up(service, job.request, key, record)
        record.request_class = sized.request_class
        record.reason = sized.reason if job.only is None else Reason.PINNED.value
        job = replace(job, request_class=sized.request_class, demand=sized.demand, edits=sized.edits)
        answer = await service.flow.send(job, record)
        async with answer:
            await send_answer(answer, reply, record)
        _learn(service, job, sized, record)

    def _finish(self, record: RequestRecord) -> None:
        record.ended_at_s = self._state.clock.now_s()
        if record.outcome is None:
            # Cancelled from outside: the server is stopping for good.
            record.outcome = _left(record)
        self._state.metrics.finish(record)
        log_request(record)


async def _home(service: ModelService, request: ParsedRequest) -> str | None:
    """The one engine that keeps the conversation a request continues, if it continues one."""
    if request.previous_response_id is None:
        return None
    return await locate(service, request.previous_response_id)


def _learn(service: ModelService, job: Job, sized: Sized, record: RequestRecord) -> None:
    """What an engine of ours really counted and produced. A relay has another tokenizer."""
    if record.engine is None or record.outcome is not Outcome.COMPLETED or record.prompt_tokens_used is None:
        return
    service.counter.learn(job.request.prompt, sized.count, record.prompt_tokens_used, sized.request_class)
    if record.completion_tokens_used:
        service.outputs[sized.request_class].note(record.completion_tokens_used // job.demand.sequences)


def _stopping(when: str) -> ApiError:
    return ApiError(
        503,
        "shutting_down",
        f"This router stopped {when}. Send the request again; another one takes it.",
        retry_after_s=5,
    )


def _target(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    path: str = scope["path"]
    return f"{path}?{query}" if query else path


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
