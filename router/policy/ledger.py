"""What one engine holds for us: KV tokens, seats and prefill lanes, by class.

Invariants:
 - committed tokens of all classes stay within the capacity, and of a class within its budget, except for a request
   that is larger than its budget: that one runs alone in its class;
 - batch requests before their first token never outnumber the prefill lanes;
 - `finish` gives back exactly what `offer` and `true_up` took, once.

The engine itself may hold more or less; this is what we promised it at most. It never waits, and never knows why a
request ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from router.policy.demand import Demand, RequestClass

#: Room answer for an engine that would take a request of any size.
UNBOUNDED_TOKENS = 2**62
_BATCH = RequestClass.BATCH


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """What one class may hold on one engine: seats, a share (0..1] of its KV tokens, and batch prefills at a time."""

    max_num_seqs: int
    kv_share_ratio: float = 1.0
    prefill_lanes: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`max_num_seqs`: seats of the engine as a whole. A class without an entry may not run here."""

    max_num_seqs: int
    classes: Mapping[RequestClass, ClassLimits]


class Shortage(StrEnum):
    """What was missing."""

    TOKENS = "tokens"
    SEATS = "seats"
    LANE = "lane"
    CLASS = "class"


@dataclass(frozen=True, slots=True)
class Holding:
    """What a class holds on an engine at one moment."""

    requests: int = 0
    seats: int = 0
    tokens: int = 0
    in_prefill: int = 0


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """For gauges, the simulator and tests. Tokens are KV tokens."""

    capacity_tokens: int
    max_num_seqs: int
    chat_reserve_tokens: int
    held: Mapping[RequestClass, Holding]

    @property
    def committed_tokens(self) -> int:
        return sum(holding.tokens for holding in self.held.values())

    @property
    def seats(self) -> int:
        return sum(holding.seats for holding in self.held.values())


class _Sum(msgspec.Struct, gc=False):
    requests: int = 0
    seats: int = 0
    tokens: int = 0
    in_prefill: int = 0


class _Entry(msgspec.Struct, gc=False):
    held: _Sum
    seats: int
    tokens: int
    in_prefill: bool = True


class Ledger:
    """The account of one engine. Tokens are KV tokens; `block_size_tokens` rounds every sequence up as the engine
    does (vLLM hands out KV in blocks)."""

    __slots__ = (
        *("_committed_tokens", "_entries", "_seats", "_sums", "block_size_tokens", "capacity_tokens"),
        *("chat_reserve_tokens", "limits"),
    )

    def __init__(
        self, capacity_tokens: int, limits: EngineLimits, block_size_tokens: int = 1, chat_reserve_tokens: int = 0
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.limits = limits
        self.block_size_tokens = block_size_tokens
        self.chat_reserve_tokens = chat_reserve_tokens
        self._entries: dict[str, _Entry] = {}
        self._sums = {request_class: _Sum() for request_class in RequestClass}
        self._committed_tokens = 0
        self._seats = 0

    def budget_tokens(self, request_class: RequestClass) -> int:
        """What `request_class` may hold here in all."""
        limits = self.limits.classes.get(request_class)
        return 0 if limits is None else self._budget_tokens(request_class, limits)

    def _budget_tokens(self, request_class: RequestClass, limits: ClassLimits) -> int:
        share = int(self.capacity_tokens * limits.kv_share_ratio)
        if request_class is _BATCH:
            return max(0, min(share, self.capacity_tokens - self.chat_reserve_tokens))
        return share

    def cost_tokens(self, demand: Demand) -> int:
        """What `demand` is charged here: its KV tokens, each sequence rounded up to whole blocks."""
        return demand.kv_tokens + demand.sequences * (self.block_size_tokens - 1)

    def shortage(self, request_class: RequestClass, demand: Demand) -> Shortage | None:
        """Why `demand` cannot start now, or None if it can."""
        limits = self.limits.classes.get(request_class)
        if limits is None:
            return Shortage.CLASS
        held = self._sums[request_class]
        if limits.prefill_lanes is not None and held.in_prefill >= limits.prefill_lanes:
            return Shortage.LANE
        if not self._seats_suffice(held, limits, demand.sequences):
            return Shortage.SEATS
        if self.cost_tokens(demand) > self._free_tokens(request_class, held, limits):
            return Shortage.TOKENS
        return None

    def room_tokens(self, request_class: RequestClass) -> int:
        """The largest cost that could start now by tokens and lanes; `UNBOUNDED_TOKENS` on an empty engine, since a
        request larger than the budget runs alone."""
        limits = self.limits.classes.get(request_class)
        if limits is None:
            return 0
        held = self._sums[request_class]
        if limits.prefill_lanes is not None and held.in_prefill >= limits.prefill_lanes:
            return 0
        if held.seats >= limits.max_num_seqs or self._seats >= self.limits.max_num_seqs:
            return 0
        return self._free_tokens(request_class, held, limits)

    def offer(self, request_id: str, request_class: RequestClass, demand: Demand) -> Shortage | None:
        """Commit `demand` if it can start now. `request_id` must not be here already."""
        assert request_id not in self._entries, "a request is offered to an engine once"
        missing = self.shortage(request_class, demand)
        if missing is not None:
            return missing
        tokens, seats = self.cost_tokens(demand), demand.sequences
        held = self._sums[request_class]
        self._entries[request_id] = _Entry(held, seats, tokens)
        held.requests += 1
        held.seats += seats
        held.in_prefill += 1
        held.tokens += tokens
        self._seats += seats
        self._committed_tokens += tokens
        return None

    def first_token(self, request_id: str) -> bool:
        """Prefill is over: the lane is free. False if that was known, or the request is not here."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.in_prefill:
            return False
        entry.in_prefill = False
        entry.held.in_prefill -= 1
        return True

    def true_up(self, request_id: str, demand: Demand) -> int:
        """Replace the charge by what is known now; tokens freed (negative: taken). Never refused: the engine already
        holds them."""
        entry = self._entries.get(request_id)
        if entry is None:
            return 0
        assert demand.sequences == entry.seats, "seats do not change while a request runs"
        change = self.cost_tokens(demand) - entry.tokens
        entry.tokens += change
        entry.held.tokens += change
        self._committed_tokens += change
        return -change

    def finish(self, request_id: str) -> int:
        """Give everything back; how many tokens that was. 0 the second time, and for a request that is not here."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return 0
        held, tokens = entry.held, entry.tokens
        held.requests -= 1
        held.seats -= entry.seats
        held.in_prefill -= entry.in_prefill
        held.tokens -= tokens
        self._seats -= entry.seats
        self._committed_tokens -= tokens
        return tokens

    def load_ratio(self) -> float:
        """Committed share of the capacity; above 1 while an oversized request runs alone."""
        return self._committed_tokens / max(1, self.capacity_tokens)

    def load_ratio_with(self, demand: Demand) -> float:
        """The same once `demand` were committed here too."""
        return (self._committed_tokens + self.cost_tokens(demand)) / max(1, self.capacity_tokens)

    def held_tokens(self, request_class: RequestClass) -> int:
        return self._sums[request_class].tokens

    def in_prefill(self, request_class: RequestClass) -> int:
        """Requests of this class before their first token."""
        return self._sums[request_class].in_prefill

    def snapshot(self) -> LedgerSnapshot:
        held = {c: Holding(s.requests, s.seats, s.tokens, s.in_prefill) for c, s in self._sums.items()}
        return LedgerSnapshot(self.capacity_tokens, self.limits.max_num_seqs, self.chat_reserve_tokens, held)

    def _free_tokens(self, request_class: RequestClass, held: _Sum, limits: ClassLimits) -> int:
        """What is left by tokens alone; a capacity that shrank leaves nothing."""
        if not self._entries:
            return UNBOUNDED_TOKENS
        free = self.capacity_tokens - self._committed_tokens
        if held.requests:
            free = min(free, self._budget_tokens(request_class, limits) - held.tokens)
        return max(0, free)

    def _seats_suffice(self, held: _Sum, limits: ClassLimits, seats: int) -> bool:
        if held.requests == 0 and (seats > limits.max_num_seqs or seats > self.limits.max_num_seqs):
            return not self._entries  # more sequences than seats: alone, the engine queues the rest itself
        in_class = held.seats + seats <= limits.max_num_seqs
        return in_class and self._seats + seats <= self.limits.max_num_seqs
