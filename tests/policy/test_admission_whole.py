"""Admission as a whole: every request ends in one decision, every token comes back."""

import random

import pytest

from router.policy.decision import Held, Refused
from tests.policy.house import BATCH, CHAT, HOLD_S, house


def test_the_hint_to_come_back_follows_the_measured_drain() -> None:
    home = house(borrow=False, hold_s=0.0)
    for number in range(20):
        home.offer(f"r{number}", CHAT, 100)
        home.now_s += 1
        home.finish(f"r{number}")
    home.offer("a", CHAT, 100)

    refusals = [home.offer("b", CHAT, 100, sample=sample) for sample in (0.0, 1.0)]
    rate = 20 * 100 / 19

    waits = [refused.retry_after_s for refused in refusals if isinstance(refused, Refused)]
    assert waits == [pytest.approx(max(1.0, 100 / rate)), pytest.approx(1.25 * max(1.0, 100 / rate))]


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_in_one_decision_and_all_tokens_come_back(seed: int) -> None:
    rng = random.Random(seed)
    shared = rng.random() < 0.5
    home = house(
        chat=("c1", "c2"),
        batch=("c1",) if shared else ("b1",),
        chat_reserve_ratio=0.3 if shared else 0.0,
        borrow=rng.random() < 0.7,
    )
    engines = tuple(home.admission.snapshot().engines)
    open_ids: set[str] = set()
    left: set[str] = set()

    for number in range(600):
        action = rng.random()
        if action < 0.45:
            request_class = rng.choice((CHAT, CHAT, BATCH))
            only = rng.choice((None, None, None, *engines))
            home.offer(f"r{number}", request_class, rng.choice((5, 20, 60, 150)), sample=rng.random(), only=only)
            open_ids.add(f"r{number}")
        elif action < 0.75 and open_ids:
            name = rng.choice(sorted(open_ids))
            open_ids.discard(name)
            left.add(name)
            home.finish(name)
        elif action < 0.82 and open_ids:
            home.note(home.admission.first_token(rng.choice(sorted(open_ids)), home.now_s))
        elif action < 0.86:
            home.serving(rng.choice(engines), rng.random() < 0.8)
        elif action < 0.89:
            home.admission.pause(rng.choice(engines), home.now_s + rng.random())
        elif action < 0.92:
            home.note(home.admission.resize(rng.choice(engines), rng.choice((80, 100, 200)), 1, home.now_s))
        else:
            home.expire(rng.random())
        assert home.admission.snapshot().held_requests <= 3
    home.expire(HOLD_S)
    home.finish(*sorted(open_ids))

    finals = [decision.request_id for decision in home.seen if not isinstance(decision, Held)]
    held = {decision.request_id for decision in home.seen if isinstance(decision, Held)}
    offered = {decision.request_id for decision in home.seen}
    assert len(finals) == len(set(finals))
    assert offered - set(finals) <= held & left
    assert home.committed_tokens == home.held_tokens == 0
    assert {h.in_prefill for ledger in home.admission.snapshot().engines.values() for h in ledger.held.values()} == {0}


def test_a_request_has_one_place_and_one_hold_at_a_time() -> None:
    home = house()
    home.offer("a", CHAT, 100)
    home.offer("b", CHAT, 100)

    for name, text in (("a", "one place"), ("b", "held once")):
        with pytest.raises(AssertionError, match=text):
            home.offer(name, CHAT, 1)
