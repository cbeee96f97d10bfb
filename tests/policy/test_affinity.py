"""Requests go where the beginning of their prompt is cached, and never at the price of an uneven load."""

import itertools
import random

import pytest

from router.policy.affinity import (
    AGE_MAX_S,
    BOUNDS_BYTES,
    EXCESS_RATIO,
    PREFIX_MAX_BYTES,
    SLACK_RATIO,
    Affinity,
    AffinityResult,
    may_follow,
    prefix_of,
)
from router.policy.decision import Admitted
from tests.policy.conversations import Load, play
from tests.policy.house import BATCH, CHAT, House, house

RNG = random.Random(5)
SYSTEM = RNG.randbytes(2_000)
HIT, MOVED, NONE = AffinityResult.HIT, AffinityResult.MOVED, AffinityResult.NONE
THREE = ("c1", "c2", "c3")


def ask(home: House, name: str, prompt: bytes, *, tokens: int = 1, sample: float = 0.0) -> Admitted:
    decision = home.offer(name, CHAT, tokens, prefix=prefix_of(prompt), sample=sample)
    assert isinstance(decision, Admitted)
    return decision


# -- marks --------------------------------------------------------------------------------------------------------


def test_the_marks_of_a_longer_turn_begin_with_those_of_the_turn_before() -> None:
    prompt = RNG.randbytes(PREFIX_MAX_BYTES)

    lengths = sorted(RNG.choices(range(PREFIX_MAX_BYTES), k=50))
    marks = [prefix_of(prompt[:length]).marks for length in lengths]

    for shorter, longer in itertools.pairwise(marks):
        assert longer[: len(shorter)] == shorter


def test_prompts_that_differ_anywhere_before_a_bound_do_not_share_its_mark() -> None:
    prompt = bytearray(RNG.randbytes(20_000))
    marks = prefix_of(bytes(prompt)).marks

    for at in (0, 511, 512, 5_000, 19_000):
        prompt[at] ^= 1
        other = prefix_of(bytes(prompt)).marks
        prompt[at] ^= 1
        alike = [bound for bound, mine, its in zip(BOUNDS_BYTES, marks, other, strict=False) if mine == its]
        assert alike == [bound for bound in BOUNDS_BYTES[: len(marks)] if bound <= at]


def test_the_steps_are_fine_and_few() -> None:
    steps = [end - start for start, end in zip((0, *BOUNDS_BYTES), BOUNDS_BYTES, strict=False)]

    assert (BOUNDS_BYTES[0], BOUNDS_BYTES[-1]) == (512, PREFIX_MAX_BYTES)
    assert len(BOUNDS_BYTES) <= 40
    assert all(step <= max(512, end // 8) for step, end in zip(steps, BOUNDS_BYTES, strict=True))


def test_what_is_short_has_no_marks_and_what_is_beyond_the_bound_is_not_looked_at() -> None:
    long = RNG.randbytes(PREFIX_MAX_BYTES)

    assert prefix_of(b"").marks == prefix_of(b"x" * 511).marks == ()
    assert prefix_of(long + b"more") == prefix_of(long)


# -- the table ----------------------------------------------------------------------------------------------------


def test_the_longest_match_wins() -> None:
    table = Affinity()
    first, second = SYSTEM + b"a" * 2_000, SYSTEM + b"b" * 2_000
    table.note(prefix_of(first), "e1", 0.0)
    table.note(prefix_of(second), "e2", 1.0)

    assert table.find(prefix_of(first + b"more" * 100), 2.0) == ("e1", pytest.approx(3_584 / 4_400))
    assert table.find(prefix_of(second), 2.0) == ("e2", pytest.approx(3_584 / 4_000))
    assert table.find(prefix_of(SYSTEM + b"c" * 2_000), 2.0) == ("e2", pytest.approx(1_536 / 4_000))
    assert table.find(prefix_of(b"d" * 2_000), 2.0) is None


def test_what_was_not_seen_for_long_is_not_followed() -> None:
    table = Affinity()
    table.note(prefix_of(SYSTEM), "e1", 0.0)

    assert table.find(prefix_of(SYSTEM), AGE_MAX_S) is not None
    assert table.find(prefix_of(SYSTEM), AGE_MAX_S + 1) is None


def test_the_table_is_bounded_and_forgets_the_least_used_first() -> None:
    table = Affinity(entries_max=30)
    table.note(prefix_of(SYSTEM), "e1", 0.0)
    for number in range(100):
        table.note(prefix_of(RNG.randbytes(1_500)), "e2", float(number))
        table.note(prefix_of(SYSTEM), "e1", float(number))

    assert len(table) == 30
    assert table.find(prefix_of(SYSTEM), 100.0) == ("e1", pytest.approx(1_536 / 2_000))


# -- the bound ----------------------------------------------------------------------------------------------------


def test_an_engine_is_followed_up_to_a_quarter_and_a_little_above_the_least_loaded() -> None:
    edge = 0.4 * (1 + EXCESS_RATIO) + SLACK_RATIO

    assert may_follow(edge, 0.4, 1.0)
    assert not may_follow(edge + 0.001, 0.4, 1.0)
    assert may_follow(SLACK_RATIO, 0.0, 1.0)


def test_a_short_match_allows_less_than_a_long_one() -> None:
    assert may_follow(0.5, 0.4, 1.0)
    assert not may_follow(0.5, 0.4, 0.2)
    assert may_follow(0.4, 0.4, 0.0)


# -- in a pool ----------------------------------------------------------------------------------------------------


def test_turns_of_a_conversation_stay_on_their_engine() -> None:
    home = house(chat=THREE, capacity_tokens=10_000)
    prompt = SYSTEM
    first = ask(home, "t0", prompt, sample=0.4)

    for turn in range(1, 20):
        home.finish(f"t{turn - 1}")
        prompt += RNG.randbytes(500)
        again = ask(home, f"t{turn}", prompt, sample=turn / 20)
        assert (again.engine, again.affinity) == (first.engine, HIT)

    assert first.affinity is NONE


def test_a_loaded_engine_is_left_and_the_conversation_goes_on_where_it_went() -> None:
    home = house(chat=THREE, capacity_tokens=1_000)
    first = ask(home, "a", SYSTEM)
    home.finish("a")
    home.offer("load", CHAT, 100, only=first.engine)

    moved = ask(home, "b", SYSTEM)
    home.finish("b", "load")
    after = ask(home, "c", SYSTEM)

    assert moved.affinity is MOVED
    assert moved.engine != first.engine
    assert (after.engine, after.affinity) == (moved.engine, HIT)


@pytest.mark.parametrize("why", ["excluded", "down", "paused", "full"])
def test_an_engine_that_may_not_take_it_is_not_followed(why: str) -> None:
    home = house(chat=THREE, capacity_tokens=1_000)
    near = ask(home, "a", SYSTEM).engine
    home.finish("a")
    if why == "down":
        home.serving(near, False)
    elif why == "paused":
        home.admission.pause(near, home.now_s + 1)
    elif why == "full":
        for number in range(8):
            home.offer(f"seat{number}", CHAT, 0, only=near)
    excluded = frozenset({near}) if why == "excluded" else frozenset()

    decision = home.offer("b", CHAT, 1, prefix=prefix_of(SYSTEM), excluded=excluded)

    assert isinstance(decision, Admitted)
    assert decision.engine != near
    assert decision.affinity is MOVED


def test_where_there_is_no_choice_nothing_is_said_of_affinity() -> None:
    home = house(chat=("c1",))

    decision = ask(home, "a", SYSTEM)
    short = house(chat=THREE).offer("b", CHAT, 1, prefix=prefix_of(b"short"))

    assert decision.affinity is None
    assert isinstance(short, Admitted)
    assert short.affinity is None


def test_batch_follows_its_documents_too() -> None:
    home = house(chat=(), batch=("b1", "b2", "b3"), capacity_tokens=10_000)
    seen = set()

    for number in range(6):
        decision = home.offer(f"r{number}", BATCH, 1, prefix=prefix_of(SYSTEM), sample=number / 6)
        assert isinstance(decision, Admitted)
        seen.add(decision.engine)
        home.finish(f"r{number}")

    assert len(seen) == 1


def test_models_do_not_meet() -> None:
    one, other = house(chat=THREE, capacity_tokens=1_000), house(chat=THREE, capacity_tokens=1_000)
    ask(one, "a", SYSTEM)

    assert ask(other, "a", SYSTEM).affinity is NONE


# -- a workload ---------------------------------------------------------------------------------------------------


def test_conversations_find_their_cache_and_the_load_stays_even() -> None:
    load = Load(chats_per_s=6.0, seconds=60.0)

    plain = play(load, seed=2, with_affinity=False)
    near = play(load, seed=2, with_affinity=True)

    assert near.same_engine_ratio > 0.8 > 0.4 > plain.same_engine_ratio
    assert near.cached_ratio > plain.cached_ratio + 0.05
    assert near.busiest_ratio < (1 + EXCESS_RATIO) * plain.busiest_ratio


def test_a_short_system_prompt_in_common_does_not_herd_the_pool_on_one_engine() -> None:
    load = Load(chats_per_s=40.0, systems=1, system_bytes=600, turns=1, seconds=20.0)

    plain = play(load, seed=3, with_affinity=False)
    near = play(load, seed=3, with_affinity=True)

    assert plain.load_ratio > 0.1
    assert near.busiest_ratio < plain.busiest_ratio + 0.15
    assert near.refused == plain.refused == 0


def test_a_full_pool_refuses_no_more_for_affinity() -> None:
    load = Load(chats_per_s=100.0, system_bytes=8_000, turns=2, seconds=12.0)

    plain = play(load, seed=4, with_affinity=False)
    near = play(load, seed=4, with_affinity=True)

    assert plain.refused > 0
    assert near.refused < 1.1 * plain.refused
