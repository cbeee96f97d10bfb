"""CPU time and memory of a process with all its descendants, as Linux counts them under /proc.

CPU time is the steady figure on a shared machine: it hardly depends on what else runs, while rates and latencies do.
"""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CpuTime", "cpu_time", "family", "pss_mib", "rss_mib", "waited_for_cpu_s"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds in the program and in the kernel on its behalf, to 10 ms each."""

    user_s: float = 0.0
    kernel_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.user_s + self.kernel_s

    def __sub__(self, earlier: "CpuTime") -> "CpuTime":
        return CpuTime(self.user_s - earlier.user_s, self.kernel_s - earlier.kernel_s)


def family(pid: int) -> list[int]:
    """`pid` and its living descendants. Empty where it is gone."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        fields = _stat(int(folder.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, to_visit = [], [pid] if (_PROC / str(pid)).exists() else []
    while to_visit:
        one = to_visit.pop()
        found.append(one)
        to_visit += children.get(one, [])
    return found


def cpu_time(pid: int) -> CpuTime:
    """What the family has used so far, children that have ended included."""
    user = kernel = 0
    for one in family(pid):
        fields = _stat(one)
        if fields:
            user += int(fields[11]) + int(fields[13])
            kernel += int(fields[12]) + int(fields[14])
    return CpuTime(user / _TICKS_PER_S, kernel / _TICKS_PER_S)


def pss_mib(pid: int) -> float:
    """Memory of the family, MiB; a page that processes share counts in parts."""
    return sum(_kib(_PROC / str(one) / "smaps_rollup", "Pss:") for one in family(pid)) / 1024


def rss_mib(pid: int) -> float:
    """Memory of this one process, MiB, shared pages counted whole."""
    return _kib(_PROC / str(pid) / "status", "VmRSS:") / 1024


def waited_for_cpu_s(pid: int) -> float:
    """Seconds that the process's first thread was ready to run while others had the processor: the machine's doing, not
    its own. 0 where the kernel does not say."""
    try:
        return int((_PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty where the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def _kib(page: Path, name: str) -> int:
    try:
        lines = page.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
