"""The waiting line of batch requests: who is next, who leaves, and what happens while the store is away."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from router.flow.gate import Gate, NoPlace
from router.flow.lease import Lease
from router.flow.line import BatchLine, LineBounds, QueueClosed, QueueFull, QueueWaitOver, Turn
from router.policy.admission import Admission, AdmissionRules, PoolRules
from router.policy.decision import Offer
from router.policy.demand import Demand, RequestClass
from router.policy.ledger import ClassLimits, EngineLimits
from router.queue.memory import MemoryQueue
from router.queue.store import Enqueued, EnqueueRefusal, QueueDown, QueueStats, Ticket
from tests.flow.jumping import JumpingLoop, run_on

BATCH = RequestClass.BATCH
MODEL = "m"
WAIT_MAX_S = 3_600.0


class Unsteady(MemoryQueue):
    """A store that can be away, and whose replies can be lost after the deed."""

    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__(loop)
        self.is_away = False
        self.loses_reply_of: str | None = None
        self.calls: list[str] = []

    async def enqueue(
        self, model: str, ticket: Ticket, *, max_requests: int, max_tokens: int
    ) -> Enqueued | EnqueueRefusal:
        self._begin("enqueue")
        answer = await super().enqueue(model, ticket, max_requests=max_requests, max_tokens=max_tokens)
        self._end("enqueue")
        return answer

    async def claim(self, model: str, owner: str, *, max_tokens: int) -> Ticket | None:
        self._begin("claim")
        answer = await super().claim(model, owner, max_tokens=max_tokens)
        self._end("claim")
        return answer

    async def put_back(self, model: str, ticket: Ticket) -> None:
        self._begin("put_back")
        await super().put_back(model, ticket)

    async def leave(self, model: str, ticket_id: str, owner: str) -> bool:
        self._begin("leave")
        return await super().leave(model, ticket_id, owner)

    async def beat(self, model: str, owner: str, *, lease_s: float) -> None:
        self._begin("beat")
        await super().beat(model, owner, lease_s=lease_s)

    async def stats(self, model: str) -> QueueStats:
        self._begin("stats")
        return await super().stats(model)

    def _begin(self, name: str) -> None:
        self.calls.append(name)
        if self.is_away:
            raise QueueDown("away")

    def _end(self, name: str) -> None:
        if self.loses_reply_of == name:
            self.loses_reply_of = None
            raise QueueDown("no reply")


class House:
    """A line before a gate over batch engines of 100 tokens and one lane each."""

    def __init__(
        self, loop: JumpingLoop, *, engines: tuple[str, ...] = ("l",), store: Unsteady | None = None, owner: str = "me"
    ) -> None:
        limits = {name: EngineLimits(8, {BATCH: ClassLimits(8, prefill_lanes=1)}) for name in engines}
        self.loop = loop
        self.gate = Gate(
            Admission(AdmissionRules(None, PoolRules(engines)), limits, dict.fromkeys(engines, 100)),
            loop,
            rng=random.Random(0),
        )
        self.store = store or Unsteady(loop)
        self.line = BatchLine(MODEL, LineBounds(5, 500, WAIT_MAX_S), self.store, self.gate, loop, owner=owner)
        self.pump = asyncio.create_task(self.line.run())
        for name in engines:
            self.gate.set_serving(name, True)

    async def wait(self, name: str, tokens: int = 100, *, priority: int = 0, **fields: Any) -> Turn:
        ticket, age_s = fields.pop("place", None), fields.pop("age_s", 0.0)
        request = Offer(name, BATCH, Demand(0, 0, tokens), **fields)
        return await self.line.wait(request, priority=priority, place=ticket, age_s=age_s)

    async def later(self, name: str, tokens: int = 100, **fields: Any) -> asyncio.Task[Turn]:
        """One that stands in line by now."""
        task = asyncio.create_task(self.wait(name, tokens, **fields))
        await self.settle()
        return task

    async def settle(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def served(self, *tasks: asyncio.Task[Turn]) -> list[str]:
        """Which task got its turn, in order; each gives its place back at once."""
        order: list[str] = []
        open_tasks = set(tasks)
        while open_tasks:
            done, open_tasks = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: each.result().ticket.seq):
                turn = task.result()
                order.append(turn.ticket.id)
                turn.lease.release()
        return order

    async def close(self) -> None:
        self.pump.cancel()
        await asyncio.wait({self.pump})
        self.gate.close()

    async def check_empty(self) -> None:
        await self.settle()
        assert not self.line._waiters
        assert (await MemoryQueue.stats(self.store, MODEL)).requests == 0
        assert {ledger.committed_tokens for ledger in self.gate.snapshot().engines.values()} == {0}
        assert not self.pump.done()


def with_house(test: Callable[[House], Coroutine[Any, Any, None]], **options: Any) -> None:
    loop = JumpingLoop()

    async def main() -> None:
        home = House(loop, **options)
        try:
            async with asyncio.timeout(10 * WAIT_MAX_S):
                await test(home)
            await home.check_empty()
        finally:
            await home.close()

    run_on(loop, main())


# -- order --------------------------------------------------------------------------------------------------------


def test_equal_requests_go_first_come_first_served() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        tasks = [await home.later(name) for name in ("b", "c", "d")]

        first.lease.release()

        assert await home.served(*tasks) == ["b", "c", "d"]

    with_house(test)


def test_an_urgent_request_is_the_next_one_however_many_stand_in_line() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        tasks = [await home.later(name, priority=5) for name in ("b", "c", "d")]
        tasks.append(await home.later("urgent", priority=-1))

        first.lease.release()

        assert await home.served(*tasks) == ["urgent", "b", "c", "d"]

    with_house(test)


def test_a_request_that_the_engine_sent_back_stands_where_it_stood() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        tasks = [await home.later(name) for name in ("b", "c")]
        first.lease.release()
        turn = await tasks[0]

        home.gate.pause("l", 1.0)
        turn.lease.release()
        again = await home.later("b", place=turn.ticket)

        assert await home.served(again, tasks[1]) == ["b", "c"]

    with_house(test)


def test_nobody_passes_a_head_that_does_not_fit_yet() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a", 60)
        first.lease.first_token()
        big = await home.later("big", 80)
        small = await home.later("small", 10)
        assert not small.done()

        first.lease.release()

        assert await home.served(big, small) == ["big", "small"]

    with_house(test)


def test_the_next_one_goes_with_the_first_token_of_the_one_before() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a", 50)
        second = await home.later("b", 50)
        assert not second.done()

        first.lease.first_token()
        turn = await second

        turn.lease.release()
        first.lease.release()

    with_house(test)


def test_two_replicas_send_only_their_own_and_share_the_bounds() -> None:
    async def test(home: House) -> None:
        other = House(home.loop, store=home.store, owner="other")
        mine, theirs = await home.wait("a"), await other.wait("b")
        waiting = [await home.later("c"), await other.later("d")]

        theirs.lease.release()
        turn = await waiting[1]

        assert not waiting[0].done()
        assert turn.ticket.owner == "other"
        for lease in (mine.lease, turn.lease):
            lease.release()
        (await waiting[0]).lease.release()
        await other.close()

    with_house(test)


def test_the_tickets_of_a_replica_that_died_go_and_make_room() -> None:
    async def test(home: House) -> None:
        other = House(home.loop, store=home.store, owner="other")
        held = await other.wait("a")
        dead = [await other.later(name) for name in ("b", "c", "d", "e", "f")]
        await other.close()
        with pytest.raises(QueueFull):
            await home.wait("x")

        await asyncio.sleep(60)

        (await home.wait("x")).lease.release()
        for task in dead:
            task.cancel()
        held.lease.release()
        await asyncio.wait(dead)

    with_house(test)


def test_chat_that_comes_and_goes_beside_a_head_that_does_not_fit_is_no_news_for_the_store() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a", 60)
        first.lease.first_token()
        big = await home.later("big", 80)
        begun = home.store.calls.count("claim")

        for _ in range(100):
            home.gate.on_room()
            await home.settle()
        asked = home.store.calls.count("claim") - begun

        assert asked <= 1
        first.lease.release()
        assert await home.served(big) == ["big"]

    with_house(test)


def test_a_new_head_that_fits_goes_at_once_however_the_head_before_it_went() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a", 60)
        first.lease.first_token()
        big = await home.later("big", 80)
        begun_s = home.loop.time_s

        urgent = await (await home.later("urgent", 10, priority=-1))
        urgent.lease.release()
        small = await home.later("small", 10)
        big.cancel()
        (await small).lease.release()

        assert home.loop.time_s == begun_s
        first.lease.release()

    with_house(test)


def test_a_smaller_one_behind_a_head_that_just_went_goes_with_it() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a", 60)
        first.lease.first_token()
        big, small = await home.later("big", 80), await home.later("small", 20)
        begun_s = home.loop.time_s

        first.lease.release()
        (turn := await big).lease.first_token()
        other = await small

        assert home.loop.time_s == begun_s
        turn.lease.release()
        other.lease.release()

    with_house(test)


# -- bounds and leaving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "asked", "refusal"),
    [([10] * 5, 10, EnqueueRefusal.FULL_REQUESTS), ([100] * 4, 101, EnqueueRefusal.FULL_TOKENS)],
)
def test_the_line_is_bounded_by_requests_and_by_tokens(waiting: list[int], asked: int, refusal: EnqueueRefusal) -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        tasks = [await home.later(f"w{number}", tokens) for number, tokens in enumerate(waiting)]

        with pytest.raises(QueueFull) as full:
            await home.wait("one too many", asked)

        assert full.value.refusal is refusal
        first.lease.release()
        await home.served(*tasks)

    with_house(test)


def test_a_request_of_no_tokens_or_of_absurdly_many_can_stand_in_line() -> None:
    async def test(home: House) -> None:
        turn = await home.wait("nothing", 0)
        turn.lease.release()

        with pytest.raises(QueueFull):
            await home.wait("absurd", 2**60)

    with_house(test)


def test_the_longest_wait_is_counted_from_the_arrival_over_all_turns() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        begun_s = home.loop.time_s

        with pytest.raises(QueueWaitOver):
            await home.wait("b")
        waited_s = home.loop.time_s - begun_s
        with pytest.raises(QueueWaitOver):
            await home.wait("c", age_s=WAIT_MAX_S - 10)

        assert waited_s == WAIT_MAX_S
        assert home.loop.time_s - begun_s == WAIT_MAX_S + 10
        first.lease.release()

    with_house(test)


def test_a_client_that_leaves_while_it_waits_takes_its_ticket_along() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a", 60)
        first.lease.first_token()
        big = await home.later("big", 80)
        small = await home.later("small", 10)

        big.cancel()

        (await small).lease.release()
        first.lease.release()

    with_house(test)


def test_a_client_that_leaves_in_the_tick_of_its_turn_gives_the_place_on() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        gone = await home.later("gone")
        third = await home.later("c")
        first.lease.release()
        while "gone" in home.line._waiters:
            await asyncio.sleep(0)

        gone.cancel()

        (await third).lease.release()

    with_house(test)


def test_a_ticket_whose_client_is_gone_is_dropped_at_its_turn() -> None:
    async def test(home: House) -> None:
        await home.store.enqueue(MODEL, Ticket("nobody's", "me", 10), max_requests=9, max_tokens=999)

        turn = await home.wait("a")

        turn.lease.release()

    with_house(test)


def test_a_stopping_process_sends_everybody_home_and_takes_nobody_back() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        waiting = [await home.later(name) for name in ("b", "c")]

        home.line.send_home()

        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [QueueClosed, QueueClosed]
        first.lease.release()
        for place in (None, first.ticket):
            with pytest.raises(QueueClosed):
                await home.wait("d", place=place)

    with_house(test)


# -- engines ------------------------------------------------------------------------------------------------------


def test_who_waits_stays_while_no_engine_serves_and_goes_on_when_one_is_back() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        second = await home.later("b")
        home.gate.set_serving("l", False)
        first.lease.release()
        await asyncio.sleep(600)
        assert not second.done()

        home.gate.set_serving("l", True)

        (await second).lease.release()

    with_house(test)


@pytest.mark.parametrize("fields", [{"only": "l1"}, {"excluded": frozenset({"l2"})}])
def test_a_request_whose_engine_went_away_does_not_stand_before_the_others(fields: dict[str, Any]) -> None:
    async def test(home: House) -> None:
        on_l1, on_l2 = await home.wait("a", only="l1"), await home.wait("b", only="l2")
        bound = await home.later("bound", **fields)
        free = await home.later("free")

        home.gate.set_serving("l1", False)
        on_l2.lease.release()

        with pytest.raises(NoPlace):
            await bound
        (await free).lease.release()
        on_l1.lease.release()

    with_house(test, engines=("l1", "l2"))


# -- the store comes and goes -------------------------------------------------------------------------------------


def test_while_the_store_is_away_new_requests_are_refused_at_once_and_the_waiting_keep_their_places() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        waiting = [await home.later(name) for name in ("b", "c")]
        home.store.is_away = True
        with pytest.raises(QueueDown):
            await home.wait("d")
        assert not home.line.is_up
        calls = len(home.store.calls)

        with pytest.raises(QueueDown):
            await home.wait("e")

        assert len(home.store.calls) == calls
        first.lease.release()
        await asyncio.sleep(300)
        assert not any(task.done() for task in waiting)
        home.store.is_away = False
        assert await home.served(*waiting) == ["b", "c"]
        assert home.line.is_up

    with_house(test)


def test_a_store_that_forgot_everything_is_told_again_in_the_old_order() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        waiting = [await home.later(name) for name in ("b", "c", "d")]
        home.store.is_away = True
        await asyncio.sleep(10)
        home.store._lines.clear()
        home.store.is_away = False
        await asyncio.sleep(10)

        first.lease.release()

        assert await home.served(*waiting) == ["b", "c", "d"]

    with_house(test)


def test_a_store_that_forgets_without_ever_being_away_is_told_again_within_a_beat() -> None:
    async def test(home: House) -> None:
        first = await home.wait("first")
        waiting = [await home.later(name) for name in ("a", "b", "c")]

        for name in ("a", "b", "c"):
            await home.store.leave(MODEL, name, "me")
        await asyncio.sleep(3)
        stats = await home.store.stats(MODEL)
        first.lease.release()

        assert stats.requests == 3
        assert await home.served(*waiting) == ["a", "b", "c"]

    with_house(test)


def test_a_client_that_leaves_while_its_place_is_looked_after_leaves_no_ticket_before_the_others() -> None:
    async def test(home: House) -> None:
        first = await home.wait("first")
        leaver = await home.later("leaver")
        put_back, is_put_back = home.store.put_back, asyncio.Event()

        async def slow(model: str, ticket: Ticket) -> None:
            is_put_back.set()
            await asyncio.sleep(0.5)
            await put_back(model, ticket)

        home.store.put_back = slow  # type: ignore[method-assign]  # this one reply takes its time
        await is_put_back.wait()
        home.store.put_back = put_back  # type: ignore[method-assign]
        leaver.cancel()
        await asyncio.sleep(10)
        stats = await home.store.stats(MODEL)
        second = await home.later("second")
        first.lease.release()

        assert stats.requests == 0
        assert await home.served(second) == ["second"]

    with_house(test)


def test_a_ticket_that_came_back_for_nobody_goes_also_if_the_store_goes_away_while_told_so() -> None:
    async def test(home: House) -> None:
        first = await home.wait("first")
        leaver = await home.later("leaver")
        stood = home.line._waiters["leaver"].ticket
        leaver.cancel()
        await home.settle()
        leave, is_asked_again = home.store.leave, asyncio.Event()

        async def away(model: str, ticket_id: str, owner: str) -> bool:
            is_asked_again.set()
            raise QueueDown("away")

        await home.store.put_back(MODEL, stood)
        home.store.leave = away  # type: ignore[method-assign]  # this one call finds nobody
        await is_asked_again.wait()
        home.store.leave = leave  # type: ignore[method-assign]
        await asyncio.sleep(5)
        stats = await home.store.stats(MODEL)
        first.lease.release()

        assert stats.requests == 0

    with_house(test)


def test_a_turn_whose_reply_was_lost_is_not_lost() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        waiting = [await home.later(name) for name in ("b", "c")]
        home.store.loses_reply_of = "claim"

        first.lease.release()
        await home.settle()
        assert not home.line.is_up

        assert await home.served(*waiting) == ["b", "c"]
        assert home.line.is_up

    with_house(test)


def test_a_request_whose_entry_was_taken_but_not_confirmed_leaves_no_ticket() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        home.store.loses_reply_of = "enqueue"

        with pytest.raises(QueueDown):
            await home.wait("b")

        await asyncio.sleep(10)
        first.lease.release()

    with_house(test)


def test_a_request_sent_back_while_the_store_is_away_keeps_its_place() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        second = await home.later("b")
        home.store.is_away = True
        first.lease.release()

        again = await home.later("a", place=first.ticket)
        await asyncio.sleep(30)
        home.store.is_away = False

        assert await home.served(again, second) == ["a", "b"]

    with_house(test)


def test_a_pause_of_the_whole_process_longer_than_its_lease_costs_nobody_a_place() -> None:
    async def test(home: House) -> None:
        first = await home.wait("a")
        waiting = [await home.later(name) for name in ("b", "c")]
        home.loop.time_s += 100
        assert await home.store.reap(MODEL) == 2

        first.lease.release()

        assert await home.served(*waiting) == ["b", "c"]

    with_house(test)


def test_many_clients_that_come_and_leave_while_the_store_comes_and_goes_leave_nothing_behind() -> None:
    async def test(home: House) -> None:
        rng = random.Random(11)
        ends: list[str] = []

        async def client(number: int) -> None:
            try:
                turn = await home.wait(f"r{number}", rng.choice((10, 50, 100, 150)), priority=rng.choice((0, 0, 1)))
            except (QueueDown, QueueFull) as error:
                ends.append(type(error).__name__)
                return
            await _hold(turn.lease, rng)
            ends.append("served")

        tasks: list[asyncio.Task[None]] = []
        for number in range(300):
            tasks.append(asyncio.create_task(client(number)))
            await asyncio.sleep(rng.random())
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
            if rng.random() < 0.05:
                home.store.is_away = not home.store.is_away
            if rng.random() < 0.05:
                home.store.loses_reply_of = rng.choice(("claim", "enqueue"))
        home.store.is_away, home.store.loses_reply_of = False, None
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(30)

        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        assert "served" in ends

    with_house(test)


async def _hold(lease: Lease, rng: random.Random) -> None:
    try:
        await asyncio.sleep(rng.random())
        lease.first_token()
        await asyncio.sleep(rng.random())
    finally:
        lease.release()
