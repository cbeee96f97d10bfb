"""A client that goes away frees the engine, wherever its request stood."""

import asyncio
from typing import Any

import pytest

from tests.engine.client import ANSWER_MAX_S, Answer, chat, chats, openai_client
from tests.engine.process import wait_until
from tests.engine.stack import BATCH_SEATS, MODEL, Fleet, Router
from tests.engine.texts import prose
from tests.engine.vllm import SETTLE_MAX_S, Vllm

#: The model never ends by itself, so each of these runs until somebody stops it: 10 s at least on an idle machine.
ENDLESS_CHAT = {"max_tokens": 2_500, "ignore_eos": True}
ENDLESS_BATCH = {"max_tokens": 20_000, "ignore_eos": True}


def _body(content: str, *, stream: bool, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": stream, **fields}


async def _leave(calls: list["asyncio.Task[Answer]"]) -> None:
    """Cancel the calls: the client closes their connections."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def _in_flight(engine: Vllm, running: int) -> None:
    await asyncio.to_thread(engine.wait_until_in_flight, running)


def test_a_client_that_leaves_a_stream_frees_its_seat(router: Router, fleet: Fleet) -> None:
    async def leave_after_the_first_chunk() -> None:
        async with openai_client(router.url) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Count."}],
                stream=True,
                extra_body=ENDLESS_CHAT,
            )
            async with raw.parse() as chunks:
                await anext(chunks)
                await _in_flight(fleet.chat, 1)

    asyncio.run(leave_after_the_first_chunk())

    fleet.chat.wait_until_in_flight(0)


def test_a_client_that_leaves_before_its_whole_answer_frees_its_seat(router: Router, fleet: Fleet) -> None:
    async def leave_while_it_runs() -> None:
        async with openai_client(router.url) as client:
            call = asyncio.create_task(chat(client, _body("Count.", stream=False, **ENDLESS_CHAT)))
            await _in_flight(fleet.chat, 1)
            await _leave([call])
            await _in_flight(fleet.chat, 0)

    asyncio.run(leave_while_it_runs())

    assert fleet.chat.in_flight() == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_never_reaches_the_engine(router: Router, fleet: Fleet, stream: bool) -> None:
    # The one prefill lane comes free without a first token to see: the first of them is not streamed.
    seated = [_body(prose(6_500, seed), stream=seed > 0, **ENDLESS_BATCH) for seed in range(BATCH_SEATS)]
    queued = _body(prose(9_000, 99), stream=stream, **ENDLESS_BATCH)
    last = _body(prose(7_000, 100), stream=False, max_tokens=4)
    before = fleet.batch.counters()
    # An engine counts a prompt once it has computed it, and a request only when it has finished by itself.
    all_seated = before.plus(0, sum(fleet.batch.tokens_of(body["messages"]) for body in seated))

    async def fill_the_seats_queue_and_leave() -> None:
        async with openai_client(router.url) as client:
            running = [asyncio.create_task(chat(client, body)) for body in seated]
            await asyncio.to_thread(fleet.batch.wait_until_counters, all_seated)
            await _in_flight(fleet.batch, BATCH_SEATS)
            waiting = asyncio.create_task(chat(client, queued))
            await _in_queue(router, 1)
            await _leave([waiting])
            await _in_queue(router, 0)
            await _in_flight(fleet.batch, BATCH_SEATS)
            await _leave(running)
            await _in_flight(fleet.batch, 0)

    asyncio.run(asyncio.wait_for(fill_the_seats_queue_and_leave(), ANSWER_MAX_S))
    [answer] = asyncio.run(chats(router.url, [last], at_once=1))

    assert answer.is_served
    fleet.batch.wait_until_counters(all_seated.plus(1, fleet.batch.tokens_of(last["messages"])))


async def _in_queue(router: Router, requests: int) -> None:
    """Return once the router itself says that so many requests wait."""

    def waiting() -> float | None:
        return router.metric("router_queue_requests", model=MODEL)

    what = f"requests in the queue, {requests} wanted"
    await asyncio.to_thread(wait_until, waiting, lambda seen: seen == requests, within_s=SETTLE_MAX_S, what=what)
