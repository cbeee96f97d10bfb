"""The route table: every path the router answers, and the error shape of all the others.

One table, Starlette's, says what exists; inference calls on it are pure ASGI apps, which `guard.py` also finds without
walking the table.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import ApiError
from router.http.guard import Guard, error_shape
from router.http.inference import Inference
from router.http.ops import Ops
from router.http.service import RouterState
from router.request import Endpoint

#: Path of every inference call. What the engine has not is the engine's to refuse.
INFERENCE_PATHS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/messages": Endpoint.MESSAGES,
    "/v1/messages/count_tokens": Endpoint.COUNT_TOKENS,
    "/v1/embeddings": Endpoint.EMBEDDINGS,
    "/tokenize": Endpoint.TOKENIZE,
    "/detokenize": Endpoint.DETOKENIZE,
    "/score": Endpoint.SCORE,
    "/v1/score": Endpoint.SCORE,
    "/rerank": Endpoint.RERANK,
    "/v1/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
    "/pooling": Endpoint.POOLING,
    "/classify": Endpoint.CLASSIFY,
    "/v1/audio/transcriptions": Endpoint.AUDIO,
    "/v1/audio/translations": Endpoint.AUDIO,
}


def build(state: RouterState) -> tuple[ASGIApp, Ops]:
    """The whole ASGI application over `state`, and the ops handlers (whose gauges are refreshed from outside)."""
    ops = Ops(state)
    posts = {path: Inference(state, endpoint) for path, endpoint in INFERENCE_PATHS.items()}
    routes = [
        *(Route(path, _Post(app)) for path, app in posts.items()),
        Route("/v1/responses/{response_id}", ops.stored_response, methods=["GET"]),
        Route("/v1/responses/{response_id}/cancel", ops.cancel_response, methods=["POST"]),
        Route("/v1/models", ops.models, methods=["GET"]),
        Route("/v1/models/{model:path}", ops.model, methods=["GET"]),
        Route("/healthz", ops.healthz, methods=["GET"]),
        Route("/readyz", ops.readyz, methods=["GET"]),
        Route("/metrics", ops.metrics, methods=["GET"]),
    ]
    table = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, ApiError: _api_error, 500: _bug})
    # A redirect for a slash loses the body, the key or the scheme.
    table.router.redirect_slashes = False
    return Guard(state, posts=posts, table=table), ops


class _Post:
    """A raw ASGI endpoint for POST only (Starlette's `methods` does not apply to a raw one)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise HTTPException(405, headers={"allow": "POST"})
        await self._app(scope, receive, send)


def _answer(request: Request, error: ApiError) -> Response:
    body = b"" if request.method == "HEAD" else error.body(error_shape(request.scope["path"]))
    return Response(body, error.status, headers=error.response_headers())


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    headers = dict(error.headers or {})
    if error.status_code == 405:
        allow = headers.get("allow") or headers.get("Allow") or "another method"
        api = ApiError(405, "method_not_allowed", f"{request.method} is not allowed on {path}; use {allow}.")
    elif error.status_code == 404:
        meant = f" Did you mean /v1{path}? A client's base URL ends in /v1." if f"/v1{path}" in INFERENCE_PATHS else ""
        api = ApiError(404, "not_found", f"There is no route {path!r} here.{meant}")
    else:
        api = ApiError(error.status_code, "http_error", error.detail)
    api.headers = headers
    return _answer(request, api)


async def _bug(request: Request, _: Exception) -> Response:
    return _answer(request, ApiError(500, "internal_error", "The router failed on this request; see its log."))
