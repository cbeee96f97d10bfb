"""What the router takes a prompt for, seen from outside: its headers, the pool it chose, and that nothing is refused
or changed for what the counter makes of it."""

import asyncio
import base64
import json
from typing import Any

import pytest

from router.sim.faults import FaultKind, FaultRule, Faults
from tests.http.scripted import ScriptedEngine, says, streams
from tests.http.setting import LONG_TOKENS, chat_body, long_sim, model_config
from tests.http.stack import Stack, fresh

SPECIAL = "explain <|endoftext|> and <|im_start|> in this file"


def counted(answer: Any) -> int:
    return int(answer.headers["x-router-prompt-tokens"])


def in_a_tool_result(text: str) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": text},
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": SPECIAL}],
        [{"role": "user", "content": SPECIAL + " word" * 9_000}],
        in_a_tool_result(SPECIAL),
    ],
    ids=["plain", "padded", "tool result"],
)
async def test_a_text_that_quotes_special_tokens_is_counted_and_forwarded_byte_for_byte(
    stack: Stack, messages: list[dict[str, Any]]
) -> None:
    body = json.dumps({"model": "llama", "messages": messages, "max_tokens": 2}).encode()

    answer = await stack.post("/v1/chat/completions", body)

    assert answer.status_code == 200, answer.text
    assert stack.sent_for(answer).body == body
    assert counted(answer) > 0


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "d" * 500,
            "parameters": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(15)}},
        },
    }
    for number in range(40)
]


async def test_tools_are_counted_and_alone_can_make_a_request_long(stack: Stack) -> None:
    bare = await stack.chat(max_tokens=2)

    with_tools = await stack.chat(max_tokens=2, tools=TOOLS)

    assert (bare.headers["x-router-pool"], with_tools.headers["x-router-pool"]) == ("chat", "batch")
    assert counted(with_tools) >= stack.sent_for(with_tools).prompt_tokens * 0.9
    assert counted(with_tools) > counted(bare)


@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_tools_stay_in_the_count_also_where_none_may_be_chosen(stack: Stack, choice: str) -> None:
    answer = await stack.chat(max_tokens=2, tools=TOOLS, tool_choice=choice)

    assert answer.headers["x-router-pool"] == "batch"


async def test_an_image_is_charged_by_the_stated_rule_whatever_its_bytes(stack: Stack) -> None:
    def with_image(size: int) -> list[dict[str, Any]]:
        url = "data:image/png;base64," + base64.b64encode(b"\x89PNG" + b"x" * size).decode()
        parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        return [{"role": "user", "content": parts}]

    bare = await stack.chat("What is it?", max_tokens=2)
    small = await stack.post("/v1/chat/completions", {**chat_body(max_tokens=2), "messages": with_image(1_000)})
    large = await stack.post("/v1/chat/completions", {**chat_body(max_tokens=2), "messages": with_image(400_000)})

    assert small.headers["x-router-prompt-tokens-exact"] == "false"
    assert counted(small) == counted(large)
    assert 1_280 <= counted(small) - counted(bare) <= 1_400


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": in_a_tool_result("done")},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"messages": [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]},
        {"chat_template": "{{ messages[0].content }}"},
        {"documents": [{"title": "t", "text": "x"}], "reasoning_effort": "low"},
    ],
)
async def test_template_options_are_forwarded_unchanged(stack: Stack, fields: dict[str, Any]) -> None:
    body = json.dumps(chat_body(max_tokens=2) | fields).encode()

    answer = await stack.post("/v1/chat/completions", body)

    assert answer.status_code == 200
    assert stack.sent_for(answer).body == body


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([7] * 5_000, 5_000), ([[1, 2, 3], [4, 5]], 5), (["a", "b"], None), ("", None), ([5], 1)],
    ids=["ids", "lists of ids", "texts", "empty text", "one id"],
)
async def test_prompts_as_ids_and_as_lists_are_forwarded_unchanged_and_ids_are_counted_exactly(
    stack: Stack, prompt: Any, tokens: int | None
) -> None:
    body = json.dumps({"model": "llama", "prompt": prompt, "max_tokens": 2}).encode()

    answer = await stack.post("/v1/completions", body)

    assert stack.sent_for(answer).body == body
    if tokens is not None:
        assert (answer.headers["x-router-prompt-tokens-exact"], counted(answer)) == ("true", tokens)
        assert counted(answer) == stack.sent_for(answer).prompt_tokens


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], "a"], [[]], [1.5], [True], None, {"a": 1}, [None]])
async def test_a_prompt_of_mixed_or_empty_kind_is_a_clients_error(stack: Stack, prompt: Any) -> None:
    answer = await stack.post("/v1/completions", {"model": "llama", "prompt": prompt})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


async def test_each_prompt_of_a_list_is_held_against_the_limit_on_its_own(stack: Stack) -> None:
    fits = {"model": "llama", "prompt": [[1] * 9_000, [2] * 9_000], "max_tokens": 10}
    too_long = {"model": "llama", "prompt": [[1] * (LONG_TOKENS + 1), [2]], "max_tokens": 10}

    taken = await stack.post("/v1/completions", fits)
    refused = await stack.post("/v1/completions", too_long)

    assert (taken.status_code, counted(taken)) == (200, 18_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "seats"),
    [
        ({**chat_body(), "n": 4, "max_tokens": 100}, 4),
        ({"model": "llama", "prompt": ["a"] * 10, "max_tokens": 16}, 10),
        ({"model": "llama", "prompt": ["a"] * 3, "n": 3, "max_tokens": 16}, 9),
        ({"model": "llama", "prompt": "a", "n": 1, "best_of": 4, "max_tokens": 16}, 4),
    ],
)
async def test_a_request_is_charged_for_every_sequence_it_asks_for(
    stack: Stack, body: dict[str, Any], seats: int
) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    await stack.c.set_faults(Faults((FaultRule(kind=FaultKind.SILENT),)))

    call = asyncio.create_task(stack.post(path, body))
    page = await stack.metrics()
    while page.value("router_ledger_seats", engine="c") == 0:
        page = await stack.metrics()
    call.cancel()
    await asyncio.wait({call})
    await stack.c.set_faults(Faults())

    assert page.value("router_ledger_seats", engine="c") == seats
    assert page.value("router_ledger_committed_tokens", engine="c") >= seats * int(body["max_tokens"])


@pytest.mark.parametrize(("prompt_tokens", "cap", "pool"), [(700, 300, "chat"), (700, 400, "batch")])
async def test_a_prompt_that_fits_chat_only_without_its_answer_goes_to_the_long_pool(
    stack: Stack, prompt_tokens: int, cap: int, pool: str
) -> None:
    answer = await stack.post("/v1/completions", {"model": "llama", "prompt": [1] * prompt_tokens, "max_tokens": cap})

    assert (answer.status_code, answer.headers["x-router-pool"]) == (200, pool)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_too_long_for_every_pool_is_never_sent_and_told_the_true_numbers(
    stack: Stack, stream: bool
) -> None:
    sent_before = len(stack.entries("c")) + len(stack.entries("l"))

    answer = await stack.post(
        "/v1/completions", {"model": "llama", "prompt": [1] * 20_000, "max_tokens": 50, "stream": stream}
    )

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "16384" in error["message"]
    assert "20050" in error["message"]
    assert counted(answer) == 20_000
    assert len(stack.entries("c")) + len(stack.entries("l")) == sent_before


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_own_400_reaches_the_client_as_it_is_without_retry_or_relay(stream: bool) -> None:
    # An engine before 0.32 refuses what does not fit; its context is smaller than the router was told.
    older = long_sim(version="0.31.0")

    async with fresh(long=older, x=None, models=[model_config(threshold_tokens=100)]) as stack:
        answer = await stack.chat("word " * 500, max_tokens=LONG_TOKENS - 200, stream=stream)

        assert answer.status_code == 400
        assert str(LONG_TOKENS) in answer.text
        assert len(stack.entries("l")) == 1
        assert len(stack.entries("c")) == 0


async def test_a_400_told_as_the_first_event_of_a_stream_is_a_400_and_not_a_fault_of_the_engine() -> None:
    event = (
        b'data: {"error":{"message":"maximum context length is 1024 tokens","type":"BadRequestError","code":400}}\n\n'
    )
    engine = ScriptedEngine(streams(event, b"data: [DONE]\n\n"))

    async with fresh(c=engine) as stack:
        answer = await stack.chat(stream=True, max_tokens=5)
        page = await stack.metrics()

        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "maximum context length is 1024 tokens"
        assert len(engine.calls) == 1
        assert page.value("router_requests_total", outcome="client_error") == 1
        assert page.value("router_engine_up", engine="c") == 1
        engine.answering = says()
