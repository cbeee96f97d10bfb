"""Whether one engine may be sent requests: its state machine.

    unknown   nothing has answered yet
    loading   it is there or expected, but no token has come out of it (an engine that loads refuses connections)
    serving   it gives real tokens
    draining  the operator took it out, or it is shutting down: what runs goes on, nothing new is sent
    down      it refuses connections, or loses one request after the other
    asleep    its weights are put away

    event              serving                                          any other state
    probe_ok           stays; forgets refusals                          unknown -> loading
    probe_refused      down at the 2nd, or with 1 failed connect        unknown -> loading, draining and asleep -> down
    probe_unreachable  as refused, unless it gave tokens lately         as refused
    probe_failed       down at the 2nd in a row without tokens between  loading
    probe_slow         stays: a busy engine answers /health late        unknown -> loading
    connect_failed     down with 1 refused probe, else stays            stays
    work_ok            stays; forgets losses                            serving (drained by the operator: stays)
    request_ok         the same, and relapses                           down, loading -> serving if in touch
    tokens_seen        stays; counts as tokens lately                   stays
    request_lost       down at the 3rd in a row without tokens between  stays
    request_timeout    the same
    request_failed     the same; it answered 5xx                        stays
    work_failed        down, unless it gave tokens lately               stays
    asleep             asleep                                           asleep (down and draining stay)
    awake              stays                                            asleep -> loading
    shutdown_seen      draining                                         stays
    drain / undrain    draining / loading until it gives a token

Rules: tokens alone bring an engine in, /health never does; silence of /health alone never takes it out. Tokens of a
request sent long ago prove nothing about new ones: those of traffic count only while the engine accepts connections.

A relapse is to go down by requests: an engine may give the token it is asked for and still fail what clients send. Once
it is back from one, a single failed request takes it out again until a client's request got tokens from it; and it is
asked for a token 0, 2, 4, ... s after it went down, at most `work_interval_s`.

This file is given `now_s` and never knows how a probe is made.
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec.structs import replace


class EngineState(StrEnum):
    """The value is the metric label. Only `SERVING` is sent new requests."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    DOWN = "down"
    ASLEEP = "asleep"


class LifecycleEvent(StrEnum):
    """What was seen of an engine. `probe_*` is the answer to /health, `work_*` that to the router's own request for one
    token, `request_*` and `connect_failed` are traffic; `tokens_seen`: its own counter of generated tokens grew, for
    whomever."""

    PROBE_OK = "probe_ok"
    PROBE_REFUSED = "probe_refused"
    PROBE_UNREACHABLE = "probe_unreachable"
    PROBE_FAILED = "probe_failed"
    PROBE_SLOW = "probe_slow"
    CONNECT_FAILED = "connect_failed"
    REQUEST_OK = "request_ok"
    TOKENS_SEEN = "tokens_seen"
    REQUEST_LOST = "request_lost"
    REQUEST_TIMEOUT = "request_timeout"
    REQUEST_FAILED = "request_failed"
    WORK_OK = "work_ok"
    WORK_FAILED = "work_failed"
    ASLEEP = "asleep"
    AWAKE = "awake"
    SHUTDOWN_SEEN = "shutdown_seen"
    DRAIN = "drain"
    UNDRAIN = "undrain"


@dataclass(frozen=True, slots=True)
class LifecycleRules:
    """`lately_s`: tokens within it speak for an engine. `work_interval_s`: an idle engine is asked for a token this
    often. The counts are events in a row."""

    refusals_to_down: int = 2
    failures_to_down: int = 2
    losses_to_down: int = 3
    lately_s: float = 10.0
    work_interval_s: float = 30.0


class Lifecycle(msgspec.Struct, frozen=True):
    """One engine as seen so far. `since_s`: when it came into `state`. `reason` is for people. `is_held`: the operator
    took it out. `is_in_touch`: the last probe reached it. `relapses`: how often requests took it out since one got
    tokens. `is_failing`: it is down for what it answers, and reachable."""

    state: EngineState
    since_s: float
    reason: str
    rules: LifecycleRules = LifecycleRules()
    last_ok_at_s: float | None = None
    is_held: bool = False
    refusals: int = 0
    failures: int = 0
    losses: int = 0
    connects_failed: int = 0
    is_slow: bool = False
    is_in_touch: bool = False
    relapses: int = 0
    is_failing: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether it is down and not for requests alone: its connections or its /health fail too."""
        return self.state is EngineState.DOWN and (self.failures > 0 or not self.is_in_touch)

    @property
    def is_amiss(self) -> bool:
        """Whether tokens for a client would change more than the time of the last ones."""
        is_counting = self.losses or self.failures or self.relapses
        return bool(is_counting) or self.state is not EngineState.SERVING

    def gave_tokens_lately(self, now_s: float) -> bool:
        """Whether real work came out of it within `lately_s`."""
        return self.last_ok_at_s is not None and now_s - self.last_ok_at_s <= self.rules.lately_s

    def wants_work(self, now_s: float) -> bool:
        """Whether it should be asked for one token now: not in, idle for long, or slow while nobody vouches for it."""
        if self.state is EngineState.ASLEEP or self.is_held:
            return False
        if self.state is EngineState.DOWN and self.relapses > 1:
            return now_s - self.since_s >= min(2.0 ** (self.relapses - 1), self.rules.work_interval_s)
        if self.state is not EngineState.SERVING or self.last_ok_at_s is None:
            return True
        return (self.is_slow and not self.gave_tokens_lately(now_s)) or (
            now_s - self.last_ok_at_s >= self.rules.work_interval_s
        )


def new_lifecycle(now_s: float, rules: LifecycleRules | None = None) -> Lifecycle:
    return Lifecycle(EngineState.UNKNOWN, now_s, "not asked yet", rules or LifecycleRules())


def advance(life: Lifecycle, event: LifecycleEvent, now_s: float, detail: str = "") -> Lifecycle:
    """The engine after `event`. `detail` goes into the reason where the state changes or the engine stays out."""
    match event:
        case LifecycleEvent.REQUEST_OK | LifecycleEvent.WORK_OK:
            return _after_tokens(life, event, now_s)
        case (
            LifecycleEvent.PROBE_OK
            | LifecycleEvent.PROBE_SLOW
            | LifecycleEvent.PROBE_FAILED
            | LifecycleEvent.PROBE_REFUSED
            | LifecycleEvent.PROBE_UNREACHABLE
            | LifecycleEvent.CONNECT_FAILED
        ):
            return _after_contact(life, event, now_s, detail)
        case (
            LifecycleEvent.REQUEST_LOST
            | LifecycleEvent.REQUEST_TIMEOUT
            | LifecycleEvent.REQUEST_FAILED
            | LifecycleEvent.WORK_FAILED
        ):
            return _after_loss(life, event, now_s, detail)
        case _:
            return _after_notice(life, event, now_s, detail)


def _to(life: Lifecycle, state: EngineState, now_s: float, reason: str) -> Lifecycle:
    """The engine in `state`. Counters start anew where the state changes."""
    if state is life.state:
        return replace(life, reason=reason)
    return replace(
        life,
        state=state,
        since_s=now_s,
        reason=reason,
        refusals=0,
        failures=0,
        losses=0,
        connects_failed=0,
        is_slow=False,
        is_failing=False,
    )


def _after_tokens(life: Lifecycle, event: LifecycleEvent, now_s: float) -> Lifecycle:
    relapses = 0 if event is LifecycleEvent.REQUEST_OK else life.relapses
    life = replace(life, last_ok_at_s=now_s, losses=0, failures=0, relapses=relapses)
    if life.state is EngineState.SERVING or life.is_held:
        return life
    may_return = life.is_in_touch and life.state not in (EngineState.DRAINING, EngineState.ASLEEP)
    if event is LifecycleEvent.REQUEST_OK and not may_return:
        return life
    return _to(life, EngineState.SERVING, now_s, "gives tokens")


def _after_contact(life: Lifecycle, event: LifecycleEvent, now_s: float, detail: str) -> Lifecycle:
    if event is LifecycleEvent.CONNECT_FAILED:
        return _judge_refusals(replace(life, connects_failed=life.connects_failed + 1), now_s, detail)
    if event is LifecycleEvent.PROBE_UNREACHABLE and life.gave_tokens_lately(now_s):
        event = LifecycleEvent.PROBE_SLOW
    if event in (LifecycleEvent.PROBE_REFUSED, LifecycleEvent.PROBE_UNREACHABLE):
        return _judge_refusals(replace(life, refusals=life.refusals + 1, is_in_touch=False), now_s, detail)
    # From here on it accepted a connection.
    is_slow = event is LifecycleEvent.PROBE_SLOW
    is_back = life.state is EngineState.LOADING and not life.is_in_touch
    life = replace(life, refusals=0, connects_failed=0, is_slow=is_slow, is_in_touch=True)
    if event is LifecycleEvent.PROBE_FAILED:
        life = replace(life, failures=life.failures + 1)
        if life.state is EngineState.SERVING and life.failures >= life.rules.failures_to_down:
            down = _to(life, EngineState.DOWN, now_s, f"/health failed {life.failures} times: {detail}")
            return replace(down, failures=life.failures)
    elif event is LifecycleEvent.PROBE_OK:
        life = replace(life, failures=0)
    if life.state is EngineState.UNKNOWN or is_back:
        return _to(life, EngineState.LOADING, now_s, "it answers; waiting for one token from it")
    return life


def _judge_refusals(life: Lifecycle, now_s: float, detail: str) -> Lifecycle:
    """Listed by state: one never seen alive is loading; one that was in needs two signs of which one is a probe."""
    if life.state is EngineState.UNKNOWN:
        life = _to(life, EngineState.LOADING, now_s, life.reason)
    if life.state is EngineState.LOADING:
        return replace(life, reason=detail or "connection refused: not up yet")
    if life.state is EngineState.DOWN:
        gone = "connection refused" if life.is_failing else life.reason
        return replace(life, reason=detail or gone, is_failing=False)
    is_out = life.refusals >= life.rules.refusals_to_down or (life.refusals >= 1 and life.connects_failed >= 1)
    if not is_out or life.is_held:
        return life
    return _to(life, EngineState.DOWN, now_s, detail or "connection refused")


def _after_loss(life: Lifecycle, event: LifecycleEvent, now_s: float, detail: str) -> Lifecycle:
    if life.state is not EngineState.SERVING:
        is_new = event is LifecycleEvent.WORK_FAILED and detail and not life.is_held
        return replace(life, reason=detail) if is_new else life
    if event is LifecycleEvent.WORK_FAILED:
        if life.gave_tokens_lately(now_s):
            return life
        return _to(life, EngineState.DOWN, now_s, detail or "it gave no token when asked for one")
    losses = life.losses + 1
    if losses < (life.rules.losses_to_down if life.relapses == 0 else 1):
        return replace(life, losses=losses)
    reason = f"{losses} requests in a row ended in {event.value}"
    if life.relapses:
        reason = f"it gave the token it was asked for, but the next request ended in {event.value}"
    life = _to(life, EngineState.DOWN, now_s, reason)
    return replace(life, relapses=life.relapses + 1, is_failing=event is LifecycleEvent.REQUEST_FAILED)


def _after_notice(life: Lifecycle, event: LifecycleEvent, now_s: float, detail: str) -> Lifecycle:
    state = life.state
    if event is LifecycleEvent.TOKENS_SEEN:
        return replace(life, last_ok_at_s=now_s) if state is EngineState.SERVING else life
    if event is LifecycleEvent.DRAIN:
        return _to(replace(life, is_held=True), EngineState.DRAINING, now_s, detail or "drained by the operator")
    if event is LifecycleEvent.UNDRAIN and life.is_held:
        return _to(replace(life, is_held=False), EngineState.LOADING, now_s, "put back; waiting for one token from it")
    if event is LifecycleEvent.SHUTDOWN_SEEN and state is EngineState.SERVING:
        return _to(life, EngineState.DRAINING, now_s, detail or "it is shutting down")
    if event is LifecycleEvent.ASLEEP and state not in (EngineState.DOWN, EngineState.DRAINING, EngineState.ASLEEP):
        return _to(life, EngineState.ASLEEP, now_s, "its weights are put away (POST /wake_up)")
    if event is LifecycleEvent.AWAKE and state is EngineState.ASLEEP:
        return _to(life, EngineState.LOADING, now_s, "awake; waiting for one token from it")
    return life
