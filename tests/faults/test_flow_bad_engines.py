"""What clients see of an engine that goes bad before it is left, counted; and how it comes back."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from router.flow.job import Refusal
from router.policy.demand import Demand
from router.policy.lifecycle import EngineState, LifecycleEvent
from tests.flow.stack import QUICK, Stack, body_of, fresh, run, sim, sim_relay
from tests.upstream.fakes import Connection, Script, answer

PLAIN = body_of(max_tokens=4)
ERROR = answer(b'{"error":{"message":"boom","code":500}}', status=500)
GOOD = answer(b'{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}')
FEW = 3


async def says_500(connection: Connection) -> None:
    await connection.send(ERROR)


async def drops(connection: Connection) -> None:
    connection.reset()


async def is_silent(_: Connection) -> None:
    await asyncio.Event().wait()


def engine(play: Callable[[Connection], Awaitable[None]], seen: list[bytes]) -> Script:
    async def script(connection: Connection) -> None:
        while (request := await connection.request()) is not None:
            seen.append(request.body)
            await play(connection)

    return script


async def statuses(stack: Stack, requests: int) -> list[int]:
    """One request after the other, each with a prompt of its own."""
    found = []
    for number in range(requests):
        job = stack.job(body=body_of(f"Question {number}", max_tokens=4), demand=Demand(4, 4, 0))
        try:
            answered, _ = await stack.send(job)
            found.append(answered.status)
        except Refusal as refusal:
            found.append(refusal.error.status)
    return found


@pytest.mark.parametrize(
    ("play", "status"), [(says_500, 502), (drops, 502), (is_silent, 504)], ids=["500", "lost", "silent"]
)
def test_one_bad_engine_of_two_is_left_after_three_requests_and_all_others_are_answered(
    play: Callable[[Connection], Awaitable[None]], status: int
) -> None:
    async def test() -> None:
        seen: list[bytes] = []
        settings = {"timeouts": type(QUICK)(5.0, 0.05, 5.0)}
        pool = {"bad": engine(play, seen), "good": sim()}
        async with fresh(chat=pool, batch={}, chat_settings=settings) as stack:
            found = Counter(await statuses(stack, 40))

            assert found == {status: FEW, 200: 40 - FEW}
            assert len(seen) == FEW
            assert stack.engines["bad"].status.state is EngineState.DOWN

    run(test())


def test_an_engine_back_by_its_probe_alone_costs_one_more_request() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat={"bad": engine(says_500, seen), "good": sim()}, batch={}) as stack:
            await statuses(stack, 30)
            before = len(seen)
            stack.engines["bad"].see(LifecycleEvent.WORK_OK)

            found = Counter(await statuses(stack, 30))

            assert (before, len(seen)) == (FEW, FEW + 1)
            assert found == {502: 1, 200: 29}

    run(test())


def test_an_answer_right_after_the_probe_ends_the_row_of_relapses() -> None:
    async def test() -> None:
        calls = 0

        async def mended_for_one(connection: Connection) -> None:
            nonlocal calls
            calls += 1
            await connection.send(GOOD if calls == FEW + 1 else ERROR)

        async with fresh(chat={"only": engine(mended_for_one, [])}, batch={}) as stack:
            await statuses(stack, FEW)
            stack.engines["only"].see(LifecycleEvent.WORK_OK)

            found = await statuses(stack, 2)

            assert found == [200, 502]
            assert stack.engines["only"].status.state is EngineState.SERVING

    run(test())


def test_where_every_engine_fails_they_are_asked_all_the_same_and_one_that_answers_is_back_in() -> None:
    async def test() -> None:
        calls = 0

        async def until_mended(connection: Connection) -> None:
            nonlocal calls
            calls += 1
            await connection.send(ERROR if calls <= FEW + 1 else GOOD)

        async with fresh(chat={"only": engine(until_mended, [])}, batch={}) as stack:
            found = await statuses(stack, FEW + 3)

            assert found == [502] * (FEW + 1) + [200] * 2
            assert stack.engines["only"].status.state is EngineState.SERVING

    run(test())


def test_a_relay_is_a_better_last_resort_than_an_engine_that_fails() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat={"only": engine(says_500, seen)}, batch={}, relay=sim_relay()) as stack:
            found = await statuses(stack, FEW + 2)

            assert found == [502] * FEW + [200] * 2
            assert (len(seen), stack.calls("x")) == (FEW, 2)

    run(test())


def test_an_engine_that_is_gone_or_silent_is_no_last_resort() -> None:
    async def test() -> None:
        for play in (drops, is_silent):
            seen: list[bytes] = []
            settings = {"timeouts": type(QUICK)(5.0, 0.05, 5.0)}
            async with fresh(chat={"only": engine(play, seen)}, batch={}, chat_settings=settings) as stack:
                found = await statuses(stack, FEW + 2)

                assert found[FEW:] == [503, 503]
                assert len(seen) == FEW

    run(test())


@pytest.mark.parametrize("status", [400, 404, 422, 501])
def test_a_clients_own_mistake_takes_no_engine_out(status: int) -> None:
    async def test() -> None:
        seen: list[bytes] = []

        async def refuses(connection: Connection) -> None:
            await connection.send(answer(b'{"error":{"message":"no","code":400}}', status=status))

        async with fresh(chat={"a": engine(refuses, seen), "b": engine(refuses, seen)}, batch={}) as stack:
            found = await statuses(stack, 20)

            assert found == [status] * 20
            assert len(seen) == 20
            assert all(each.status.can_serve for each in stack.engines.values())

    run(test())


@pytest.mark.parametrize(
    "events", [(LifecycleEvent.DRAIN,), (LifecycleEvent.ASLEEP,), (LifecycleEvent.PROBE_REFUSED,) * 2]
)
def test_an_engine_that_drains_sleeps_or_is_gone_is_sent_nothing_new_from_that_moment(events: Any) -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat={"leaving": engine(says_500, seen), "good": sim()}, batch={}) as stack:
            for event in events:
                stack.engines["leaving"].see(event)

            assert await statuses(stack, 10) == [200] * 10
            assert seen == []

    run(test())
