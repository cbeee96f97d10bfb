"""The account of one engine: what it may hold, and that all of it comes back, once."""

import random

import pytest
from msgspec.structs import replace

from router.policy.demand import Demand, RequestClass
from router.policy.ledger import UNBOUNDED_TOKENS, ClassLimits, EngineLimits, Ledger, LedgerSnapshot, Shortage

CHAT, BATCH = RequestClass.CHAT, RequestClass.BATCH


def demand(tokens: int, *, n: int = 1) -> Demand:
    """`tokens` in all, in `n` sequences that share no prompt."""
    return Demand(0, 0, tokens // n, n=n)


def shared(capacity_tokens: int = 1_000, *, chat_reserve_tokens: int = 0, block_size_tokens: int = 1) -> Ledger:
    """One engine of 8 seats for both classes: chat 6 seats; batch 4 seats, 60 % of the tokens and 2 lanes."""
    classes = {CHAT: ClassLimits(6), BATCH: ClassLimits(4, 0.6, 2)}
    return Ledger(capacity_tokens, EngineLimits(8, classes), block_size_tokens, chat_reserve_tokens)


def check_sums(snapshot: LedgerSnapshot) -> None:
    for held in snapshot.held.values():
        assert held.requests >= 0
        assert held.seats >= held.requests
        assert held.tokens >= 0
        assert 0 <= held.in_prefill <= held.requests
    assert snapshot.held[BATCH].in_prefill <= 2
    assert snapshot.held[CHAT].seats <= 6 or snapshot.held[CHAT].requests == 1
    assert snapshot.seats <= 8 or sum(held.requests for held in snapshot.held.values()) == 1


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_keeps_within_tokens_seats_and_lanes_and_ends_at_zero(seed: int) -> None:
    rng = random.Random(seed)
    block = rng.choice((1, 16))
    ledger = shared(chat_reserve_tokens=rng.choice((0, 300)), block_size_tokens=block)
    running: dict[str, tuple[RequestClass, int]] = {}

    for number in range(400):
        action = rng.random()
        if action < 0.5 or not running:
            name, request_class = f"r{number}", rng.choice((CHAT, BATCH))
            n = rng.choice((1, 1, 1, 3, 9))
            wanted = demand(rng.choice((10, 100, 250, 700, 1_500)) * n, n=n)
            before = ledger.snapshot()
            room = ledger.room_tokens(request_class)
            if ledger.offer(name, request_class, wanted) is None:
                after = ledger.snapshot()
                cost = ledger.cost_tokens(wanted)
                running[name] = (request_class, cost)
                assert cost <= room
                assert after.committed_tokens == before.committed_tokens + cost
                alone = len(running) == 1
                alone_in_class = before.held[request_class].requests == 0
                assert after.committed_tokens <= ledger.capacity_tokens or alone
                assert after.held[request_class].tokens <= ledger.budget_tokens(request_class) or alone_in_class
            else:
                assert ledger.snapshot() == before
        elif action < 0.75:
            name = rng.choice(list(running))
            _, taken = running.pop(name)
            assert ledger.finish(name) == taken
            assert ledger.finish(name) == 0
        else:
            ledger.first_token(rng.choice(list(running)))
        check_sums(ledger.snapshot())
        assert ledger.snapshot().committed_tokens == sum(taken for _, taken in running.values())
    for name in running:
        ledger.finish(name)

    assert ledger.snapshot().committed_tokens == ledger.snapshot().seats == 0
    assert {held.in_prefill for held in ledger.snapshot().held.values()} == {0}


def test_a_lane_comes_free_with_the_first_token_and_only_once() -> None:
    ledger = shared()
    for name in ("a", "b"):
        assert ledger.offer(name, BATCH, demand(10)) is None
    assert ledger.shortage(BATCH, demand(10)) is Shortage.LANE
    assert ledger.room_tokens(BATCH) == 0

    answers = [ledger.first_token("a"), ledger.first_token("a"), ledger.first_token("nobody")]

    assert answers == [True, False, False]
    assert ledger.offer("c", BATCH, demand(10)) is None
    assert ledger.shortage(BATCH, demand(10)) is Shortage.LANE


def test_a_request_that_ends_in_prefill_gives_its_lane_back() -> None:
    ledger = shared()
    for name in ("a", "b"):
        ledger.offer(name, BATCH, demand(10))

    ledger.finish("a")

    assert ledger.in_prefill(BATCH) == 1
    assert ledger.shortage(BATCH, demand(10)) is None


def test_a_request_larger_than_the_engine_runs_alone() -> None:
    ledger = shared(1_000)
    assert ledger.room_tokens(BATCH) == UNBOUNDED_TOKENS

    assert ledger.offer("big", BATCH, demand(5_000)) is None

    assert ledger.shortage(BATCH, demand(1)) is Shortage.TOKENS
    assert ledger.shortage(CHAT, demand(1)) is Shortage.TOKENS
    assert ledger.load_ratio == 5.0
    assert ledger.finish("big") == 5_000


def test_a_request_larger_than_its_class_may_hold_runs_alone_in_its_class() -> None:
    ledger = shared(1_000)
    ledger.offer("chat", CHAT, demand(100))

    assert ledger.offer("big", BATCH, demand(800)) is None

    assert ledger.shortage(BATCH, demand(1)) is Shortage.TOKENS
    assert ledger.shortage(CHAT, demand(100)) is None
    assert ledger.shortage(CHAT, demand(101)) is Shortage.TOKENS


def test_more_sequences_than_seats_run_on_an_empty_engine_only() -> None:
    ledger = shared()
    ledger.offer("one", CHAT, demand(10))
    assert ledger.shortage(CHAT, demand(90, n=9)) is Shortage.SEATS
    ledger.finish("one")

    assert ledger.offer("many", CHAT, demand(90, n=9)) is None

    assert ledger.shortage(CHAT, demand(1)) is Shortage.SEATS
    assert ledger.shortage(BATCH, demand(1)) is Shortage.SEATS


def test_seats_are_counted_by_class_and_in_all() -> None:
    ledger = shared()
    for number in range(4):
        ledger.offer(f"b{number}", BATCH, demand(10))
        ledger.first_token(f"b{number}")

    assert ledger.shortage(BATCH, demand(10)) is Shortage.SEATS
    assert ledger.offer("c", CHAT, demand(40, n=4)) is None
    assert ledger.shortage(CHAT, demand(10)) is Shortage.SEATS


def test_a_class_without_an_entry_may_not_run_here() -> None:
    ledger = Ledger(1_000, EngineLimits(8, {CHAT: ClassLimits(8)}))

    assert ledger.offer("b", BATCH, demand(1)) is Shortage.CLASS

    assert ledger.budget_tokens(BATCH) == ledger.room_tokens(BATCH) == 0


def test_batch_stays_under_the_reserve_of_chat_and_under_its_share() -> None:
    budgets = {reserve: shared(chat_reserve_tokens=reserve).budget_tokens(BATCH) for reserve in (0, 300, 700, 2_000)}

    assert budgets == {0: 600, 300: 600, 700: 300, 2_000: 0}
    assert shared(chat_reserve_tokens=700).budget_tokens(CHAT) == 1_000


def test_every_sequence_is_rounded_up_to_whole_blocks() -> None:
    ledger = shared(block_size_tokens=16)

    assert ledger.cost_tokens(demand(100)) == 115
    assert ledger.cost_tokens(demand(100, n=4)) == 160


def test_true_up_replaces_the_charge_and_is_never_refused() -> None:
    ledger = shared(1_000)
    ledger.offer("a", CHAT, demand(900))

    freed = [ledger.true_up("a", replace(demand(900), output_tokens=tokens)) for tokens in (400, 1_500)]
    unknown = ledger.true_up("nobody", demand(5))

    assert freed == [500, -1_100]
    assert unknown == 0
    assert ledger.finish("a") == 1_500
    assert ledger.snapshot().committed_tokens == 0


def test_a_smaller_capacity_takes_nothing_back_and_a_larger_one_makes_room() -> None:
    ledger = shared(1_000)
    ledger.offer("a", CHAT, demand(800))

    ledger.resize(500)
    assert ledger.shortage(CHAT, demand(1)) is Shortage.TOKENS
    assert ledger.snapshot().committed_tokens == 800
    ledger.resize(2_000)

    assert ledger.shortage(CHAT, demand(1_200)) is None
    assert ledger.finish("a") == 800


def test_a_request_is_not_here_twice() -> None:
    ledger = shared()
    ledger.offer("a", CHAT, demand(10))

    with pytest.raises(AssertionError, match="offered to an engine once"):
        ledger.offer("a", CHAT, demand(10))
