"""What only a store with a clock of its own can show: time."""

import asyncio

from router.queue.limits import OWNER_GRACE_S
from router.queue.memory import MemoryQueue
from router.queue.store import Ticket
from tests.queue.conftest import FixedClock

_MODEL = "model"
_BOUNDS = {"max_requests": 10, "max_tokens": 100}


def test_a_lease_ends_when_its_seconds_are_over_and_not_before() -> None:
    async def main() -> None:
        clock = FixedClock()
        queue = MemoryQueue(clock)
        await queue.enqueue(_MODEL, Ticket("one", "me", 10), **_BOUNDS)
        await queue.beat(_MODEL, "me", lease_s=15.0)
        clock.time_s += 14.9
        assert await queue.reap(_MODEL) == 0

        clock.time_s += 0.1

        assert await queue.reap(_MODEL) == 1

    asyncio.run(main())


def test_an_owner_that_never_beats_is_dead_after_the_grace() -> None:
    async def main() -> None:
        clock = FixedClock()
        queue = MemoryQueue(clock)
        await queue.enqueue(_MODEL, Ticket("one", "me", 10), **_BOUNDS)
        clock.time_s += OWNER_GRACE_S / 2
        await queue.enqueue(_MODEL, Ticket("two", "me", 10), **_BOUNDS)
        assert await queue.reap(_MODEL) == 0

        clock.time_s += OWNER_GRACE_S / 2

        assert await queue.reap(_MODEL) == 2

    asyncio.run(main())


def test_the_age_counts_from_the_first_arrival_also_after_a_return() -> None:
    async def main() -> None:
        clock = FixedClock()
        queue = MemoryQueue(clock)
        await queue.enqueue(_MODEL, Ticket("one", "me", 10), **_BOUNDS)
        clock.time_s += 40.0
        claimed = await queue.claim(_MODEL, "me", max_tokens=10)
        assert claimed is not None
        clock.time_s += 2.0

        await queue.put_back(_MODEL, claimed)

        assert (await queue.stats(_MODEL)).oldest_age_s == 42.0

    asyncio.run(main())


def test_a_clock_at_its_origin_still_gives_places() -> None:
    async def main() -> None:
        queue = MemoryQueue(FixedClock(0.0))
        for name in ("one", "two"):
            await queue.enqueue(_MODEL, Ticket(name, "me", 10), **_BOUNDS)

        first = await queue.claim(_MODEL, "me", max_tokens=10)

        assert first is not None
        assert (first.id, first.seq) == ("one", 1)
        assert (await queue.stats(_MODEL)).oldest_age_s == 0.0

    asyncio.run(main())
