"""Hints that are allowed and fit win, with a reason; and every answer says what was decided."""

import asyncio
from typing import Any

import httpx
import pytest

from router.sim.faults import FaultKind, FaultRule, Faults
from tests.http.setting import LONG_TOKENS, MODEL, chat_body, model_config, outside_sim
from tests.http.stack import Stack, fresh, new_client, until

DECISION = ("x-router-pool", "x-router-reason", "x-router-prompt-tokens", "x-router-prompt-tokens-exact")


def where(answer: httpx.Response) -> tuple[int, str, str]:
    return answer.status_code, answer.headers["x-router-pool"], answer.headers["x-router-reason"]


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({}, {}, ("chat", "below_threshold")),
        ({"x-router-class": "batch"}, {}, ("batch", "hint_header")),
        ({"x-router-class": "BATCH"}, {}, ("batch", "hint_header")),
        ({"x-router-class": "chat"}, {}, ("chat", "hint_header")),
        ({}, {"service_tier": "flex"}, ("batch", "hint_service_tier")),
        ({}, {"service_tier": "auto"}, ("chat", "below_threshold")),
        ({}, {"service_tier": None}, ("chat", "below_threshold")),
        ({"x-router-class": "chat"}, {"service_tier": "flex"}, ("chat", "hint_header")),
    ],
)
async def test_a_hint_of_the_client_wins_where_it_fits(
    stack: Stack, headers: dict[str, str], fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    answer = await stack.chat(max_tokens=2, headers=headers, **fields)

    assert where(answer) == (200, *expected)


async def test_a_hint_that_does_not_fit_is_told_and_not_obeyed(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": [1] * 5_000, "max_tokens": 2}

    answer = await stack.post("/v1/completions", body, headers={"x-router-class": "chat"})

    assert where(answer) == (200, "batch", "hint_does_not_fit")


async def test_an_unknown_class_is_a_clients_error(stack: Stack) -> None:
    answer = await stack.chat(headers={"x-router-class": "fast"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-router-class")


async def test_a_key_may_have_a_class_of_its_own_and_may_be_kept_from_asking_for_another() -> None:
    keys = [
        {"name": "free", "key": "free-key"},
        {"name": "nightly", "key": "nightly-key", "default_class": "batch"},
        {"name": "bound", "key": "bound-key", "may_set": []},
    ]
    async with fresh(keys=keys) as stack:

        async def chat(key: str, *, hint: str | None = None, **fields: Any) -> tuple[int, str, str]:
            headers = {"authorization": f"Bearer {key}-key"} | ({} if hint is None else {"x-router-class": hint})
            return where(await stack.chat(max_tokens=2, headers=headers, **fields))

        assert await chat("nightly") == (200, "batch", "hint_key")
        assert await chat("nightly", hint="chat") == (200, "chat", "hint_header")
        assert await chat("bound", hint="batch") == (200, "chat", "below_threshold")
        assert await chat("bound", service_tier="flex") == (200, "chat", "below_threshold")
        assert await chat("free", hint="batch") == (200, "batch", "hint_header")


# -- what every answer says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body(max_tokens=2)),
        ("/v1/chat/completions", chat_body(max_tokens=2, stream=True)),
        ("/v1/completions", {"model": MODEL, "prompt": "x"}),
        ("/v1/completions", {"model": MODEL, "prompt": [1] * 3_000}),
        ("/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 2}),
        ("/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 2, "stream": True}),
        ("/v1/messages", chat_body(max_tokens=2)),
        ("/v1/messages", chat_body(max_tokens=2, stream=True)),
        ("/v1/embeddings", {"model": MODEL, "input": "x"}),
    ],
)
async def test_an_answer_of_an_engine_says_where_why_and_how_long(stack: Stack, path: str, body: Any) -> None:
    answer = await stack.post(path, body)

    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == stack.sent_for(answer).x_request_id
    assert answer.headers["x-router-engine"] in ("c", "l")
    assert "x-router-relay" not in answer.headers
    assert all(answer.headers[name] for name in DECISION)
    assert int(answer.headers["x-router-queue-wait-ms"]) >= 0
    assert answer.headers["x-router-prompt-tokens-exact"] in ("true", "false")
    assert all(len(answer.headers.get_list(name)) == 1 for name in (*DECISION, "x-request-id"))


async def test_a_refusal_says_what_was_known_by_then(stack: Stack) -> None:
    long = await stack.post("/v1/completions", {"model": MODEL, "prompt": [1] * (LONG_TOKENS + 1)})
    unknown = await stack.post("/v1/completions", {"model": "nope", "prompt": "x"})
    engines = await stack.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 0})

    assert (long.headers["x-router-prompt-tokens"], long.headers["x-router-prompt-tokens-exact"]) == ("16385", "true")
    assert {"x-request-id", "x-router-queue-wait-ms"} <= set(unknown.headers)
    assert not {"x-router-engine", "x-router-pool", "x-router-prompt-tokens"} & set(unknown.headers)
    assert engines.status_code == 400
    assert {"x-router-engine", *DECISION} <= set(engines.headers)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/llama", "/nothing"])
async def test_every_other_route_tells_the_requests_id_too(stack: Stack, path: str) -> None:
    answer = await stack.get(path, headers={"x-request-id": "mine.1:a_b-c"})

    assert answer.headers.get_list("x-request-id") == ["mine.1:a_b-c"]


async def test_a_borrowed_place_and_a_relayed_request_are_told() -> None:
    impatient = {"max_num_seqs": 1, "ttft_target_s": 0.01}
    async with fresh(x=outside_sim(), models=[model_config(chat=impatient)]) as stack:
        await stack.c.set_faults(Faults((FaultRule(kind=FaultKind.SILENT),)))
        holder = asyncio.create_task(stack.chat())
        await until(lambda: len(stack.entries("c")) == 1)

        borrowed = await stack.chat(max_tokens=2)
        await stack.long.set_faults(Faults((FaultRule(kind=FaultKind.SILENT),)))
        lenders = [asyncio.create_task(stack.chat()) for _ in range(3)]
        await until(lambda: len(stack.entries("l")) == 4)
        relayed = await stack.chat(max_tokens=2)
        for call in (holder, *lenders):
            call.cancel()
        await asyncio.wait((holder, *lenders))
        await stack.c.set_faults(Faults())
        await stack.long.set_faults(Faults())

        assert where(borrowed) == (200, "batch", "below_threshold,borrowed")
        assert borrowed.headers["x-router-engine"] == "l"
        assert relayed.status_code == 200
        assert (relayed.headers["x-router-pool"], relayed.headers["x-router-relay"]) == ("relay", "x")
        assert "x-router-engine" not in relayed.headers
        assert relayed.headers["x-router-reason"] == "below_threshold"


async def test_a_wait_in_the_batch_queue_is_told_in_milliseconds() -> None:
    async with fresh(models=[model_config(batch={"max_num_seqs": 1})]) as stack:
        await stack.long.set_faults(Faults((FaultRule(kind=FaultKind.FIRST_TOKEN_DELAY, value=0.15),)))
        body = {"model": MODEL, "prompt": [1] * 3_000, "max_tokens": 2}
        async with new_client(stack.url) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(2)))

        waits = sorted(int(answer.headers["x-router-queue-wait-ms"]) for answer in answers)
        assert {answer.status_code for answer in answers} == {200}
        assert waits[1] >= 100
