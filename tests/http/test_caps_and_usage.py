"""Output caps, the usage chunk and repeated keys: what the router reads of a body is what the engine acts on."""

import json
from typing import Any

import pytest

from tests.http.scripted import DONE, ScriptedEngine, chunk, streams
from tests.http.setting import ALIAS, MODEL, chat_body
from tests.http.stack import Stack, fresh

MESSAGES = '"messages":[{"role":"user","content":"Hello."}]'


async def chat_bytes(stack: Stack, fields: str) -> Any:
    return await stack.post("/v1/chat/completions", f"{{{fields}}}".encode())


@pytest.mark.parametrize(
    ("caps", "pool"),
    [
        ({"max_completion_tokens": 5}, "chat"),
        ({"max_completion_tokens": 3_000}, "batch"),
        ({"max_completion_tokens": 5, "max_tokens": 3_000}, "chat"),
        ({"max_completion_tokens": 3_000, "max_tokens": 5}, "batch"),
    ],
)
async def test_the_newer_cap_decides_where_it_is_given_and_both_reach_the_engine(
    stack: Stack, caps: dict[str, int], pool: str
) -> None:
    answer = await stack.post("/v1/chat/completions", {**chat_body(), **caps})

    assert (answer.status_code, answer.headers["x-router-pool"]) == (200, pool)
    entry = stack.sent_for(answer)
    assert caps.items() <= json.loads(entry.body).items()
    assert entry.max_tokens == caps["max_completion_tokens"]


async def test_a_chat_without_a_cap_gets_none_added(stack: Stack) -> None:
    body = json.dumps(chat_body()).encode()

    answer = await stack.post("/v1/chat/completions", body)

    assert stack.sent_for(answer).body == body


@pytest.mark.parametrize("cap", ["-1", '"100"', "true", "1.5", "1e3", "[1]", "99999999999999999999", "-0.0001"])
async def test_a_cap_that_is_no_number_of_tokens_is_refused_with_the_fields_name(stack: Stack, cap: str) -> None:
    answer = await chat_bytes(stack, f'"model":"llama",{MESSAGES},"max_tokens":{cap}')

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("cap", ["null", "0"])
async def test_a_cap_that_only_the_engine_may_judge_reaches_it(stack: Stack, cap: str) -> None:
    body = f'"model":"llama",{MESSAGES},"max_tokens":{cap}'

    answer = await chat_bytes(stack, body)

    assert answer.status_code in (200, 400)
    assert stack.sent_for(answer).body == f"{{{body}}}".encode()


async def test_usage_is_metered_without_the_client_seeing_a_chunk_that_it_did_not_ask_for(stack: Stack) -> None:
    before = await stack.metrics()

    answer = await stack.chat(stream=True, max_tokens=7, user="me")

    entry = stack.sent_for(answer)
    assert json.loads(entry.body) == chat_body(
        stream=True, max_tokens=7, user="me", stream_options={"include_usage": True}
    )
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert all(chunk["choices"] for chunk in chunks)
    assert "usage" not in answer.text
    after = await stack.metrics()
    spent = after.value("router_tokens_total", kind="completion") - before.value(
        "router_tokens_total", kind="completion"
    )
    assert spent == 7


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
async def test_usage_that_the_client_asked_for_reaches_it_once_and_the_body_is_not_touched(
    stack: Stack, options: dict[str, bool]
) -> None:
    body = json.dumps(chat_body(stream=True, max_tokens=3, stream_options=options)).encode()

    answer = await stack.post("/v1/chat/completions", body)

    assert stack.sent_for(answer).body == body
    assert answer.text.count('"choices":[],') == 1


async def test_continuous_usage_does_not_come_with_the_option_that_the_router_adds(stack: Stack) -> None:
    answer = await stack.chat(stream=True, max_tokens=3, stream_options={"continuous_usage_stats": True})

    asked = json.loads(stack.sent_for(answer).body)["stream_options"]
    assert asked == {"include_usage": True, "continuous_usage_stats": False}


async def test_stream_options_without_a_stream_do_not_reach_the_engine(stack: Stack) -> None:
    answer = await stack.chat(max_tokens=3, stream_options={"include_usage": True})

    assert answer.status_code == 200
    assert "stream_options" not in json.loads(stack.sent_for(answer).body)


async def test_a_usage_chunk_that_still_has_choices_is_the_engines_own_and_stays() -> None:
    last = (
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,'
        b'"completion_tokens":2,"total_tokens":7}}\n\n'
    )
    engine = ScriptedEngine(streams(chunk("a"), last, DONE))

    async with fresh(c=engine) as stack:
        answer = await stack.chat(stream=True, max_tokens=3)
        page = await stack.metrics()

        assert answer.content == chunk("a") + last + DONE
        assert page.value("router_tokens_total", kind="prompt") == 5
        engine.answering = streams(chunk("a"), DONE)
        await stack.chat(stream=True)


@pytest.mark.parametrize(
    ("first", "second", "status"), [(MODEL, "nope", 404), ("nope", MODEL, 200), ("nope", ALIAS, 200)]
)
@pytest.mark.parametrize("name", ['"model"', '"\\u006dodel"'])
async def test_of_two_models_the_last_one_is_looked_up_and_sent(
    stack: Stack, first: str, second: str, status: int, name: str
) -> None:
    answer = await chat_bytes(stack, f'"model":"{first}",{MESSAGES},"max_tokens":2,{name}:"{second}"')

    assert answer.status_code == status
    if status == 200:
        assert stack.sent_for(answer).model == MODEL


@pytest.mark.parametrize(("caps", "pool"), [((5, 3_000), "batch"), ((3_000, 5), "chat")])
async def test_of_two_caps_the_last_one_routes_and_is_what_the_engine_obeys(
    stack: Stack, caps: tuple[int, int], pool: str
) -> None:
    answer = await chat_bytes(stack, f'"max_tokens":{caps[0]},"model":"llama",{MESSAGES},"max\\u005ftokens":{caps[1]}')

    assert answer.headers["x-router-pool"] == pool
    assert stack.sent_for(answer).max_tokens == caps[1]


async def test_of_two_streams_and_two_conversations_the_last_ones_count(stack: Stack) -> None:
    long = "word " * 3_000

    answer = await chat_bytes(
        stack,
        f'"model":"llama","stream":false,"messages":[{{"role":"user","content":"{long}"}}],"max_tokens":2,'
        f'"stream":true,{MESSAGES}',
    )

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-router-pool"] == "chat"
    entry = stack.sent_for(answer)
    assert (entry.stream, entry.prompt_tokens < 20) == (True, True)
