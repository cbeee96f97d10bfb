"""A running upper quantile over the last observations, cheap to read.

Used for the output length of requests that set no cap, and for the KV tokens chat has lately held. Lengths are
heavy-tailed, so an upper quantile of what was seen is what memory safety needs, not a mean.
"""

from collections import deque


class RecentQuantile:
    """The `quantile` (0..1) of the last `window` values; `initial` until `least` values were seen.

    Reading is O(1): the figure is recomputed once in `refresh_every` observations.
    """

    __slots__ = ("_least", "_pending", "_quantile", "_refresh_every", "_value", "_values")

    def __init__(
        self, *, initial: int, quantile: float = 0.99, window: int = 512, least: int = 32, refresh_every: int = 16
    ) -> None:
        self._values: deque[int] = deque(maxlen=window)
        self._value = initial
        self._quantile = quantile
        self._least = least
        self._refresh_every = refresh_every
        self._pending = 0

    def note(self, value: int) -> None:
        """One observation."""
        self._values.append(value)
        self._pending += 1
        if len(self._values) >= self._least and self._pending >= self._refresh_every:
            ordered = sorted(self._values)
            self._value = ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))]
            self._pending = 0

    @property
    def value(self) -> int:
        return self._value
