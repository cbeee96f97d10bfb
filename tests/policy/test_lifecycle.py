"""When an engine is sent requests and when not."""

import itertools
import random

import pytest

from router.policy.lifecycle import (
    EngineState,
    Lifecycle,
    LifecycleEvent,
    LifecycleRules,
    advance,
    new_lifecycle,
)

E = LifecycleEvent
S = EngineState


def after(*events: LifecycleEvent, life: Lifecycle | None = None, now_s: float = 0.0) -> Lifecycle:
    life = life or new_lifecycle(now_s)
    for event in events:
        life = advance(life, event, now_s)
    return life


def serving(now_s: float = 0.0) -> Lifecycle:
    return after(E.PROBE_OK, E.WORK_OK, now_s=now_s)


def test_health_alone_never_brings_an_engine_in() -> None:
    life = after(*[E.PROBE_OK] * 100)

    assert life.state is S.LOADING
    assert life.wants_work(0)


def test_a_loading_engine_says_whether_it_is_there_yet_and_why_it_gives_no_token() -> None:
    refused = after(E.PROBE_REFUSED)
    there = after(E.PROBE_OK, life=refused)
    failed = advance(there, E.WORK_FAILED, 0, "why")

    assert "refused" in refused.reason
    assert "answers" in there.reason
    assert after(E.PROBE_OK, life=failed).reason == "why"


def test_one_token_brings_an_engine_in() -> None:
    life = after(E.PROBE_REFUSED, E.PROBE_REFUSED, E.PROBE_OK, E.WORK_OK)

    assert life.state is S.SERVING
    assert not life.wants_work(0)


def test_an_engine_that_refuses_before_it_was_ever_up_is_loading_not_down() -> None:
    assert after(*[E.PROBE_REFUSED] * 10).state is S.LOADING


@pytest.mark.parametrize(
    "signs",
    [(E.PROBE_REFUSED, E.PROBE_REFUSED), (E.PROBE_REFUSED, E.CONNECT_FAILED), (E.CONNECT_FAILED, E.PROBE_REFUSED)],
)
def test_two_signs_of_refusal_of_which_one_is_a_probe_take_it_down(signs: tuple[LifecycleEvent, ...]) -> None:
    assert after(signs[0], life=serving()).state is S.SERVING
    assert after(*signs, life=serving()).state is S.DOWN


def test_failed_connections_of_traffic_alone_do_not_take_it_down() -> None:
    assert after(*[E.CONNECT_FAILED] * 50, life=serving()).state is S.SERVING


def test_a_probe_that_gets_through_forgets_refusals() -> None:
    events = [E.PROBE_REFUSED, E.PROBE_OK] * 10 + [E.PROBE_REFUSED, E.PROBE_SLOW] * 10

    assert after(*events, life=serving()).state is S.SERVING


def test_a_slow_health_page_never_takes_it_out() -> None:
    life = serving()
    for now_s in range(1000):
        life = advance(life, E.PROBE_SLOW, now_s)

    assert life.state is S.SERVING
    assert life.wants_work(1000)


def test_an_engine_slow_to_answer_is_asked_for_a_token_only_where_no_traffic_vouches_for_it() -> None:
    life = advance(advance(serving(), E.REQUEST_OK, 100), E.PROBE_SLOW, 105)

    assert not life.wants_work(105)
    assert life.wants_work(111)


def test_an_idle_engine_is_asked_for_a_token_now_and_then() -> None:
    life = advance(serving(), E.PROBE_OK, 29)

    assert not life.wants_work(29)
    assert life.wants_work(30)
    assert not advance(life, E.REQUEST_OK, 30).wants_work(59)


def test_a_token_not_given_takes_it_down_unless_traffic_got_some_lately() -> None:
    assert advance(serving(0), E.WORK_FAILED, 11).state is S.DOWN
    assert advance(advance(serving(0), E.REQUEST_OK, 5), E.WORK_FAILED, 11).state is S.SERVING


def test_a_counter_of_tokens_that_grows_vouches_for_a_serving_engine_and_brings_none_in() -> None:
    life = advance(serving(0), E.TOKENS_SEEN, 100)

    assert advance(life, E.WORK_FAILED, 105).state is S.SERVING
    assert not life.wants_work(129)
    assert after(E.PROBE_OK, E.TOKENS_SEEN).state is S.LOADING


def test_requests_lost_or_late_in_a_row_take_it_down() -> None:
    assert after(E.REQUEST_LOST, E.REQUEST_TIMEOUT, life=serving()).state is S.SERVING
    assert after(E.REQUEST_LOST, E.REQUEST_TIMEOUT, E.REQUEST_LOST, life=serving()).state is S.DOWN


def test_a_success_between_losses_keeps_it_in() -> None:
    assert after(*[E.REQUEST_LOST, E.REQUEST_LOST, E.REQUEST_OK] * 10, life=serving()).state is S.SERVING


def test_an_unreachable_engine_whose_streams_go_on_stays_and_one_without_goes() -> None:
    busy = advance(advance(serving(0), E.PROBE_UNREACHABLE, 1), E.PROBE_UNREACHABLE, 2)
    gone = advance(advance(serving(0), E.PROBE_UNREACHABLE, 11), E.PROBE_UNREACHABLE, 12)

    assert (busy.state, gone.state) == (S.SERVING, S.DOWN)


def test_a_failing_health_page_takes_it_down_only_where_no_token_comes_between() -> None:
    assert after(E.PROBE_FAILED, E.PROBE_FAILED, life=serving()).state is S.DOWN
    assert after(*[E.PROBE_FAILED, E.REQUEST_OK] * 10, life=serving()).state is S.SERVING


def test_tokens_of_an_old_stream_do_not_bring_back_an_engine_that_refuses_connections() -> None:
    life = after(E.PROBE_REFUSED, E.PROBE_REFUSED, E.REQUEST_OK, life=serving())

    assert life.state is S.DOWN
    assert after(E.PROBE_OK, E.REQUEST_OK, life=life).state is S.SERVING


def test_an_engine_that_shuts_down_drains_until_it_gives_a_token_to_a_new_request() -> None:
    life = after(E.SHUTDOWN_SEEN, E.PROBE_OK, E.REQUEST_OK, life=serving())

    assert life.state is S.DRAINING
    assert after(E.PROBE_REFUSED, E.PROBE_REFUSED, life=life).state is S.DOWN
    assert after(E.WORK_OK, life=life).state is S.SERVING


def test_what_the_operator_drains_stays_out_until_it_is_put_back_and_gives_a_token() -> None:
    life = after(E.DRAIN, E.WORK_OK, E.PROBE_OK, E.REQUEST_OK, E.UNDRAIN, life=serving())
    drained = after(E.DRAIN, E.WORK_OK, E.PROBE_REFUSED, E.PROBE_REFUSED, life=serving())

    assert drained.state is S.DRAINING
    assert not drained.wants_work(0)
    assert life.state is S.LOADING
    assert after(E.WORK_OK, life=life).state is S.SERVING


def test_a_sleeping_engine_is_left_alone_until_it_wakes_and_gives_a_token() -> None:
    life = after(E.ASLEEP, E.PROBE_OK, E.REQUEST_OK, life=serving())

    assert life.state is S.ASLEEP
    assert not life.wants_work(1000)
    assert after(E.AWAKE, life=life).state is S.LOADING
    assert after(E.AWAKE, E.WORK_OK, life=life).state is S.SERVING


def test_the_time_of_a_state_is_when_it_began() -> None:
    life = advance(advance(serving(now_s=3), E.PROBE_OK, 4), E.REQUEST_OK, 5)

    assert life.since_s == 3
    assert advance(life, E.DRAIN, 9).since_s == 9


def test_the_counts_are_rules() -> None:
    rules = LifecycleRules(refusals_to_down=4, losses_to_down=1)
    life = after(E.WORK_OK, life=new_lifecycle(0, rules))

    assert after(*[E.PROBE_REFUSED] * 3, life=life).state is S.SERVING
    assert after(E.REQUEST_LOST, life=life).state is S.DOWN


def test_no_sequence_of_events_brings_an_engine_in_without_a_token() -> None:
    for events in itertools.product([e for e in E if e not in (E.WORK_OK, E.REQUEST_OK)], repeat=3):
        assert after(*events).state is not S.SERVING


def test_whatever_happened_an_engine_that_answers_and_gives_a_token_serves_again() -> None:
    rng = random.Random(11)
    for _ in range(500):
        life = after(*rng.choices(list(E), k=12))

        again = after(E.UNDRAIN, E.AWAKE, E.PROBE_OK, E.WORK_OK, life=life)

        assert again.state is S.SERVING
        assert again.reason


# -- engines that fail what clients send --------------------------------------------------------------------------


def failing(now_s: float = 0.0) -> Lifecycle:
    """Taken out by three answers of 5xx in a row."""
    return after(*[E.REQUEST_FAILED] * 3, life=serving(now_s), now_s=now_s)


def test_three_answers_of_5xx_in_a_row_take_it_out_and_two_do_not() -> None:
    assert after(*[E.REQUEST_FAILED] * 2, life=serving()).state is S.SERVING
    assert failing().state is S.DOWN
    assert after(*[E.REQUEST_FAILED, E.REQUEST_FAILED, E.REQUEST_OK] * 10, life=serving()).state is S.SERVING


def test_only_one_that_answers_and_can_be_reached_is_said_to_fail() -> None:
    lost = after(*[E.REQUEST_LOST] * 3, life=serving())
    gone = after(E.PROBE_REFUSED, life=failing())
    back = after(E.WORK_OK, life=failing())

    assert (failing().is_failing, lost.is_failing, gone.is_failing, back.is_failing) == (True, False, False, False)
    assert gone.reason != failing().reason


def test_back_from_a_relapse_a_single_failure_takes_it_out_until_a_client_got_tokens() -> None:
    back = after(E.WORK_OK, life=failing())

    assert back.state is S.SERVING
    for failure in (E.REQUEST_FAILED, E.REQUEST_LOST, E.REQUEST_TIMEOUT):
        assert after(failure, life=back).state is S.DOWN
        assert after(E.REQUEST_OK, failure, failure, life=back).state is S.SERVING


def test_each_relapse_in_a_row_keeps_it_away_longer_up_to_the_interval_of_an_idle_one() -> None:
    life, now_s, waits = failing(), 0.0, []
    for _ in range(8):
        waits.append(next(wait_s for wait_s in range(100) if life.wants_work(now_s + wait_s)))
        now_s += 1_000.0
        life = advance(advance(life, E.WORK_OK, now_s), E.REQUEST_FAILED, now_s)
        assert life.state is S.DOWN

    assert waits == [0, 2, 4, 8, 16, 30, 30, 30]


def test_tokens_for_a_client_bring_a_failing_engine_back_and_end_the_row() -> None:
    life = after(E.WORK_OK, E.REQUEST_FAILED, E.PROBE_OK, E.REQUEST_OK, life=failing())

    assert (life.state, life.relapses) == (S.SERVING, 0)


def test_an_engine_stuck_with_a_green_health_page_is_out_after_the_idle_interval_and_the_limit_of_a_token() -> None:
    rules, limit_s = LifecycleRules(), 120.0
    life = advance(serving(0), E.REQUEST_OK, 0)
    now_s = 0.0
    while not life.wants_work(now_s):
        life = advance(life, E.PROBE_OK, now_s)
        now_s += 1.0

    life = advance(life, E.WORK_FAILED, now_s + limit_s)

    assert now_s == rules.work_interval_s
    assert life.state is S.DOWN
