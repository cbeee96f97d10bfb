"""Paths, methods and odd headers: an answer in the right shape, never a redirect and never a 500."""

import json
from typing import Any

import pytest

from router.http.routes import INFERENCE_PATHS
from tests.http.scripted import ScriptedEngine, says
from tests.http.setting import chat_body
from tests.http.stack import Stack, fresh
from tests.http.wire import Wire, exchange, request

#: Routes that GET has, with what it says there.
WITH_HEAD = {
    "/v1/models": 200,
    "/v1/models/llama": 200,
    "/v1/models/none": 404,
    "/v1/responses/none": 404,
    "/healthz": 200,
    "/readyz": 200,
    "/metrics": 200,
}
BODY = json.dumps(chat_body(max_tokens=2)).encode()


def is_openai_error(answer: Any, status: int) -> bool:
    error = answer.json()["error"]
    return bool(
        answer.status_code == status
        and answer.headers["content-type"] == "application/json"
        and set(error) == {"message", "type", "param", "code"}
        and error["message"]
        and error["type"]
    )


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions", "/V1/models"]
)
async def test_an_odd_slash_is_a_404_and_not_a_redirect(stack: Stack, path: str) -> None:
    answer = await exchange(stack.port, request(path, BODY, headers=["connection: close", "x-forwarded-proto: https"]))

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404")
    assert b"location" not in head.lower()
    assert json.loads(body)["error"]["code"] == "not_found"


async def test_an_escaped_path_is_the_same_route(stack: Stack) -> None:
    answer = await stack.post("/v1/%63hat/completions", BODY)

    assert answer.status_code == 200
    assert stack.sent_for(answer).path == "/v1/chat/completions"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_a_wrong_method_is_a_405_that_says_which_is_right(stack: Stack, method: str) -> None:
    answer = await stack.client.request(method, "/v1/chat/completions")
    models = await stack.client.request("POST" if method == "GET" else method, "/v1/models")

    assert is_openai_error(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert is_openai_error(models, 405)
    assert "GET" in models.headers["allow"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("path", [*INFERENCE_PATHS, *WITH_HEAD, "/nothing"])
async def test_head_has_an_empty_body_and_a_true_status(stack: Stack, path: str) -> None:
    async with Wire(stack.port) as wire:
        await wire.send(request(path, method="HEAD"))
        status, _ = await wire.head()
        await wire.send(request("/healthz", method="GET"))
        following, _, body = await wire.answer()

    assert status == {**WITH_HEAD, "/nothing": 404}.get(path, 405)
    assert (following, json.loads(body)) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/files", "/v1/models/none", "/%00", "/v1/models/%2e%2e%2fx"])
async def test_an_unknown_path_is_a_404_in_the_standard_shape(stack: Stack, path: str) -> None:
    answer = await stack.get(path)

    assert is_openai_error(answer, 404)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("PUT", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/messages/", 404, "not_found_error"),
    ],
)
async def test_anthropics_routes_answer_in_anthropics_shape(
    stack: Stack, method: str, path: str, status: int, kind: str
) -> None:
    answer = await stack.client.request(method, path, content=b"{}")

    assert answer.status_code == status
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["[", "evil.test:99999999", "a b", "http://x/", "é", ""])
@pytest.mark.parametrize("target", ["/nothing", "/v1/chat/completions", "/v1/models/none"])
async def test_an_odd_host_header_changes_nothing(stack: Stack, host: str, target: str) -> None:
    answer = await exchange(stack.port, request(target, method="GET", headers=["connection: close"], host=host))

    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405", b"HTTP/1.1 400"))


async def test_headers_of_other_alphabets_pass_and_odd_request_ids_are_replaced(stack: Stack) -> None:
    headers = ["connection: close", "x-team: équipe 模型", "x-request-id: é-1"]

    answer = await exchange(stack.port, request("/v1/chat/completions", BODY, headers=headers))

    head = answer.partition(b"\r\n\r\n")[0].decode("latin-1").lower()
    assert head.startswith("http/1.1 200")
    request_id = head.partition("x-request-id: ")[2].partition("\r\n")[0]
    assert request_id.startswith("req-")
    (entry,) = [entry for entry in stack.entries("c") if entry.x_request_id == request_id]
    assert entry.headers["x-team"].encode("latin-1").decode() == "équipe 模型"


async def test_a_plain_request_id_is_kept_and_is_the_engines_too(stack: Stack) -> None:
    answer = await stack.chat(max_tokens=2, headers={"x-request-id": "mine-1"})

    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert stack.sent_for(answer).x_request_id == "mine-1"


@pytest.mark.parametrize(
    "name", ["模型", "\ud83d\ude00", "a\nb", "x" * 10_000, "http://127.0.0.1:9", "../llama", " llama"]
)
async def test_an_unknown_model_of_any_spelling_is_a_readable_404(stack: Stack, name: str) -> None:
    answer = await stack.post("/v1/chat/completions", {**chat_body(), "model": name})

    assert is_openai_error(answer, 404)
    assert answer.json()["error"]["code"] == "model_not_found"
    assert len(answer.content) < 2_000


async def test_header_bytes_of_an_engine_pass_and_it_cannot_speak_for_the_router() -> None:
    headers = "content-type: application/json\r\nx-note: \xe9\xff\x80\r\nx-router-pool: mine\r\nset-cookie: a=b\r\n"
    engine = ScriptedEngine(says(headers=headers))

    async with fresh(c=engine) as stack:
        answer = await stack.chat(max_tokens=2)

        assert answer.status_code == 200
        assert dict(answer.headers.raw)[b"x-note"] == b"\xe9\xff\x80"
        assert answer.headers.get_list("x-router-pool") == ["chat"]
        assert "set-cookie" not in answer.headers
