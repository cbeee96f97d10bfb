"""Log lines: a finished request's and all others, through one handler."""

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from router.observe.lines import LineWriter
from router.observe.log import LineHandler, dropped_lines, log_request
from router.policy.demand import RequestClass
from router.policy.outcome import Outcome
from tests.observe.records import finished


class Logged:
    """What goes out, by lines."""

    def __init__(self, reader: int) -> None:
        self._reader = reader

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in os.read(self._reader, 2**20).splitlines()]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Logged]:
    reader, file = os.pipe()
    writer = LineWriter(file)
    os.close(file)
    monkeypatch.setattr(logging.root, "handlers", [LineHandler(writer)])
    before = logging.root.level
    logging.root.setLevel(logging.INFO)
    yield Logged(reader)
    # Not by assignment: loggers remember what is enabled until a level is set.
    logging.root.setLevel(before)
    writer.close()
    os.close(reader)


def test_a_finished_request_is_one_line_with_its_fields_in_order(logged: Logged) -> None:
    log_request(finished(stream=True, hold_wait_s=0.00125, bytes_in=1_000, bytes_out=2_000))

    (line,) = logged.lines()
    assert line.pop("ts")[-5:-4] == "."
    assert list(line.items()) == [
        ("level", "info"),
        ("logger", "router.request"),
        ("message", "request"),
        ("request_id", "req-1"),
        ("endpoint", "chat_completions"),
        ("model", "m"),
        ("tenant", "team"),
        ("class", "chat"),
        ("reason", "below_threshold"),
        ("pool", "chat"),
        ("engine", "e"),
        ("stream", True),
        ("status", 200),
        ("outcome", "completed"),
        ("attempts", 1),
        ("prompt_tokens", 300),
        ("prompt_tokens_exact", True),
        ("prompt_tokens_used", 300),
        ("completion_tokens_used", 20),
        ("queue_wait_ms", 0.0),
        ("hold_wait_ms", 1.3),
        ("ttft_ms", 20.0),
        ("duration_ms", 500.0),
        ("bytes_in", 1_000),
        ("bytes_out", 2_000),
    ]


def test_what_has_no_value_is_left_out_and_what_is_nought_is_not(logged: Logged) -> None:
    log_request(
        finished(
            request_class=None,
            engine=None,
            count=None,
            status=None,
            outcome=Outcome.CLIENT_LEFT_UPLOAD,
            attempts=0,
            first_token_at_s=None,
            ended_at_s=None,
            prompt_tokens_used=None,
            completion_tokens_used=None,
        )
    )

    (line,) = logged.lines()
    assert {"class", "engine", "relay", "status", "prompt_tokens", "ttft_ms"}.isdisjoint(line)
    assert (line["attempts"], line["stream"], line["duration_ms"], line["bytes_in"]) == (0, False, 0.0, 0)


def test_request_lines_stand_in_order_among_the_others(logged: Logged) -> None:
    log = logging.getLogger("router.test")

    log.info("before %d", 1)
    log_request(finished())
    log.warning("after")

    assert [line["message"] for line in logged.lines()] == ["before 1", "request", "after"]


@pytest.mark.parametrize("where", ["router.request", "root", "handler"])
def test_a_level_above_info_keeps_request_lines_away(where: str, logged: Logged) -> None:
    of = logging.getLogger("router.request") if where == "router.request" else logging.root
    target = logging.root.handlers[0] if where == "handler" else of
    before = target.level
    target.setLevel(logging.WARNING)
    try:
        log_request(finished())
    finally:
        target.setLevel(before)
    logging.getLogger("router.test").error("the only one")

    assert [line["message"] for line in logged.lines()] == ["the only one"]


def test_a_handler_that_is_not_ours_gets_an_ordinary_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.request")

    log_request(finished(request_class=RequestClass.BATCH))

    (record,) = caplog.records
    fields = vars(record)["fields"]
    assert (record.name, record.levelname, record.getMessage()) == ("router.request", "INFO", "request")
    assert (fields["class"], fields["outcome"]) == ("batch", "completed")
    assert "ts" not in fields


def test_a_line_may_hold_an_exception_and_bytes_that_are_no_text(logged: Logged) -> None:
    try:
        raise ValueError("it broke")
    except ValueError:
        logging.getLogger("router.test").exception("name %s, 100 %% größer", os.fsdecode(b"\xff"))

    (line,) = logged.lines()
    assert (line["level"], line["logger"]) == ("error", "router.test")
    assert line["message"] == "name \udcff, 100 % größer"
    assert line["exception"].endswith("ValueError: it broke")


def test_a_log_call_whose_text_does_not_fit_its_values_raises_nothing(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)

    logging.getLogger("router.test").info("%d", "no number")
    logging.getLogger("router.test").info("next")

    assert [line["message"] for line in logged.lines()] == ["next"]


def test_lines_that_had_no_room_are_told(logged: Logged) -> None:
    before = dropped_lines()
    while dropped_lines() == before:
        log_request(finished())

    assert dropped_lines() == 1
