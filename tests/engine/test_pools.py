"""Chat and long prompts, mixed, through the official client: where each went, by what the engines counted."""

import asyncio
import random
from typing import Any

from tests.engine.client import Answer, chats
from tests.engine.fake_relay import FakeRelay
from tests.engine.stack import MODEL, Fleet, Router
from tests.engine.texts import prose

CHATS = 200
LONG_PROMPTS = 20
LONG_MIN_TOKENS = 6_000
LONG_MAX_TOKENS = 28_000
#: Asked of `prose`, whose lengths are right within a tenth, so that they end between the two.
LONG_FIRST_TOKENS = 6_450
LONG_LAST_TOKENS = 28_200
#: Half the seats of the chat engine: it is never full, so nothing is borrowed or relayed.
CHATS_AT_ONCE = 8
#: Twice the seats of the batch engine: half of them wait in the queue.
LONG_AT_ONCE = 4


def _bodies(lengths_tokens: list[int], seed: int) -> list[dict[str, Any]]:
    """One body for each length, every other one streamed."""
    return [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": prose(tokens, seed + number)}],
            "max_tokens": 12,
            "stream": number % 2 == 0,
        }
        for number, tokens in enumerate(lengths_tokens)
    ]


def test_every_chat_and_every_long_prompt_ends_in_its_own_pool(router: Router, fleet: Fleet, relay: FakeRelay) -> None:
    rng = random.Random(7)
    chat_bodies = _bodies([rng.randint(20, 1_500) for _ in range(CHATS)], seed=1_000)
    step_tokens = (LONG_LAST_TOKENS - LONG_FIRST_TOKENS) // (LONG_PROMPTS - 1)
    long_bodies = _bodies([LONG_FIRST_TOKENS + step_tokens * i for i in range(LONG_PROMPTS)], seed=5_000)
    chat_before, batch_before = fleet.chat.counters(), fleet.batch.counters()

    async def send() -> tuple[list[Answer], list[Answer]]:
        chat_answers = chats(router.url, chat_bodies, at_once=CHATS_AT_ONCE)
        long_answers = chats(router.url, long_bodies, at_once=LONG_AT_ONCE)
        return await asyncio.gather(chat_answers, long_answers)

    chat_answers, long_answers = asyncio.run(send())

    assert [answer for answer in chat_answers + long_answers if not answer.is_served] == []
    assert {answer.pool for answer in chat_answers} == {"chat"}
    assert {answer.pool for answer in long_answers} == {"batch"}
    assert all(LONG_MIN_TOKENS <= _used(answer) <= LONG_MAX_TOKENS for answer in long_answers)
    assert [answer.is_counted_exactly for answer in long_answers] == [True] * LONG_PROMPTS
    assert [answer.counted_tokens for answer in long_answers] == [_used(answer) for answer in long_answers]
    fleet.chat.wait_until_counters(chat_before.plus(CHATS, sum(map(_used, chat_answers))))
    fleet.batch.wait_until_counters(batch_before.plus(LONG_PROMPTS, sum(map(_used, long_answers))))
    assert relay.received == []


def _used(answer: Answer) -> int:
    """What the engine says the prompt had."""
    assert answer.prompt_tokens is not None
    return answer.prompt_tokens
