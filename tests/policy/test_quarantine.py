"""Prompts that engines die of are kept from the next engine; prompts that only were there are not."""

import random

import pytest

from router.policy.quarantine import CONFIRM_S, CROWD_MAX, DEATHS_MAX, PROMPTS_MAX, QUARANTINE_S, Quarantine

POISON, OTHER = b"poison", b"other"
NO_TOKENS: dict[str, float] = {}


def crowd(size: int) -> list[bytes]:
    return [b"innocent-%d" % number for number in range(size)]


def death(memory: Quarantine, engine: str, at_s: float, *prompts: bytes) -> None:
    for prompt in prompts:
        memory.lost(prompt, engine, at_s)
    memory.died(engine, at_s + 1)


def is_held(memory: Quarantine, prompt: bytes, now_s: float) -> bool:
    return memory.until_s(prompt, now_s, NO_TOKENS) is not None


def test_a_prompt_that_two_engines_died_of_is_in_quarantine_for_ten_minutes_after_the_second() -> None:
    memory = Quarantine()
    death(memory, "a", 0.0, POISON)
    once = is_held(memory, POISON, 50.0)
    death(memory, "b", 100.0, POISON)

    assert not once
    assert memory.until_s(POISON, 102.0, NO_TOKENS) == 100.0 + QUARANTINE_S
    assert is_held(memory, POISON, 99.0 + QUARANTINE_S)
    assert not is_held(memory, POISON, 100.0 + QUARANTINE_S)
    assert not is_held(memory, OTHER, 102.0)


def test_one_engine_killed_twice_counts_too() -> None:
    memory = Quarantine()
    death(memory, "a", 0.0, POISON)
    death(memory, "a", 120.0, POISON)

    assert is_held(memory, POISON, 122.0)


def test_deaths_that_are_far_apart_have_nothing_to_do_with_each_other() -> None:
    memory = Quarantine()
    death(memory, "a", 0.0, POISON)
    death(memory, "b", QUARANTINE_S + 1, POISON)

    assert not is_held(memory, POISON, QUARANTINE_S + 2)


def test_a_lost_connection_of_an_engine_that_lives_is_forgotten() -> None:
    memory = Quarantine()
    for engine in ("a", "b", "c"):
        memory.lost(POISON, engine, 0.0)

    assert not memory.until_s(POISON, 1.0, {"a": 0.5, "b": 0.5, "c": 0.5})
    assert not is_held(memory, POISON, CONFIRM_S + 1)
    assert not memory.deaths


def test_a_prompt_sent_again_at_once_does_not_reach_a_third_engine_before_the_deaths_are_certain() -> None:
    memory = Quarantine()
    memory.lost(POISON, "a", 0.0)
    memory.lost(POISON, "b", 0.1)

    assert memory.until_s(POISON, 0.2, NO_TOKENS) == pytest.approx(0.1 + CONFIRM_S)
    memory.died("a", 0.7)
    memory.died("b", 0.8)
    assert memory.until_s(POISON, 0.9, NO_TOKENS) == pytest.approx(0.1 + QUARANTINE_S)


def test_many_losses_of_one_death_count_once() -> None:
    memory = Quarantine()
    for at_s in (0.0, 1.0, 2.0):
        memory.lost(POISON, "a", at_s)
    memory.died("a", 3.0)
    memory.lost(POISON, "a", 4.0)

    assert not is_held(memory, POISON, 5.0)


def test_a_token_for_the_same_prompt_clears_it() -> None:
    memory = Quarantine()
    death(memory, "a", 0.0, POISON)
    death(memory, "b", 10.0, POISON)

    memory.cleared(POISON)

    assert not is_held(memory, POISON, 12.0)
    assert not memory.deaths


def test_two_deaths_with_a_crowd_in_common_hold_nobody() -> None:
    memory = Quarantine()
    everybody = crowd(100)
    death(memory, "a", 0.0, *everybody)
    death(memory, "b", 30.0, *everybody)

    assert not any(is_held(memory, prompt, 32.0) for prompt in everybody)


def test_what_remains_in_common_when_the_others_have_lived_is_the_one_at_fault() -> None:
    memory = Quarantine()
    everybody = crowd(100)
    death(memory, "a", 0.0, POISON, *everybody)
    death(memory, "b", 30.0, POISON, *everybody[:33])
    before = is_held(memory, POISON, 31.5)

    for prompt in everybody:
        memory.cleared(prompt)

    assert not before
    assert is_held(memory, POISON, 40.0)


@pytest.mark.parametrize(("common", "is_quarantined"), [(CROWD_MAX, True), (CROWD_MAX + 1, False)])
def test_only_a_few_may_be_common_to_two_deaths(common: int, is_quarantined: bool) -> None:
    memory = Quarantine()
    death(memory, "a", 0.0, *crowd(common), b"only here")
    death(memory, "b", 1.0, *crowd(common), b"only there")

    assert [is_held(memory, prompt, 3.0) for prompt in crowd(common)] == [is_quarantined] * common


def test_crowds_in_which_only_the_poison_is_common_show_it_at_the_second_death() -> None:
    memory = Quarantine()
    rng = random.Random(1)
    first, second = crowd(200)[:100], crowd(200)[100:]
    rng.shuffle(first)
    death(memory, "a", 0.0, *first, POISON)
    death(memory, "b", 5.0, POISON, *second)

    held = [prompt for prompt in [POISON, *first, *second] if is_held(memory, prompt, 7.0)]

    assert held == [POISON]


def test_memory_is_bounded() -> None:
    memory = Quarantine()
    for number in range(3 * DEATHS_MAX):
        death(memory, f"e{number}", float(number), *crowd(PROMPTS_MAX + 50))

    assert len(memory.deaths) <= DEATHS_MAX
    assert max(len(each.prompts) for each in memory.deaths) <= PROMPTS_MAX


def test_nothing_is_asked_while_nothing_was_lost() -> None:
    memory = Quarantine()
    memory.died("a", 0.0)
    memory.cleared(POISON)

    assert not memory.deaths
