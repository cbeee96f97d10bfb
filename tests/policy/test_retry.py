"""What may be sent again: the table of `policy/retry.py`, row by row."""

import pytest

from router.policy.retry import AttemptBudget, Failure, RetryRules

STARTED = (Failure.LOST, Failure.FIRST_BYTE_LATE, Failure.SERVER_ERROR)
NOT_STARTED = tuple(failure for failure in Failure if failure not in STARTED)


def budget(attempts_max: int = 3, *, retry_started: bool = False) -> AttemptBudget:
    begun = AttemptBudget(RetryRules(attempts_max, retry_started))
    begun.begin()
    return begun


@pytest.mark.parametrize("failure", NOT_STARTED)
def test_what_cannot_have_started_is_sent_again_until_the_budget_is_spent(failure: Failure) -> None:
    attempts = budget(3)

    answers = []
    for _ in range(3):
        answers.append(attempts.may_try_again(failure))
        attempts.begin()

    assert answers == [True, True, False]


@pytest.mark.parametrize("failure", STARTED)
def test_what_may_have_started_is_not_sent_again_unless_the_operator_says_so(failure: Failure) -> None:
    assert failure.can_have_started
    assert not budget().may_try_again(failure)
    assert budget(retry_started=True).may_try_again(failure)


def test_what_may_have_started_is_sent_again_once_at_most() -> None:
    attempts = budget(10, retry_started=True)
    assert attempts.may_try_again(Failure.LOST)
    attempts.begin()
    assert attempts.may_try_again(Failure.CONNECT_FAILED)
    attempts.begin()

    assert not attempts.may_try_again(Failure.SERVER_ERROR)


def test_a_budget_of_one_allows_one_attempt_whatever_failed() -> None:
    assert not any(budget(1, retry_started=True).may_try_again(failure) for failure in Failure)


def test_an_attempt_that_was_never_taken_costs_nothing() -> None:
    attempts = budget(1)

    attempts.forgive()

    assert not attempts.is_spent
    assert attempts.may_try_again(Failure.BUSY)


def test_what_somebody_has_to_mend_does_not_pass_by_itself() -> None:
    passing = {failure for failure in Failure if failure.passes}

    assert passing == {Failure.CONNECT_FAILED, Failure.BUSY, Failure.ABORTED_EMPTY, Failure.SHUTTING_DOWN}
