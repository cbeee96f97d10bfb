"""One engine as the rest of the router sees it: a frozen snapshot, and what traffic has to say about it.

Rules: `status` is replaced, never changed; `note_*` are synchronous and cheap, since the flow calls them for every
request; whoever watches is called in the same tick, after the new status is in place. What a sighting means is
`policy/lifecycle.py`; how an engine is probed is `health.py`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from router.clock import Clock
from router.config.model import EngineConfig
from router.policy.lifecycle import (
    EngineState,
    Lifecycle,
    LifecycleEvent,
    LifecycleRules,
    advance,
    new_lifecycle,
)
from router.upstream.api import ConnectFailed, NoConnectionToGive, Upstream
from router.upstream.behaviour import EngineBehaviour, behaviour_of
from router.upstream.scrape import EngineMetrics

#: A small part of any interval that the lifecycle measures from the last token.
_OK_EVERY_S = 0.1

_UNKNOWN_BEHAVIOUR = behaviour_of("")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot. `since_s`: monotonic seconds when `state` began. `is_gone`: it is down, and not for requests alone.
    `version` is empty, `max_model_len` and `capacity_tokens` are None where the engine does not say. `metrics` is None
    where they are missing or old."""

    state: EngineState
    reason: str
    since_s: float
    is_gone: bool = False
    version: str = ""
    behaviour: EngineBehaviour = _UNKNOWN_BEHAVIOUR
    served_model_names: tuple[str, ...] = ()
    max_model_len: int | None = None
    capacity_tokens: int | None = None
    metrics: EngineMetrics | None = None

    @property
    def can_serve(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.state is EngineState.SERVING


class Engine:
    """One vLLM server. Owned by the composition root; shared by the pools that name it."""

    def __init__(
        self, config: EngineConfig, upstream: Upstream, clock: Clock, rules: LifecycleRules | None = None
    ) -> None:
        self.config = config
        self.upstream = upstream
        #: Set when traffic saw something that a probe should settle at once.
        self.attention = asyncio.Event()
        self._clock = clock
        self._life = new_lifecycle(clock.now_s(), rules)
        self._status = EngineStatus(
            self._life.state, self._life.reason, self._life.since_s, capacity_tokens=config.capacity_tokens
        )
        self._watchers: list[Callable[[Engine], None]] = []
        #: Until then tokens of a request are no news.
        self._is_ok_until_s = float("-inf")

    def __repr__(self) -> str:
        return f"<Engine {self.name}: {self._status.state.value}, {self._status.reason}>"

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def life(self) -> Lifecycle:
        """For the monitor: what it should ask next."""
        return self._life

    def watch(self, on_change: Callable[["Engine"], None]) -> None:
        """`on_change` is called whenever anything in `status` but the metrics has changed."""
        self._watchers.append(on_change)

    def note_request_ok(self) -> None:
        """Tokens of a request came out of it. Where nothing was amiss, one in `_OK_EVERY_S` is taken in."""
        if self._clock.now_s() >= self._is_ok_until_s:
            self.see(LifecycleEvent.REQUEST_OK)

    @property
    def is_failing(self) -> bool:
        """Down for what it answers, and reachable: where nothing else is left, it may be asked all the same."""
        return self._life.is_failing

    def note_request_failed(self) -> None:
        """A request ended in a 5xx that is no refusal."""
        self.attention.set()
        self.see(LifecycleEvent.REQUEST_FAILED)

    def note_request_lost(self) -> None:
        """The connection of a request broke."""
        self.attention.set()
        self.see(LifecycleEvent.REQUEST_LOST)

    def note_request_timeout(self) -> None:
        """A request was given up for silence."""
        self.attention.set()
        self.see(LifecycleEvent.REQUEST_TIMEOUT)

    def note_connect_failed(self, error: ConnectFailed | None = None) -> None:
        """No connection for a request. `NoConnectionToGive` is a limit of our own and says nothing about the engine."""
        if not isinstance(error, NoConnectionToGive):
            self.attention.set()
            self.see(LifecycleEvent.CONNECT_FAILED)

    def note_shutdown_seen(self) -> None:
        """It said that it is shutting down, or aborted a request before its first token."""
        self.see(LifecycleEvent.SHUTDOWN_SEEN)

    def drain(self) -> None:
        """Send it nothing new until `undrain`."""
        self.see(LifecycleEvent.DRAIN)

    def undrain(self) -> None:
        self.see(LifecycleEvent.UNDRAIN)

    def see(self, event: LifecycleEvent, detail: str = "") -> None:
        """Take in one sighting."""
        self._life = life = advance(self._life, event, self._clock.now_s(), detail)
        ok_at_s = life.last_ok_at_s
        self._is_ok_until_s = float("-inf") if ok_at_s is None or life.is_amiss else ok_at_s + _OK_EVERY_S
        status = self._status
        if life.state is not status.state or life.reason != status.reason or life.is_gone is not status.is_gone:
            self._set(replace(status, state=life.state, reason=life.reason, since_s=life.since_s, is_gone=life.is_gone))

    def learn_identity(self, version: str | None, names: tuple[str, ...] | None, max_model_len: int | None) -> None:
        """What registration read; None (or a missing `max_model_len`) leaves what was known."""
        status = self._status
        if version is not None:
            status = replace(status, version=version, behaviour=behaviour_of(version))
        if names is not None:
            status = replace(status, served_model_names=names)
        self._set(replace(status, max_model_len=status.max_model_len if max_model_len is None else max_model_len))

    def learn_metrics(self, metrics: EngineMetrics | None) -> None:
        """The last page read, or None where there is none worth keeping. A capacity once stated stays known."""
        before, capacity = self._status.metrics, self._status.capacity_tokens
        if metrics is not None and metrics.capacity_tokens is not None:
            capacity = metrics.capacity_tokens
        self._set(replace(self._status, metrics=metrics, capacity_tokens=capacity))
        if metrics is None:
            return
        generated = before.generated_tokens if before is not None else None
        if generated is not None and metrics.generated_tokens is not None and metrics.generated_tokens > generated:
            self.see(LifecycleEvent.TOKENS_SEEN)
        if metrics.is_asleep is not None:
            self.see(LifecycleEvent.ASLEEP if metrics.is_asleep else LifecycleEvent.AWAKE)

    def _set(self, status: EngineStatus) -> None:
        is_news = replace(self._status, metrics=status.metrics) != status
        self._status = status
        if is_news:
            for on_change in self._watchers:
                on_change(self)
