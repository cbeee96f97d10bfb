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
_UNBOUNDED_LANES = 2**62
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


class _Account(msgspec.Struct, gc=False):
    """What a class may hold here, and holds. One that may not run here has no seats."""

    max_num_seqs: int
    prefill_lanes: int
    budget_tokens: int = 0
    requests: int = 0
    seats: int = 0
    tokens: int = 0
    in_prefill: int = 0


class _Entry(msgspec.Struct, gc=False):
    account: _Account
    seats: int
    tokens: int
    in_prefill: bool = True


class Ledger:
    """The account of one engine. Tokens are KV tokens; `block_size_tokens` rounds every sequence up as the engine
    does (vLLM hands out KV in blocks). `load_ratio` is the committed share of the capacity, above 1 while an oversized
    request runs alone.

    What an offer is compared with is worked out when it changes, not when it is asked for.
    """

    __slots__ = (
        *("_accounts", "_committed_tokens", "_entries", "_max_num_seqs", "_rounding_tokens", "_seats", "_whole_tokens"),
        *("capacity_tokens", "chat_reserve_tokens", "limits", "load_ratio"),
    )

    def __init__(
        self, capacity_tokens: int, limits: EngineLimits, block_size_tokens: int = 1, chat_reserve_tokens: int = 0
    ) -> None:
        self.limits = limits
        self.chat_reserve_tokens = chat_reserve_tokens
        self._accounts = {request_class: _account(limits.classes.get(request_class)) for request_class in RequestClass}
        self._entries: dict[str, _Entry] = {}
        self._max_num_seqs = limits.max_num_seqs
        self._committed_tokens = 0
        self._seats = 0
        self.resize(capacity_tokens, block_size_tokens)

    def resize(self, capacity_tokens: int, block_size_tokens: int = 1) -> None:
        """The engine has `capacity_tokens`. A smaller capacity takes nothing back."""
        self.capacity_tokens = capacity_tokens
        #: What a sequence may be charged above its tokens.
        self._rounding_tokens = block_size_tokens - 1
        #: What loads are shares of.
        self._whole_tokens = max(1, capacity_tokens)
        self.load_ratio = self._committed_tokens / self._whole_tokens
        for request_class, limits in self.limits.classes.items():
            self._accounts[request_class].budget_tokens = int(capacity_tokens * limits.kv_share_ratio)
        self.reserve_for_chat(self.chat_reserve_tokens)

    def reserve_for_chat(self, tokens: int) -> None:
        """Batch may hold no more than the capacity without `tokens`."""
        self.chat_reserve_tokens = tokens
        limits = self.limits.classes.get(_BATCH)
        if limits is not None:
            share = int(self.capacity_tokens * limits.kv_share_ratio)
            self._accounts[_BATCH].budget_tokens = max(0, min(share, self.capacity_tokens - tokens))

    def budget_tokens(self, request_class: RequestClass) -> int:
        """What `request_class` may hold here in all."""
        return self._accounts[request_class].budget_tokens

    def cost_tokens(self, demand: Demand) -> int:
        """What `demand` is charged here: its KV tokens, each sequence rounded up to whole blocks."""
        return demand.kv_tokens + demand.sequences * self._rounding_tokens

    def shortage(self, request_class: RequestClass, demand: Demand) -> Shortage | None:
        """Why `demand` cannot start now, or None if it can."""
        if request_class not in self.limits.classes:
            return Shortage.CLASS
        account = self._accounts[request_class]
        if account.in_prefill >= account.prefill_lanes:
            return Shortage.LANE
        if not self._seats_suffice(account, demand.sequences):
            return Shortage.SEATS
        if self.cost_tokens(demand) > self._free_tokens(account):
            return Shortage.TOKENS
        return None

    def room_tokens(self, request_class: RequestClass) -> int:
        """The largest cost that could start now by tokens and lanes; `UNBOUNDED_TOKENS` on an empty engine, since a
        request larger than the budget runs alone."""
        account = self._accounts[request_class]
        if account.in_prefill >= account.prefill_lanes:
            return 0
        if account.seats >= account.max_num_seqs or self._seats >= self._max_num_seqs:
            return 0
        return self._free_tokens(account)

    def offer(self, request_id: str, request_class: RequestClass, demand: Demand) -> Shortage | None:
        """Commit `demand` if it can start now. `request_id` must not be here already."""
        assert request_id not in self._entries, "a request is offered to an engine once"
        account, seats = self._accounts[request_class], demand.sequences
        tokens = demand.kv_tokens + seats * self._rounding_tokens
        if (
            self._committed_tokens + tokens > self.capacity_tokens
            or account.tokens + tokens > account.budget_tokens
            or self._seats + seats > self._max_num_seqs
            or account.seats + seats > account.max_num_seqs
            or account.in_prefill >= account.prefill_lanes
        ):
            # It does not fit beside the others. It may still run alone.
            missing = self.shortage(request_class, demand)
            if missing is not None:
                return missing
        self._entries[request_id] = _Entry(account, seats, tokens)
        account.requests += 1
        account.seats += seats
        account.in_prefill += 1
        account.tokens += tokens
        self._seats += seats
        self._committed_tokens += tokens
        self.load_ratio = self._committed_tokens / self._whole_tokens
        return None

    def first_token(self, request_id: str) -> bool:
        """Prefill is over: the lane is free. False if that was known, or the request is not here."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.in_prefill:
            return False
        entry.in_prefill = False
        entry.account.in_prefill -= 1
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
        entry.account.tokens += change
        self._committed_tokens += change
        self.load_ratio = self._committed_tokens / self._whole_tokens
        return -change

    def finish(self, request_id: str) -> int:
        """Give everything back; how many tokens that was. 0 the second time, and for a request that is not here."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return 0
        account, tokens = entry.account, entry.tokens
        account.requests -= 1
        account.seats -= entry.seats
        account.in_prefill -= entry.in_prefill
        account.tokens -= tokens
        self._seats -= entry.seats
        self._committed_tokens -= tokens
        self.load_ratio = self._committed_tokens / self._whole_tokens
        return tokens

    def load_ratio_with(self, demand: Demand) -> float:
        """`load_ratio` once `demand` were committed here too."""
        tokens = demand.kv_tokens + demand.sequences * self._rounding_tokens
        return (self._committed_tokens + tokens) / self._whole_tokens

    def held_tokens(self, request_class: RequestClass) -> int:
        return self._accounts[request_class].tokens

    def in_prefill(self, request_class: RequestClass) -> int:
        """Requests of this class before their first token."""
        return self._accounts[request_class].in_prefill

    def snapshot(self) -> LedgerSnapshot:
        held = {c: Holding(a.requests, a.seats, a.tokens, a.in_prefill) for c, a in self._accounts.items()}
        return LedgerSnapshot(self.capacity_tokens, self._max_num_seqs, self.chat_reserve_tokens, held)

    def _free_tokens(self, account: _Account) -> int:
        """What is left by tokens alone; a capacity that shrank leaves nothing."""
        if not self._entries:
            return UNBOUNDED_TOKENS
        free = self.capacity_tokens - self._committed_tokens
        if account.requests:
            free = min(free, account.budget_tokens - account.tokens)
        return max(0, free)

    def _seats_suffice(self, account: _Account, seats: int) -> bool:
        if account.requests == 0 and (seats > account.max_num_seqs or seats > self._max_num_seqs):
            return not self._entries  # more sequences than seats: alone, the engine queues the rest itself
        in_class = account.seats + seats <= account.max_num_seqs
        return in_class and self._seats + seats <= self._max_num_seqs


def _account(limits: ClassLimits | None) -> _Account:
    if limits is None:
        return _Account(0, 0)
    return _Account(limits.max_num_seqs, _UNBOUNDED_LANES if limits.prefill_lanes is None else limits.prefill_lanes)
