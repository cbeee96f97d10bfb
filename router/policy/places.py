"""The engines of one model, in two pools: which one a request gets its place on, and what came back.

Choosing, among the engines that serve, are not paused and may take the request: the one that has its prompt's prefix,
within the bound of `affinity.py`; else the less loaded of two drawn ones, then the other, then the rest by load. One
that is quiet comes after all others and is not followed: `QUIET_WAITING` requests or more are waiting for their first
token there, and for `QUIET_S` none of them got one. It may be stuck, or deep in one long prefill; either way the next
request is better off elsewhere, and its first token makes it a choice again.

It never knows who waits: that is `admission.py`. Every call is synchronous and either commits a request or leaves all
as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from router.policy.affinity import SLACK_RATIO, Affinity, AffinityResult, may_follow
from router.policy.choice import two_of
from router.policy.decision import Admitted, Offer
from router.policy.demand import Demand, RequestClass
from router.policy.drain import DrainMeter
from router.policy.lanes import ChatReserve
from router.policy.ledger import Ledger, LedgerSnapshot

_CHAT, _BATCH = RequestClass.CHAT, RequestClass.BATCH
_HIT, _MOVED, _NONE = AffinityResult.HIT, AffinityResult.MOVED, AffinityResult.NONE
NOBODY: frozenset[str] = frozenset()
#: Ten times the usual target of a first token. One or two slow requests prove nothing.
QUIET_S = 10.0
QUIET_WAITING = 3


@dataclass(slots=True, eq=False)
class EnginePlaces:
    """One engine. `reserve`: only where chat and batch share it. `waiting`: requests that showed no token yet;
    `sign_at_s`: when one did last, or began to wait where none did."""

    name: str
    ledger: Ledger
    reserve: ChatReserve | None
    serving: bool = False
    failing: bool = False
    paused_until_s: float = float("-inf")
    waiting: int = 0
    sign_at_s: float = 0.0

    def is_quiet(self, now_s: float) -> bool:
        return self.waiting >= QUIET_WAITING and now_s - self.sign_at_s > QUIET_S

    def update_reserve(self) -> None:
        if self.reserve is not None:
            self.ledger.reserve_for_chat(self.reserve.tokens(self.ledger.capacity_tokens))


@dataclass(slots=True, eq=False)
class PoolPlaces:
    """One pool, without engines where the model has no such pool. `serving`: those of `engines` that serve, in the
    configured order; kept so that choosing need not look for them."""

    request_class: RequestClass
    engines: tuple[EnginePlaces, ...]
    serving: tuple[EnginePlaces, ...] = ()
    drain: DrainMeter = field(default_factory=DrainMeter)

    def may_take(self, excluded: frozenset[str], only: str | None) -> tuple[EnginePlaces, ...]:
        """The engines that serve, now with room or without, are not `excluded` and, with `only`, are that one."""
        return _allowed(self.serving, excluded, only)

    def available(self, now_s: float) -> tuple[EnginePlaces, ...]:
        """The engines that serve and are not paused."""
        return tuple([engine for engine in self.serving if engine.paused_until_s <= now_s])


class _Place(msgspec.Struct):
    engine: EnginePlaces
    pool: PoolPlaces
    is_waiting: bool = True


class Places:
    """Every place of one model. `chat` and `batch` name engines of `engines`."""

    def __init__(self, engines: Mapping[str, EnginePlaces], chat: tuple[str, ...], batch: tuple[str, ...]) -> None:
        self.chat = PoolPlaces(_CHAT, tuple([engines[name] for name in chat]))
        self.batch = PoolPlaces(_BATCH, tuple([engines[name] for name in batch]))
        #: Chat's engines that fail and can be reached. Of use only while nothing else serves chat.
        self.failing = PoolPlaces(_CHAT, self.chat.engines)
        self._engines = engines
        self._affinity = Affinity()
        #: The requests that have a place, by id.
        self.taken: dict[str, _Place] = {}
        #: When the last pause ends.
        self._paused_until_s = float("-inf")
        #: Whether it can matter to a request of a class which engine it goes to: several of its pool serve. Batch
        #: waits, and more may serve by then.
        self.has_choice = {_CHAT: False, _BATCH: len(batch) > 1}
        for engine in engines.values():
            engine.update_reserve()

    def pool(self, request_class: RequestClass) -> PoolPlaces:
        return self.chat if request_class is _CHAT else self.batch

    # -- one request --------------------------------------------------------------------------------------------

    def give(self, offer: Offer, pool: PoolPlaces, now_s: float, avoiding: frozenset[str] = NOBODY) -> Admitted | None:
        """Commit `offer` on an engine of `pool` that is not among `avoiding`, if one has room: on the one that has the
        most of its prefix, if the load there allows."""
        engines = pool.serving if now_s >= self._paused_until_s else pool.available(now_s)
        if avoiding or offer.excluded or offer.only is not None:
            engines = _allowed(engines, offer.excluded | avoiding, offer.only)
        if len(engines) < 2:
            return self._take(engines[0], offer, pool, now_s) if engines else None
        prefix = offer.prefix
        if prefix is None or not prefix.marks:
            return self._choose(offer, engines, pool, now_s)
        admitted, otherwise = None, _NONE
        known = self._affinity.find(prefix, now_s)
        if known is not None:
            name, share_ratio = known
            near, otherwise = self._engines[name], _MOVED
            if near in engines and not near.is_quiet(now_s):
                load_ratio = near.ledger.load_ratio_with(offer.demand)
                # Within the slack it may be followed whatever the others have.
                if load_ratio <= SLACK_RATIO * share_ratio or _may_follow(load_ratio, engines, offer, share_ratio):
                    admitted = self._take(near, offer, pool, now_s, _HIT)
        if admitted is None:
            admitted = self._choose(offer, engines, pool, now_s, otherwise)
        if admitted is not None:
            self._affinity.note(prefix, admitted.engine, now_s)
        return admitted

    def first_token(self, request_id: str, now_s: float) -> bool:
        """A token was seen: prefill is over. False if that was known, or the request has no place."""
        place = self.taken.get(request_id)
        if place is None:
            return False
        place.engine.sign_at_s = now_s
        if place.is_waiting:
            place.is_waiting = False
            place.engine.waiting -= 1
        return place.engine.ledger.first_token(request_id)

    def prefill_over(self, request_id: str) -> bool:
        """The prefill is taken for over, though no token was seen; the same answer."""
        place = self.taken.get(request_id)
        return place is not None and place.engine.ledger.first_token(request_id)

    def true_up(self, request_id: str, demand: Demand) -> int:
        """The request holds `demand`; tokens freed (negative: taken)."""
        place = self.taken.get(request_id)
        return 0 if place is None else place.engine.ledger.true_up(request_id, demand)

    def give_back(self, request_id: str, now_s: float, is_answered: bool = False) -> bool:
        """`is_answered`: it got its whole answer, a sign of its engine. False if the request has no place."""
        place = self.taken.pop(request_id, None)
        if place is None:
            return False
        engine = place.engine
        engine.waiting -= place.is_waiting
        if is_answered:
            engine.sign_at_s = now_s
        place.pool.drain.note(engine.ledger.finish(request_id), now_s)
        return True

    # -- engines ------------------------------------------------------------------------------------------------

    def resize(self, engine: str, capacity_tokens: int, block_size_tokens: int) -> None:
        state = self._engines[engine]
        state.ledger.resize(capacity_tokens, block_size_tokens)
        state.update_reserve()

    def set_serving(self, engine: str, serving: bool, *, is_failing: bool = False) -> None:
        state = self._engines[engine]
        state.serving, state.failing = serving, is_failing
        for pool in (self.chat, self.batch):
            pool.serving = tuple([each for each in pool.engines if each.serving])
        self.has_choice[_CHAT] = len(self.chat.serving) > 1
        self.failing.serving = tuple([each for each in self.chat.engines if each.failing])

    def pause(self, engine: str, until_s: float) -> None:
        state = self._engines[engine]
        state.paused_until_s = max(state.paused_until_s, until_s)
        self._paused_until_s = max(self._paused_until_s, until_s)

    def pauses_s(self, now_s: float) -> list[float]:
        """When the pauses end that are not over."""
        return [state.paused_until_s for state in self._engines.values() if state.paused_until_s > now_s]

    def snapshot(self) -> Mapping[str, LedgerSnapshot]:
        return {name: state.ledger.snapshot() for name, state in self._engines.items()}

    # -- choosing -----------------------------------------------------------------------------------------------

    def _choose(
        self,
        offer: Offer,
        engines: tuple[EnginePlaces, ...],
        pool: PoolPlaces,
        now_s: float,
        affinity: AffinityResult | None = None,
    ) -> Admitted | None:
        """The less loaded of two drawn `engines` (two or more), the other, the rest by load."""
        drawn, second = two_of(len(engines), offer.sample)
        first, other = engines[drawn], engines[second]
        if first.is_quiet(now_s) or other.is_quiet(now_s):
            order = sorted(engines, key=lambda engine: (engine.is_quiet(now_s), engine.ledger.load_ratio))
            return self._take_first(order, offer, pool, now_s, affinity)
        if other.ledger.load_ratio < first.ledger.load_ratio:
            first, other = other, first
        admitted = self._take(first, offer, pool, now_s, affinity) or self._take(other, offer, pool, now_s, affinity)
        if admitted is not None or len(engines) == 2:
            return admitted
        rest = [engine for engine in engines if engine is not first and engine is not other]
        return self._take_first(sorted(rest, key=_load_ratio), offer, pool, now_s, affinity)

    def _take_first(
        self,
        order: Sequence[EnginePlaces],
        offer: Offer,
        pool: PoolPlaces,
        now_s: float,
        affinity: AffinityResult | None,
    ) -> Admitted | None:
        """Commit `offer` on the first in `order` that has room."""
        for engine in order:
            admitted = self._take(engine, offer, pool, now_s, affinity)
            if admitted is not None:
                return admitted
        return None

    def _take(
        self, engine: EnginePlaces, offer: Offer, pool: PoolPlaces, now_s: float, affinity: AffinityResult | None = None
    ) -> Admitted | None:
        """Commit `offer` on `engine` if it has room."""
        ledger, request_class = engine.ledger, offer.request_class
        is_borrowed = request_class is not pool.request_class
        if is_borrowed and offer.only is None and ledger.in_prefill(_BATCH) > 0:
            # Behind a batch prefill it would wait for seconds.
            return None
        if ledger.offer(offer.request_id, request_class, offer.demand) is not None:
            return None
        self.taken[offer.request_id] = _Place(engine, pool)
        if engine.waiting == 0:
            engine.sign_at_s = now_s
        engine.waiting += 1
        pool.drain.begin(now_s)
        if engine.reserve is not None and request_class is _CHAT:
            engine.reserve.note(ledger.held_tokens(_CHAT))
            engine.update_reserve()
        return Admitted(offer.request_id, engine.name, pool.request_class, is_borrowed, affinity)


def _allowed(engines: tuple[EnginePlaces, ...], excluded: frozenset[str], only: str | None) -> tuple[EnginePlaces, ...]:
    if not excluded and only is None:
        return engines
    return tuple([engine for engine in engines if engine.name not in excluded and only in (None, engine.name)])


def _load_ratio(engine: EnginePlaces) -> float:
    return engine.ledger.load_ratio


def _may_follow(load_ratio: float, engines: tuple[EnginePlaces, ...], offer: Offer, share_ratio: float) -> bool:
    """Whether `load_ratio` is within the bound of the less loaded of two drawn `engines`."""
    first, second = two_of(len(engines), offer.sample)
    demand = offer.demand
    least = min(engines[first].ledger.load_ratio_with(demand), engines[second].ledger.load_ratio_with(demand))
    return may_follow(load_ratio, least, share_ratio)
