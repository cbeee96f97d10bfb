"""A demo run is good only if the engines' own logs agree with what the clients got."""

from collections.abc import Sequence

import pytest

from router.cli._verdict import Seen, Sight, demo_fields, judge
from router.policy.demand import RequestClass
from router.sim.load import RequestResult, RouterHeaders

_CHAT, _BATCH = RequestClass.CHAT, RequestClass.BATCH


def _result(
    request_class: RequestClass = _CHAT,
    ending: str = "completed",
    reason: str = "",
    router: RouterHeaders | None = None,
) -> RequestResult:
    return RequestResult(
        index=0,
        request_class=request_class,
        planned_tokens=10,
        intended_at_s=0.0,
        ended_at_s=1.0,
        ending=ending,
        reason=reason,
        sent_at_s=0.0,
        first_content_at_s=0.5 if ending == "completed" else None,
        router=router or RouterHeaders(pool=request_class.value, request_id="r"),
    )


def _sight(chat: Sequence[int] = (), batch: Sequence[int] = (), batch_id: str | None = None) -> Sight:
    return Sight(
        chat=[Seen(tokens, None, 200) for tokens in chat],
        batch=[Seen(tokens, batch_id, 200) for tokens in batch],
        relay=[],
        threshold_tokens=3_000,
    )


def _arrived(chat: int = 0, batch: int = 0) -> dict[RequestClass, int]:
    return {_CHAT: chat, _BATCH: batch}


def test_a_run_in_which_everything_is_where_it_belongs_is_good() -> None:
    results = [_result(), _result(_BATCH)]

    verdict = judge(results, _arrived(1, 1), _sight(chat=[50], batch=[9_000, 20]))

    assert verdict.is_good
    assert verdict.misrouted == {_CHAT: 0, _BATCH: 0}


def test_an_arrival_without_an_outcome_is_found() -> None:
    verdict = judge([_result()], _arrived(2), _sight())

    assert not verdict.is_good
    assert verdict.problems == ("2 requests arrived but 1 have an outcome",)


def test_a_long_prompt_in_the_chat_engines_log_is_misrouted_whatever_the_client_was_told() -> None:
    verdict = judge([_result(_BATCH)], _arrived(0, 1), _sight(chat=[9_000]))

    assert verdict.misrouted[_BATCH] == 1
    assert not verdict.is_good


@pytest.mark.parametrize(
    ("router", "sight", "is_good"),
    [
        (RouterHeaders(pool="batch", reason="below_threshold"), _sight(), False),
        (RouterHeaders(pool="batch", reason="below_threshold,borrowed"), _sight(), True),
        (RouterHeaders(pool="chat", reason="below_threshold", request_id="r"), _sight(batch=[20], batch_id="r"), False),
        (RouterHeaders(pool="chat", reason="below_threshold", request_id="r"), _sight(batch=[20], batch_id="x"), True),
        (RouterHeaders(relay="outside"), _sight(), True),
    ],
)
def test_a_chat_on_the_batch_engine_must_have_been_borrowed(router: RouterHeaders, sight: Sight, is_good: bool) -> None:
    verdict = judge([_result(router=router)], _arrived(1), sight)

    assert verdict.is_good is is_good
    assert verdict.misrouted[_CHAT] == (0 if is_good else 1)


@pytest.mark.parametrize(
    ("ending", "reason", "is_good"),
    [
        ("http_429", "chat_full: come again in 2 s", True),
        ("http_503", "queue_full: come again in 9 s", True),
        ("interrupted", "the run was stopped", True),
        ("http_429", "", False),
        ("http_500", "internal_error: a bug", False),
        ("cut", "ended before [DONE]", False),
        ("timeout", "no end within 120 s", False),
    ],
)
def test_a_failure_needs_an_explanation(ending: str, reason: str, is_good: bool) -> None:
    verdict = judge([_result(ending=ending, reason=reason)], _arrived(1), _sight())

    assert verdict.is_good is is_good


def test_problems_are_listed_with_a_bound_and_counted_without() -> None:
    results = [_result(ending="cut") for _ in range(50)]

    verdict = judge(results, _arrived(50), _sight())

    assert len(verdict.problems) == 20
    assert verdict.problem_count == 50


def test_the_object_adds_up() -> None:
    results = [_result(), _result(_BATCH), _result(ending="http_429", reason="full")]
    sight = _sight(chat=[50, 60], batch=[9_000])
    verdict = judge(results, _arrived(2, 1), sight)

    fields = demo_fields(results, _arrived(2, 1), sight, verdict, duration_s=2.0)

    assert fields["ok"] is True
    assert fields["arrivals"] == fields["outcomes_sum"] == 3
    assert fields["classes"]["chat"]["sent"] == 2
    assert fields["classes"]["chat"]["outcomes"] == {"completed": 1, "http_429": 1}
    assert fields["classes"]["chat"]["ttft_ms"] == {"p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert fields["classes"]["batch"]["queue_wait_ms"]["p50"] is None
    assert fields["engines"]["chat"] == {
        "requests": 2,
        "chat_size": 2,
        "batch_size": 0,
        "longest_prompt_tokens": 60,
        "statuses": {"200": 2},
        "prompt_tokens_p50": 55,
    }
