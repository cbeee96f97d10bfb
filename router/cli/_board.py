"""The demo's live table: what went where, how fast, how long it waited.

Takes results as they come, keeps counts and the last few hundred values of each line, and draws them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.policy.demand import RequestClass
from router.sim.load import RequestResult
from router.sim.measures import percentile, ttft_ms

#: Values behind the live percentiles of one line.
_RECENT_MAX = 500
#: Lines of the table; further ones are one line. There are a dozen outcomes, pools and relays in a demo.
_LINES_MAX = 40


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a simulator holds at this moment, in requests."""

    name: str
    running: int
    waiting: int


@dataclass(slots=True)
class _Line:
    count: int = 0
    ttfts_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_MAX))
    waits_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_MAX))


class Board:
    """Counts of a run so far, and their picture."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, str], _Line] = {}
        self._taken = 0

    def take(self, results: Sequence[RequestResult]) -> None:
        """Count what is new in a list that only grows."""
        for result in results[self._taken :]:
            self._count(result)
        self._taken = len(results)

    def table(
        self, *, elapsed_s: float, in_flight: Mapping[RequestClass, int], engines: Sequence[EngineLoad]
    ) -> RenderableType:
        """The picture now."""
        table = Table(title=f"router demo, {elapsed_s:.0f} s")
        for heading in ("class", "pool", "by"):
            table.add_column(heading)
        for heading in ("n", "TTFT ms p50", "p99", "wait ms p50", "p99"):
            table.add_column(heading, justify="right")
        for key in sorted(self._lines):
            line = self._lines[key]
            table.add_row(*key, str(line.count), *_two(line.ttfts_ms), *_two(line.waits_ms))
        flying = ", ".join(f"{request_class} {count}" for request_class, count in in_flight.items())
        held = ", ".join(f"{engine.name} {engine.running} running {engine.waiting} waiting" for engine in engines)
        return Group(
            table, Text(f"in flight: {flying}"), Text(f"engines: {held}"), Text("Ctrl-C stops it", style="dim")
        )

    def _count(self, result: RequestResult) -> None:
        router = result.router
        if not result.is_completed:
            key = (result.request_class.value, "-", result.ending)
        elif router.relay is not None:
            key = (result.request_class.value, "relay", router.relay)
        else:
            borrowed = " (borrowed)" if "borrow" in (router.reason or "") else ""
            key = (result.request_class.value, (router.pool or "-") + borrowed, router.engine or "-")
        if key not in self._lines and len(self._lines) >= _LINES_MAX:
            key = ("other", "-", "-")
        line = self._lines.setdefault(key, _Line())
        line.count += 1
        if result.is_completed and (ttft := ttft_ms(result)) is not None:
            line.ttfts_ms.append(ttft)
        if router.queue_wait_ms is not None:
            line.waits_ms.append(router.queue_wait_ms)


def _two(values: deque[float]) -> tuple[str, str]:
    """Median and 99th percentile, or dashes."""
    if not values:
        return "-", "-"
    ordered = sorted(values)
    return f"{percentile(ordered, 50):.0f}", f"{percentile(ordered, 99):.0f}"
