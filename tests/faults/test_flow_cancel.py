"""A client may leave at any moment: cancel at the Nth await, for N = 1, 2, 3 ... until a run passes untouched."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.clock import SystemClock
from router.flow.job import Job, Refusal
from router.queue.embedded import EmbeddedValkey
from router.queue.memory import MemoryQueue
from router.queue.store import QueueStore
from router.sim.faults import FaultKind
from tests.flow.stack import BATCH, Stack, body_of, cancelled_at, fault, run, sim, sim_relay, stack_of
from tests.queue.servers import queue_at

STREAM = body_of(max_tokens=4, stream=True)
PLAIN = body_of(max_tokens=4)
#: Far above the awaits of any of these runs; a bound on a test that never passes untouched.
_RUNS_MAX = 120


async def at_every_await(stack: Stack, make: Callable[[], Job], prepare: Callable[[], object] = lambda: None) -> int:
    """Cancel `make()`'s request at each of its awaits in turn, and once more amid its clean-up; how many there were."""
    for at in range(1, _RUNS_MAX):
        for times in (1, 2):
            prepare()
            was_cancelled = await cancelled_at(_quietly(stack, make()), at, times=times)
            await stack.check_at_rest()
            if not was_cancelled:
                return at - 1
    raise AssertionError("no run passed untouched")


async def _quietly(stack: Stack, job: Job) -> None:
    try:
        await stack.send(job)
    except Refusal:
        pass


@asynccontextmanager
async def store_of(kind: str, directory: Path) -> AsyncIterator[QueueStore]:
    if kind == "memory":
        yield MemoryQueue(SystemClock())
        return
    valkey = EmbeddedValkey(directory / "data")
    queue = queue_at(await valkey.start())
    try:
        yield queue
    finally:
        await queue.close()
        await valkey.stop()


@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])
def test_chat_that_leaves_at_any_await_gives_everything_back(body: dict[str, object]) -> None:
    async def test() -> None:
        async with stack_of() as stack:
            waits = await at_every_await(stack, lambda: stack.job(body=body))
            assert waits >= 2

    run(test())


@pytest.mark.parametrize("kind", ["memory", "embedded"])
@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])
def test_batch_that_leaves_at_any_await_gives_ticket_and_place_back(
    kind: str, body: dict[str, object], tmp_path: Path
) -> None:
    async def test() -> None:
        async with store_of(kind, tmp_path) as store, stack_of(store=store) as stack:
            waits = await at_every_await(stack, lambda: stack.job(BATCH, body=body))
            assert waits >= 3

    run(test())


def test_a_request_that_leaves_on_its_way_from_engine_to_engine_to_relay_gives_everything_back() -> None:
    async def test() -> None:
        busy = sim(fault(FaultKind.REJECT_503))
        gone = sim(fault(FaultKind.ABORT))
        async with stack_of(
            chat={"c1": gone, "c2": gone}, batch={"l": busy}, relay=sim_relay(), attempts_max=5
        ) as stack:
            waits = await at_every_await(stack, lambda: stack.job(body=STREAM), prepare=stack.all_serve)
            assert waits >= 8
            assert stack.calls("x") > 0

    run(test())
