"""What counts as a promise broken, and what a client calls an answer."""

import json
from typing import Any

import pytest

from bench.clients import _judge
from bench.failover import LOST_MAX, REQUESTS, broken_promises


def _kept() -> dict[str, Any]:
    clean = {
        "tokens_held_after": 0,
        "in_flight_after": 0,
        "sockets_before": 9,
        "sockets_after": 4,
        "arrivals_equal_outcomes": True,
    }
    lost = {"ok": REQUESTS - LOST_MAX, "passed_on_500": LOST_MAX, "broken": 0, "requests_to_bad_engine": LOST_MAX}
    left = {"cancelled_within_s": {"p50": 0.1, "max": 2.0}, "engine_running_after": 0}
    return {
        "answers_500": clean | lost | {"longest_wait_s": 0.1},
        "stalled": clean | lost | {"longest_wait_s": 3.0},
        "gone": clean | lost | {"ok": REQUESTS, "passed_on_500": 0, "longest_wait_s": 0.1},
        "hang_up_streams": clean | left,
        "hang_up_plain": clean | left,
    }


def test_a_run_at_every_bound_keeps_every_promise() -> None:
    assert broken_promises(_kept()) == []


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("answers_500", {"passed_on_500": LOST_MAX + 1}, "failures reached clients"),
        ("stalled", {"requests_to_bad_engine": LOST_MAX + 1}, "was left after"),
        ("stalled", {"longest_wait_s": 9.0}, "a client waited 9.0 s"),
        ("gone", {"passed_on_500": 1}, "failures reached clients"),
        ("gone", {"ok": REQUESTS - 1}, "answered well"),
        ("hang_up_plain", {"cancelled_within_s": {"p50": 0.1, "max": None}}, "cancelled within None s"),
        ("hang_up_streams", {"engine_running_after": 1}, "still run"),
        ("hang_up_streams", {"tokens_held_after": 512}, "tokens still held"),
        ("gone", {"sockets_after": 10}, "sockets more"),
        ("gone", {"arrivals_equal_outcomes": False}, "sum of outcomes"),
    ],
)
def test_a_promise_that_is_broken_is_told_in_words(case: str, change: dict[str, Any], said: str) -> None:
    found = _kept()
    found[case] |= change

    assert any(said in line for line in broken_promises(found))


@pytest.mark.parametrize(
    ("status", "text", "is_stream", "word"),
    [
        (200, '{"choices": []}', False, "ok"),
        (200, 'data: {"choices": []}\n\ndata: [DONE]\n\n', True, "ok"),
        (200, 'data: {"choices": []}\n\n', True, "broken"),
        (200, 'data: {"error": {"code": 500}}\n\ndata: [DONE]\n\n', True, "engine_failed"),
        (502, json.dumps({"error": {}}), True, "engine_failed"),
        (503, json.dumps({"error": {}}), False, "refused"),
        (429, json.dumps({"error": {}}), False, "refused"),
    ],
)
def test_an_answer_is_called_what_its_client_would_call_it(status: int, text: str, is_stream: bool, word: str) -> None:
    assert _judge(status, text, is_stream=is_stream)[0] == word
