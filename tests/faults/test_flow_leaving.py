"""A client that leaves: held, in line, in prefill or amid its stream, the engine hears of it and everything is free."""

import asyncio
import random
from typing import Any

import pytest

from router.flow.job import Job
from router.policy.decision import Offer
from router.policy.demand import RequestClass
from router.request import RequestRecord
from router.sim.faults import FaultKind
from tests.flow.stack import BATCH, CHAT, Stack, body_of, fault, fresh, placed, run, sim, until

STREAM = body_of(max_tokens=4_000, stream=True)
PLAIN = body_of(max_tokens=4_000)
#: Real time: thousands of tokens take the better part of a minute, so nothing ends by itself during a test.
SLOW = sim(time_scale=1.0, seats=16)


async def gone(task: asyncio.Task[Any]) -> None:
    """The client of `task` has left, and the task has heard of it."""
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def read_for_ever(stack: Stack, job: Job, record: RequestRecord) -> None:
    with await stack.flow.send(job, record) as answered:
        while await answered.read():
            pass


def begin(stack: Stack, job: Job) -> tuple[asyncio.Task[None], RequestRecord]:
    record = stack.record()
    return asyncio.create_task(read_for_ever(stack, job, record)), record


@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])
@pytest.mark.parametrize(("request_class", "name"), [(CHAT, "c"), (BATCH, "l")])
def test_a_client_that_leaves_in_prefill_clears_the_engine_and_the_ledger(
    request_class: RequestClass, name: str, body: dict[str, Any]
) -> None:
    async def test() -> None:
        async with fresh(chat={"c": SLOW}, batch={"l": SLOW}) as stack:
            long = body_of("word " * 4_000, **{key: body[key] for key in ("max_tokens", "stream") if key in body})
            task, record = begin(stack, stack.job(request_class, body=long))
            await until(lambda: stack.running(name) == 1)
            assert record.first_token_at_s is None
            assert stack.committed_tokens == 100

            await gone(task)

            stack.check_ledger()
            await until(lambda: stack.running(name) == 0)

    run(test())


@pytest.mark.parametrize(("request_class", "name"), [(CHAT, "c"), (BATCH, "l")])
def test_a_client_that_leaves_amid_its_stream_clears_the_engine_and_the_ledger(
    request_class: RequestClass, name: str
) -> None:
    async def test() -> None:
        async with fresh(chat={"c": SLOW}, batch={"l": SLOW}) as stack:
            task, record = begin(stack, stack.job(request_class, body=STREAM))
            await until(lambda: record.first_token_at_s is not None)
            assert stack.running(name) == 1

            await gone(task)

            stack.check_ledger()
            await until(lambda: stack.running(name) == 0)

    run(test())


def test_a_client_that_leaves_while_it_is_held_was_never_sent() -> None:
    async def test() -> None:
        async with fresh(capacity_tokens=100, borrow=False, chat_settings={"hold_ratio": 1.0}) as stack:
            lease = await placed(stack.gate, _place(stack))
            task, record = begin(stack, stack.job(tokens=50))
            await until(lambda: stack.gate.snapshot().held_requests == 1)

            await gone(task)

            assert stack.gate.snapshot().held_requests == 0
            assert record.sent_at_s is None
            assert stack.calls("c") == 0
            assert record.hold_wait_s > 0
            lease.release()

    run(test())


def test_a_client_that_leaves_while_it_is_in_line_was_never_sent_and_the_next_one_is() -> None:
    async def test() -> None:
        async with fresh() as stack:
            lease = stack.gate.try_batch(_place(stack, BATCH))
            assert lease is not None
            task, record = begin(stack, stack.job(BATCH))
            await until(lambda: len(stack.line._waiters) == 1)
            other, _ = begin(stack, stack.job(BATCH))
            await until(lambda: len(stack.line._waiters) == 2)

            await gone(task)
            lease.release()
            await other

            assert record.sent_at_s is None
            assert stack.calls("l") == 1

    run(test())


def test_a_client_that_leaves_while_it_is_back_in_line_was_not_sent() -> None:
    async def test() -> None:
        async with fresh(batch={"l": sim(fault(FaultKind.REJECT_503))}) as stack:
            task, record = begin(stack, stack.job(BATCH))
            await until(lambda: record.attempts == 1 and len(stack.line._waiters) == 1 and record.sent_at_s is None)

            await gone(task)

            assert record.sent_at_s is None
            assert record.overhead_s is not None

    run(test())


def _place(stack: Stack, request_class: RequestClass = CHAT) -> Offer:
    job = stack.job(request_class, tokens=100)
    return Offer(job.place_id, job.request_class, job.demand)


def test_a_crowd_of_clients_that_read_a_little_and_leave_takes_nothing_along() -> None:
    async def test() -> None:
        rng = random.Random(5)
        async with fresh(chat={"c": SLOW}, chat_settings={"hold_ratio": 5.0}, borrow=False) as stack:

            async def client(events: int) -> None:
                with await stack.flow.send(stack.job(body=STREAM), stack.record()) as answered:
                    seen = 0
                    while part := await answered.read():
                        seen += part.count(b"data:")
                        if seen >= events:
                            return

            for _ in range(6):
                await asyncio.gather(*(client(rng.randrange(4)) for _ in range(16)))

            await until(lambda: stack.running("c") == 0)
            assert stack.sims["c"].engine.snapshot().aborted_total == 96

    run(test())


def test_an_answer_that_is_closed_twice_gives_back_once() -> None:
    async def test() -> None:
        async with fresh(chat={"c": SLOW}) as stack:
            one = await stack.flow.send(stack.job(body=STREAM), stack.record())
            other = await stack.flow.send(stack.job(body=STREAM), stack.record())

            for _ in range(2):
                one.close()

            assert stack.committed_tokens == 100
            other.close()

    run(test())
