"""A running upper quantile over the last observations, cheap to read.

Used for the output length of requests that set no cap, and for the KV tokens chat has lately held. Lengths are
heavy-tailed, so an upper quantile of what was seen is what memory safety needs, not a mean.
"""

from bisect import bisect_left, insort
from collections import deque


class RecentQuantile:
    """The `quantile` (0..1) of the last `window` values; `initial` until `least` values were seen.

    The values are kept sorted beside their order of arrival: an observation is two binary searches and moves at most
    `window` pointers, reading is one attribute.
    """

    __slots__ = ("_latest", "_least", "_quantile", "_sorted", "value")

    def __init__(self, *, initial: int, quantile: float = 0.99, window: int = 512, least: int = 32) -> None:
        self.value = initial
        self._latest: deque[int] = deque(maxlen=window)
        self._sorted: list[int] = []
        self._quantile = quantile
        self._least = least

    def note(self, value: int) -> None:
        """One observation."""
        latest, ordered = self._latest, self._sorted
        if len(latest) == latest.maxlen:
            del ordered[bisect_left(ordered, latest[0])]
        latest.append(value)
        insort(ordered, value)
        size = len(ordered)
        if size >= self._least:
            self.value = ordered[min(size - 1, int(self._quantile * size))]
