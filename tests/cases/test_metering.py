"""Tokens are metered wherever an answer comes from, also from who does not tell them."""

import json
from typing import Any

import pytest

from router.sim.relay import relay_options
from tests.cases.house import CaseEngine, House, house_of
from tests.http.scripted import DONE, chunk, says, streams
from tests.http.setting import MODEL, RELAY_KEY, chat_body
from tests.http.stack import until

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
KINDS = ("prompt", "completion", "prompt_estimated", "completion_estimated")


async def metered(house: House) -> list[float]:
    page = await house.metrics()
    return [page.by("router_tokens_total", "kind").get(kind, 0.0) for kind in KINDS]


def plain(message: dict[str, Any]) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()


async def test_a_relay_that_refuses_the_usage_option_is_asked_without_it_and_its_tokens_are_estimated() -> None:
    relay = relay_options(
        model="vendor/big-1", api_key=RELAY_KEY, time_scale=0.0, rejected_fields=frozenset({"stream_options"})
    )
    async with house_of(relay=relay, chats=False) as house:
        for name in "cl":
            await house.engines[name].stop()
        await until(lambda: not house.serves("c") and not house.serves("l"))

        answers = [await house.chat("Hello there.", stream=True, max_tokens=5) for _ in range(3)]
        used = await metered(house)

        assert {answer.status_code for answer in answers} == {200}
        assert all("stream_options" not in str(entry.body) for entry in house.entries("x")[-2:])
        counted = [int(answer.headers["x-router-prompt-tokens"]) for answer in answers]
        assert used == [0, 0, sum(counted), 3 * 5]


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ((ROLE, chunk("a"), chunk("b"), chunk("c"), LAST, DONE), 4),
        ((b"".join((ROLE, chunk("a"), chunk("b"), LAST, DONE)),), 3),
        ((ROLE, chunk("a"), b": a comment\n\n", chunk("b") + chunk("c"), LAST + DONE), 4),
        ((ROLE, chunk("a"), LAST), 2),
    ],
    ids=["one by one", "all at once", "in pairs", "no end mark"],
)
async def test_a_stream_without_usage_is_metered_by_its_events(events: tuple[bytes, ...], tokens: int) -> None:
    engine = CaseEngine(streams(*events))
    async with house_of(chat={"c": engine}) as house:
        answer = await house.chat(stream=True, max_tokens=9)
        used = await metered(house)

        assert answer.content == b"".join(events)
        assert used == [0, 0, int(answer.headers["x-router-prompt-tokens"]), tokens]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (plain({"role": "assistant", "content": "x" * 400}), 200),
        (plain({"role": "assistant", "content": "é" * 100, "reasoning_content": "y" * 200}), 200),
        (plain({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "z" * 100}}]}), 50),
        (b"no JSON, which is all text", 13),
        (plain({"role": "assistant", "content": ""}), 0),
    ],
    ids=["text", "reasoning", "tool call", "no json", "nothing"],
)
async def test_a_plain_answer_without_usage_is_metered_by_its_text(body: bytes, tokens: int) -> None:
    """Nothing was learned yet: two bytes a token."""
    async with house_of(chat={"c": CaseEngine(says(body))}) as house:
        answer = await house.chat(max_tokens=9)
        used = await metered(house)

        assert answer.content == body
        assert used == [0, 0, int(answer.headers["x-router-prompt-tokens"]), tokens]


async def test_what_generates_nothing_is_metered_by_its_prompt_alone() -> None:
    async with house_of(chat={"c": CaseEngine(says(b'{"data":[]}'))}) as house:
        answer = await house.post("/v1/embeddings", {"model": MODEL, "input": "some text"})
        used = await metered(house)

        assert used == [0, 0, int(answer.headers["x-router-prompt-tokens"]), 0]


async def test_an_error_and_an_answer_that_broke_off_are_not_estimated() -> None:
    async with house_of(chat={"c": CaseEngine(says(b'{"error":{"message":"no"}}', status=400))}) as house:
        refused = await house.chat(max_tokens=9)
        house.engines["c"].answering = streams(ROLE, chunk("a"), b'data: {"error":{"message":"no","code":500}}\n\n')
        broken = await house.chat(stream=True, max_tokens=9)
        used = await metered(house)
        house.engines["c"].answering = says()

        assert (refused.status_code, broken.status_code) == (400, 200)
        assert used == [0, 0, 0, 0]


async def test_usage_is_metered_as_it_is_told_and_nothing_is_estimated() -> None:
    async with house_of() as house:
        await house.post("/v1/chat/completions", chat_body())
        used = await metered(house)

        assert used == [5, 1, 0, 0]
