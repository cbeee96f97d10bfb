"""What every store promises (`router/queue/store.py`), over every store."""

from dataclasses import replace

import pytest

from router.queue.limits import PRIORITY_MAX, TOKENS_MAX
from router.queue.store import Enqueued, EnqueueRefusal, QueueStats, QueueStore, Ticket
from tests.queue.conftest import Tell

_MODEL = "org/model"
_ODD_NAMES = (
    "",
    " ",
    "two words",
    "{braces}",
    "}{",
    "{m:org/model}",
    "模型",
    "nul\0name",
    "new\nline",
    "colon:ticket:order",
    "a" * 500,
    "a" * 501,
    "lone \ud800 surrogate",
    "%7Bm%7D",
)


async def _enqueue(
    queue: QueueStore,
    ticket: Ticket,
    *,
    model: str = _MODEL,
    max_requests: int = 1_000,
    max_tokens: int = TOKENS_MAX,
) -> Enqueued:
    answer = await queue.enqueue(model, ticket, max_requests=max_requests, max_tokens=max_tokens)
    assert isinstance(answer, Enqueued)
    return answer


async def _drain(queue: QueueStore, owner: str, *, model: str = _MODEL) -> list[str]:
    ids = []
    while (ticket := await queue.claim(model, owner, max_tokens=TOKENS_MAX)) is not None:
        ids.append(ticket.id)
    return ids


def test_equal_priorities_leave_first_in_first_out(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        names = [f"t{number}" for number in range(20)]
        for name in names:
            await _enqueue(queue, Ticket(name, "me", 10))

        assert await _drain(queue, "me") == names

    tell(story)


def test_an_urgent_ticket_stands_before_all_that_are_less_urgent(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        for number in range(10):
            await _enqueue(queue, Ticket(f"low{number}", "me", 10, priority=5))

        urgent = await _enqueue(queue, Ticket("urgent", "me", 10, priority=-PRIORITY_MAX))
        last = await _enqueue(queue, Ticket("last", "me", 10, priority=PRIORITY_MAX))

        assert (urgent.ahead_requests, urgent.ahead_tokens) == (0, 0)
        assert (last.ahead_requests, last.ahead_tokens) == (11, 110)
        order = await _drain(queue, "me")
        assert (order[0], order[1], order[-1]) == ("urgent", "low0", "last")

    tell(story)


def test_a_ticket_put_back_keeps_its_place_before_newcomers(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        for name in ("first", "second"):
            await _enqueue(queue, Ticket(name, "me", 10))
        claimed = await queue.claim(_MODEL, "me", max_tokens=10)
        assert claimed is not None
        await _enqueue(queue, Ticket("newcomer", "me", 10))

        await queue.put_back(_MODEL, claimed)

        assert await queue.ahead(_MODEL, "first") == 0
        assert await _drain(queue, "me") == ["first", "second", "newcomer"]

    tell(story)


def test_a_ticket_put_back_twice_stands_once(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        ticket = (await _enqueue(queue, Ticket("one", "me", 10))).ticket

        await queue.put_back(_MODEL, ticket)
        await queue.put_back(_MODEL, ticket)

        stats = await queue.stats(_MODEL)
        assert (stats.requests, stats.tokens) == (1, 10)

    tell(story)


def test_a_ticket_is_put_back_although_the_line_is_full(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await _enqueue(queue, Ticket("one", "me", 10), max_requests=1)
        claimed = await queue.claim(_MODEL, "me", max_tokens=10)
        assert claimed is not None
        await _enqueue(queue, Ticket("two", "me", 10), max_requests=1)

        await queue.put_back(_MODEL, claimed)

        assert await _drain(queue, "me") == ["one", "two"]

    tell(story)


def test_a_store_that_lost_everything_takes_its_tickets_back_in_order(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        tickets = [(await _enqueue(queue, Ticket(f"t{number}", "me", 10))).ticket for number in range(3)]
        future = replace(tickets[2], id="future", seq=tickets[2].seq + 10**9)
        await _drain(queue, "me")

        for ticket in (future, *reversed(tickets)):
            await queue.put_back(_MODEL, ticket)
        newcomer = (await _enqueue(queue, Ticket("newcomer", "me", 10))).ticket

        assert newcomer.seq > future.seq
        assert await _drain(queue, "me") == ["t0", "t1", "t2", "future", "newcomer"]

    tell(story)


def test_the_bound_of_requests_holds_and_one_more_changes_nothing(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        for name in ("one", "two"):
            await _enqueue(queue, Ticket(name, "me", 10), max_requests=2)
        before = await queue.stats(_MODEL)

        refusal = await queue.enqueue(_MODEL, Ticket("three", "me", 10), max_requests=2, max_tokens=1_000)

        assert refusal is EnqueueRefusal.FULL_REQUESTS
        after = await queue.stats(_MODEL)
        assert (after.requests, after.tokens) == (before.requests, before.tokens) == (2, 20)
        assert await queue.ahead(_MODEL, "three") is None

    tell(story)


def test_the_bound_of_tokens_holds_and_one_more_changes_nothing(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await _enqueue(queue, Ticket("one", "me", 60), max_tokens=100)
        await _enqueue(queue, Ticket("two", "other", 40, priority=3), max_tokens=100)

        refusal = await queue.enqueue(_MODEL, Ticket("three", "me", 1), max_requests=10, max_tokens=100)

        assert refusal is EnqueueRefusal.FULL_TOKENS
        stats = await queue.stats(_MODEL)
        assert (stats.requests, stats.tokens) == (2, 100)
        assert await queue.leave(_MODEL, "two", "other")
        await _enqueue(queue, Ticket("three", "me", 40), max_tokens=100)

    tell(story)


def test_a_line_of_no_length_takes_nobody(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        refusal = await queue.enqueue(_MODEL, Ticket("one", "me", 1), max_requests=0, max_tokens=0)

        assert refusal is EnqueueRefusal.FULL_REQUESTS
        assert await queue.stats(_MODEL) == QueueStats(0, 0, 0.0)

    tell(story)


def test_one_id_twice_keeps_its_first_place_and_values_even_in_a_full_line(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await _enqueue(queue, Ticket("zero", "me", 7))
        first = await _enqueue(queue, Ticket("one", "me", 10))
        await _enqueue(queue, Ticket("two", "me", 10))

        again = await _enqueue(queue, Ticket("one", "other", 99, priority=-1), max_requests=3, max_tokens=27)

        assert again == first
        assert (again.ahead_requests, again.ahead_tokens) == (1, 7)
        stats = await queue.stats(_MODEL)
        assert (stats.requests, stats.tokens) == (3, 27)

    tell(story)


def test_nobody_passes_the_head_however_small(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await _enqueue(queue, Ticket("big", "me", 101))
        await _enqueue(queue, Ticket("small", "me", 1))

        too_big = await queue.claim(_MODEL, "me", max_tokens=100)
        fits = await queue.claim(_MODEL, "me", max_tokens=101)

        assert too_big is None
        assert fits is not None
        assert (fits.id, fits.owner, fits.tokens, fits.priority) == ("big", "me", 101, 0)

    tell(story)


def test_an_owner_claims_its_own_tickets_only(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        # Names that sort around each other, so that one owner's range could touch the next one's.
        owners = ("a", "a b", "a!", "a ", "ab", "A", "é", "a:0")
        for number, owner in enumerate(owners * 2):
            await _enqueue(queue, Ticket(f"{owner}/{number // len(owners)}", owner, 10))

        assert await queue.claim(_MODEL, "nobody", max_tokens=100) is None
        for owner in owners:
            assert await _drain(queue, owner) == [f"{owner}/0", f"{owner}/1"]
        assert await queue.stats(_MODEL) == QueueStats(0, 0, 0.0)

    tell(story)


def test_a_claimed_ticket_is_out_of_the_line(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await _enqueue(queue, Ticket("one", "me", 10))

        await queue.claim(_MODEL, "me", max_tokens=10)

        assert await queue.claim(_MODEL, "me", max_tokens=10) is None
        assert await queue.ahead(_MODEL, "one") is None
        assert not await queue.leave(_MODEL, "one", "me")
        assert await queue.stats(_MODEL) == QueueStats(0, 0, 0.0)

    tell(story)


def test_a_ticket_leaves_once_and_at_its_owner_s_word_only(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await _enqueue(queue, Ticket("one", "me", 10))
        await _enqueue(queue, Ticket("two", "me", 10))

        assert not await queue.leave(_MODEL, "one", "other")
        assert await queue.leave(_MODEL, "one", "me")
        assert not await queue.leave(_MODEL, "one", "me")

        assert await queue.ahead(_MODEL, "two") == 0
        assert (await queue.stats(_MODEL)).tokens == 10

    tell(story)


def test_ahead_counts_all_owners(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        for number in range(4):
            await _enqueue(queue, Ticket(f"t{number}", f"owner{number % 2}", 10))

        ranks = [await queue.ahead(_MODEL, f"t{number}") for number in range(4)]

        assert ranks == [0, 1, 2, 3]
        assert await queue.ahead(_MODEL, "unknown") is None

    tell(story)


def test_the_tickets_of_a_dead_owner_go_and_those_of_a_living_one_stay(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        for number in range(3):
            await _enqueue(queue, Ticket(f"dead{number}", "dead", 10))
            await _enqueue(queue, Ticket(f"live{number}", "live", 10))
        await queue.beat(_MODEL, "live", lease_s=3_600)
        await queue.beat(_MODEL, "dead", lease_s=0)

        assert await queue.reap(_MODEL) == 3
        assert await queue.reap(_MODEL) == 0

        stats = await queue.stats(_MODEL)
        assert (stats.requests, stats.tokens) == (3, 30)
        assert await _drain(queue, "live") == ["live0", "live1", "live2"]

    tell(story)


def test_reaping_is_bounded_and_goes_on_where_it_stopped(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        for number in range(7):
            owner = f"dead{number % 2}"
            await _enqueue(queue, Ticket(f"t{number}", owner, 10))
            await queue.beat(_MODEL, owner, lease_s=0)

        counts = [await queue.reap(_MODEL, limit=3) for _ in range(4)]

        assert counts == [3, 3, 1, 0]
        assert await queue.stats(_MODEL) == QueueStats(0, 0, 0.0)

    tell(story)


def test_an_owner_that_beats_again_in_time_lives_on(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await _enqueue(queue, Ticket("one", "me", 10))
        await queue.beat(_MODEL, "me", lease_s=0)

        await queue.beat(_MODEL, "me", lease_s=3_600)

        assert await queue.reap(_MODEL) == 0
        assert await queue.ahead(_MODEL, "one") == 0

    tell(story)


def test_an_owner_that_never_beat_has_time_to_begin(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await _enqueue(queue, Ticket("one", "me", 10))

        assert await queue.reap(_MODEL) == 0

    tell(story)


def test_an_owner_without_tickets_is_forgotten_and_may_come_back(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await queue.beat(_MODEL, "me", lease_s=0)
        assert await queue.reap(_MODEL) == 0

        await _enqueue(queue, Ticket("one", "me", 10))

        assert await queue.reap(_MODEL) == 0
        assert await _drain(queue, "me") == ["one"]

    tell(story)


def test_the_age_is_that_of_the_oldest_ticket_wherever_it_stands(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        assert (await queue.stats(_MODEL)).oldest_age_s == 0.0
        young = (await _enqueue(queue, Ticket("young", "me", 10, priority=-1))).ticket
        old = replace(young, id="old", priority=9, seq=young.seq - 500_000_000)

        await queue.put_back(_MODEL, old)

        assert 500.0 <= (await queue.stats(_MODEL)).oldest_age_s < 600.0
        await queue.leave(_MODEL, "old", "me")
        assert (await queue.stats(_MODEL)).oldest_age_s < 100.0

    tell(story)


def test_the_sum_of_tokens_is_exact_through_every_way_out(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        for number in range(8):
            await _enqueue(queue, Ticket(f"t{number}", "me", 2**number, priority=number % 3))
        seen = []
        claimed = await queue.claim(_MODEL, "me", max_tokens=TOKENS_MAX)
        seen.append((await queue.stats(_MODEL)).tokens)
        assert claimed is not None
        await queue.put_back(_MODEL, claimed)
        seen.append((await queue.stats(_MODEL)).tokens)
        await queue.leave(_MODEL, "t5", "me")
        await queue.leave(_MODEL, "t5", "me")
        seen.append((await queue.stats(_MODEL)).tokens)
        await queue.beat(_MODEL, "me", lease_s=0)
        await queue.reap(_MODEL)
        seen.append((await queue.stats(_MODEL)).tokens)

        assert seen == [255 - claimed.tokens, 255, 255 - 32, 0]

    tell(story)


def test_the_largest_numbers_stay_exact(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        largest = (await _enqueue(queue, Ticket("one", "me", TOKENS_MAX - 1, priority=PRIORITY_MAX))).ticket

        claimed = await queue.claim(_MODEL, "me", max_tokens=TOKENS_MAX - 1)

        assert claimed == largest
        assert largest.tokens == TOKENS_MAX - 1

    tell(story)


def test_lines_of_different_models_never_touch_whatever_their_names(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        for number, model in enumerate(_ODD_NAMES):
            await _enqueue(queue, Ticket("same id", "me", number + 1), model=model)

        sums = [(await queue.stats(model)).tokens for model in _ODD_NAMES]

        assert sums == [number + 1 for number in range(len(_ODD_NAMES))]
        for model in _ODD_NAMES:
            assert await _drain(queue, "me", model=model) == ["same id"]

    tell(story)


def test_odd_ids_and_owners_come_back_as_they_were(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        odd = [name for name in _ODD_NAMES if name]
        for name in odd:
            await _enqueue(queue, Ticket(name, "owner of " + name, 10))

        claimed = [await queue.claim(_MODEL, "owner of " + name, max_tokens=10) for name in odd]

        assert [(ticket.id, ticket.owner) for ticket in claimed if ticket] == [
            (name, "owner of " + name) for name in odd
        ]

    tell(story)


@pytest.mark.parametrize(
    "ticket",
    [
        Ticket("", "me", 1),
        Ticket("one", "", 1),
        Ticket("one", "me", 0),
        Ticket("one", "me", TOKENS_MAX + 1),
        Ticket("one", "me", 1, priority=PRIORITY_MAX + 1),
        Ticket("one", "me", 1, priority=-PRIORITY_MAX - 1),
    ],
)
def test_a_ticket_that_no_store_can_hold_is_the_caller_s_mistake(tell: Tell, ticket: Ticket) -> None:
    async def story(queue: QueueStore) -> None:
        with pytest.raises(ValueError, match="ticket"):
            await queue.enqueue(_MODEL, ticket, max_requests=10, max_tokens=TOKENS_MAX)
        with pytest.raises(ValueError, match="ticket"):
            await queue.put_back(_MODEL, replace(ticket, seq=1))

        assert (await queue.stats(_MODEL)).requests == 0

    tell(story)


def test_a_ticket_without_a_place_cannot_be_put_back(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        with pytest.raises(ValueError, match="place"):
            await queue.put_back(_MODEL, Ticket("one", "me", 1))

    tell(story)


def test_a_store_answers_a_ping_and_closes_twice(tell: Tell) -> None:
    async def story(queue: QueueStore) -> None:
        await queue.ping()
        await queue.close()
        await queue.close()

    tell(story)
