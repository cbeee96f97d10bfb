"""The comparison says what it should of given figures, and its layers are those of the tree."""

from pathlib import Path
from typing import Any

from bench.overhead import OURS, PEER, TARGETS, missed, ratios, table
from bench.profile_router import layer_of

ROOT = Path(__file__).parents[2]


def _figures(requests: float, events: float, p50_us: float, p99_us: float) -> dict[str, Any]:
    def spread(value: float) -> dict[str, float]:
        return {"median": value, "least": value, "most": value, "slices": 1}

    return {
        "requests_per_cpu_s": spread(requests),
        "events_per_cpu_s": spread(events),
        "added_latency_p50_us": spread(p50_us),
        "added_latency_p99_us": spread(p99_us),
        "added_ttft_p50_us": spread(1.0),
        "cpu_us_per_request": 1e6 / requests,
        "cpu_us_per_event": 1e6 / events,
        "kernel_ratio": spread(0.3),
        "pss_mib": 80.0,
        "failures": 0,
    }


def test_a_ratio_is_ours_over_theirs() -> None:
    found = ratios(_figures(20_000, 30_000, 140, 320), _figures(10_000, 30_000, 70, 160))

    assert found == {
        "requests_per_cpu_s_ratio": 2.0,
        "events_per_cpu_s_ratio": 1.0,
        "added_latency_p50_ratio": 2.0,
        "added_latency_p99_ratio": 2.0,
    }


def test_targets_are_met_at_their_bound_and_missed_beyond_it() -> None:
    met = {"requests_per_cpu_s_ratio": 1.0, "events_per_cpu_s_ratio": 1.0}
    met |= {"added_latency_p50_ratio": 2.0, "added_latency_p99_ratio": 2.0}
    bad = {"requests_per_cpu_s_ratio": 0.99, "events_per_cpu_s_ratio": 0.99}
    bad |= {"added_latency_p50_ratio": 2.01, "added_latency_p99_ratio": 2.01}

    assert missed(met) == []
    assert len(missed(bad)) == len(TARGETS)


def test_what_could_not_be_compared_is_missed() -> None:
    found = ratios(_figures(1, 1, 1, 1), None)

    assert set(found.values()) == {None}
    assert len(missed(found)) == len(TARGETS)


def test_the_table_shows_a_peer_that_is_not_there_with_the_reason() -> None:
    ours = _figures(20_000, 30_000, 140, 320)
    targets = dict.fromkeys(TARGETS, "any")
    report = {**ratios(ours, None), "targets": targets, "proxies": {OURS: ours, PEER: None}}

    text = table({**report, "not_measured": {PEER: "no network"}})

    assert "20,000" in text
    assert "not measured: no network" in text


def test_every_module_of_the_router_belongs_to_a_layer() -> None:
    modules = [str(module) for module in (ROOT / "router").rglob("*.py")]

    layers = {layer_of(module) for module in modules}

    assert None not in layers
    assert {"inbound", "guard", "parse", "count", "admission", "connection", "answer", "metrics"} <= layers
