"""What one proxy costs: work done for each second of its own CPU time, and the time it adds beside the bare engine.

A slice is a few seconds of one load on one proxy. Slices of several proxies are taken in turns by the caller, so that
whatever else the machine does meets all alike; a figure is the median over slices, with the least and the largest.
"""

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

from bench.yardstick.cost import CpuTime, cpu_time
from bench.yardstick.load import Load, Outcome, send

__all__ = ["Slice", "Spread", "added_us", "measure"]

#: A proxy may still be busy with the end of the last answer when its client has it.
_SETTLE_S = 0.02


@dataclass(frozen=True, slots=True)
class Slice:
    """One load on one proxy, and the CPU time that the proxy used for it."""

    outcome: Outcome
    used: CpuTime

    @property
    def requests_per_cpu_s(self) -> float | None:
        return self.outcome.ok / self.used.total_s if self.used.total_s > 0 else None

    @property
    def events_per_cpu_s(self) -> float | None:
        return self.outcome.events / self.used.total_s if self.used.total_s > 0 else None

    @property
    def requests_per_s(self) -> float:
        return self.outcome.ok / self.outcome.elapsed_s

    @property
    def kernel_ratio(self) -> float | None:
        """Part of the CPU time that was spent in the kernel."""
        return self.used.kernel_s / self.used.total_s if self.used.total_s > 0 else None


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over slices."""

    median: float
    least: float
    most: float
    slices: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """None where no slice has the figure."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        median, least, most = (round(value, 3) for value in (statistics.median(known), min(known), max(known)))
        return cls(median, least, most, len(known))


def measure(port: int, pid: int, load: Load) -> Slice:
    """One slice on the proxy `pid` that listens on 127.0.0.1:`port`."""
    before = cpu_time(pid)
    outcome = send(port, load)
    time.sleep(_SETTLE_S)
    return Slice(outcome, cpu_time(pid) - before)


def added_us(through: Outcome, direct: Outcome, percentile: str, *, to_first_token: bool = False) -> float | None:
    """How much later the answer (or its first token) came through the proxy than from the engine itself. Differences
    of percentiles, not percentiles of differences: the two loads are not the same requests."""
    one, other = (through.ttft_us, direct.ttft_us) if to_first_token else (through.latency_us, direct.latency_us)
    if percentile not in one or percentile not in other:
        return None
    return one[percentile] - other[percentile]
