"""How fast a pool gives tokens back, and so how long a refused client should stay away.

    retry_after_s = clamp(missing_tokens / drain_tokens_per_s, 1, 48), spread by up to +25 %: 1 to 60

The rate is what was really given back over the last `WINDOW_S` seconds. A pool that gave nothing back lately says the
longest wait there is.
"""

from collections import deque

WINDOW_S = 30.0
SHORTEST_S = 1.0
#: openai-python sleeps exactly what it is told, even two minutes; a minute is the longest that still serves a person.
LONGEST_S = 60.0
#: Also at the longest: of a pool that stands still many clients are sent away at once.
_SPREAD_RATIO = 0.25
_LONGEST_UNSPREAD_S = LONGEST_S / (1 + _SPREAD_RATIO)


class DrainMeter:
    """Tokens given back per second over a sliding window, in one-second buckets (at most `WINDOW_S` + 1 of them)."""

    __slots__ = ("_buckets", "_started_at_s")

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque()
        self._started_at_s: float | None = None

    def note(self, tokens: int, now_s: float) -> None:
        """`tokens` came back."""
        if self._started_at_s is None:
            self._started_at_s = now_s
        second = int(now_s)
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1] = (second, self._buckets[-1][1] + tokens)
        else:
            self._buckets.append((second, tokens))
        self._forget(now_s)

    def rate_tokens_per_s(self, now_s: float) -> float:
        """0 where nothing was given back within the window."""
        self._forget(now_s)
        if not self._buckets or self._started_at_s is None:
            return 0.0
        span_s = min(WINDOW_S, max(1.0, now_s - self._started_at_s))
        return sum(tokens for _, tokens in self._buckets) / span_s

    def retry_after_s(self, missing_tokens: int, now_s: float, *, spread: float) -> float:
        """Seconds until `missing_tokens` will have come back. `spread` (0..1) tells two clients apart."""
        rate = self.rate_tokens_per_s(now_s)
        wait_s = missing_tokens / rate if rate > 0 else LONGEST_S
        return min(_LONGEST_UNSPREAD_S, max(SHORTEST_S, wait_s)) * (1 + _SPREAD_RATIO * spread)

    def _forget(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] < now_s - WINDOW_S:
            self._buckets.popleft()
