"""What is measured of one request, how many such values are summed up, and what was promised (SLOs).

Rules: pure; times come in seconds and leave in milliseconds; latency counts from the intended time of a request.

Source of names and definitions: vLLM, `vllm/benchmarks/serve.py`.
"""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.policy.demand import RequestClass
from router.sim.load import RequestResult

#: Percentiles reported beside the median unless the user asks for others.
PERCENTILES = (90.0, 95.0, 99.0)

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
#: `e2e` is what people say, `e2el` what the report says.
_SLO_METRICS = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el", "e2el": "e2el"}


@dataclass(frozen=True, slots=True)
class Slo:
    """A promise to one class: `metric` is `ttft`, `tpot` or `e2el`, at most `limit_ms` milliseconds."""

    request_class: RequestClass
    metric: str
    limit_ms: float


@dataclass(frozen=True, slots=True)
class Stats:
    """One distribution in milliseconds. `percentiles` are (percent, value), all 0 where there are no samples."""

    samples: int
    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]

    def fields(self, name: str) -> dict[str, float]:
        """The names of `vllm bench serve`: mean_ttft_ms, median_ttft_ms, std_ttft_ms, p99_ttft_ms, ..."""
        values = {f"mean_{name}_ms": self.mean, f"median_{name}_ms": self.median, f"std_{name}_ms": self.std}
        values |= {f"{percent_word(percent)}_{name}_ms": value for percent, value in self.percentiles}
        return {key: round(value, 3) for key, value in values.items()}


def parse_duration_s(text: str) -> float:
    """`500ms`, `20s`, `1.5m`, `8h` as seconds, above 0.

    Raises: `ValueError` with what was given and what is right.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a duration; write a number and a unit, such as 500ms, 20s, 5m or 8h")
    seconds = float(found[1]) * _UNITS_S[found[2]]
    if not seconds > 0:
        raise ValueError(f"duration {text!r} must be above 0")
    return seconds


def parse_slos(text: str) -> tuple[Slo, ...]:
    """`chat.ttft=1s,batch.e2e=8h` as promises.

    Raises: `ValueError` that says which part is wrong and what is right.
    """
    classes = {item.value: item for item in RequestClass}
    slos: dict[tuple[RequestClass, str], Slo] = {}
    for part in text.split(","):
        key, equals, limit = part.strip().partition("=")
        name, dot, metric = key.partition(".")
        if not (equals and dot):
            raise ValueError(f"SLO {part.strip()!r} is not CLASS.METRIC=DURATION, for instance chat.ttft=1s")
        if name not in classes:
            raise ValueError(f"SLO names class {name!r}; the classes are {', '.join(classes)}")
        if metric not in _SLO_METRICS:
            raise ValueError(f"SLO names metric {metric!r}; the metrics are ttft, tpot and e2e")
        slo = Slo(classes[name], _SLO_METRICS[metric], parse_duration_s(limit) * 1000)
        if (slo.request_class, slo.metric) in slos:
            raise ValueError(f"SLO {key} is given twice")
        slos[slo.request_class, slo.metric] = slo
    return tuple(slos.values())


def ttft_ms(result: RequestResult) -> float | None:
    """From the intended time to the first content; None without content."""
    at_s = result.first_content_at_s
    return None if at_s is None else (at_s - result.intended_at_s) * 1000


def tpot_ms(result: RequestResult) -> float | None:
    """Mean time of one output token after the first; None where there is no second one, or no usage."""
    tokens, first_s, last_s = result.completion_tokens, result.first_content_at_s, result.last_content_at_s
    if tokens is None or tokens < 2 or first_s is None or last_s is None:
        return None
    return (last_s - first_s) * 1000 / (tokens - 1)


def e2el_ms(result: RequestResult) -> float | None:
    """From the intended time to the last content; None without content."""
    at_s = result.last_content_at_s
    return None if at_s is None else (at_s - result.intended_at_s) * 1000


MEASURES = {"ttft": ttft_ms, "tpot": tpot_ms, "e2el": e2el_ms}


def is_good(result: RequestResult, slos: Sequence[Slo]) -> bool:
    """Whether a completed request kept everything that its class was promised."""
    for slo in slos:
        if slo.request_class is result.request_class:
            # An answer of one token has no pace: it counts as 0 ms, as in `vllm bench serve`.
            value = MEASURES[slo.metric](result) or 0.0
            if value > slo.limit_ms:
                return False
    return True


def stats(values: Iterable[float], percentiles: Sequence[float]) -> Stats:
    """Mean, median, population deviation and percentiles (linear between neighbours); zeros for no values."""
    ordered = sorted(values)
    if not ordered:
        return Stats(0, 0.0, 0.0, 0.0, tuple((percent, 0.0) for percent in percentiles))
    return Stats(
        samples=len(ordered),
        mean=statistics.fmean(ordered),
        median=percentile(ordered, 50.0),
        std=statistics.pstdev(ordered),
        percentiles=tuple((percent, percentile(ordered, percent)) for percent in percentiles),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` (0 to 100) of the ordered values lie, linear between neighbours.

    An infinite neighbour makes the result infinite. Raises: `IndexError` for no values.
    """
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    fraction = place - below
    if fraction == 0 or below + 1 >= len(ordered):
        return ordered[below]
    if math.isinf(ordered[below + 1]):
        return math.inf
    return ordered[below] + (ordered[below + 1] - ordered[below]) * fraction


def percent_word(percent: float) -> str:
    """`p99`, `p99.9`: how `vllm bench serve` writes a percentile."""
    return f"p{percent:g}"
