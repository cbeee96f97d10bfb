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
from dataclasses import dataclass

from router.policy.decision import Decision, Held, Offer, RefusalCause, Refused, Waiting
from router.policy.demand import Demand, RequestClass
from router.policy.lanes import ChatReserve
from router.policy.ledger import EngineLimits, Ledger, LedgerSnapshot
from router.policy.places import NOBODY, EnginePlaces, Places

_CHAT, _BATCH = RequestClass.CHAT, RequestClass.BATCH
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
        engines = {
            name: EnginePlaces(
                name,
                Ledger(capacity_tokens[name], limits[name]),
                ChatReserve(rules.chat_reserve_ratio) if name in shared else None,
            )
            for name in limits
        }
        chat, batch = (pool.engines if pool is not None else () for pool in (rules.chat, rules.batch))
        self._places = Places(engines, chat, batch)
        self._chat, self._batch = self._places.chat, self._places.batch
        #: Kept up to date: whether it can matter to a request of a class which engine it goes to.
        self.has_choice: Mapping[RequestClass, bool] = self._places.has_choice
        self._held: OrderedDict[str, tuple[Offer, float]] = OrderedDict()

    # -- requests -----------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now_s: float) -> Decision:
        """A request asks for a place; the one decision about it comes back."""
        assert offer.request_id not in self._places.taken, "a request has one place at a time"
        assert offer.request_id not in self._held, "a request is held once"
        if offer.request_class is not _CHAT:
            return self._offer_batch(offer, now_s)
        awaited = self._awaited() if self._held else NOBODY
        return self._places.give(offer, self._chat, now_s, awaited) or self._hold_or_refuse(offer, now_s)

    def first_token(self, request_id: str, now_s: float) -> Sequence[Decision]:
        """A token was seen: prefill is over, a lane came free."""
        is_news = self._places.first_token(request_id, now_s)
        return self._serve_held(now_s) if self._held and is_news else _NOTHING

    def prefill_over(self, request_id: str, now_s: float) -> Sequence[Decision]:
        """Prefill is probably over, though no token was seen: the lane is free all the same."""
        is_news = self._places.prefill_over(request_id)
        return self._serve_held(now_s) if is_news and self._held else _NOTHING

    def true_up(self, request_id: str, demand: Demand, now_s: float) -> Sequence[Decision]:
        """What the request really holds, from `usage` or from the tokens seen so far."""
        freed = self._places.true_up(request_id, demand)
        return self._serve_held(now_s) if freed > 0 and self._held else _NOTHING

    def finish(self, request_id: str, now_s: float, is_answered: bool = False) -> Sequence[Decision]:
        """The request is over, however it ended; `is_answered`: in its whole answer. Idempotent; also withdraws one
        that is still held."""
        if not self._places.give_back(request_id, now_s, is_answered) and self._held.pop(request_id, None) is None:
            return _NOTHING
        return self._serve_held(now_s) if self._held else _NOTHING

    def expire(self, now_s: float) -> Sequence[Decision]:
        """End the holds whose time is over: borrowed, or refused. A pause that is over makes places, too."""
        over = [offer for offer, until_s in self._held.values() if until_s <= now_s]
        decisions: list[Decision] = []
        for offer in over:
            del self._held[offer.request_id]
            decisions.append(self._places.give(offer, self._chat, now_s) or self._last_resort(offer, now_s))
        decisions.extend(self._serve_held(now_s))
        return decisions

    # -- engines ------------------------------------------------------------------------------------------------

    def resize(self, engine: str, capacity_tokens: int, block_size_tokens: int, now_s: float) -> Sequence[Decision]:
        """The engine said what it has. A smaller capacity takes nothing back; new requests wait until it fits."""
        self._places.resize(engine, capacity_tokens, block_size_tokens)
        return self._serve_held(now_s)

    def set_serving(self, engine: str, serving: bool, now_s: float, *, is_failing: bool = False) -> Sequence[Decision]:
        """Only serving engines are chosen; what runs elsewhere is not touched. One that `is_failing` is chat's last
        resort, where no engine serves that may take a request."""
        self._places.set_serving(engine, serving, is_failing=is_failing)
        return self._serve_held(now_s)

    def pause(self, engine: str, until_s: float) -> None:
        """The engine said 503: backpressure. It is left alone for a moment."""
        self._places.pause(engine, until_s)

    def next_expiry_s(self, now_s: float) -> float | None:
        """When `expire` is due next: a hold or a pause ends. None while nobody is held."""
        if not self._held:
            return None
        return min([*(until_s for _, until_s in self._held.values()), *self._places.pauses_s(now_s)])

    # -- questions ----------------------------------------------------------------------------------------------

    def room_tokens(self, now_s: float) -> int:
        """The largest batch cost that could start somewhere now; 0 for none."""
        return max((engine.ledger.room_tokens(_BATCH) for engine in self._batch.available(now_s)), default=0)

    def is_serving(
        self, request_class: RequestClass, *, excluded: frozenset[str] = NOBODY, only: str | None = None
    ) -> bool:
        """Whether any engine of the pool serves that is not `excluded` and, with `only`, is that one."""
        return bool(self._places.pool(request_class).may_take(excluded, only))

    def retry_after_s(self, request_class: RequestClass, missing_tokens: int, now_s: float, spread: float) -> float:
        """Seconds until `missing_tokens` will have come back to the pool, by its measured drain."""
        return self._places.pool(request_class).drain.retry_after_s(missing_tokens, now_s, spread=spread)

    def snapshot(self) -> AdmissionSnapshot:
        return AdmissionSnapshot(
            self._places.snapshot(),
            len(self._held),
            sum(offer.demand.kv_tokens for offer, _ in self._held.values()),
        )

    # -- chat ---------------------------------------------------------------------------------------------------

    def _hold_or_refuse(self, offer: Offer, now_s: float) -> Decision:
        """The chat pool has no place for it now."""
        rules = self._rules.chat
        if rules is None or not self._chat.may_take(offer.excluded, offer.only):
            return self._last_resort(offer, now_s)
        until_s = offer.hold_until_s if offer.hold_until_s is not None else now_s + rules.hold_s
        if len(self._held) >= rules.hold_max_requests or until_s <= now_s:
            return self._last_resort(offer, now_s)
        self._held[offer.request_id] = (offer, until_s)
        return Held(offer.request_id, until_s)

    def _awaited(self) -> frozenset[str]:
        """The engines that held ones wait for."""
        serving = _names(self._chat.serving)
        awaited = NOBODY
        for offer, _ in self._held.values():
            awaited |= _names(self._chat.may_take(offer.excluded, offer.only))
            if awaited >= serving:
                break
        return awaited

    def _last_resort(self, offer: Offer, now_s: float) -> Decision:
        """No more waiting in the chat pool: borrow, or ask one that fails where none serves, or refuse."""
        may_borrow = self._rules.borrow or offer.only is not None
        if may_borrow:
            borrowed = self._places.give(offer, self._batch, now_s)
            if borrowed is not None:
                return borrowed
        is_serving = self._chat.may_take(offer.excluded, offer.only) or (
            may_borrow and self._batch.may_take(offer.excluded, offer.only)
        )
        if not is_serving:
            # Better an engine that failed on others than none at all: it may have failed for what they sent.
            admitted = self._places.give(offer, self._places.failing, now_s)
            if admitted is not None:
                return admitted
        ahead = sum(other.demand.kv_tokens for other, _ in self._held.values())
        return self._refused(offer, RefusalCause.SATURATED if is_serving else RefusalCause.NO_ENGINE, ahead, now_s)

    def _serve_held(self, now_s: float) -> Sequence[Decision]:
        """Give free places to the held ones; of those that wait for the same engine, first come first served."""
        if not self._held:
            return _NOTHING
        decisions: list[Decision] = []
        awaited = NOBODY
        serving = _names(self._chat.serving)
        for offer, _ in tuple(self._held.values()):
            if awaited >= serving:
                break
            admitted = self._places.give(offer, self._chat, now_s, awaited)
            if admitted is None:
                awaited |= _names(self._chat.may_take(offer.excluded, offer.only))
            else:
                del self._held[offer.request_id]
                decisions.append(admitted)
        return decisions

    # -- batch --------------------------------------------------------------------------------------------------

    def _offer_batch(self, offer: Offer, now_s: float) -> Decision:
        admitted = self._places.give(offer, self._batch, now_s)
        if admitted is not None:
            return admitted
        # The line waits for its pool as a whole; a request for engines that are gone would stand before all others.
        is_restricted = bool(offer.excluded) or offer.only is not None
        if is_restricted and not self._batch.may_take(offer.excluded, offer.only):
            return self._refused(offer, RefusalCause.NO_ENGINE, 0, now_s)
        return Waiting(offer.request_id)

    def _refused(self, offer: Offer, cause: RefusalCause, ahead_tokens: int, now_s: float) -> Refused:
        missing = offer.demand.kv_tokens + ahead_tokens
        retry_after_s = self.retry_after_s(offer.request_class, missing, now_s, offer.sample)
        return Refused(offer.request_id, cause, retry_after_s)


def _names(engines: tuple[EnginePlaces, ...]) -> frozenset[str]:
    return frozenset([engine.name for engine in engines])


def _shared(rules: AdmissionRules) -> frozenset[str]:
    """The engines on which a reserve is kept for chat: those of both pools."""
    if rules.chat is None or rules.batch is None or rules.chat_reserve_ratio == 0.0:
        return NOBODY
    return frozenset(rules.chat.engines) & frozenset(rules.batch.engines)
