"""How fast a pool gives tokens back, and so how long a refused client should stay away.

    retry_after_s = clamp(missing_tokens / drain_tokens_per_s, 1, 48), spread by up to +25 %: 1 to 60

The rate is what was really given back over the last `WINDOW_S` seconds, idle time left out. A pool that has just filled
says `FIRST_GUESS_S`, and the longer it gives nothing back, the longer the wait, up to the longest there is.
"""

from collections import deque

WINDOW_S = 30.0
SHORTEST_S = 1.0
#: Before anything was seen to come free: about the length of a chat answer.
FIRST_GUESS_S = 5.0
#: openai-python sleeps exactly what it is told, even two minutes; a minute is the longest that still serves a person.
LONGEST_S = 60.0
#: Also at the longest: of a pool that stands still many clients are sent away at once.
_SPREAD_RATIO = 0.25
_LONGEST_UNSPREAD_S = LONGEST_S / (1 + _SPREAD_RATIO)


class DrainMeter:
    """Tokens given back per second while anything was held, over a sliding window, in one-second buckets (at most
    `WINDOW_S` + 1 of them). Time in which nothing was held says nothing about how fast places come free."""

    __slots__ = ("_buckets", "_busy_since_s", "_held", "_idle_since_s", "_second", "_second_tokens", "_sum_tokens")

    def __init__(self) -> None:
        #: Seconds that are over and their tokens; `_sum_tokens` is what they hold together.
        self._buckets: deque[tuple[int, int]] = deque()
        self._sum_tokens = 0
        #: The second under way.
        self._second = 0
        self._second_tokens = 0
        #: When it was first busy, moved on by every pause since.
        self._busy_since_s = 0.0
        self._idle_since_s = float("-inf")
        self._held = 0

    def begin(self, now_s: float) -> None:
        """A request was given its place."""
        if self._held == 0:
            pause_s = now_s - self._idle_since_s
            self._busy_since_s = now_s if pause_s > WINDOW_S else self._busy_since_s + pause_s
        self._held += 1

    def note(self, tokens: int, now_s: float) -> None:
        """One that had begun gave `tokens` back."""
        self._held -= 1
        if self._held == 0:
            self._idle_since_s = now_s
        if int(now_s) != self._second:
            self._turn(now_s)
        self._second_tokens += tokens

    def rate_tokens_per_s(self, now_s: float) -> float:
        """0 where nothing was given back within the window."""
        self._turn(now_s)
        tokens = self._sum_tokens + self._second_tokens
        return tokens / min(WINDOW_S, max(1.0, now_s - self._busy_since_s))

    def retry_after_s(self, missing_tokens: int, now_s: float, *, spread: float) -> float:
        """Seconds until `missing_tokens` will have come back. `spread` (0..1) tells two clients apart."""
        rate = self.rate_tokens_per_s(now_s)
        if rate > 0:
            wait_s = missing_tokens / rate
        else:
            # No place has come free yet: as long again as that has lasted is the best guess there is.
            wait_s = max(FIRST_GUESS_S, now_s - self._busy_since_s) if self._held else FIRST_GUESS_S
        return min(_LONGEST_UNSPREAD_S, max(SHORTEST_S, wait_s)) * (1 + _SPREAD_RATIO * spread)

    def _turn(self, now_s: float) -> None:
        """Close the second that is over and forget those that left the window."""
        second = int(now_s)
        if second != self._second:
            if self._second_tokens:
                self._buckets.append((self._second, self._second_tokens))
                self._sum_tokens += self._second_tokens
            self._second, self._second_tokens = second, 0
        buckets = self._buckets
        while buckets and buckets[0][0] < now_s - WINDOW_S:
            self._sum_tokens -= buckets.popleft()[1]
