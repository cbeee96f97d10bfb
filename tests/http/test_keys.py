"""Without a key nothing is reached, however the path is spelt and whatever the method is."""

from collections.abc import Iterator

import pytest

from router.http.routes import INFERENCE_PATHS
from tests.http.setting import chat_body
from tests.http.stack import Stack, new_client, stack_of
from tests.http.stage import Stage
from tests.http.wire import exchange, request

KEY = "the-right-key"
OPEN = ("/healthz", "/readyz", "/metrics")
GUARDED = (
    *INFERENCE_PATHS,
    "/v1/models",
    "/v1/models/llama",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/invocations",
    "/v2/embed",
    "/docs",
    "/openapi.json",
    "/health",
    "/version",
    "/load",
    "/sim/log",
    "/nothing",
    "/",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/chat/completions/",
    "/V1/chat/completions",
    "/v1/%63hat/completions",
    "/v1/../tokenize",
    "/healthz/../v1/models",
    "/healthz/",
    "//healthz",
    "/metrics/x",
    "/HEALTHZ",
    "/healthz;x",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
WRONG = (
    (),
    ("authorization: Bearer wrong",),
    ("authorization: Bearer ",),
    ("authorization: Bearer",),
    ("authorization: Basic dGhlLXJpZ2h0LWtleQ==",),
    (f"authorization: {KEY}",),
    (f"authorization: Token {KEY}",),
    ("x-api-key: ",),
    ("authorization: Bearer wrong", f"authorization: Bearer {KEY}"),
    (f"authorization: Bearer {KEY}", "authorization: Bearer wrong"),
    (f"authorization: Bearer {KEY}", "x-api-key: wrong"),
    (f"authorization: Bearer {KEY}\xe9",),
)


@pytest.fixture(scope="module")
def locked_stack(stage: Stage) -> Stack:
    return stage.start(stack_of(keys=[{"name": "team", "key": KEY}, {"name": "other", "key": "other-key"}]))


@pytest.fixture
def locked(stage: Stage, locked_stack: Stack) -> Iterator[Stack]:
    yield locked_stack
    stage.run(locked_stack.check_at_rest())


def closing(target: str, method: str, headers: tuple[str, ...] = ()) -> bytes:
    body = b"" if method in ("GET", "HEAD", "OPTIONS", "TRACE") else b"{}"
    return request(target, body, method=method, headers=["connection: close", *headers])


@pytest.mark.parametrize("path", GUARDED)
async def test_every_path_asks_for_a_key_with_every_method(locked: Stack, path: str) -> None:
    answers = [await exchange(locked.port, closing(path, method)) for method in METHODS]

    assert [answer.split(b" ", 2)[1] for answer in answers] == [b"401"] * len(METHODS)
    assert all(b"www-authenticate: Bearer" in answer for answer in answers)


@pytest.mark.parametrize("headers", WRONG)
async def test_a_wrong_key_in_any_form_is_none(locked: Stack, headers: tuple[str, ...]) -> None:
    sent_before = len(locked.entries("c")) + len(locked.entries("l"))
    body = b'{"model":"llama","messages":[{"role":"user","content":"x"}]}'

    answer = await exchange(locked.port, request("/v1/chat/completions", body, headers=["connection: close", *headers]))

    assert answer.startswith(b"HTTP/1.1 401")
    assert len(locked.entries("c")) + len(locked.entries("l")) == sent_before


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"authorization": f"BEARER   {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "authorization": f"Bearer {KEY}"},
    ],
)
async def test_the_right_key_opens_in_either_header(locked: Stack, headers: dict[str, str]) -> None:
    async with new_client(locked.url) as client:
        answer = await client.post("/v1/chat/completions", json=chat_body(max_tokens=2), headers=headers)

    assert answer.status_code == 200
    assert {"authorization", "x-api-key"}.isdisjoint(locked.sent_for(answer).headers)


@pytest.mark.parametrize("path", OPEN)
async def test_the_documented_open_routes_need_no_key(locked: Stack, path: str) -> None:
    async with new_client(locked.url) as client:
        answer = await client.get(path)

    assert answer.status_code == 200
    assert KEY not in answer.text


async def test_an_absolute_request_line_is_guarded_like_any_other(locked: Stack) -> None:
    refused = await exchange(locked.port, closing("http://evil.test/v1/models", "GET"))
    with_key = await exchange(
        locked.port, closing("http://evil.test/v1/models", "GET", (f"authorization: Bearer {KEY}",))
    )

    assert refused.startswith(b"HTTP/1.1 401")
    assert with_key.startswith(b"HTTP/1.1 200")


async def test_a_refusal_for_the_key_is_counted_and_told_in_the_shape_of_the_route(locked: Stack) -> None:
    before = (await locked.metrics()).value("router_requests_total", outcome="refused_unauthenticated")

    async with new_client(locked.url) as client:
        openai = await client.post("/v1/chat/completions", json=chat_body())
        anthropic = await client.post("/v1/messages/count_tokens", json=chat_body())

    after = (await locked.metrics()).value("router_requests_total", outcome="refused_unauthenticated")
    assert openai.json()["error"]["code"] == "invalid_api_key"
    assert openai.headers["x-request-id"]
    assert anthropic.json()["type"] == "error"
    assert anthropic.json()["error"]["type"] == "authentication_error"
    assert after - before == 2
