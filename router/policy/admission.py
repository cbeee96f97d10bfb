"""Who may start now, who waits, and who is sent away: the pools of one model over the ledgers of their engines.

Chat, in order: a place in the chat pool; a bounded hold for one; a place borrowed from the batch pool; else refused
(the driver then tries a relay). Batch: a place in the batch pool, else it waits in the durable line, which is not
kept here: the driver offers the head of that line again when `room_tokens` allows.

States of a chat request:  offered -> admitted -> finished
                           offered -> held -> admitted | refused | withdrawn
Nobody overtakes a held one on an engine that this one waits for, too.

Every call is synchronous and returns the decisions it led to; carrying them out is the driver's part. Ids are unique
among what is admitted or held.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.policy.choice import two_of
from router.policy.decision import Admitted, Decision, Held, Offer, RefusalCause, Refused, Waiting
from router.policy.demand import Demand, RequestClass
from router.policy.drain import DrainMeter
from router.policy.lanes import ChatReserve
from router.policy.ledger import EngineLimits, Ledger, LedgerSnapshot

_CHAT, _BATCH = RequestClass.CHAT, RequestClass.BATCH
_NOBODY: frozenset[str] = frozenset()
_NOTHING: Sequence[Decision] = ()


@dataclass(frozen=True, slots=True)
class PoolRules:
    """One pool: its engines in configured order, the longest hold (seconds) and how many may be held at once."""

    engines: tuple[str, ...]
    hold_s: float = 0.0
    hold_max_requests: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """The pools of one model, None where it has none; whether chat may borrow from the batch pool."""

    chat: PoolRules | None
    batch: PoolRules | None
    borrow: bool = True
    chat_reserve_ratio: float = 0.0


@dataclass(slots=True, eq=False)
class _Engine:
    """`reserve`: only where chat and batch share the engine."""

    name: str
    ledger: Ledger
    reserve: ChatReserve | None
    serving: bool = False
    paused_until_s: float = float("-inf")


@dataclass(slots=True, eq=False)
class _Pool:
    """`serving`: those of `engines` that serve, in configured order; kept so that choosing need not look for them.
    A class without a pool has one without engines."""

    request_class: RequestClass
    engines: tuple[_Engine, ...]
    serving: tuple[_Engine, ...] = ()
    drain: DrainMeter = field(default_factory=DrainMeter)


@dataclass(frozen=True, slots=True)
class AdmissionSnapshot:
    """For gauges and tests."""

    engines: Mapping[str, LedgerSnapshot]
    held_requests: int
    held_tokens: int


class Admission:
    """The account of one model. `limits` per engine name; an engine may serve both pools (two lanes)."""

    def __init__(
        self, rules: AdmissionRules, limits: Mapping[str, EngineLimits], capacity_tokens: Mapping[str, int]
    ) -> None:
        self._rules = rules
        shared = _shared(rules)
        self._engines = {
            name: _Engine(
                name,
                Ledger(capacity_tokens[name], limits[name]),
                ChatReserve(rules.chat_reserve_ratio) if name in shared else None,
            )
            for name in limits
        }
        self._chat = _Pool(_CHAT, self._engines_of(rules.chat))
        self._batch = _Pool(_BATCH, self._engines_of(rules.batch))
        self._held: OrderedDict[str, tuple[Offer, float]] = OrderedDict()
        self._places: dict[str, tuple[_Engine, _Pool]] = {}
        #: When the last pause ends.
        self._paused_until_s = float("-inf")
        for engine in self._engines.values():
            _update_reserve(engine)

    # -- requests -----------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now_s: float) -> Decision:
        """A request asks for a place; the one decision about it comes back."""
        assert offer.request_id not in self._places, "a request has one place at a time"
        assert offer.request_id not in self._held, "a request is held once"
        return self._offer_chat(offer, now_s) if offer.request_class is _CHAT else self._offer_batch(offer, now_s)

    def first_token(self, request_id: str, now_s: float) -> Sequence[Decision]:
        """Prefill is over: a lane came free."""
        place = self._places.get(request_id)
        if place is None or not place[0].ledger.first_token(request_id):
            return _NOTHING
        return self._serve_held(now_s) if self._held else _NOTHING

    def true_up(self, request_id: str, demand: Demand, now_s: float) -> Sequence[Decision]:
        """What the request really holds, from `usage` or from the tokens seen so far."""
        place = self._places.get(request_id)
        if place is None:
            return _NOTHING
        freed = place[0].ledger.true_up(request_id, demand)
        return self._serve_held(now_s) if freed > 0 and self._held else _NOTHING

    def finish(self, request_id: str, now_s: float) -> Sequence[Decision]:
        """The request is over, however it ended. Idempotent; also withdraws one that is still held."""
        place = self._places.pop(request_id, None)
        if place is not None:
            engine, pool = place
            pool.drain.note(engine.ledger.finish(request_id), now_s)
        elif self._held.pop(request_id, None) is None:
            return _NOTHING
        return self._serve_held(now_s) if self._held else _NOTHING

    def expire(self, now_s: float) -> Sequence[Decision]:
        """End the holds whose time is over: borrowed, or refused. A pause that is over makes places, too."""
        over = [offer for offer, until_s in self._held.values() if until_s <= now_s]
        decisions: list[Decision] = []
        for offer in over:
            del self._held[offer.request_id]
            decisions.append(self._place(offer, self._chat, now_s) or self._last_resort(offer, now_s))
        decisions.extend(self._serve_held(now_s))
        return decisions

    # -- engines ------------------------------------------------------------------------------------------------

    def resize(self, engine: str, capacity_tokens: int, block_size_tokens: int, now_s: float) -> Sequence[Decision]:
        """The engine said what it has. A smaller capacity takes nothing back; new requests wait until it fits."""
        state = self._engines[engine]
        state.ledger.capacity_tokens = capacity_tokens
        state.ledger.block_size_tokens = block_size_tokens
        _update_reserve(state)
        return self._serve_held(now_s)

    def set_serving(self, engine: str, serving: bool, now_s: float) -> Sequence[Decision]:
        """Only serving engines are chosen; what runs elsewhere is not touched."""
        self._engines[engine].serving = serving
        for pool in (self._chat, self._batch):
            pool.serving = tuple([each for each in pool.engines if each.serving])
        return self._serve_held(now_s)

    def pause(self, engine: str, until_s: float) -> None:
        """The engine said 503: backpressure. It is left alone for a moment."""
        state = self._engines[engine]
        state.paused_until_s = max(state.paused_until_s, until_s)
        self._paused_until_s = max(self._paused_until_s, until_s)

    def next_expiry_s(self, now_s: float) -> float | None:
        """When `expire` is due next: a hold or a pause ends. None while nobody is held."""
        if not self._held:
            return None
        pauses = [state.paused_until_s for state in self._engines.values() if state.paused_until_s > now_s]
        return min([*(until_s for _, until_s in self._held.values()), *pauses])

    # -- questions ----------------------------------------------------------------------------------------------

    def room_tokens(self, now_s: float) -> int:
        """The largest batch cost that could start somewhere now; 0 for none."""
        engines = self._available(self._batch, now_s)
        return max((engine.ledger.room_tokens(_BATCH) for engine in engines), default=0)

    def is_serving(
        self, request_class: RequestClass, *, excluded: frozenset[str] = _NOBODY, only: str | None = None
    ) -> bool:
        """Whether any engine of the pool serves that is not `excluded` and, with `only`, is that one."""
        return bool(_allowed(self._pool(request_class).serving, excluded, only))

    def retry_after_s(self, request_class: RequestClass, missing_tokens: int, now_s: float, spread: float) -> float:
        """Seconds until `missing_tokens` will have come back to the pool, by its measured drain."""
        return self._pool(request_class).drain.retry_after_s(missing_tokens, now_s, spread=spread)

    def snapshot(self) -> AdmissionSnapshot:
        return AdmissionSnapshot(
            {name: state.ledger.snapshot() for name, state in self._engines.items()},
            len(self._held),
            sum(offer.demand.kv_tokens for offer, _ in self._held.values()),
        )

    # -- chat ---------------------------------------------------------------------------------------------------

    def _offer_chat(self, offer: Offer, now_s: float) -> Decision:
        rules = self._rules.chat
        if rules is None or not self._may_take(self._chat, offer):
            return self._last_resort(offer, now_s)
        admitted = self._place(offer, self._chat, now_s, avoiding=self._awaited() if self._held else _NOBODY)
        if admitted is not None:
            return admitted
        until_s = offer.hold_until_s if offer.hold_until_s is not None else now_s + rules.hold_s
        if len(self._held) >= rules.hold_max_requests or until_s <= now_s:
            return self._last_resort(offer, now_s)
        self._held[offer.request_id] = (offer, until_s)
        return Held(offer.request_id, until_s)

    def _awaited(self) -> frozenset[str]:
        """The engines that held ones wait for."""
        serving = _names(self._chat.serving)
        awaited = _NOBODY
        for offer, _ in self._held.values():
            awaited |= _names(self._may_take(self._chat, offer))
            if awaited >= serving:
                break
        return awaited

    def _last_resort(self, offer: Offer, now_s: float) -> Decision:
        """No more waiting in the chat pool: borrow, or refuse."""
        may_borrow = self._rules.borrow or offer.only is not None
        if may_borrow:
            borrowed = self._place(offer, self._batch, now_s)
            if borrowed is not None:
                return borrowed
        serving = self._may_take(self._chat, offer) or (may_borrow and self._may_take(self._batch, offer))
        ahead = sum(other.demand.kv_tokens for other, _ in self._held.values())
        return self._refused(offer, RefusalCause.SATURATED if serving else RefusalCause.NO_ENGINE, ahead, now_s)

    def _serve_held(self, now_s: float) -> Sequence[Decision]:
        """Give free places to the held ones; of those that wait for the same engine, first come first served."""
        if not self._held:
            return _NOTHING
        decisions: list[Decision] = []
        awaited = _NOBODY
        serving = _names(self._chat.serving)
        for offer, _ in tuple(self._held.values()):
            if awaited >= serving:
                break
            admitted = self._place(offer, self._chat, now_s, avoiding=awaited)
            if admitted is None:
                awaited |= _names(self._may_take(self._chat, offer))
            else:
                del self._held[offer.request_id]
                decisions.append(admitted)
        return decisions

    # -- batch --------------------------------------------------------------------------------------------------

    def _offer_batch(self, offer: Offer, now_s: float) -> Decision:
        admitted = self._place(offer, self._batch, now_s)
        if admitted is not None:
            return admitted
        # The line waits for its pool as a whole; a request for engines that are gone would stand before all others.
        is_restricted = bool(offer.excluded) or offer.only is not None
        if is_restricted and not self._may_take(self._batch, offer):
            return self._refused(offer, RefusalCause.NO_ENGINE, 0, now_s)
        return Waiting(offer.request_id)

    # -- places -------------------------------------------------------------------------------------------------

    def _place(self, offer: Offer, pool: _Pool, now_s: float, *, avoiding: frozenset[str] = _NOBODY) -> Admitted | None:
        """Commit `offer` on an engine of `pool`: the less loaded of two drawn ones, the other, the rest by load."""
        engines = self._available(pool, now_s)
        if avoiding or offer.excluded or offer.only is not None:
            engines = _allowed(engines, offer.excluded | avoiding, offer.only)
        if not engines:
            return None
        if len(engines) == 1:
            return self._take(engines[0], offer, pool, now_s)
        drawn, second = two_of(len(engines), offer.sample)
        first, other = engines[drawn], engines[second]
        if other.ledger.load_ratio() < first.ledger.load_ratio():
            first, other = other, first
        admitted = self._take(first, offer, pool, now_s) or self._take(other, offer, pool, now_s)
        if admitted is not None or len(engines) == 2:
            return admitted
        rest = [engine for engine in engines if engine is not first and engine is not other]
        for engine in sorted(rest, key=_load_ratio):
            admitted = self._take(engine, offer, pool, now_s)
            if admitted is not None:
                return admitted
        return None

    def _take(self, engine: _Engine, offer: Offer, pool: _Pool, now_s: float) -> Admitted | None:
        """Commit `offer` on `engine` if it has room."""
        ledger, request_class = engine.ledger, offer.request_class
        is_borrowed = request_class is not pool.request_class
        if is_borrowed and offer.only is None and ledger.in_prefill(_BATCH) > 0:
            # Behind a batch prefill it would wait for seconds.
            return None
        if ledger.offer(offer.request_id, request_class, offer.demand) is not None:
            return None
        self._places[offer.request_id] = (engine, pool)
        pool.drain.begin(now_s)
        if engine.reserve is not None and request_class is _CHAT:
            engine.reserve.note(ledger.held_tokens(_CHAT))
            _update_reserve(engine)
        return Admitted(offer.request_id, engine.name, pool.request_class, is_borrowed)

    def _available(self, pool: _Pool, now_s: float) -> tuple[_Engine, ...]:
        """The engines of `pool` that may be chosen right now."""
        if now_s >= self._paused_until_s:
            return pool.serving
        return tuple([engine for engine in pool.serving if engine.paused_until_s <= now_s])

    def _may_take(self, pool: _Pool, offer: Offer) -> tuple[_Engine, ...]:
        """The engines of `pool` that serve and may take `offer`, now or later."""
        return _allowed(pool.serving, offer.excluded, offer.only)

    def _pool(self, request_class: RequestClass) -> _Pool:
        return self._chat if request_class is _CHAT else self._batch

    def _engines_of(self, rules: PoolRules | None) -> tuple[_Engine, ...]:
        return () if rules is None else tuple([self._engines[name] for name in rules.engines])

    def _refused(self, offer: Offer, cause: RefusalCause, ahead_tokens: int, now_s: float) -> Refused:
        missing = offer.demand.kv_tokens + ahead_tokens
        retry_after_s = self.retry_after_s(offer.request_class, missing, now_s, offer.spread)
        return Refused(offer.request_id, cause, retry_after_s)


def _allowed(engines: tuple[_Engine, ...], excluded: frozenset[str], only: str | None) -> tuple[_Engine, ...]:
    """Those of `engines` that are not `excluded` and, with `only`, are that one."""
    if not excluded and only is None:
        return engines
    return tuple([engine for engine in engines if engine.name not in excluded and only in (None, engine.name)])


def _names(engines: tuple[_Engine, ...]) -> frozenset[str]:
    return frozenset([engine.name for engine in engines])


def _load_ratio(engine: _Engine) -> float:
    return engine.ledger.load_ratio()


def _shared(rules: AdmissionRules) -> frozenset[str]:
    """The engines on which a reserve is kept for chat: those of both pools."""
    if rules.chat is None or rules.batch is None or rules.chat_reserve_ratio == 0.0:
        return _NOBODY
    return frozenset(rules.chat.engines) & frozenset(rules.batch.engines)


def _update_reserve(engine: _Engine) -> None:
    if engine.reserve is not None:
        engine.ledger.chat_reserve_tokens = engine.reserve.tokens(engine.ledger.capacity_tokens)
