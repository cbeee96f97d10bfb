"""The chat engine is killed while it works: what becomes of the requests on it, and of those that come after."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.client import Answer, chat, chats, openai_client
from tests.engine.fake_relay import FakeRelay
from tests.engine.stack import MODEL, Fleet, Router
from tests.engine.texts import prose

SILENT = 5
SPEAKING = 3
AFTER = 24
AFTER_AT_ONCE = 6


def _endless(number: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": prose(60, number)}]
    return {"model": MODEL, "messages": messages, "stream": stream, "max_tokens": 2_500, "ignore_eos": True}


def _short(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prose(80, 500 + number)}]
    return {"model": MODEL, "messages": messages, "stream": number % 2 == 0, "max_tokens": 8}


@dataclass(frozen=True, slots=True)
class Aftermath:
    """The answers to what ran at the kill without a byte sent, to what streamed, and to what was sent after it."""

    silent: list[Answer]
    speaking: list[Answer]
    after: list[Answer]


@pytest.fixture(scope="module")
def aftermath(doomed_router: Router, fleet: Fleet) -> Aftermath:
    async def kill_under_load() -> Aftermath:
        async with openai_client(doomed_router.url) as client:
            silent = [asyncio.create_task(chat(client, _endless(n, stream=False))) for n in range(SILENT)]
            speaking = [asyncio.create_task(chat(client, _endless(50 + n, stream=True))) for n in range(SPEAKING)]
            await asyncio.to_thread(fleet.doomed.wait_until_in_flight, SILENT + SPEAKING)
            await asyncio.to_thread(fleet.doomed.program.kill)
            after = await chats(doomed_router.url, [_short(n) for n in range(AFTER)], at_once=AFTER_AT_ONCE)
            return Aftermath(await asyncio.gather(*silent), await asyncio.gather(*speaking), after)

    return asyncio.run(kill_under_load())


def test_a_request_that_may_have_started_and_sent_no_byte_ends_in_502(aftermath: Aftermath) -> None:
    assert [answer.status for answer in aftermath.silent] == [502] * SILENT
    assert all(answer.error.get("message") for answer in aftermath.silent)


def test_a_stream_that_had_begun_ends_in_an_error_and_not_as_if_it_were_whole(aftermath: Aftermath) -> None:
    assert [answer.status for answer in aftermath.speaking] == [200] * SPEAKING
    assert all(answer.text and answer.error.get("message") for answer in aftermath.speaking)


def test_chat_that_comes_after_is_answered_by_the_batch_pool_or_the_relay(
    aftermath: Aftermath, doomed_relay: FakeRelay
) -> None:
    assert [answer for answer in aftermath.after if not answer.is_served] == []
    borrowed = [answer for answer in aftermath.after if answer.headers.get("x-router-engine") == "batch-0"]
    relayed = [answer for answer in aftermath.after if answer.headers.get("x-router-relay") == "outside"]
    assert len(borrowed) + len(relayed) == AFTER
    assert len(relayed) == len(doomed_relay.received)
    assert borrowed
