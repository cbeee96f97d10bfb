"""The upper quantile of what was seen lately."""

import random

from router.policy.quantile import RecentQuantile


def test_until_enough_was_seen_it_says_what_it_was_given() -> None:
    quantile = RecentQuantile(initial=512, least=32)

    for _ in range(31):
        quantile.note(7)

    assert quantile.value == 512


def test_it_is_a_value_that_was_seen_and_that_few_exceed() -> None:
    rng = random.Random(1)
    quantile = RecentQuantile(initial=0)
    values = [int(rng.lognormvariate(5, 1)) for _ in range(512)]

    for value in values:
        quantile.note(value)

    assert quantile.value in values
    assert sum(value > quantile.value for value in values) <= 0.01 * len(values)


def test_it_forgets_what_left_the_window() -> None:
    quantile = RecentQuantile(initial=0, window=64)
    for _ in range(64):
        quantile.note(10_000)

    for _ in range(64):
        quantile.note(10)

    assert quantile.value == 10
