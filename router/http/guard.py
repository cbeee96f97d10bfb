"""Before every route: a request id on every answer, and a key before anything else but the open routes.

The list of what is open is exact and short; whatever is not on it, known or unknown, in any spelling, needs a key.
Then an inference call goes straight to its app, found by its exact path; everything else, other methods on those paths
too, to the route table. Nothing is decided by a path's spelling before the key is seen.
"""

from collections.abc import Awaitable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ApiError, ErrorShape
from router.http.client import Reply
from router.http.doorstep import OPEN_PATHS
from router.http.head import HEAD, MAY_SET_WITHOUT_KEYS, Head, RequestIds, presented_key, read_fields
from router.http.service import RouterState
from router.observe.log import log_request
from router.policy.outcome import Outcome
from router.request import RequestRecord

#: Time for some calls to end. Probes and scrapes are answered meanwhile: a full router is not a dead one.
_FULL_RETRY_AFTER_S = 5


class Guard:
    """The ASGI 3 application; its call is no coroutine function, so a server that guesses the version has to be told.

    `posts`: apps that serve POST on exactly their path, and put the id on their answers themselves; `table`: the app
    for everything else.
    """

    def __init__(self, state: RouterState, *, posts: Mapping[str, ASGIApp], table: ASGIApp) -> None:
        self._state = state
        self._posts = dict(posts)
        self._table = table
        self._ids = RequestIds()
        self._tasks = state.tasks
        self._keys = state.keys
        self._needs_key = not state.keys.is_open
        self._calls_max = state.config.server.connections_max

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """The call behind the door, or its refusal, to be awaited: once inside, nothing of the guard is in its way."""
        if scope["type"] != "http":
            return self._table(scope, receive, send)
        headers = scope["headers"]
        fields: dict[bytes, bytes] = dict(headers)
        if len(fields) != len(headers):
            fields = read_fields(headers)
        given = fields.get(b"x-request-id")
        request_id = next(self._ids.new) if given is None else self._ids.of(given)
        path: str = scope["path"]
        key = None
        if path not in OPEN_PATHS:
            if self._needs_key:
                presented = presented_key(fields)
                key = self._keys.find(presented) if presented is not None else None
                if key is None:
                    return self._refuse(request_id, path, send, _unauthenticated(), Outcome.REFUSED_UNAUTHENTICATED)
            calls = len(self._tasks)
            if calls >= self._calls_max:
                return self._refuse(request_id, path, send, _too_many(calls), Outcome.REFUSED_ROUTER_FULL)
        scope[HEAD] = Head(request_id, key, MAY_SET_WITHOUT_KEYS if key is None else key.may_set, fields)
        app = self._posts.get(path) if scope["method"] == "POST" else None
        if app is not None:
            return app(scope, receive, send)
        return self._table(scope, receive, _with_request_id(send, request_id))

    async def _refuse(self, request_id: str, path: str, send: Send, error: ApiError, outcome: Outcome) -> None:
        state = self._state
        record = RequestRecord(request_id, state.clock.now_s())
        record.outcome = outcome
        state.metrics.arrived()
        try:
            await Reply(send, record, error_shape(path)).fail(error)
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


def error_shape(path: str) -> ErrorShape:
    """Which error shape the callers of a path read."""
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return ErrorShape.ANTHROPIC if is_anthropic else ErrorShape.OPENAI


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
