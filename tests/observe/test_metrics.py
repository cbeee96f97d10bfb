"""The request series: what one finished request adds, and how the page shows it."""

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.observe import metrics as metrics_module
from router.observe.metrics import OVERHEAD_BUCKETS, SECONDS_BUCKETS, TOKENS_BUCKETS, Metrics
from router.policy.demand import RequestClass
from router.policy.outcome import Outcome
from tests.http.scrape import Metrics as Page
from tests.observe.records import finished


def page(metrics: Metrics) -> Page:
    return Page(metrics.page().decode())


def without_created(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if "_created" not in line]


def family(text: bytes, name: str) -> list[str]:
    return [
        line for line in without_created(text) if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(name)
    ]


def test_a_finished_request_adds_to_each_series_once() -> None:
    metrics = Metrics()

    metrics.arrived()
    metrics.attempted("m", "e", "answered")
    metrics.finish(finished(hold_wait_s=0.004))

    seen = page(metrics)
    chat = {"model": "m", "class": "chat"}
    assert seen.value("router_arrivals_total") == 1
    assert seen.value("router_attempts_total", model="m", target="e", result="answered") == 1
    assert (
        seen.value(
            "router_requests_total",
            endpoint="chat_completions",
            pool="chat",
            target="engine",
            outcome="completed",
            **chat,
        )
        == 1
    )
    assert seen.value("router_classified_total", reason="below_threshold", **chat) == 1
    assert seen.value("router_counted_total", model="m", method="exact") == 1
    assert seen.value("router_prompt_tokens_sum", **chat) == 300
    assert seen.value("router_request_duration_seconds_sum", **chat) == 0.5
    assert seen.value("router_time_to_first_token_seconds_count", pool="chat", **chat) == 1
    assert seen.value("router_overhead_seconds_sum", model="m") == 0.0003
    assert seen.value("router_hold_wait_seconds_sum", model="m") == 0.004
    assert seen.value("router_tokens_total", model="m", tenant="team", kind="prompt") == 300
    assert seen.value("router_tokens_total", model="m", tenant="team", kind="completion") == 20
    assert "router_queue_wait_seconds_count" not in seen.text


def test_a_request_refused_at_the_door_is_an_arrival_and_an_outcome_and_nothing_else() -> None:
    metrics = Metrics()

    metrics.arrived()
    refused = finished(
        endpoint="none",
        model="none",
        tenant="none",
        request_class=None,
        reason="none",
        pool="none",
        engine=None,
        count=None,
        outcome=Outcome.REFUSED_UNAUTHENTICATED,
        overhead_s=None,
        first_token_at_s=None,
        prompt_tokens_used=None,
        completion_tokens_used=None,
    )
    metrics.finish(refused)

    samples = {
        sample.name
        for sample in page(metrics).samples
        if sample.labels.get("model") == "none" and "created" not in sample.name
    }
    assert samples == {
        "router_requests_total",
        "router_request_duration_seconds_bucket",
        "router_request_duration_seconds_count",
        "router_request_duration_seconds_sum",
    }


def test_arrivals_equal_the_sum_of_outcomes_whatever_the_labels() -> None:
    metrics = Metrics()
    rng = random.Random(3)
    outcomes, classes = list(Outcome), [RequestClass.CHAT, RequestClass.BATCH, None]

    for _ in range(500):
        metrics.arrived()
        metrics.finish(
            finished(
                outcome=rng.choice(outcomes),
                request_class=rng.choice(classes),
                tenant=f"team-{rng.randrange(5)}",
                engine=rng.choice(["e", None]),
                relay=rng.choice(["r", None]),
            )
        )

    seen = page(metrics)
    assert seen.value("router_requests_total") == seen.value("router_arrivals_total") == 500
    assert sum(seen.by("router_requests_total", "outcome").values()) == 500
    assert seen.value("router_request_duration_seconds_count") == 500


def test_more_combinations_of_labels_than_are_kept_resolved_count_no_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "_ENDINGS_MAX", 3)
    metrics = Metrics()

    for number in range(30):
        metrics.finish(finished(tenant=f"team-{number % 10}"))

    tokens = page(metrics)
    assert tokens.value("router_requests_total") == 30
    assert {tokens.value("router_tokens_total", tenant=f"team-{n}", kind="prompt") for n in range(10)} == {900}
    assert len(metrics._endings) <= 3


def test_a_request_that_did_not_end_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="one outcome"):
        Metrics().finish(finished(outcome=None))


@pytest.mark.parametrize("bounds", [SECONDS_BUCKETS, OVERHEAD_BUCKETS, TOKENS_BUCKETS])
def test_a_histogram_reads_as_the_client_librarys_own(bounds: tuple[float, ...]) -> None:
    metrics, registry, rng = Metrics(), CollectorRegistry(), random.Random(5)
    values = [*bounds, 0.0, *(rng.choice(bounds) * rng.random() * 2 for _ in range(200)), bounds[-1] * 3]
    theirs = Histogram("h", "What it is", ("model",), registry=registry, buckets=bounds)
    ours = metrics._tallies.histogram("h", "What it is", ("model",), bounds)

    for value in values:
        theirs.labels('a "quoted" name').observe(value)
        metrics_module.observe(ours.cells('a "quoted" name'), bounds, value)

    assert family(metrics.page(), "h") == without_created(generate_latest(registry))


def test_a_counter_reads_as_the_client_librarys_own() -> None:
    metrics, registry = Metrics(), CollectorRegistry()
    theirs = Counter("c", "What it is", ("model",), registry=registry)
    Counter("c_bare", "What it is", registry=registry)
    ours = metrics._tallies.counter("c", "What it is", ("model",))
    metrics._tallies.counter("c_bare", "What it is", ())

    theirs.labels("m").inc(12)
    ours.cells("m")[0] += 12

    assert family(metrics.page(), "c") == without_created(generate_latest(registry))
    assert "c_created{" in metrics.page().decode()
