"""Faults on demand: what the simulated server does wrong, to which requests, and how often.

A `Faults` is a list of rules, tried in order for every inference request; the first rule of a kind that applies counts.
Deciding is seeded and depends only on the order of requests. This module decides; `server.py` carries out.
"""

import random
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class FaultKind(StrEnum):
    """What goes wrong. `value` in brackets is `FaultRule.value`."""

    #: The first token comes [s] later; headers of a stream are already out.
    FIRST_TOKEN_DELAY = "first_token_delay"  # noqa: S105  a token of text, not a credential
    #: The request is read and never answered; the connection stays open.
    SILENT = "silent"
    #: The server stops listening and closes idle connections, for [s] or until the faults change (0).
    REFUSE_CONNECTIONS = "refuse_connections"
    #: 503, as with a full queue.
    REJECT_503 = "reject_503"
    #: 429 with `Retry-After: [s]`, as an outside provider.
    REJECT_429 = "reject_429"
    #: 500, an engine that died.
    ERROR_500 = "error_500"
    #: A stream of 200 whose first event is an error of status [code, 503 when 0]; other answers have that status.
    STREAM_ERROR = "stream_error"
    #: The connection is reset after [k] events of a stream; before the answer where it is no stream.
    CUT = "cut"
    #: The stream goes silent after [k] events, the connection stays open; no answer where it is no stream.
    STALL = "stall"
    #: 200 with `finish_reason: "abort"` and no tokens, as in a shutdown.
    ABORT = "abort"
    #: The request is read, then the connection closes without an answer.
    DROP = "drop"
    #: Answers are compressed, asked for or not.
    GZIP = "gzip"
    #: `/health` takes [s].
    SLOW_HEALTH = "slow_health"
    #: `/health` says 503, as with a dead engine.
    HEALTH_503 = "health_503"


#: Faults that hold without a request.
_STANDING = frozenset({FaultKind.REFUSE_CONNECTIONS, FaultKind.SLOW_HEALTH, FaultKind.HEALTH_503})


class FaultRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One fault. A msgspec type because it is also the JSON of `POST /sim/faults`.

    The first `after_requests` requests since the faults were set are spared; of those that follow, `ratio` (0 to 1) are
    hit, until `requests` were hit (None: without end). Counts concern inference requests; the rules for `/health` and
    `refuse_connections` apply while they are set.
    """

    kind: FaultKind
    value: float = 0.0
    after_requests: int = 0
    requests: int | None = None
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.value < 0 or self.after_requests < 0 or not 0.0 <= self.ratio <= 1.0:
            raise ValueError("value and after_requests are at least 0, ratio is 0 to 1")
        if self.requests is not None and self.requests < 0:
            raise ValueError("requests is at least 0, or null for no end")


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rules in force. An empty one is a healthy server."""

    rules: tuple[FaultRule, ...] = ()

    def standing(self, kind: FaultKind) -> FaultRule | None:
        """The rule of a kind that holds without a request (`/health`, listening), or None."""
        return next((rule for rule in self.rules if rule.kind is kind), None)


@dataclass(frozen=True, slots=True)
class RequestFaults:
    """What befalls one request: kind to its value."""

    values: dict[FaultKind, float]

    def __contains__(self, kind: FaultKind) -> bool:
        return kind in self.values

    def value(self, kind: FaultKind, default: float = 0.0) -> float:
        """The rule's value, or `default` where no such fault applies."""
        return self.values.get(kind, default)


class FaultBoard:
    """The faults in force and how often each rule has hit. `set` starts all counts anew."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  repeatable draws, no secret
        self.set(faults)

    @property
    def faults(self) -> Faults:
        return self._faults

    def set(self, faults: Faults) -> None:
        self._faults = faults
        self._seen = [0] * len(faults.rules)
        self._hits = [0] * len(faults.rules)

    def decide(self) -> RequestFaults:
        """What happens to the next request."""
        values: dict[FaultKind, float] = {}
        for position, rule in enumerate(self._faults.rules):
            self._seen[position] += 1
            is_spent = rule.requests is not None and self._hits[position] >= rule.requests
            is_out = rule.kind in _STANDING or rule.kind in values or is_spent
            if is_out or self._seen[position] <= rule.after_requests:
                continue
            if rule.ratio < 1.0 and self._random.random() >= rule.ratio:
                continue
            self._hits[position] += 1
            values[rule.kind] = rule.value
        return RequestFaults(values)
