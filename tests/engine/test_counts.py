"""The router's count of a prompt is the engine's own, whatever the conversation is made of."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.engine.client import Answer, chats
from tests.engine.stack import MODEL, PARTS_MODEL, Router
from tests.tokens.varied_chats import varied_chats

AT_ONCE = 8
#: Enough of each to say something about all.
CHATS_MIN = 100


def _bodies(model: str) -> list[dict[str, Any]]:
    fixed = {"model": model, "max_tokens": 2, "stream": False}
    return [{**body, **fixed} for body in varied_chats()]


def _differences(bodies: Sequence[Mapping[str, Any]], answers: Sequence[Answer]) -> list[str]:
    return [
        f"{answer.counted_tokens} counted, {answer.prompt_tokens} used: {body['messages']!r:.300}"
        for body, answer in zip(bodies, answers, strict=True)
        if answer.is_served and answer.counted_tokens != answer.prompt_tokens
    ]


@pytest.mark.parametrize("model", [MODEL, PARTS_MODEL])
def test_the_count_of_a_chat_is_what_the_engine_says_it_used(counting_router: Router, model: str) -> None:
    bodies = _bodies(model)

    answers = asyncio.run(chats(counting_router.url, bodies, at_once=AT_ONCE))

    assert [answer.error for answer in answers if not answer.is_served] == []
    assert len(answers) >= CHATS_MIN
    assert [answer.is_counted_exactly for answer in answers] == [True] * len(answers)
    assert _differences(bodies, answers) == []


def test_the_chats_that_are_counted_hold_tools_and_content_parts() -> None:
    bodies = varied_chats()

    with_tools = [body for body in bodies if body.get("tools")]
    with_parts = [body for body in bodies if any(isinstance(m.get("content"), list) for m in body["messages"])]

    assert len(with_tools) >= 15
    assert len(with_parts) >= 15
