"""The asyncio driver of the ledger: who is woken, when, and that a place is never lost on the way to its owner."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from router.flow.gate import Gate, NoPlace
from router.flow.lease import Lease
from router.policy.admission import Admission, AdmissionRules, PoolRules
from router.policy.decision import Offer, RefusalCause
from router.policy.demand import Demand, RequestClass
from router.policy.ledger import ClassLimits, EngineLimits
from tests.flow.jumping import JumpingLoop, run_on
from tests.flow.stack import placed

CHAT, BATCH = RequestClass.CHAT, RequestClass.BATCH
HOLD_S = 2.0


class House:
    """A gate over one chat engine of 100 tokens and one batch engine of 100 tokens with one lane."""

    def __init__(self, loop: JumpingLoop, *, borrow: bool = False) -> None:
        limits = {
            "c": EngineLimits(8, {CHAT: ClassLimits(8)}),
            "l": EngineLimits(8, {CHAT: ClassLimits(7), BATCH: ClassLimits(8, prefill_lanes=1)}),
        }
        rules = AdmissionRules(PoolRules(("c",), HOLD_S, 4), PoolRules(("l",)), borrow)
        self.loop = loop
        self.gate = Gate(Admission(rules, limits, {"c": 100, "l": 100}), loop, rng=random.Random(0))
        self.rooms = 0
        self.gate.on_room = self._room
        for name in limits:
            self.gate.set_serving(name, True)

    async def chat(self, name: str, tokens: int = 100, **fields: Any) -> Lease:
        return await placed(self.gate, Offer(name, CHAT, Demand(0, 0, tokens), **fields))

    def batch(self, name: str, tokens: int = 100, **fields: Any) -> Lease | None:
        return self.gate.try_batch(Offer(name, BATCH, Demand(0, 0, tokens), **fields))

    async def later(self, name: str, tokens: int = 100) -> asyncio.Task[Lease]:
        """A request in a task of its own, held by now."""
        task = asyncio.create_task(self.chat(name, tokens))
        await asyncio.sleep(0)
        return task

    def check_empty(self) -> None:
        snapshot = self.gate.snapshot()
        assert snapshot.held_requests == 0
        assert {ledger.committed_tokens for ledger in snapshot.engines.values()} == {0}

    def _room(self) -> None:
        self.rooms += 1


def with_house(test: Callable[[House], Coroutine[Any, Any, None]], *, borrow: bool = False) -> None:
    loop = JumpingLoop()

    async def main() -> None:
        home = House(loop, borrow=borrow)
        try:
            await test(home)
            home.check_empty()
        finally:
            home.gate.close()

    run_on(loop, main())


def test_a_held_request_is_woken_by_a_place_that_comes_back() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a")
        second = await home.later("b")

        first.release()
        lease = await second

        assert (lease.place.engine, lease.place.pool, lease.place.borrowed) == ("c", CHAT, False)
        assert home.loop.time_s == 1_000.0
        lease.release()

    with_house(test)


def test_a_hold_ends_when_it_is_due_and_says_why_and_when_to_return() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a")

        with pytest.raises(NoPlace) as none:
            await home.chat("b")

        assert home.loop.time_s == 1_000.0 + HOLD_S
        assert none.value.cause is RefusalCause.SATURATED
        assert 1 <= none.value.retry_after_s <= 60
        first.release()

    with_house(test)


def test_one_timer_serves_holds_that_end_one_after_the_other() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a")
        early = await home.later("b")
        home.loop.time_s += 0.5
        late = await home.later("c")
        ends: list[tuple[str, float]] = []
        for name, task in (("b", early), ("c", late)):
            task.add_done_callback(lambda _, name=name: ends.append((name, home.loop.time_s)))  # type: ignore[misc]  # a default binds the loop variable

        await asyncio.wait({early, late})

        assert ends == [("b", 1_000.0 + HOLD_S), ("c", 1_000.5 + HOLD_S)]
        assert all(isinstance(task.exception(), NoPlace) for task in (early, late))
        first.release()

    with_house(test)


def test_a_shorter_hold_that_comes_later_ends_first() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a")
        long = await home.later("b")

        with pytest.raises(NoPlace):
            await home.chat("c", hold_until_s=home.loop.time_s + 0.1)

        assert home.loop.time_s == pytest.approx(1_000.1)
        assert not long.done()
        first.release()
        (await long).release()

    with_house(test)


def test_a_hold_that_is_over_may_borrow() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a")

        lease = await home.chat("b")

        assert (lease.place.engine, lease.place.pool, lease.place.borrowed) == ("l", BATCH, True)
        lease.release()
        first.release()

    with_house(test, borrow=True)


def test_a_pause_that_ends_within_the_hold_gives_the_place() -> None:
    async def test(home: House) -> None:
        home.gate.pause("c", 0.5)

        lease = await home.chat("a")

        assert home.loop.time_s == 1_000.5
        lease.release()

    with_house(test)


def test_a_pause_that_comes_during_a_hold_does_not_outlast_it() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a")
        second = await home.later("b")
        home.gate.pause("c", 0.5)
        first.release()

        lease = await second

        assert home.loop.time_s == 1_000.5
        lease.release()

    with_house(test)


def test_a_client_that_leaves_while_held_is_withdrawn_and_the_next_moves_up() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a", 60)
        big = await home.later("big", 80)
        small = await home.later("small", 10)

        big.cancel()
        lease = await small

        assert big.cancelled()
        assert home.loop.time_s == 1_000.0
        lease.release()
        first.release()

    with_house(test)


def test_a_client_that_leaves_in_the_tick_of_its_admission_gives_the_place_on() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a")
        gone = await home.later("gone")
        third = await home.later("c")

        first.release()
        gone.cancel()
        lease = await third

        assert gone.cancelled()
        lease.release()

    with_house(test)


def test_a_client_that_left_before_its_admission_does_not_keep_it() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a")
        gone = await home.later("gone")
        third = await home.later("c")

        gone.cancel()
        first.release()
        lease = await third

        lease.release()

    with_house(test)


def test_a_lease_is_given_back_once_however_often_it_is_released() -> None:
    async def test(home: House) -> None:
        first = await home.chat("a", 50)
        second = await home.chat("b", 50)

        for _ in range(3):
            first.release()
            first.first_token()
            first.produced(10_000)

        assert home.gate.snapshot().engines["c"].committed_tokens == 50
        second.release()

    with_house(test)


def test_the_line_is_told_of_every_place_that_may_be_one() -> None:
    async def test(home: House) -> None:
        lease = home.batch("a")
        assert lease is not None
        assert home.gate.room_tokens() == 0
        rooms = [home.rooms]

        for change in (lease.first_token, lease.release, lambda: home.gate.resize("l", 200, 1)):
            change()
            rooms.append(home.rooms)

        assert rooms == [rooms[0] + step for step in range(4)]

    with_house(test)


def test_a_prefill_that_will_not_show_its_end_is_over_when_it_is_expected_to_be() -> None:
    async def test(home: House) -> None:
        lanes = []
        for ends_early in (False, True):
            lease = home.batch(f"r{ends_early}")
            assert lease is not None
            lease.expect_first_token(3.0)
            lease.expect_first_token(1.0)
            if ends_early:
                lease.release()
                lease = home.batch("next", 10)
                assert lease is not None
            for _ in range(2):
                await asyncio.sleep(2.0)
                lanes.append(home.gate.snapshot().engines["l"].held[BATCH].in_prefill)
            lease.release()

        assert lanes == [1, 0, 1, 1]

    with_house(test)


def test_batch_without_room_gets_none_and_without_an_engine_for_it_is_told_so() -> None:
    async def test(home: House) -> None:
        lease = home.batch("a")
        assert lease is not None
        assert home.batch("b", 1) is None

        with pytest.raises(NoPlace) as none:
            home.batch("c", 1, only="c")

        assert none.value.cause is RefusalCause.NO_ENGINE
        assert home.gate.may_ever_place(Offer("d", BATCH, Demand(0, 0, 1), only="l"))
        assert not home.gate.may_ever_place(Offer("d", BATCH, Demand(0, 0, 1), excluded=frozenset({"l"})))
        lease.release()

    with_house(test)


def test_an_answer_without_a_cap_is_charged_as_it_outgrows_its_reserve() -> None:
    async def test(home: House) -> None:
        lease = await home.chat("a", 10)
        charged = []

        for tokens in (5, 10, 11, 40, 75, 76):
            lease.produced(tokens)
            charged.append(home.gate.snapshot().engines["c"].committed_tokens)

        assert charged == [10, 10, 75, 75, 75, 140]
        lease.release()

    with_house(test)


def test_many_clients_that_come_and_leave_in_any_order_leave_nothing_behind() -> None:
    async def test(home: House) -> None:
        rng = random.Random(7)

        async def client(number: int) -> None:
            try:
                lease = await home.chat(f"r{number}", rng.choice((10, 40, 100)))
            except NoPlace:
                return
            try:
                await asyncio.sleep(rng.random())
                lease.first_token()
                await asyncio.sleep(rng.random())
            finally:
                lease.release()

        tasks = [asyncio.create_task(client(number)) for number in range(200)]
        for task in rng.sample(tasks, 80):
            await asyncio.sleep(rng.random() / 20)
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)

        assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}

    with_house(test, borrow=True)
