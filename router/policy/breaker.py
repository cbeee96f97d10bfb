"""Whether a relay is worth trying: a circuit breaker.

    closed     every call goes out; `failures` of them failed in a row -> open
    open       no call goes out for `open_s` -> half-open
    half-open  one call, the trial, goes out; success -> closed, failure -> open again, ignored -> another trial

Rules: every admitted call ends once, as success, failure or ignored. Ignored is a real ending (the client's own 4xx, a
client that left): it proves nothing in either direction. What a call admitted before the breaker opened has to say no
longer counts. It must never know what a relay is.
"""

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """The value is the metric label."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Ending(StrEnum):
    """How a call ended, as far as the breaker cares."""

    SUCCESS = "success"
    FAILURE = "failure"
    IGNORED = "ignored"


@dataclass(slots=True, eq=False)
class Permit:
    """The right to make one call. Owned by the caller, given back to `Breaker.end`."""

    era: int
    is_trial: bool
    is_ended: bool = False


class Breaker:
    """One for each relay. Times are monotonic seconds given by the caller."""

    def __init__(self, failures: int, open_s: float) -> None:
        """`failures` >= 1 in a row open it, for `open_s` > 0 seconds."""
        assert failures >= 1
        assert open_s > 0
        self._failures_max = failures
        self._open_s = open_s
        self._failures = 0
        self._opened_at_s: float | None = None
        self._trial: Permit | None = None
        #: Grows each time it opens or closes; a permit of an older era is stale.
        self._era = 0

    def state(self, now_s: float) -> BreakerState:
        if self._opened_at_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s - self._opened_at_s < self._open_s else BreakerState.HALF_OPEN

    def can_admit(self, now_s: float) -> bool:
        """Whether `admit` would give a permit now; takes nothing."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def admit(self, now_s: float) -> Permit | None:
        """A permit for one call, or None. Whoever gets one must `end` it on every path."""
        if not self.can_admit(now_s):
            return None
        if self._opened_at_s is None:
            return Permit(self._era, is_trial=False)
        self._trial = Permit(self._era, is_trial=True)
        return self._trial

    def end(self, permit: Permit, ending: Ending, now_s: float) -> None:
        """Give a permit back. Idempotent: only its first ending counts."""
        if permit.is_ended:
            return
        permit.is_ended = True
        if permit is self._trial:
            self._trial = None
        if permit.era != self._era or ending is Ending.IGNORED:
            return
        if ending is Ending.SUCCESS:
            self._failures = 0
            if self._opened_at_s is not None:
                self._opened_at_s = None
                self._era += 1
            return
        self._failures += 1
        if permit.is_trial or self._failures >= self._failures_max:
            self._opened_at_s = now_s
            self._failures = 0
            self._era += 1

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until a trial may go out; 0 where a call may go now."""
        if self._opened_at_s is None:
            return 0.0
        return max(0.0, self._opened_at_s + self._open_s - now_s)
