"""The store of the queue is killed and comes back: batch is refused meanwhile, nobody in line loses a place."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.flow import line
from router.flow.job import Refusal
from router.flow.lease import Lease
from router.policy.decision import Offer
from router.policy.outcome import Outcome
from router.queue.data_dir import lock_holder
from router.queue.embedded import EmbeddedValkey
from tests.flow.stack import BATCH, Stack, body_of, fresh, run, sim_relay, until
from tests.queue.servers import queue_at


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line looks after its store every few milliseconds instead of every two seconds."""
    for name in ("_BEAT_EVERY_S", "_DOWN_PAUSE_S", "_POLL_S"):
        monkeypatch.setattr(line, name, 0.02)


class Valkey:
    """An embedded server that can be killed and started again on its data."""

    def __init__(self, directory: Path) -> None:
        self._lock = directory / "data" / "server.lock"
        self._server = EmbeddedValkey(directory / "data")

    async def start(self) -> str:
        return await self._server.start()

    async def kill(self) -> None:
        pid = lock_holder(self._lock)
        assert pid
        os.kill(pid, signal.SIGKILL)
        await self._server.wait()

    async def stop(self) -> None:
        await self._server.stop()


@asynccontextmanager
async def house(directory: Path, **options: Any) -> AsyncIterator[tuple[Stack, Valkey]]:
    valkey = Valkey(directory)
    queue = queue_at(await valkey.start())
    try:
        async with fresh(store=queue, **options) as stack:
            yield stack, valkey
    finally:
        await queue.close()
        await valkey.stop()


def taken(stack: Stack) -> Lease:
    """The one lane of the batch engine."""
    job = stack.job(BATCH)
    lease = stack.gate.try_batch(Offer(job.place_id, BATCH, job.demand))
    assert lease is not None
    return lease


async def queued(stack: Stack, *names: str, order: list[str]) -> list[asyncio.Task[None]]:
    """Clients in line, in this order; each adds its name when it has its answer."""

    async def client(name: str) -> None:
        await stack.send(stack.job(BATCH, body=body_of(name, max_tokens=2)))
        order.append(name)

    tasks: list[asyncio.Task[None]] = []
    for name in names:
        tasks.append(asyncio.create_task(client(name)))
        await until(lambda: len(stack.line._waiters) == len(tasks))
        await until(lambda: all(waiter.ticket.seq for waiter in stack.line._waiters.values()))
    return tasks


def test_who_waits_keeps_its_place_over_the_death_of_the_store_and_who_comes_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path) as (stack, valkey):
            order: list[str] = []
            lease = taken(stack)
            tasks = await queued(stack, "a", "b", "c", order=order)

            await valkey.kill()
            for _ in range(3):
                with pytest.raises(Refusal) as refused:
                    await stack.send(stack.job(BATCH))
                assert (refused.value.error.status, refused.value.outcome) == (503, Outcome.REFUSED_QUEUE_DOWN)
                assert refused.value.error.retry_after_s
            chat, _ = await stack.send(stack.job())
            lease.release()
            assert (chat.status, order) == (200, [])
            await valkey.start()
            await asyncio.gather(*tasks)

            assert order == ["a", "b", "c"]
            assert stack.line.is_up
            assert (await stack.send(stack.job(BATCH)))[0].status == 200

    run(test())


def test_a_store_that_comes_back_empty_is_told_the_line_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path / "one") as (stack, valkey):
            order: list[str] = []
            lease = taken(stack)
            tasks = await queued(stack, "a", "b", "c", order=order)
            await valkey.kill()
            await until(lambda: not stack.line.is_up)
            for file in (tmp_path / "one" / "data").rglob("*.aof"):
                file.write_bytes(b"")
            await valkey.start()
            await until(lambda: stack.line.is_up)

            lease.release()
            await asyncio.gather(*tasks)

            assert order == ["a", "b", "c"]

    run(test())


def test_a_client_that_leaves_while_the_store_is_away_leaves_no_ticket_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path) as (stack, valkey):
            lease = taken(stack)
            tasks = await queued(stack, "a", "b", order=[])
            await valkey.kill()

            tasks[0].cancel()
            await valkey.start()

            lease.release()
            await tasks[1]
            assert tasks[0].cancelled()

    run(test())


def test_while_the_store_is_away_batch_goes_to_a_relay_that_may_take_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path, relay=sim_relay()) as (stack, valkey):
            await valkey.kill()

            answered, _ = await stack.send(stack.job(BATCH))

            assert (answered.status, stack.records[0].relay) == (200, "x")
            await valkey.start()
            await until(lambda: stack.line.is_up)

    run(test())
