"""The simulated engine behind vLLM's HTTP face, as an ASGI app (`create_app`) or listening on loopback (`running`).

`/sim/log` and `/sim/faults` are the simulator's own and ask for no key: this is a stand-in for tests and demos, not
something to expose.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from router.clock import Clock, SystemClock
from router.request import Endpoint
from router.sim.calls import check_model, messages_of, parse_body, prompts_of, require
from router.sim.engine import SimEngine
from router.sim.faults import FaultKind, Faults
from router.sim.log import RequestLog
from router.sim.options import SimServerOptions
from router.sim.refusals import Refusal
from router.sim.serving import Inference
from router.sim.state import SimState
from router.sim.wire import Listener

__all__ = ["RunningSim", "SimServerOptions", "create_app", "running"]

_GENERATING = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/messages": Endpoint.MESSAGES,
}


def create_app(options: SimServerOptions, clock: Clock | None = None) -> Starlette:
    """The server as an ASGI app. Its lifespan owns the engine; without lifespan events nothing is generated."""
    state = SimState(options, clock or SystemClock())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.task.start()
        try:
            yield
        finally:
            state.closing.set()
            await state.task.aclose()

    return _app(state, lifespan)


class RunningSim:
    """A listening server. `running` owns it."""

    def __init__(self, state: SimState, listener: Listener) -> None:
        self._state = state
        self._listener = listener
        self._reopening: asyncio.Task[None] | None = None
        self._stay_closed = asyncio.Event()
        state.on_faults = self._follow_faults

    @property
    def url(self) -> str:
        """Without a trailing slash. It stays the same over refusals."""
        return f"http://{self._state.options.host}:{self.port}"

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def engine(self) -> SimEngine:
        return self._state.engine

    @property
    def log(self) -> RequestLog:
        return self._state.log

    @property
    def lag_dropped_s(self) -> float:
        """Seconds by which the machine was too slow for the time scale asked for."""
        return self._state.task.lag_dropped_s

    async def set_faults(self, faults: Faults) -> None:
        """As `POST /sim/faults`, but heard while the server refuses connections too."""
        await self._state.set_faults(faults)

    async def kill(self) -> None:
        """As SIGKILL: nothing listens any more, every connection is reset. `set_faults` listens again."""
        await self._end_reopening()
        self._listener.kill()

    async def aclose(self) -> None:
        """End everything at once. Idempotent."""
        await self._end_reopening()
        self._state.closing.set()
        await self._listener.aclose()

    async def _follow_faults(self, faults: Faults) -> None:
        await self._end_reopening()
        rule = faults.standing(FaultKind.REFUSE_CONNECTIONS)
        if rule is None:
            await self._listener.listen()
            return
        self._listener.refuse()
        if rule.value > 0:
            self._reopening = asyncio.create_task(self._reopen(rule.value), name="sim-reopen")

    async def _reopen(self, after_s: float) -> None:
        try:
            async with asyncio.timeout(after_s):
                await self._stay_closed.wait()
        except TimeoutError:
            await self._listener.listen()

    async def _end_reopening(self) -> None:
        """Let no listener open behind our back. Cancelling could leave a half-made one."""
        task, self._reopening = self._reopening, None
        if task is not None:
            self._stay_closed.set()
            await asyncio.wait({task})
            self._stay_closed.clear()


@asynccontextmanager
async def running(options: SimServerOptions, clock: Clock | None = None) -> AsyncIterator[RunningSim]:
    """Serve in this event loop until the block ends; then every connection is reset and nothing is left behind.

    Raises: `OSError` where the address is taken, `ValueError` for a shape that vLLM would not start with.
    """
    state = SimState(options, clock or SystemClock())
    state.task.start()
    listener = Listener(_app(state, None), options.host, options.port)
    sim = RunningSim(state, listener)
    try:
        # Listening first fixes the port, which a server that refuses from its start has too.
        await listener.listen()
        await sim.set_faults(options.faults)
        yield sim
    finally:
        await sim.aclose()
        await state.task.aclose()


def _app(state: SimState, lifespan: Callable[[Starlette], Any] | None) -> Starlette:
    options = state.options
    routes: list[BaseRoute] = [
        Route(path, Inference(endpoint, state), methods=["POST"]) for path, endpoint in _GENERATING.items()
    ]
    if options.serves_embeddings:
        routes.append(Route("/v1/embeddings", Inference(Endpoint.EMBEDDINGS, state), methods=["POST"]))
    plain = _Plain(state)
    routes.append(_get("/v1/models", plain.models))
    if options.face == "vllm":
        routes += [
            _post("/v1/messages/count_tokens", plain.count_tokens),
            _post("/tokenize", plain.tokenize),
            _post("/detokenize", plain.detokenize),
            _get("/version", plain.version),
            _get("/health", plain.health),
            _get("/ping", plain.health),
            _post("/ping", plain.health),
            _get("/load", plain.load),
            _get("/metrics", plain.metrics),
        ]
    routes += [_get("/sim/log", plain.log), _get("/sim/faults", plain.faults), _post("/sim/faults", plain.set_faults)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _detail})


def _get(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    route = Route(path, endpoint, methods=["GET"])
    # vLLM's framework adds no HEAD: `HEAD /health` is 405 there.
    route.methods = {"GET"}
    return route


def _post(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    return Route(path, endpoint, methods=["POST"])


async def _detail(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, dict(error.headers or {}))


class _Plain:
    """The routes that generate nothing."""

    def __init__(self, state: SimState) -> None:
        self._state = state

    async def models(self, request: Request) -> Response:
        if not self._state.is_authorized(request.headers):
            return self._refusal(Refusal(401, "Incorrect API key provided."), Endpoint.CHAT)
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._state.options.names]})

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": self._state.options.version})

    async def health(self, _: Request) -> Response:
        """Empty 200; 503 where the engine is dead or a fault says so."""
        faults = self._state.board.faults
        slow = faults.standing(FaultKind.SLOW_HEALTH)
        if slow is not None:
            await self._pass_time(slow.value)
        is_dead = faults.standing(FaultKind.HEALTH_503) is not None or not self._state.task.is_alive
        return Response(status_code=503 if is_dead else 200)

    async def load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self._state.in_flight if self._state.options.tracks_load else 0})

    async def metrics(self, _: Request) -> Response:
        return Response(self._state.series.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def count_tokens(self, request: Request) -> Response:
        endpoint = Endpoint.COUNT_TOKENS
        if not self._state.is_authorized(request.headers):
            return self._refusal(Refusal(401, "Incorrect API key provided."), endpoint)
        try:
            fields = await self._fields(request)
            require(endpoint, fields)
            check_model(fields, self._state.options)
            (prompt,) = prompts_of(endpoint, fields, self._state.options)
        except Refusal as refusal:
            return self._refusal(refusal, endpoint)
        management = {"original_input_tokens": prompt.tokens}
        return JSONResponse({"input_tokens": prompt.tokens, "context_management": management})

    async def tokenize(self, request: Request) -> Response:
        """A text or a conversation to ids; not bound by the context."""
        options = self._state.options
        try:
            fields = await self._fields(request)
            check_model(fields, options)
            if "prompt" in fields:
                text = fields["prompt"]
                if not isinstance(text, str):
                    raise Refusal(400, "prompt must be one string", type="Bad Request", param="body.prompt")
            else:
                require(Endpoint.CHAT, fields)
                text = options.tokenizer.render(
                    messages_of(Endpoint.CHAT, fields, options), fields.get("tools") or None
                )
        except Refusal as refusal:
            return self._refusal(refusal, Endpoint.TOKENIZE)
        ids = options.tokenizer.encode(text)
        shown = {"count": len(ids), "max_model_len": options.shape.max_model_len, "tokens": ids, "token_strs": None}
        return JSONResponse(shown)

    async def detokenize(self, request: Request) -> Response:
        try:
            fields = await self._fields(request)
            check_model(fields, self._state.options)
            ids = fields.get("tokens")
            if not isinstance(ids, list) or not all(isinstance(each, int) and each >= 0 for each in ids):
                raise Refusal(400, "tokens must be a list of token ids", type="Bad Request", param="body.tokens")
        except Refusal as refusal:
            return self._refusal(refusal, Endpoint.DETOKENIZE)
        return JSONResponse({"prompt": self._state.options.tokenizer.decode(ids)})

    async def log(self, _: Request) -> Response:
        """Every logged call, oldest first, without headers."""
        return JSONResponse([entry.as_json() for entry in self._state.log.entries()])

    async def faults(self, _: Request) -> Response:
        return Response(msgspec.json.encode(self._state.board.faults), media_type="application/json")

    async def set_faults(self, request: Request) -> Response:
        """Replace the faults: `{"rules": [{"kind": "reject_503", "requests": 3}]}`."""
        try:
            faults = msgspec.json.decode(await request.body(), type=Faults)
        except msgspec.MsgspecError as error:
            return JSONResponse({"detail": str(error)}, 400)
        await self._state.set_faults(faults)
        return Response(msgspec.json.encode(faults), media_type="application/json")

    async def _pass_time(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._state.closing.wait()
        except TimeoutError:
            pass

    async def _fields(self, request: Request) -> dict[str, Any]:
        return parse_body(await request.body(), request.headers.get("content-type", ""))

    def _refusal(self, refusal: Refusal, endpoint: Endpoint) -> Response:
        return JSONResponse(refusal.content(endpoint, self._state.options), refusal.status, refusal.headers)

    def _card(self, name: str) -> dict[str, Any]:
        options, created = self._state.options, self._state.created_unix_s
        if options.face == "provider":
            return {"id": name, "object": "model", "created": created, "owned_by": "provider"}
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": options.root or options.model,
            "parent": None,
            "max_model_len": options.shape.max_model_len,
            "permission": [],
        }
