"""The circuit breaker: what opens it, what closes it, and what it ignores."""

from router.policy.breaker import Breaker, BreakerState, Ending


def fail(breaker: Breaker, times: int, now_s: float = 0.0) -> None:
    for _ in range(times):
        permit = breaker.admit(now_s)
        assert permit is not None
        breaker.end(permit, Ending.FAILURE, now_s)


def test_it_opens_at_the_last_of_so_many_failures_in_a_row() -> None:
    breaker = Breaker(failures=3, open_s=10)

    fail(breaker, 2)
    assert breaker.state(0) is BreakerState.CLOSED
    fail(breaker, 1)

    assert breaker.state(0) is BreakerState.OPEN
    assert breaker.admit(9.9) is None
    assert breaker.retry_after_s(4) == 6


def test_a_success_between_failures_starts_the_count_anew() -> None:
    breaker = Breaker(failures=2, open_s=10)
    fail(breaker, 1)
    permit = breaker.admit(0)
    assert permit is not None

    breaker.end(permit, Ending.SUCCESS, 0)
    fail(breaker, 1)

    assert breaker.state(0) is BreakerState.CLOSED


def test_an_ignored_ending_neither_counts_nor_starts_the_count_anew() -> None:
    breaker = Breaker(failures=2, open_s=10)
    fail(breaker, 1)
    for _ in range(5):
        permit = breaker.admit(0)
        assert permit is not None
        breaker.end(permit, Ending.IGNORED, 0)

    fail(breaker, 1)

    assert breaker.state(0) is BreakerState.OPEN


def test_after_its_time_it_lets_one_trial_through_at_a_time() -> None:
    breaker = Breaker(failures=1, open_s=10)
    fail(breaker, 1)

    trial = breaker.admit(10)

    assert breaker.state(10) is BreakerState.HALF_OPEN
    assert trial is not None
    assert breaker.admit(10) is None
    assert not breaker.can_admit(10)


def test_a_trial_that_succeeds_closes_it_and_one_that_fails_opens_it_again() -> None:
    for ending, state in ((Ending.SUCCESS, BreakerState.CLOSED), (Ending.FAILURE, BreakerState.OPEN)):
        breaker = Breaker(failures=5, open_s=10)
        fail(breaker, 5)
        trial = breaker.admit(10)
        assert trial is not None

        breaker.end(trial, ending, 12)

        assert breaker.state(21) is state


def test_a_trial_that_proves_nothing_makes_room_for_another() -> None:
    breaker = Breaker(failures=1, open_s=10)
    fail(breaker, 1)
    trial = breaker.admit(10)
    assert trial is not None

    breaker.end(trial, Ending.IGNORED, 11)

    assert breaker.state(11) is BreakerState.HALF_OPEN
    assert breaker.admit(11) is not None


def test_calls_of_before_it_opened_no_longer_count() -> None:
    breaker = Breaker(failures=1, open_s=10)
    old = [breaker.admit(0), breaker.admit(0)]
    fail(breaker, 1)

    for permit, ending in zip(old, (Ending.SUCCESS, Ending.FAILURE), strict=True):
        assert permit is not None
        breaker.end(permit, ending, 9)

    assert breaker.state(9) is BreakerState.OPEN
    assert breaker.state(10) is BreakerState.HALF_OPEN


def test_a_permit_given_back_twice_counts_once() -> None:
    breaker = Breaker(failures=2, open_s=10)
    permit = breaker.admit(0)
    assert permit is not None

    breaker.end(permit, Ending.FAILURE, 0)
    breaker.end(permit, Ending.FAILURE, 0)

    assert breaker.state(0) is BreakerState.CLOSED
