"""Around every route: a request id on every answer, and a key before anything else but the open routes.

The list of what is open is exact and short; whatever is not on it, known or unknown, in any spelling, needs a key.
"""

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.config.model import KeyConfig
from router.errors import ApiError, ErrorShape
from router.http.client import Reply
from router.http.service import RouterState
from router.observe.log import log_request
from router.policy.outcome import Outcome
from router.request import RequestRecord

#: Routes that need no key: probes of load balancers and scrapes of Prometheus.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})

#: Time for some calls to end. Probes and scrapes are answered meanwhile: a full router is not a dead one.
_FULL_RETRY_AFTER_S = 5

#: A client's own id is kept if it is safe in a header, a log line and an engine's id.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Guard:
    """ASGI middleware; the outermost."""

    def __init__(self, app: ASGIApp, state: RouterState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "key": None}
        send = _with_request_id(send, request_id)
        if scope["path"] not in OPEN_PATHS and not self._state.keys.is_open:
            key = self._find_key(scope)
            if key is None:
                await self._refuse(scope, send, _unauthenticated(), Outcome.REFUSED_UNAUTHENTICATED)
                return
            scope["state"]["key"] = key
        if scope["path"] not in OPEN_PATHS and self._state.in_flight >= self._state.config.server.connections_max:
            await self._refuse(scope, send, _too_many(self._state.in_flight), Outcome.REFUSED_ROUTER_FULL)
            return
        await self._app(scope, receive, send)

    def _find_key(self, scope: Scope) -> KeyConfig | None:
        """The key presented: a bearer token, or Anthropic's header. Two different ones open nothing."""
        presented: set[str] = set()
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, token = value.decode("latin-1").strip().partition(" ")
                presented.add(token.strip() if kind.lower() == "bearer" else "")
            elif name == b"x-api-key":
                presented.add(value.decode("latin-1").strip())
        return self._state.keys.find(presented.pop()) if len(presented) == 1 else None

    async def _refuse(self, scope: Scope, send: Send, error: ApiError, outcome: Outcome) -> None:
        state = self._state
        record = RequestRecord(scope["state"]["request_id"], state.clock.now_s())
        record.outcome = outcome
        state.metrics.arrived()
        shape = ErrorShape.ANTHROPIC if is_anthropic(scope) else ErrorShape.OPENAI
        try:
            await Reply(send, record, shape).fail(error)
        finally:
            record.ended_at_s = state.clock.now_s()
            state.metrics.finish(record)
            log_request(record)


def _unauthenticated() -> ApiError:
    return ApiError(
        401,
        "invalid_api_key",
        "A valid API key is needed: send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`.",
        headers={"www-authenticate": "Bearer"},
    )


def _too_many(calls: int) -> ApiError:
    return ApiError(
        503,
        "too_many_connections",
        f"The router has {calls:,} calls under way and takes no more (server.connections_max). Try again.",
        retry_after_s=_FULL_RETRY_AFTER_S,
    )


def is_anthropic(scope: Scope) -> bool:
    """Whether the caller reads Anthropic's error shape."""
    path: str = scope["path"]
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given: str = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(given):
                return given
    return "req-" + secrets.token_hex(12)


def _with_request_id(send: Send, request_id: str) -> Send:
    header = (b"x-request-id", request_id.encode())

    async def with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if all(name != b"x-request-id" for name, _ in headers):
                headers.append(header)
            message = {**message, "headers": headers}
        await send(message)

    return with_id
