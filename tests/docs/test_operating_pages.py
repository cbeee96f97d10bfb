"""The pages on metrics, outcomes, commands and log lines name everything that there is, and nothing else."""

import logging
from dataclasses import dataclass
from typing import Any, cast

import pytest
import typer
from prometheus_client.metrics import MetricWrapperBase

from router.cli.main import app
from router.observe.log import log_request
from router.observe.metrics import LOOP_DELAY_BUCKETS, OVERHEAD_BUCKETS, SECONDS_BUCKETS, TOKENS_BUCKETS, Metrics
from router.observe.tallies import Series
from router.policy.demand import RequestClass
from router.policy.outcome import Outcome
from router.policy.retry import Failure
from router.queue.store import EnqueueRefusal
from router.request import Count, Endpoint, RequestRecord
from tests.docs.page import codes, first_codes, rows, sections, text, without_repeats

METRICS, OUTCOMES, COMMANDS, OPERATIONS = "docs/metrics.md", "docs/outcomes.md", "docs/cli.md", "docs/operations.md"


@dataclass(frozen=True)
class _Described:
    """A series, be it a tally or the client library's. `mode`: how a gauge's values become one."""

    name: str
    kind: str
    labels: tuple[str, ...]
    mode: str | None = None


def _series() -> dict[str, _Described]:
    """Every series by the name it has on the page /metrics."""
    values = vars(Metrics()).values()
    found = [_Described(one.name, one.kind, one.labels) for one in values if isinstance(one, Series)]
    found += [
        _Described(one._name, one._type, one._labelnames, getattr(one, "_multiprocess_mode", None))
        for one in values
        if isinstance(one, MetricWrapperBase)
    ]
    return {one.name + ("_total" if one.kind == "counter" else ""): one for one in found}


def _commands() -> dict[str, Any]:
    """Every command of the command line, by the words that call it."""
    found: dict[str, Any] = {}
    open_ends = [("router", cast("Any", typer.main.get_command(app)))]
    while open_ends:
        words, command = open_ends.pop()
        found[words] = command
        open_ends += [(f"{words} {name}", inner) for name, inner in getattr(command, "commands", {}).items()]
    return found


def _options(section: str) -> dict[str, str]:
    """The default of each option, by all its spellings."""
    return {" ".join(codes(row[0])): row[1] for row in rows(section)}


def _default(value: Any) -> str:
    if value is None:
        return "none"
    return "off" if value is False else f"`{value}`"


def test_every_series_has_a_heading_and_no_heading_names_one_that_is_not_there() -> None:
    headings = {heading for heading in sections(METRICS, 3) if heading.startswith("router_")}

    assert headings == set(_series())


def test_each_series_is_described_with_its_kind_and_its_labels() -> None:
    chapters = sections(METRICS, 3)

    for name, series in _series().items():
        first_line = chapters[name].strip().splitlines()[0]
        assert first_line.lower().startswith(series.kind), name
        assert codes(first_line) == list(series.labels), name


def test_each_gauge_says_how_the_workers_values_become_one() -> None:
    words = {"livesum": "added up", "livemax": "the largest", "livemin": "the smallest"}
    chapters = sections(METRICS, 3)

    for name, series in _series().items():
        if series.mode is not None:
            assert f"Gauge, {words[series.mode]} over workers." in chapters[name], name


def test_the_metrics_page_lists_the_buckets_and_every_value_of_a_label() -> None:
    page = text(METRICS)
    chapters = sections(METRICS, 3)

    for buckets in (SECONDS_BUCKETS, OVERHEAD_BUCKETS, LOOP_DELAY_BUCKETS):
        assert ", ".join(f"{bucket:g}" for bucket in buckets) in page
    assert ", ".join(str(bucket) for bucket in TOKENS_BUCKETS) in page
    assert {endpoint.value for endpoint in Endpoint} <= set(codes(chapters["router_requests_total"]))
    assert {failure.value for failure in Failure} <= set(codes(chapters["router_attempts_total"]))
    assert {refusal.value for refusal in EnqueueRefusal} <= set(codes(chapters["router_queue_refusals_total"]))


@pytest.mark.parametrize("name", ["README.md", "docs/admission.md", "docs/operations.md", "docs/http.md"])
def test_no_page_names_a_series_that_is_not_there(name: str) -> None:
    named = {code.partition("{")[0] for code in codes(text(name)) if code.startswith("router_")}

    assert named - set(_series()) == set()


def test_every_outcome_has_a_row_and_no_row_names_one_that_is_not_there() -> None:
    documented = without_repeats(first_codes(text(OUTCOMES)))

    assert documented == {outcome.value for outcome in Outcome}


def test_every_command_has_a_heading_and_every_option_a_row_with_its_default() -> None:
    chapters = sections(COMMANDS, 2)
    commands = _commands()

    assert set(chapters) == set(commands)
    for words, command in commands.items():
        options = {" ".join([*one.opts, *one.secondary_opts]): _default(one.default) for one in command.params}
        assert _options(chapters[words]) == options, words


def test_every_field_of_a_request_s_log_line_has_a_row(caplog: pytest.LogCaptureFixture) -> None:
    count = Count(
        prompt_tokens=1, longest_tokens=1, lower_tokens=1, upper_tokens=1, prompts=1, exact=True, method="exact"
    )
    record = RequestRecord(
        "id",
        0.0,
        request_class=RequestClass.CHAT,
        engine="short",
        relay="provider",
        count=count,
        status=200,
        outcome=Outcome.COMPLETED,
        error_code="engine_lost",
        first_token_at_s=1.0,
        ended_at_s=2.0,
        prompt_tokens_used=1,
        completion_tokens_used=1,
    )
    chapter = sections(OPERATIONS, 2)["Log lines"]
    caplog.set_level(logging.INFO, "router.request")

    log_request(record)

    [line] = caplog.records
    fields = set(cast("Any", line).fields)
    documented = without_repeats(first_codes(chapter))
    assert documented - {"ts", "level", "logger", "message", "exception"} == fields
