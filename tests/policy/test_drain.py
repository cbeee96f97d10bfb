"""How long a refused client is told to stay away."""

import math

import pytest

from router.policy.drain import LONGEST_S, SHORTEST_S, WINDOW_S, DrainMeter


def steady(tokens_per_s: int, *, seconds: int) -> DrainMeter:
    """A meter that has seen `tokens_per_s` in each of the last `seconds`; now is `seconds`."""
    meter = DrainMeter()
    meter.begin(0.0)
    for second in range(seconds):
        meter.begin(float(second))
        meter.note(tokens_per_s, float(second))
    return meter


def test_the_wait_is_what_is_missing_by_the_measured_rate() -> None:
    meter = steady(1_000, seconds=20)

    assert meter.rate_tokens_per_s(20.0) == 1_000
    assert meter.retry_after_s(12_000, 20.0, spread=0.0) == 12.0


def test_clients_that_are_refused_together_do_not_return_together() -> None:
    meter = steady(1_000, seconds=20)

    waits = [meter.retry_after_s(12_000, 20.0, spread=spread) for spread in (0.0, 0.5, 1.0)]

    assert waits == [12.0, 13.5, 15.0]


@pytest.mark.parametrize("spread", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("missing_tokens", [0, 1, 10_000, 10**12])
@pytest.mark.parametrize("seconds", [0, 1, 40])
def test_the_wait_is_never_less_than_a_second_nor_more_than_a_minute(
    missing_tokens: int, seconds: int, spread: float
) -> None:
    wait_s = steady(500, seconds=seconds).retry_after_s(missing_tokens, float(seconds), spread=spread)

    assert SHORTEST_S <= wait_s <= LONGEST_S
    assert 1 <= math.ceil(wait_s) <= 60


def test_a_pool_that_stands_still_says_the_longest_wait_and_spreads_it_too() -> None:
    still = DrainMeter()
    still.begin(0.0)

    waits = [still.retry_after_s(1, 100.0, spread=spread) for spread in (0.0, 1.0)]

    assert waits == [48.0, 60.0]


def test_a_burst_on_an_idle_pool_is_not_told_that_nothing_ever_comes_free() -> None:
    meter = steady(1_000, seconds=2)
    meter.note(1_000, 2.0)
    for _ in range(4):
        meter.begin(500.0)

    at_once = meter.retry_after_s(1_000, 500.0, spread=0.0)
    later = meter.retry_after_s(1_000, 520.0, spread=0.0)
    meter.note(1_000, 521.0)

    assert (at_once, later) == (5.0, 20.0)
    assert meter.retry_after_s(2_000, 521.0, spread=0.0) == 42.0


def test_what_came_back_before_the_window_is_forgotten() -> None:
    meter = steady(1_000, seconds=1)

    assert meter.rate_tokens_per_s(WINDOW_S / 2) == 1_000 / (WINDOW_S / 2)
    assert meter.rate_tokens_per_s(WINDOW_S + 1) == 0.0


def test_memory_stays_at_one_bucket_a_second_of_the_window() -> None:
    meter = DrainMeter()
    meter.begin(0.0)

    for number in range(10_000):
        meter.begin(number / 10)
        meter.note(1, number / 10)

    assert len(meter._buckets) <= WINDOW_S + 1
