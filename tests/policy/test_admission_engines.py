"""Which engine is chosen, and what happens when engines come, go, pause, grow and shrink."""

import random

from router.policy.decision import Admitted, Held, RefusalCause, Refused
from router.policy.demand import Demand
from tests.policy.house import BATCH, CHAT, HOLD_S, admitted, house


def test_two_choices_spread_the_load_and_the_less_loaded_one_wins() -> None:
    home = house(chat=("c1", "c2", "c3", "c4"), capacity_tokens=10_000)
    rng = random.Random(3)

    for number in range(240):
        home.offer(f"r{number}", CHAT, 1, sample=rng.random())
        home.admission.true_up(f"r{number}", Demand(0, 0, 10), home.now_s)
        if number % 8:
            home.finish(f"r{number}")

    seats = [ledger.seats for name, ledger in home.admission.snapshot().engines.items() if name != "b1"]
    assert sum(seats) == 30
    assert max(seats) - min(seats) <= 2


def test_a_free_engine_is_found_whichever_two_are_drawn() -> None:
    for sample in (number / 24 for number in range(24)):
        home = house(chat=("c1", "c2", "c3", "c4"))
        for name in ("c1", "c2", "c4"):
            home.offer(f"on-{name}", CHAT, 100, only=name)

        decision = home.offer("a", CHAT, 50, sample=sample)

        assert decision == Admitted("a", "c3", CHAT, borrowed=False)


def test_every_pair_of_engines_is_drawn() -> None:
    chosen: set[str] = set()
    for sample in (0.0, 0.17, 0.34, 0.51, 0.68, 0.85, 0.999_999):
        home = house(chat=("c1", "c2", "c3"))
        decision = home.offer("a", CHAT, 10, sample=sample)
        assert isinstance(decision, Admitted)
        chosen.add(decision.engine)

    assert chosen == {"c1", "c2", "c3"}


def test_an_engine_that_was_tried_is_not_tried_again() -> None:
    home = house(chat=("c1", "c2"))

    decisions = [home.offer(f"r{n}", CHAT, 1, sample=n / 10, excluded=frozenset({"c1"})) for n in range(8)]

    assert {decision.engine for decision in decisions if isinstance(decision, Admitted)} == {"c2"}


def test_chat_whose_engines_were_all_tried_is_told_that_there_is_none() -> None:
    home = house(chat=("c1",), borrow=False)

    refused = home.offer("a", CHAT, 1, excluded=frozenset({"c1"}))

    assert isinstance(refused, Refused)
    assert refused.cause is RefusalCause.NO_ENGINE


def test_full_and_gone_are_told_apart() -> None:
    full, gone = house(borrow=False, hold_s=0.0), house(borrow=False)
    full.offer("a", CHAT, 100)
    gone.serving("c1", False)

    causes = [decision.cause for home in (full, gone) if isinstance(decision := home.offer("b", CHAT, 10), Refused)]

    assert causes == [RefusalCause.SATURATED, RefusalCause.NO_ENGINE]


def test_a_pinned_request_waits_for_its_engine_though_another_is_free() -> None:
    home = house(chat=("c1", "c2"))
    home.offer("a", CHAT, 100, only="c1")

    pinned = home.offer("b", CHAT, 10, only="c1")

    assert isinstance(pinned, Held)
    assert home.finish("a") == admitted(("b", "c1"))


def test_who_waits_for_a_pinned_engine_does_not_hold_up_the_others() -> None:
    home = house(chat=("c1", "c2"))
    home.offer("a", CHAT, 100, only="c1")
    home.offer("pinned", CHAT, 10, only="c1")

    newcomer = home.offer("b", CHAT, 80)
    home.offer("next", CHAT, 30)

    assert newcomer == Admitted("b", "c2", CHAT, borrowed=False)
    assert home.finish("b") == admitted(("next", "c2"))
    assert home.finish("a") == admitted(("pinned", "c1"))


def test_nobody_overtakes_a_pinned_one_on_its_own_engine() -> None:
    home = house(chat=("c1", "c2"))
    home.offer("a", CHAT, 60, only="c1")
    home.offer("b", CHAT, 100, only="c2")
    home.offer("pinned", CHAT, 80, only="c1")

    newcomer = home.offer("small", CHAT, 10)

    assert isinstance(newcomer, Held)
    assert home.finish("a") == admitted(("pinned", "c1"), ("small", "c1"))


def test_a_request_pinned_to_a_batch_engine_goes_there_even_where_chat_may_not_borrow() -> None:
    home = house(borrow=False)

    decision = home.offer("a", CHAT, 10, only="b1")

    assert decision == Admitted("a", "b1", BATCH, borrowed=True)
    home.serving("b1", False)
    gone = home.offer("b", CHAT, 10, only="b1")
    assert isinstance(gone, Refused)
    assert gone.cause is RefusalCause.NO_ENGINE


def test_an_engine_that_said_busy_is_left_alone_until_its_pause_is_over() -> None:
    home = house(chat=("c1", "c2"))
    home.admission.pause("c1", home.now_s + 1)
    home.admission.pause("c1", home.now_s + 0.2)

    during = home.offer("a", CHAT, 1)
    home.now_s += 1
    home.finish("a")
    after = home.offer("b", CHAT, 1, only="c1")

    assert during == Admitted("a", "c2", CHAT, borrowed=False)
    assert after == Admitted("b", "c1", CHAT, borrowed=False)


def test_the_end_of_a_pause_gives_the_held_ones_their_places() -> None:
    home = house()
    home.admission.pause("c1", home.now_s + 0.5)
    home.offer("a", CHAT, 10)
    assert home.admission.next_expiry_s(home.now_s) == home.now_s + 0.5

    decisions = home.expire(0.5)

    assert decisions == admitted(("a", "c1"))
    assert home.admission.next_expiry_s(home.now_s) is None


def test_an_engine_that_comes_back_takes_the_held_ones_at_once() -> None:
    home = house(chat=("c1", "c2"))
    home.serving("c2", False)
    home.offer("a", CHAT, 100)
    home.offer("b", CHAT, 60)
    home.offer("c", CHAT, 30)

    decisions = home.serving("c2", True)

    assert decisions == admitted(("b", "c2"), ("c", "c2"))


def test_held_ones_whose_engines_all_went_away_end_with_their_hold() -> None:
    home = house(borrow=False)
    home.offer("a", CHAT, 100)
    home.offer("b", CHAT, 10)
    home.serving("c1", False)
    assert home.finish("a") == []

    (refused,) = home.expire(HOLD_S)

    assert isinstance(refused, Refused)
    assert refused.cause is RefusalCause.NO_ENGINE


def test_what_runs_on_an_engine_that_goes_away_still_comes_back() -> None:
    home = house()
    home.offer("a", CHAT, 60)

    home.serving("c1", False)
    home.finish("a")

    assert home.committed_tokens == 0


def test_a_larger_capacity_serves_the_held_and_a_smaller_one_only_waits() -> None:
    home = house()
    home.offer("a", CHAT, 80)
    home.offer("b", CHAT, 50)

    smaller = home.admission.resize("c1", 60, 1, home.now_s)
    larger = home.admission.resize("c1", 200, 16, home.now_s)

    assert smaller == []
    assert larger == admitted(("b", "c1"))
    assert home.committed_tokens == 80 + 50 + 15


def test_tokens_that_were_reserved_and_not_needed_go_to_the_held() -> None:
    home = house()
    home.offer("a", CHAT, 90)
    home.offer("b", CHAT, 40)

    decisions = home.admission.true_up("a", Demand(0, 0, 60), home.now_s)

    assert decisions == admitted(("b", "c1"))
    assert not home.admission.true_up("nobody", Demand(0, 0, 1), home.now_s)


def test_which_engine_a_chat_request_goes_to_can_matter_while_several_serve() -> None:
    home = house(chat=("c1", "c2"))

    both = home.admission.has_choice[CHAT]
    home.serving("c1", False)

    assert both
    assert not home.admission.has_choice[CHAT]
