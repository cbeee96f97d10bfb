"""What a live vLLM 0.32.0 refused, the simulated server refuses with the same status, type, param and text."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from router.sim.engine import EngineShape
from router.sim.options import SimServerOptions
from router.sim.server import RunningSim, running

MESSAGES = [{"role": "user", "content": "Hello, who are you?"}]
CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)


def with_server(test: Callable[[RunningSim, httpx.AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        shape = EngineShape(max_model_len=4_096, max_num_seqs=options.pop("max_num_seqs", 16))
        given = {"model": "tiny", "shape": shape, "time_scale": 0.0, **options}
        async with (
            running(SimServerOptions(**given)) as sim,
            httpx.AsyncClient(base_url=sim.url, timeout=10.0) as client,
        ):
            await test(sim, client)

    asyncio.run(main())


TOO_LONG = (
    "This model's maximum context length is 4096 tokens. However, your prompt contains {} input tokens, which exceeds "
    "this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value={})"
)
TOO_MANY_CHARACTERS = (
    "This model's maximum context length is 4096 tokens. However, your prompt contains 600045 characters (more than "
    "524288 characters, which is the upper bound for 4096 input tokens). Please reduce the length of the input prompt. "
    "(parameter=input_text, value=600045)"
)
NO_INTEGER = (
    "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens', 'msg': 'Input should be a valid integer, "
    "unable to parse string as an integer', 'input': 'x'}"
)
NO_MESSAGES = (
    "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', "
    "'input': '<dict of 1 items>'}"
)
LONG_TEXT = "hello " * 6_000
CAP_TEXT = (
    "{0}=5000 cannot be greater than max_model_len=4096. Please request fewer output tokens. "
    "(parameter={0}, value=5000)"
)


@pytest.mark.parametrize(
    ("path", "fields", "kind", "param", "message"),
    [
        (
            CHAT,
            {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 5},
            "BadRequestError",
            "input_tokens",
            TOO_LONG.format("at least 4097", 4097),
        ),
        (
            COMPLETIONS,
            {"prompt": [7] * 5_000, "max_tokens": 5},
            "BadRequestError",
            "input_tokens",
            TOO_LONG.format("5000", 5000),
        ),
        (RESPONSES, {"input": LONG_TEXT}, "BadRequestError", "input_tokens", TOO_LONG.format("at least 4097", 4097)),
        (
            COMPLETIONS,
            {"prompt": "x" * 600_045, "max_tokens": 5},
            "BadRequestError",
            "input_text",
            TOO_MANY_CHARACTERS,
        ),
        (
            COMPLETIONS,
            {"prompt": [7] * 4_096, "max_tokens": 1},
            "BadRequestError",
            "max_tokens",
            "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "max_tokens": 5_000},
            "BadRequestError",
            "max_tokens",
            CAP_TEXT.format("max_tokens"),
        ),
        (
            CHAT,
            {"messages": MESSAGES, "max_completion_tokens": 5_000},
            "BadRequestError",
            "max_completion_tokens",
            CAP_TEXT.format("max_completion_tokens"),
        ),
        (
            RESPONSES,
            {"input": "hello", "max_output_tokens": 5_000},
            "BadRequestError",
            "max_output_tokens",
            CAP_TEXT.format("max_output_tokens"),
        ),
        (
            CHAT,
            {"messages": MESSAGES, "max_tokens": -1},
            "BadRequestError",
            "max_tokens",
            "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "max_tokens": "x"},
            "Bad Request",
            "body.max_tokens",
            NO_INTEGER,
        ),
        (
            CHAT,
            {},
            "Bad Request",
            "body.messages",
            NO_MESSAGES,
        ),
        (
            CHAT,
            {"messages": []},
            "BadRequestError",
            None,
            "Cannot apply chat template to an empty conversation. Provide at least one message.",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "temperature": -1},
            "BadRequestError",
            "temperature",
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "BadRequestError",
            None,
            "tiny is not a multimodal model",
        ),
    ],
)
def test_a_bad_request_is_told_in_vllms_words(
    path: str, fields: dict[str, Any], kind: str, param: str | None, message: str
) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        response = await client.post(path, json={"model": "tiny", **fields})

        assert response.status_code == 400
        assert response.json() == {"error": {"message": message, "type": kind, "param": param, "code": 400}}
        assert sim.engine.is_idle

    with_server(test)


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        (b"", "application/json", "'type': 'missing', 'loc': 'body'"),
        (b"[]", "application/json", "'type': 'model_attributes_type'"),
        (b'{"messages": [', "application/json", "'type': 'json_invalid', 'loc': 'body.14'"),
        (b'{"messages": "\xff"}', "application/json", '{"detail":"There was an error parsing the body"}'),
        (b"{}", "text/plain", "Unsupported Media Type: Only 'application/json' is allowed"),
        (b'{"messages": [{"content": "x"}], "temperature": NaN}', "application/json", "finite number, got nan"),
    ],
)
def test_a_body_that_is_no_json_object_is_400(body: bytes, content_type: str, expected: str) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        response = await client.post(CHAT, content=body, headers={"content-type": content_type})

        assert response.status_code == 400
        assert expected in response.text

    with_server(test)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_an_unknown_model_is_404_with_the_aliases(path: str) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body = {"model": "nope", "messages": MESSAGES, "prompt": "x", "input": "x"}
        response = await client.post(path, json=body)

        assert response.status_code == 404
        assert response.json()["error"] == {
            "message": "The model `nope` does not exist. Valid aliases: tiny.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }

    with_server(test)


def test_a_missing_model_is_served_and_the_last_of_duplicate_keys_wins() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        raw = b'{"model":"nope","model":"tiny","messages":[{"role":"zzz","content":"x"}],"max_tokens":1}'
        last_wins = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
        missing = await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})

        assert (last_wins.status_code, missing.status_code) == (200, 200)

    with_server(test)


def test_messages_errors_have_anthropics_envelope_with_the_types_of_the_version() -> None:
    body = {"model": "nope", "messages": MESSAGES, "max_tokens": 5}
    kinds = []

    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        response = await client.post(ANTHROPIC, json=body)
        assert (response.status_code, response.json()["type"]) == (404, "error")
        kinds.append(response.json()["error"]["type"])

    with_server(test)
    with_server(test, version="0.33.0")

    assert kinds == ["NotFoundError", "not_found_error"]


def test_an_output_over_the_context_is_clamped_from_032_and_refused_before() -> None:
    body = {"prompt": [7] * 4_000, "max_tokens": 200}

    async def clamps(sim: RunningSim, client: httpx.AsyncClient) -> None:
        answer = (await client.post(COMPLETIONS, json=body)).json()
        assert answer["usage"]["completion_tokens"] == 96
        assert answer["choices"][0]["finish_reason"] == "length"

    async def refuses(sim: RunningSim, client: httpx.AsyncClient) -> None:
        response = await client.post(COMPLETIONS, json=body)
        assert response.status_code == 400
        assert "you requested 200 output tokens and your prompt contains 4000 input tokens" in response.text

    with_server(clamps, version="0.32.0")
    with_server(refuses, version="0.31.0")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("GET", CHAT, 405), ("POST", "/health", 405)]
)
def test_an_unknown_route_or_method_gets_the_frameworks_detail(method: str, path: str, status: int) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        response = await client.request(method, path)

        assert response.status_code == status
        assert list(response.json()) == ["detail"]

    with_server(test)


def test_a_key_guards_v1_and_nothing_else() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        without = await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})
        with_key = await client.get("/v1/models", headers={"authorization": "Bearer k"})
        health = await client.get("/health")

        assert (without.status_code, without.json()) == (401, {"error": "Unauthorized"})
        assert (with_key.status_code, health.status_code) == (200, 200)

    with_server(test, api_key="k")


def test_the_priority_header_wins_over_the_body_where_the_version_knows_it() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body = {"messages": MESSAGES, "max_tokens": 1, "priority": 7}
        await client.post(CHAT, json=body)
        await client.post(CHAT, json=body, headers={"X-Vllm-Priority": "-2"})
        await client.post(CHAT, json=body, headers={"X-Vllm-Priority": "soon"})

        assert [entry.priority for entry in sim.log.entries()] == [7, -2, 7]

    with_server(test)
