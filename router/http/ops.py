"""Routes that generate nothing: health, metrics, the model list, and answers that engines keep."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.errors import ApiError
from router.http.client import in_ascii
from router.http.responses import Kept, cancel_kept, read_kept
from router.http.service import ModelService, RouterState
from router.observe import process
from router.observe.log import dropped_lines
from router.observe.metrics import CONTENT_TYPE
from router.tokens.api import PromptCounter

#: What keeps a file from being opened is mostly many connections at once; some of them have ended by then.
_METRICS_RETRY_AFTER_S = 5


class Ops:
    """The handlers, over the state of this process."""

    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._created_unix_s = int(state.clock.unix_s())
        self._shown: dict[tuple[str, str], float] = {}

    async def healthz(self, _: Request) -> Response:
        """The process lives and its loop turns."""
        return JSONResponse({"status": "ok"})

    async def readyz(self, _: Request) -> Response:
        """200 while new work is taken: not stopping, and an engine serves."""
        state = self._state
        models = {service.config.name: self._readiness(service) for service in state.models}
        serves = any(model["serving"] for model in models.values())
        ready = serves and not state.draining and not state.is_broken
        status = "draining" if state.draining else "ready" if ready else "broken" if serves else "no engine serves"
        body = {"status": status, "models": models}
        return JSONResponse(body, 200 if ready else 503, headers={} if ready else {"retry-after": "5"})

    async def metrics(self, _: Request) -> Response:
        try:
            self.refresh_gauges()
            page = self._state.metrics.page()
        except OSError as error:
            # Nothing rather than a part: of several workers' files those that can be read would add up to less than
            # was shown before.
            raise _unreadable(error) from error
        return Response(page, headers={"content-type": CONTENT_TYPE})

    async def models(self, _: Request) -> Response:
        """All names that clients may use, aliases among them; never asks an engine."""
        cards = [self._card(name, service) for name, service in self._state.models.by_name.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        service = self._state.models.by_name.get(name)
        if service is None:
            raise ApiError(404, "model_not_found", f"The model {name[:200]!r} does not exist here.", param="model")
        return JSONResponse(self._card(name, service))

    async def stored_response(self, request: Request) -> Response:
        """GET /v1/responses/{id}: the engine that keeps it answers."""
        response_id = request.path_params["response_id"]
        return _kept(response_id, await read_kept(self._state, response_id))

    async def cancel_response(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: likewise."""
        response_id = request.path_params["response_id"]
        return _kept(response_id, await cancel_kept(self._state, response_id))

    def refresh_gauges(self) -> None:
        """Set what is a state, not an event, to what it is now."""
        state = self._state
        state.metrics.in_flight.set(state.in_flight)
        state.metrics.buffered.set(state.buffers.used_bytes)
        self._show_process()
        for service in state.models:
            name, flow = service.config.name, service.flow
            state.metrics.show_admission(name, flow.gate.snapshot())
            for engine in flow.engines.values():
                state.metrics.engine_up.labels(name, engine.name).set(engine.status.can_serve)
            if flow.line is not None:
                stats = flow.line.stats
                state.metrics.show_queue(
                    name,
                    requests=stats.requests,
                    tokens=stats.tokens,
                    oldest_age_s=stats.oldest_age_s,
                    is_up=flow.line.is_up,
                )
            self._show_counter(name, service.counter)
            for relay in flow.relays.all:
                state.metrics.relay_open.labels(relay.name).set(not relay.can_try)

    def _show_process(self) -> None:
        metrics = self._state.metrics
        for gauge, value in ((metrics.memory, process.resident_bytes()), (metrics.open_files, process.open_files())):
            if value is not None:
                gauge.set(value)
        metrics.cpu.inc(self._news("", "cpu", process.cpu_s()))
        metrics.log_lines_dropped.inc(self._news("", "log lines", dropped_lines()))

    def _show_counter(self, model: str, counter: PromptCounter) -> None:
        """The counter keeps sums of its own; what came since the last look goes into the series."""
        metrics = self._state.metrics
        metrics.count_misses.labels(model).inc(self._news(model, "misses", counter.misses))
        metrics.count_mismatches.labels(model).inc(self._news(model, "mismatches", counter.exact_mismatches))
        for reason, total in counter.missed.items():
            metrics.count_given_up.labels(model, reason).inc(self._news(model, reason, total))

    def _news(self, model: str, what: str, total: float) -> float:
        before = self._shown.get((model, what), 0)
        self._shown[model, what] = total
        return total - before

    def _readiness(self, service: ModelService) -> dict[str, Any]:
        engines = {name: engine.status.state.value for name, engine in service.flow.engines.items()}
        queue_up = service.flow.line.is_up if service.flow.line is not None else None
        return {"serving": service.is_serving(), "engines": engines, "queue_up": queue_up}

    def _card(self, name: str, service: ModelService) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "router",
            "root": service.config.name,
            "parent": None,
            "max_model_len": service.max_model_len(),
        }


def _unreadable(error: OSError) -> ApiError:
    text = f"The router cannot open its workers' metrics now ({error.strerror}). Try again."
    return ApiError(503, "metrics_unreadable", text, retry_after_s=_METRICS_RETRY_AFTER_S)


def _kept(response_id: str, kept: Kept | None) -> Response:
    if kept is None:
        raise ApiError(
            404,
            "response_not_found",
            f"No engine keeps the response {response_id[:200]!r}; vLLM keeps answers only with "
            "VLLM_ENABLE_RESPONSES_API_STORE=1, and only until it restarts.",
        )
    headers = {"content-type": kept.said.content_type, "x-router-engine": in_ascii(kept.engine)}
    return Response(kept.said.body, kept.said.status, headers=headers)
