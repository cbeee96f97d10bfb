"""Batch: what it may commit, alone and on an engine that it shares with chat."""

import pytest

from router.policy.admission import Admission, AdmissionRules, PoolRules
from router.policy.decision import Admitted, Offer, RefusalCause, Refused, Waiting
from router.policy.demand import Demand
from router.policy.ledger import ClassLimits, EngineLimits
from tests.policy.house import BATCH, CHAT, House, house


def test_batch_without_room_waits_in_the_line_and_is_never_refused() -> None:
    home = house()
    home.offer("a", BATCH, 80)

    assert home.offer("b", BATCH, 80) == Waiting("b")
    home.serving("b1", False)

    assert home.offer("c", BATCH, 80) == Waiting("c")


def test_the_room_that_is_told_is_the_room_that_is_given() -> None:
    home = house(batch=("b1", "b2"), batch_limits=ClassLimits(8, 0.9, 2))
    home.offer("a", BATCH, 70, only="b1")
    home.offer("b", BATCH, 50, only="b2")

    assert home.admission.room_tokens(home.now_s) == 40
    assert home.offer("c", BATCH, 41) == Waiting("c")
    assert home.offer("d", BATCH, 40) == Admitted("d", "b2", BATCH, borrowed=False)


def test_there_is_no_room_while_lanes_are_taken_engines_paused_or_gone() -> None:
    home = house()
    home.offer("a", BATCH, 10)
    assert home.admission.room_tokens(home.now_s) == 0
    home.admission.first_token("a", home.now_s)
    assert home.admission.room_tokens(home.now_s) == 90

    home.admission.pause("b1", home.now_s + 1)
    assert home.admission.room_tokens(home.now_s) == 0
    assert home.admission.room_tokens(home.now_s + 1) == 90
    home.serving("b1", False)

    assert home.admission.room_tokens(home.now_s + 1) == 0


def test_a_prompt_larger_than_the_engine_runs_alone() -> None:
    home = house()
    home.offer("a", BATCH, 10)
    assert home.offer("huge", BATCH, 500) == Waiting("huge")
    home.finish("a")

    decision = home.offer("huge", BATCH, 500)

    assert decision == Admitted("huge", "b1", BATCH, borrowed=False)
    assert home.offer("b", BATCH, 1) == Waiting("b")


@pytest.mark.parametrize("fields", [{"only": "b1"}, {"excluded": frozenset({"b2"})}])
def test_batch_that_may_only_go_to_engines_that_are_gone_is_refused_and_does_not_wait(
    fields: dict[str, object],
) -> None:
    home = house(batch=("b1", "b2"))
    home.serving("b1", False)

    decision = home.offer("a", BATCH, 10, **fields)

    assert isinstance(decision, Refused)
    assert decision.cause is RefusalCause.NO_ENGINE


def test_many_long_prompts_never_commit_more_than_the_share_of_the_engine() -> None:
    home = house(batch=("l",), capacity_tokens=400_000, batch_limits=ClassLimits(64, 0.9, 2), max_num_seqs=64)
    waiting = [f"r{number}" for number in range(60)]
    running: list[str] = []
    most_tokens = 0

    while waiting or running:
        while waiting and isinstance(home.offer(waiting[0], BATCH, 32_000), Admitted):
            running.append(waiting.pop(0))
            home.admission.first_token(running[-1], home.now_s)
        most_tokens = max(most_tokens, home.committed_tokens)
        home.finish(running.pop(0))

    assert most_tokens == 11 * 32_000
    assert most_tokens <= 0.9 * 400_000
    assert home.committed_tokens == 0


@pytest.mark.parametrize(
    ("demand", "fits"),
    [
        (Demand(50, 50, 4_000, n=32), 1),
        (Demand(1_000, 10, 16, prompts=100), 38),
        (Demand(50, 50, 512, output_is_capped=False), 177),
    ],
)
def test_sequences_prompts_and_answers_without_a_cap_are_charged_in_full(demand: Demand, fits: int) -> None:
    limits = {"c1": EngineLimits(100_000, {CHAT: ClassLimits(100_000)})}
    admission = Admission(AdmissionRules(PoolRules(("c1",)), None), limits, {"c1": 100_000})
    admission.set_serving("c1", True, 0.0)

    decisions = [admission.offer(Offer(f"r{number}", CHAT, demand), 0.0) for number in range(200)]

    assert sum(isinstance(decision, Admitted) for decision in decisions) == fits
    assert admission.snapshot().engines["c1"].committed_tokens <= max(100_000, demand.kv_tokens)


def two_lanes(*, reserve_ratio: float = 0.4, share_ratio: float = 1.0) -> House:
    return house(
        chat=("one",),
        batch=("one",),
        capacity_tokens=1_000,
        chat_reserve_ratio=reserve_ratio,
        batch_limits=ClassLimits(4, share_ratio, 1),
    )


def test_batch_on_a_shared_engine_leaves_chat_its_reserve() -> None:
    home = two_lanes()
    home.offer("long", BATCH, 500)
    home.admission.first_token("long", home.now_s)

    assert home.offer("longer", BATCH, 200) == Waiting("longer")
    assert home.offer("fits", BATCH, 100) == Admitted("fits", "one", BATCH, borrowed=False)
    assert home.offer("a", CHAT, 400) == Admitted("a", "one", CHAT, borrowed=False)


def test_batch_on_a_shared_engine_keeps_to_its_share_and_its_lane() -> None:
    home = two_lanes(reserve_ratio=0.0, share_ratio=0.5)
    home.offer("first", BATCH, 300)
    assert home.offer("second", BATCH, 100) == Waiting("second")
    home.admission.first_token("first", home.now_s)

    assert home.offer("third", BATCH, 201) == Waiting("third")
    assert home.offer("second", BATCH, 200) == Admitted("second", "one", BATCH, borrowed=False)


def test_the_reserve_of_chat_grows_with_what_chat_held_lately() -> None:
    home = two_lanes(reserve_ratio=0.1)
    before = home.admission.snapshot().engines["one"].chat_reserve_tokens
    for number in range(64):
        home.offer(f"r{number}", CHAT, 500)
        home.finish(f"r{number}")

    after = home.admission.snapshot().engines["one"].chat_reserve_tokens

    assert (before, after) == (100, 650)


def test_only_a_shared_engine_keeps_a_reserve() -> None:
    apart = house(chat_reserve_ratio=0.5)

    assert {ledger.chat_reserve_tokens for ledger in apart.admission.snapshot().engines.values()} == {0}


def test_chat_on_a_shared_engine_is_not_borrowing_and_a_batch_prefill_does_not_stop_it() -> None:
    home = two_lanes()
    home.offer("long", BATCH, 500)

    decision = home.offer("a", CHAT, 100)

    assert decision == Admitted("a", "one", CHAT, borrowed=False)
