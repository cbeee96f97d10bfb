"""The report: names and definitions of `vllm bench serve`, failures never counted as fast answers."""

import json
import math
from array import array

import pytest

from router.policy.demand import RequestClass
from router.sim.load import RequestResult, RouterHeaders
from router.sim.measures import Slo, parse_duration_s, parse_slos, percentile, stats, tpot_ms
from router.sim.report import ERRORS_MAX, report


def _done(
    index: int = 0,
    *,
    request_class: RequestClass = RequestClass.CHAT,
    intended_at_s: float = 0.0,
    sent_at_s: float | None = None,
    ttft_s: float = 0.1,
    last_s: float = 1.1,
    prompt_tokens: int | None = 100,
    completion_tokens: int | None = 11,
    gaps_s: tuple[float, ...] = (0.5, 0.5),
    router: RouterHeaders | None = None,
) -> RequestResult:
    """A completed request; `ttft_s` and `last_s` count from its intended time."""
    return RequestResult(
        index=index,
        request_class=request_class,
        planned_tokens=90,
        intended_at_s=intended_at_s,
        sent_at_s=intended_at_s if sent_at_s is None else sent_at_s,
        first_content_at_s=intended_at_s + ttft_s,
        last_content_at_s=intended_at_s + last_s,
        ended_at_s=intended_at_s + last_s,
        ending="completed",
        status=200,
        content_chunks=len(gaps_s) + 1,
        gaps_s=array("d", gaps_s),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        router=router or RouterHeaders(),
    )


def _failed(ending: str, reason: str = "", *, first_content_at_s: float | None = None) -> RequestResult:
    return RequestResult(
        index=0,
        request_class=RequestClass.CHAT,
        planned_tokens=90,
        intended_at_s=0.0,
        sent_at_s=0.0,
        first_content_at_s=first_content_at_s,
        ended_at_s=0.001,
        ending=ending,
        reason=reason,
    )


def test_latency_counts_from_the_intended_time_and_the_send_is_told_apart() -> None:
    late = _done(intended_at_s=5.0, sent_at_s=7.0, ttft_s=2.5, last_s=3.5)

    fields = report([late], duration_s=10.0).fields()

    assert fields["mean_ttft_ms"] == 2500.0
    assert fields["mean_ttft_from_send_ms"] == 500.0
    assert fields["mean_e2el_ms"] == 3500.0
    assert fields["late_sends"] == 1


def test_pace_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    several = _done(ttft_s=0.1, last_s=1.1, completion_tokens=11, gaps_s=(0.25, 0.75))
    single = _done(ttft_s=0.1, last_s=0.1, completion_tokens=1, gaps_s=())
    unknown = _done(completion_tokens=None)

    fields = report([several, single, unknown], duration_s=10.0).fields()

    assert fields["mean_tpot_ms"] == 100.0
    assert (tpot_ms(single), tpot_ms(unknown)) == (None, None)
    assert fields["usage_missing"] == 1


def test_itl_is_the_gap_between_chunks_not_between_tokens() -> None:
    result = _done(gaps_s=(0.2, 0.4))

    fields = report([result], duration_s=1.0).fields()

    assert (fields["mean_itl_ms"], fields["median_itl_ms"], fields["std_itl_ms"]) == (300.0, 300.0, 100.0)


def test_every_name_of_vllm_bench_serve_is_there() -> None:
    fields = report([_done()], duration_s=2.0).fields()

    names = {
        f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl", "e2el")
    }
    names |= {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"}
    names |= {"request_goodput", "output_throughput", "total_token_throughput"}

    assert names <= fields.keys()
    assert fields["request_throughput"] == 0.5
    assert (fields["total_input_tokens"], fields["output_throughput"], fields["total_token_throughput"]) == (
        100,
        5.5,
        55.5,
    )
    json.dumps(fields, allow_nan=False)


def test_failures_are_left_out_of_latencies_and_counted_by_kind() -> None:
    results = [
        *(_done(ttft_s=1.0) for _ in range(6)),
        _failed("http_503", "busy"),
        _failed("empty_stream"),
        _failed("error_in_stream", "500: m", first_content_at_s=0.001),
        _failed("cut", first_content_at_s=0.001),
    ]

    made = report(results, duration_s=1.0)
    fields = made.fields()

    assert (fields["arrivals"], fields["completed"], fields["failed"]) == (10, 6, 4)
    assert made.total.failed_ratio == 0.4
    assert sum(fields["outcomes"].values()) == 10
    assert fields["mean_ttft_ms"] == 1000.0
    assert fields["total_output_tokens"] == 66
    assert {error["outcome"]: error["count"] for error in fields["errors"]} == {
        "http_503": 1,
        "empty_stream": 1,
        "error_in_stream": 1,
        "cut": 1,
    }


def test_over_all_arrivals_a_failed_request_waits_for_ever() -> None:
    results = [*(_done(ttft_s=1.0) for _ in range(8)), _failed("cut"), _failed("cut"), _failed("interrupted")]

    over_all = report(results, duration_s=1.0).fields()["ttft_all_arrivals_ms"]

    assert over_all["p50"] == 1000.0
    assert over_all["p99"] is None


def test_what_the_user_stopped_is_neither_served_nor_failed() -> None:
    made = report([_done(), _failed("interrupted")], duration_s=1.0)

    assert (made.total.arrivals, made.total.completed, made.total.failed, made.total.interrupted) == (2, 1, 0, 1)
    assert made.total.failed_ratio == 0.0


def test_goodput_is_what_kept_every_promise_of_its_class() -> None:
    slos = parse_slos("chat.ttft=200ms,chat.tpot=110ms,batch.e2e=8h")
    results = [
        _done(ttft_s=0.1, last_s=1.1),
        _done(ttft_s=0.3, last_s=1.1),
        _done(ttft_s=0.1, last_s=2.1),
        _done(ttft_s=0.1, last_s=0.1, completion_tokens=1, gaps_s=()),
        _done(request_class=RequestClass.BATCH, ttft_s=3_600.0, last_s=7_200.0),
        _failed("http_429"),
    ]

    made = report(results, duration_s=2.0, slos=slos)

    assert made.total.good == 3
    assert made.total.fields()["request_goodput"] == 1.5
    assert made.total.fields()["good_ratio"] == 0.5
    assert made.classes[RequestClass.CHAT].good == 2
    assert report(results, duration_s=2.0).fields()["request_goodput"] is None


def test_headers_of_the_router_are_counted_with_a_bound() -> None:
    results = [_done(router=RouterHeaders(pool="chat", engine=f"e{n}", queue_wait_ms=float(n))) for n in range(100)]

    fields = report(results, duration_s=1.0).fields()

    assert fields["by_pool"] == {"chat": 100}
    assert len(fields["by_engine"]) == 65
    assert fields["by_engine"]["other"] == 36
    assert fields["median_queue_wait_ms"] == 49.5


def test_reasons_are_listed_with_a_bound_and_nothing_is_lost() -> None:
    results = [_failed("cut", f"reason {n}") for n in range(ERRORS_MAX + 7)]

    errors = report(results, duration_s=1.0).errors

    assert len(errors) == ERRORS_MAX + 1
    assert sum(count for *_, count in errors) == ERRORS_MAX + 7
    assert errors[-1][1] == "more"


def test_few_samples_are_said_to_be_few() -> None:
    few = report([_done() for _ in range(50)], duration_s=1.0).total.notes
    enough = report([_done() for _ in range(1_000)], duration_s=1.0).total.notes

    assert few == ("too few for a steady p90, p95, p99: 50 requests completed, 100, 200, 1000 are wanted",)
    assert enough == ()
    assert report([_failed("cut")], duration_s=1.0).total.notes == ("no request completed: there are no latencies",)


def test_no_results_at_all_make_a_report_of_zeros() -> None:
    fields = report([], duration_s=0.0).fields()

    assert (fields["arrivals"], fields["request_throughput"], fields["p99_ttft_ms"]) == (0, 0.0, 0.0)
    json.dumps(fields, allow_nan=False)


def test_percentiles_lie_on_the_line_between_neighbours() -> None:
    ordered = [1.0, 2.0, 3.0, 4.0]

    found = [percentile(ordered, percent) for percent in (0, 25, 50, 99, 100)]

    assert found == pytest.approx([1.0, 1.75, 2.5, 3.97, 4.0])
    assert percentile([7.0], 99) == 7.0
    assert math.isinf(percentile([1.0, math.inf], 50))
    assert stats([2.0, 4.0], (50.0,)).std == 1.0


def test_slos_are_read_with_their_units() -> None:
    slos = parse_slos("chat.ttft=1s, batch.e2e=8h,chat.tpot=0.5ms")

    assert slos == (
        Slo(RequestClass.CHAT, "ttft", 1_000.0),
        Slo(RequestClass.BATCH, "e2el", 28_800_000.0),
        Slo(RequestClass.CHAT, "tpot", 0.5),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chat.ttft", "not CLASS.METRIC=DURATION"),
        ("ttft=1s", "not CLASS.METRIC=DURATION"),
        ("long.ttft=1s", "classes are chat, batch"),
        ("chat.speed=1s", "metrics are ttft, tpot and e2e"),
        ("chat.ttft=1", "not a duration"),
        ("chat.ttft=-1s", "not a duration"),
        ("chat.ttft=0s", "above 0"),
        ("chat.e2e=1s,chat.e2el=2s", "twice"),
        ("", "not CLASS.METRIC=DURATION"),
    ],
)
def test_a_wrong_slo_is_refused_with_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_slos(text)


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("20s", 20.0), ("1.5m", 90.0), (" 8h ", 28_800.0)])
def test_durations_are_read_with_their_units(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)
