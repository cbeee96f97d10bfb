"""Whether a failed attempt may be followed by another, on an engine or a relay: one rule and one budget for both.

what failed                                          can have started   sent again
connection refused, TLS failure                      no                 yes
503, or a 503 as first event of a stream             no                 yes
"shutting down", an abort before any token           no                 yes
401, 402, 403: our own key, our own bill             no                 yes, but not there
connection lost, first byte late, 5xx                yes                only with `retry_started`, once
4xx                                                  -                  never: the client's own mistake
anything after the first byte to the client          -                  never
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Failure(StrEnum):
    """How an attempt failed before its first byte went to the client."""

    CONNECT_FAILED = "connect_failed"
    BUSY = "busy"
    ABORTED_EMPTY = "aborted_empty"
    SHUTTING_DOWN = "shutting_down"
    LOST = "lost"
    FIRST_BYTE_LATE = "first_byte_late"
    SERVER_ERROR = "server_error"
    REFUSED_OUR_KEY = "refused_our_key"

    @property
    def can_have_started(self) -> bool:
        return self in _MAY_HAVE_STARTED

    @property
    def passes(self) -> bool:
        """Whether the same request may well be taken later: it did not start, and nobody has to mend anything."""
        return not self.can_have_started and self is not Failure.REFUSED_OUR_KEY


_MAY_HAVE_STARTED = frozenset({Failure.LOST, Failure.FIRST_BYTE_LATE, Failure.SERVER_ERROR})


@dataclass(frozen=True, slots=True)
class RetryRules:
    """`attempts_max` counts every try, relays included (>= 1)."""

    attempts_max: int
    retry_started: bool = False


class AttemptBudget(msgspec.Struct):
    """What is left for one request. Not shared between requests."""

    rules: RetryRules
    attempts: int = 0
    started_again: int = 0

    def begin(self) -> None:
        """An attempt is made; call before each."""
        self.attempts += 1

    def forgive(self) -> None:
        """The last attempt does not count: the other side never took the request."""
        self.attempts -= 1

    @property
    def is_spent(self) -> bool:
        return self.attempts >= self.rules.attempts_max

    def may_try_again(self, failure: Failure) -> bool:
        """Whether another attempt may follow `failure`; books it as used where it may have started."""
        if self.is_spent:
            return False
        if not failure.can_have_started:
            return True
        if not self.rules.retry_started or self.started_again > 0:
            return False
        self.started_again += 1
        return True
