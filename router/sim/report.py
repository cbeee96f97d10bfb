"""What a load came to: latencies, throughput, goodput, and every failure by kind.

Rules: field names and definitions are those of `vllm bench serve`, but latency counts from the intended time, so that
a late send is latency too; percentiles are of completed requests, a failure is never a fast success; every arrival is
in exactly one outcome. It must never know how the load was sent or how the report is shown.

Source of names and definitions: vLLM, `vllm/benchmarks/serve.py`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.policy.demand import RequestClass
from router.sim.load import RequestResult
from router.sim.measures import MEASURES, PERCENTILES, Slo, Stats, is_good, percent_word, percentile, stats, ttft_ms
from router.sim.reader import Ending

#: A send later than this after its time is counted: the load generator, not the server, was behind.
LATE_AFTER_S = 0.05
#: Distinct reasons listed; what is beyond is one line.
ERRORS_MAX = 50
#: Values of one header that are counted apart; further ones are counted as `other`.
_LABELS_MAX = 64
#: Requests wanted beyond a percentile before it is more than an anecdote.
_TAIL_MIN = 10


@dataclass(frozen=True, slots=True)
class Summary:
    """A set of requests in numbers. `outcomes` adds up to `arrivals`, and so does completed + failed + interrupted."""

    arrivals: int
    completed: int
    failed: int
    interrupted: int
    late_sends: int
    usage_missing: int
    total_input_tokens: int
    total_output_tokens: int
    duration_s: float
    outcomes: Mapping[str, int]
    by_pool: Mapping[str, int]
    by_engine: Mapping[str, int]
    by_relay: Mapping[str, int]
    metrics: Mapping[str, Stats]
    ttft_all_arrivals_ms: tuple[tuple[float, float | None], ...]
    good: int | None
    notes: tuple[str, ...]

    @property
    def failed_ratio(self) -> float:
        """Failed requests over those that ended by themselves; 0 where none did."""
        ended = self.completed + self.failed
        return self.failed / ended if ended else 0.0

    def fields(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        ended = self.completed + self.failed
        fields: dict[str, Any] = {
            "arrivals": self.arrivals,
            "completed": self.completed,
            "failed": self.failed,
            "interrupted": self.interrupted,
            "failed_ratio": round(self.failed_ratio, 6),
            "outcomes": dict(self.outcomes),
            "duration": round(self.duration_s, 3),
            "request_throughput": self._per_s(self.completed),
            "request_goodput": None if self.good is None else self._per_s(self.good),
            "good_ratio": None if self.good is None or not ended else round(self.good / ended, 6),
            "output_throughput": self._per_s(self.total_output_tokens),
            "total_token_throughput": self._per_s(self.total_input_tokens + self.total_output_tokens),
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "usage_missing": self.usage_missing,
            "late_sends": self.late_sends,
            "by_pool": dict(self.by_pool),
            "by_engine": dict(self.by_engine),
            "by_relay": dict(self.by_relay),
        }
        for name, figures in self.metrics.items():
            fields |= figures.fields(name)
        fields["ttft_all_arrivals_ms"] = {
            percent_word(percent): None if value is None else round(value, 3)
            for percent, value in self.ttft_all_arrivals_ms
        }
        fields["notes"] = list(self.notes)
        return fields

    def _per_s(self, count: int) -> float:
        return round(count / self.duration_s, 4) if self.duration_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run and each class that took part in it. `errors` are (class, outcome, reason, count), most first."""

    total: Summary
    classes: Mapping[RequestClass, Summary]
    errors: tuple[tuple[str, str, str, int], ...]

    def fields(self) -> dict[str, Any]:
        """Everything as JSON takes it; the total is at the top, as `vllm bench serve` has it."""
        names = ("class", "outcome", "reason", "count")
        return {
            **self.total.fields(),
            "classes": {request_class.value: summary.fields() for request_class, summary in self.classes.items()},
            "errors": [dict(zip(names, error, strict=True)) for error in self.errors],
        }


def report(
    results: Sequence[RequestResult],
    *,
    duration_s: float,
    slos: Sequence[Slo] = (),
    percentiles: Sequence[float] = PERCENTILES,
) -> Report:
    """Sum up a run of `duration_s` seconds."""
    present = [item for item in RequestClass if any(result.request_class is item for result in results)]
    return Report(
        total=summarize(results, duration_s=duration_s, slos=slos, percentiles=percentiles),
        classes={
            item: summarize(
                [result for result in results if result.request_class is item],
                duration_s=duration_s,
                slos=[slo for slo in slos if slo.request_class is item],
                percentiles=percentiles,
            )
            for item in present
        },
        errors=_errors(results),
    )


def summarize(
    results: Sequence[RequestResult],
    *,
    duration_s: float,
    slos: Sequence[Slo],
    percentiles: Sequence[float] = PERCENTILES,
) -> Summary:
    """Sum up some requests. With `slos`, a request is good when it completed within all that its class was promised."""
    completed = [result for result in results if result.is_completed]
    failed = sum(result.is_failed for result in results)
    metrics = {name: stats(values, percentiles) for name, values in _samples(completed).items()}
    return Summary(
        arrivals=len(results),
        completed=len(completed),
        failed=failed,
        interrupted=len(results) - len(completed) - failed,
        late_sends=sum(
            result.sent_at_s is not None and result.sent_at_s - result.intended_at_s > LATE_AFTER_S
            for result in results
        ),
        usage_missing=sum(result.completion_tokens is None for result in completed),
        total_input_tokens=sum(result.prompt_tokens or 0 for result in completed),
        total_output_tokens=sum(result.completion_tokens or 0 for result in completed),
        duration_s=duration_s,
        outcomes=dict(sorted(Counter(result.ending for result in results).items())),
        by_pool=_counted(result.router.pool for result in results),
        by_engine=_counted(result.router.engine for result in results),
        by_relay=_counted(result.router.relay for result in results),
        metrics=metrics,
        ttft_all_arrivals_ms=_over_all_arrivals(results, (50.0, *percentiles)),
        good=sum(is_good(result, slos) for result in completed) if slos else None,
        notes=_notes(len(completed), percentiles),
    )


def _samples(completed: Sequence[RequestResult]) -> dict[str, list[float]]:
    """The values in milliseconds behind every reported metric."""
    samples = {
        name: [value for result in completed if (value := measure(result)) is not None]
        for name, measure in MEASURES.items()
    }
    samples["itl"] = [gap_s * 1000 for result in completed for gap_s in result.gaps_s]
    samples["ttft_from_send"] = [
        (result.first_content_at_s - result.sent_at_s) * 1000
        for result in completed
        if result.first_content_at_s is not None and result.sent_at_s is not None
    ]
    samples["queue_wait"] = [
        result.router.queue_wait_ms for result in completed if result.router.queue_wait_ms is not None
    ]
    return samples


def _over_all_arrivals(
    results: Sequence[RequestResult], percentiles: Sequence[float]
) -> tuple[tuple[float, float | None], ...]:
    """First-token percentiles in which a request that failed waits for ever: None where the percentile is such a one.

    What the user stopped is left out: it neither served nor failed.
    """
    waits = sorted(
        math.inf if not result.is_completed else ttft_ms(result) or 0.0
        for result in results
        if result.is_completed or result.is_failed
    )
    if not waits:
        return tuple((percent, None) for percent in percentiles)
    found = ((percent, percentile(waits, percent)) for percent in percentiles)
    return tuple((percent, None if math.isinf(value) else value) for percent, value in found)


def _counted(labels: Iterable[str | None]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for label in labels:
        if label is None:
            continue
        known = label in counts or len(counts) < _LABELS_MAX
        name = label if known else "other"
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def _errors(results: Sequence[RequestResult]) -> tuple[tuple[str, str, str, int], ...]:
    counts = Counter(
        (result.request_class.value, result.ending, result.reason)
        for result in results
        if result.ending != Ending.COMPLETED
    )
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    listed = [(*key, count) for key, count in ranked[:ERRORS_MAX]]
    rest = sum(count for _, count in ranked[ERRORS_MAX:])
    if rest:
        listed.append(("all", "more", f"{len(ranked) - ERRORS_MAX} further reasons", rest))
    return tuple(listed)


def _notes(samples: int, percentiles: Sequence[float]) -> tuple[str, ...]:
    """Which percentiles rest on too few requests to be repeated by another run."""
    if not samples:
        return ("no request completed: there are no latencies",)
    wanted = {percent: math.ceil(_TAIL_MIN / (1 - percent / 100) - 1e-6) for percent in percentiles if percent < 100}
    rough = {percent: count for percent, count in wanted.items() if samples < count}
    if not rough:
        return ()
    words, counts = ", ".join(map(percent_word, rough)), ", ".join(map(str, rough.values()))
    return (f"too few for a steady {words}: {samples} requests completed, {counts} are wanted",)
