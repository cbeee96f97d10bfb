"""The long cases call right what is right, and name what is not; that they run is seen at a small scale by hand."""

from typing import Any

import pytest
from prometheus_client.samples import Sample as MetricSample

from bench import long_prefill, memory_growth, metrics_over_workers, soak_self
from bench.scrape import Series


def _page(**values: float) -> Series:
    return Series(tuple(MetricSample(name, {}, value) for name, value in values.items()))


def test_a_counter_that_falls_or_vanishes_is_noted_and_a_gauge_may_do_as_it_likes() -> None:
    seen = metrics_over_workers.Seen()

    seen.note(_page(one_total=5, two_total=5, three=5), 0.01)
    seen.note(_page(one_total=4, three=1), 0.01)

    assert set(seen.fell) == {"one_total{}", "two_total{}"}


def test_a_page_that_is_late_is_counted() -> None:
    seen = metrics_over_workers.Seen()

    seen.note(_page(), 0.2)
    seen.note(_page(), 0.3)

    assert (seen.pages, seen.late, seen.longest_s) == (2, 1, 0.3)


@pytest.mark.parametrize(
    ("above_s", "at_most_s", "is_right"), [(0.05, 0.1, True), (0.1, 0.2, True), (0.2, 0.5, False), (0.01, 0.05, False)]
)
def test_a_request_is_placed_right_between_the_engines_time_and_the_clients(
    above_s: float, at_most_s: float, is_right: bool
) -> None:
    one = {"engine_took_s": 0.09, "took_s": 0.12, "above_s": above_s, "at_most_s": at_most_s}

    assert metrics_over_workers._is_placed(one) is is_right


def _samples(rss_mib: list[float]) -> list[memory_growth.Sample]:
    return [memory_growth.Sample(at_s * 72.0, rss, 20, 3, 5, 100) for at_s, rss in enumerate(rss_mib)]


def test_growth_in_the_first_sixth_is_warming_up_and_growth_after_it_is_told() -> None:
    rest = memory_growth.Sample(7300.0, 200.0, 20, 3, 0, 0)
    flat = [100.0 + each for each in range(17)] + [200.0] * 84
    growing = [100.0 + each for each in range(101)]

    for rss, is_right in ((flat, True), (growing, False)):
        samples = _samples(rss)
        found = memory_growth.summary(1.0, samples[0], samples, rest) | {"answers": {"ok_200": 1}}
        assert any("an hour" in line for line in memory_growth.faults(found)) is not is_right


def test_what_is_held_at_rest_and_answers_that_nobody_expects_are_told() -> None:
    samples = _samples([100.0] * 101)
    rest = memory_growth.Sample(7300.0, 100.0, 40, 3, 1, 64)
    found = memory_growth.summary(1.0, samples[0], samples, rest) | {"answers": {"broken_0": 2}}

    said = " ".join(memory_growth.faults(found))

    assert "files are open at rest" in said
    assert "1 requests are in flight and 64 tokens held" in said
    assert "broken_0: 2" in said


def _soaked(**changes: Any) -> dict[str, Any]:
    right = {
        "errors": 0,
        "first_error": None,
        "rss_growth_ratio": 0.05,
        "stalls_over_50ms": 0,
        "router_waited_for_cpu_s": 0.06,
        "probe": {"over_50ms": 5, "over_50ms_own": 0, "max_s": 0.01},
        "prompts_counted": 1,
        "streams_done": 1,
    }
    return right | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"errors": 1, "first_error": "HTTP 500"}, "HTTP 500"),
        ({"rss_growth_ratio": 0.051}, "memory grew by 5.1%"),
        ({"stalls_over_50ms": 2}, "over 50 ms 2 times"),
        ({"probe": {"over_50ms": 5, "over_50ms_own": 3, "max_s": 0.09}}, "3 answers of /healthz"),
        ({"prompts_counted": 0}, "no long prompt counted"),
    ],
)
def test_a_soak_that_is_not_flat_says_why(changes: dict[str, Any], said: str) -> None:
    assert soak_self.broken_promises(_soaked()) == []
    assert said in " ".join(soak_self.broken_promises(_soaked(**changes)))


def test_an_answer_that_ends_in_an_error_event_is_not_whole() -> None:
    text = 'data: {"choices": []}\n\ndata: {"error": {"code": "engine_timeout"}}\n\ndata: [DONE]\n\n'
    seen = long_prefill.Seen(200, text, 1.0, 1.0)

    assert seen.error_code == "engine_timeout"
    assert not seen.is_whole
