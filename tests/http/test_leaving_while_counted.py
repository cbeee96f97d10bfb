"""A client that leaves while its prompt is counted."""

import asyncio

import pytest

from router.request import Count
from router.tokens.api import Unsettled
from router.tokens.count import Counter
from tests.http.setting import chat_body
from tests.http.stack import fresh, until


async def test_a_client_that_leaves_while_its_prompt_is_counted_ends_its_call_and_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting, ended = asyncio.Event(), asyncio.Event()

    def open_question(self: Counter, prompt: object, **_: object) -> Unsettled:
        return Unsettled(prompt, Count(1, 1, 0, 9, 1, exact=False, method="bytes"))  # type: ignore[arg-type]  # any

    async def endless(self: Counter, unsettled: Unsettled) -> Count:
        counting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("nobody lets it go on")

    async with fresh() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(Counter, "settle", open_question)
            patch.setattr(Counter, "count_exactly", endless)
            call = asyncio.create_task(stack.client.post("/v1/chat/completions", json=chat_body()))
            await counting.wait()
            call.cancel()
            await asyncio.wait({call})
            await ended.wait()
            await until(lambda: stack.runtime.state.in_flight == 0)
        page = await stack.metrics()

        assert page.value("router_requests_total", outcome="client_left_waiting") == 1
        assert stack.entries("c") == stack.entries("l") == []
