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
from collections.abc import Mapping
from dataclasses import dataclass, replace

from router.policy.choice import two_choices_first
from router.policy.decision import Admitted, Decision, Held, Offer, RefusalCause, Refused, Waiting
from router.policy.demand import Demand, RequestClass
from router.policy.drain import DrainMeter
from router.policy.lanes import ChatReserve
from router.policy.ledger import EngineLimits, Ledger, LedgerSnapshot


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

    def pool(self, request_class: RequestClass) -> PoolRules | None:
        return self.chat if request_class is RequestClass.CHAT else self.batch


@dataclass(slots=True)
class _Engine:
    ledger: Ledger
    reserve: ChatReserve
    serving: bool = False
    paused_until_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class AdmissionSnapshot:
    """For gauges and tests."""

    engines: Mapping[str, LedgerSnapshot]
    held_requests: int
    held_tokens: int


@dataclass(slots=True)
class _Place:
    engine: str
    pool: RequestClass


class Admission:
    """The account of one model. `limits` per engine name; an engine may serve both pools (two lanes)."""

    def __init__(
        self, rules: AdmissionRules, limits: Mapping[str, EngineLimits], capacity_tokens: Mapping[str, int]
    ) -> None:
        self._rules = rules
        self._engines = {
            name: _Engine(Ledger(capacity_tokens[name], limits[name]), ChatReserve(self._reserve_ratio(name)))
            for name in limits
        }
        self._held: OrderedDict[str, tuple[Offer, float]] = OrderedDict()
        self._places: dict[str, _Place] = {}
        self._drain = {request_class: DrainMeter() for request_class in RequestClass}
        for name in self._engines:
            self._update_reserve(name)

    # -- requests -----------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now_s: float) -> list[Decision]:
        """A request asks for a place; exactly one decision about it comes back."""
        assert offer.request_id not in self._places, "a request has one place at a time"
        assert offer.request_id not in self._held, "a request is held once"
        is_chat = offer.request_class is RequestClass.CHAT
        return [self._offer_chat(offer, now_s) if is_chat else self._offer_batch(offer, now_s)]

    def first_token(self, request_id: str, now_s: float) -> list[Decision]:
        """Prefill is over: a lane came free."""
        place = self._places.get(request_id)
        if place is None or not self._engines[place.engine].ledger.first_token(request_id):
            return []
        return self._serve_held(now_s)

    def true_up(self, request_id: str, demand: Demand, now_s: float) -> list[Decision]:
        """What the request really holds, from `usage` or from the tokens seen so far."""
        place = self._places.get(request_id)
        if place is None:
            return []
        freed = self._engines[place.engine].ledger.true_up(request_id, demand)
        return self._serve_held(now_s) if freed > 0 else []

    def finish(self, request_id: str, now_s: float) -> list[Decision]:
        """The request is over, however it ended. Idempotent; also withdraws one that is still held."""
        if self._held.pop(request_id, None) is not None:
            return self._serve_held(now_s)
        place = self._places.pop(request_id, None)
        if place is None:
            return []
        freed = self._engines[place.engine].ledger.finish(request_id)
        self._drain[place.pool].note(freed, now_s)
        return self._serve_held(now_s)

    def expire(self, now_s: float) -> list[Decision]:
        """End the holds whose time is over: borrowed, or refused. A pause that is over makes places, too."""
        over = [offer for offer, until_s in self._held.values() if until_s <= now_s]
        decisions: list[Decision] = []
        for offer in over:
            del self._held[offer.request_id]
            decisions.append(self._place(offer, RequestClass.CHAT, now_s) or self._last_resort(offer, now_s))
        return decisions + self._serve_held(now_s)

    # -- engines ------------------------------------------------------------------------------------------------

    def resize(self, engine: str, capacity_tokens: int, block_size_tokens: int, now_s: float) -> list[Decision]:
        """The engine said what it has. A smaller capacity takes nothing back; new requests wait until it fits."""
        ledger = self._engines[engine].ledger
        ledger.capacity_tokens = capacity_tokens
        ledger.block_size_tokens = block_size_tokens
        self._update_reserve(engine)
        return self._serve_held(now_s)

    def set_serving(self, engine: str, serving: bool, now_s: float) -> list[Decision]:
        """Only serving engines are chosen; what runs elsewhere is not touched."""
        self._engines[engine].serving = serving
        return self._serve_held(now_s)

    def pause(self, engine: str, until_s: float) -> None:
        """The engine said 503: backpressure. It is left alone for a moment."""
        state = self._engines[engine]
        state.paused_until_s = max(state.paused_until_s, until_s)

    def next_expiry_s(self, now_s: float) -> float | None:
        """When `expire` is due next: a hold or a pause ends. None while nobody is held."""
        if not self._held:
            return None
        pauses = [state.paused_until_s for state in self._engines.values() if state.paused_until_s > now_s]
        return min([*(until_s for _, until_s in self._held.values()), *pauses])

    # -- questions ----------------------------------------------------------------------------------------------

    def room_tokens(self, now_s: float) -> int:
        """The largest batch cost that could start somewhere now; 0 for none."""
        names = self._available(RequestClass.BATCH, now_s)
        return max((self._engines[name].ledger.room_tokens(RequestClass.BATCH) for name in names), default=0)

    def is_serving(
        self, request_class: RequestClass, *, excluded: frozenset[str] = frozenset(), only: str | None = None
    ) -> bool:
        """Whether any engine of the pool serves that is not `excluded` and, with `only`, is that one."""
        return bool(self._serving(request_class, excluded, only))

    def retry_after_s(self, request_class: RequestClass, missing_tokens: int, now_s: float, spread: float) -> float:
        """Seconds until `missing_tokens` will have come back to the pool, by its measured drain."""
        return self._drain[request_class].retry_after_s(missing_tokens, now_s, spread=spread)

    def snapshot(self) -> AdmissionSnapshot:
        return AdmissionSnapshot(
            {name: state.ledger.snapshot() for name, state in self._engines.items()},
            len(self._held),
            sum(offer.demand.kv_tokens for offer, _ in self._held.values()),
        )

    # -- chat ---------------------------------------------------------------------------------------------------

    def _offer_chat(self, offer: Offer, now_s: float) -> Decision:
        pool = self._rules.chat
        if pool is None or not self._may_take(RequestClass.CHAT, offer):
            return self._last_resort(offer, now_s)
        admitted = self._place(_avoiding(offer, self._awaited()), RequestClass.CHAT, now_s)
        if admitted is not None:
            return admitted
        until_s = offer.hold_until_s if offer.hold_until_s is not None else now_s + pool.hold_s
        if len(self._held) >= pool.hold_max_requests or until_s <= now_s:
            return self._last_resort(offer, now_s)
        self._held[offer.request_id] = (offer, until_s)
        return Held(offer.request_id, until_s)

    def _awaited(self) -> frozenset[str]:
        """The engines that held ones wait for."""
        serving = frozenset(self._serving(RequestClass.CHAT))
        awaited: frozenset[str] = frozenset()
        for offer, _ in self._held.values():
            awaited |= frozenset(self._may_take(RequestClass.CHAT, offer))
            if awaited >= serving:
                break
        return awaited

    def _last_resort(self, offer: Offer, now_s: float) -> Decision:
        """No more waiting in the chat pool: borrow, or refuse."""
        may_borrow = self._rules.borrow or offer.only is not None
        if may_borrow:
            borrowed = self._place(offer, RequestClass.BATCH, now_s)
            if borrowed is not None:
                return borrowed
        serving = self._may_take(RequestClass.CHAT, offer) or (may_borrow and self._may_take(RequestClass.BATCH, offer))
        ahead = sum(other.demand.kv_tokens for other, _ in self._held.values())
        return self._refused(offer, RefusalCause.SATURATED if serving else RefusalCause.NO_ENGINE, ahead, now_s)

    def _serve_held(self, now_s: float) -> list[Decision]:
        """Give free places to the held ones; of those that wait for the same engine, first come first served."""
        decisions: list[Decision] = []
        awaited: frozenset[str] = frozenset()
        serving = frozenset(self._serving(RequestClass.CHAT))
        for offer, _ in tuple(self._held.values()):
            if awaited >= serving:
                break
            admitted = self._place(_avoiding(offer, awaited), RequestClass.CHAT, now_s)
            if admitted is None:
                awaited |= frozenset(self._may_take(RequestClass.CHAT, offer))
            else:
                del self._held[offer.request_id]
                decisions.append(admitted)
        return decisions

    # -- batch --------------------------------------------------------------------------------------------------

    def _offer_batch(self, offer: Offer, now_s: float) -> Decision:
        admitted = self._place(offer, RequestClass.BATCH, now_s)
        if admitted is not None:
            return admitted
        # The line waits for its pool as a whole; a request for engines that are gone would stand before all others.
        is_restricted = bool(offer.excluded) or offer.only is not None
        if is_restricted and not self._may_take(RequestClass.BATCH, offer):
            return self._refused(offer, RefusalCause.NO_ENGINE, 0, now_s)
        return Waiting(offer.request_id)

    # -- places -------------------------------------------------------------------------------------------------

    def _place(self, offer: Offer, pool: RequestClass, now_s: float) -> Admitted | None:
        """Commit `offer` on an engine of `pool`, the less loaded of two drawn ones first."""
        names = self._available(pool, now_s, excluded=offer.excluded, only=offer.only)
        for name in two_choices_first(names, offer.sample, self._load_ratio):
            ledger = self._engines[name].ledger
            if pool is not offer.request_class and offer.only is None and not self._may_borrow(ledger):
                continue
            if ledger.offer(offer.request_id, offer.request_class, offer.demand) is None:
                self._places[offer.request_id] = _Place(name, pool)
                self._drain[pool].begin(now_s)
                if offer.request_class is RequestClass.CHAT:
                    self._engines[name].reserve.note(ledger.held_tokens(RequestClass.CHAT))
                    self._update_reserve(name)
                return Admitted(offer.request_id, name, pool, borrowed=pool is not offer.request_class)
        return None

    def _may_borrow(self, ledger: Ledger) -> bool:
        """Chat goes to the batch pool only where no batch prefill runs: behind one it would wait for seconds."""
        return ledger.in_prefill(RequestClass.BATCH) == 0

    def _available(
        self,
        request_class: RequestClass,
        now_s: float,
        *,
        excluded: frozenset[str] = frozenset(),
        only: str | None = None,
    ) -> list[str]:
        """The engines that may be chosen right now."""
        names = self._serving(request_class, excluded, only)
        return [name for name in names if self._engines[name].paused_until_s <= now_s]

    def _may_take(self, request_class: RequestClass, offer: Offer) -> list[str]:
        """The engines of the pool that serve and may take `offer`, now or later."""
        return self._serving(request_class, offer.excluded, offer.only)

    def _serving(
        self, request_class: RequestClass, excluded: frozenset[str] = frozenset(), only: str | None = None
    ) -> list[str]:
        pool = self._rules.pool(request_class)
        names = pool.engines if pool is not None else ()
        return [n for n in names if self._engines[n].serving and n not in excluded and only in (None, n)]

    def _refused(self, offer: Offer, cause: RefusalCause, ahead_tokens: int, now_s: float) -> Refused:
        missing = offer.demand.kv_tokens + ahead_tokens
        retry_after_s = self.retry_after_s(offer.request_class, missing, now_s, offer.spread)
        return Refused(offer.request_id, cause, retry_after_s)

    def _load_ratio(self, name: str) -> float:
        return self._engines[name].ledger.load_ratio()

    def _reserve_ratio(self, name: str) -> float:
        """A reserve is kept only where chat and batch share the engine."""
        chat, batch = self._rules.chat, self._rules.batch
        shared = chat is not None and batch is not None and name in chat.engines and name in batch.engines
        return self._rules.chat_reserve_ratio if shared else 0.0

    def _update_reserve(self, name: str) -> None:
        if self._reserve_ratio(name) == 0.0:
            return
        state = self._engines[name]
        state.ledger.chat_reserve_tokens = state.reserve.tokens(state.ledger.capacity_tokens)


def _avoiding(offer: Offer, names: frozenset[str]) -> Offer:
    return replace(offer, excluded=offer.excluded | names) if names else offer
