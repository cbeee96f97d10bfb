"""The right to have one request on one engine: KV tokens, seats, and for batch a prefill lane.

Whoever got a `Lease` from the gate owns it and releases it, once or more often: release is synchronous and
idempotent, so that no cancellation can lose it.
"""

import asyncio
from typing import Protocol

from msgspec.structs import replace

from router.policy.decision import Admitted
from router.policy.demand import Demand

#: A request without a cap is charged again each time it has outgrown its reserve by this many tokens.
_GROWTH_STEP_TOKENS = 64


class LeaseHolder(Protocol):
    """What a lease reports to; the gate."""

    def first_token(self, request_id: str) -> None: ...

    def prefill_over(self, request_id: str) -> None: ...

    def true_up(self, request_id: str, demand: Demand) -> None: ...

    def release(self, request_id: str) -> None: ...


class Lease:
    """A place on `engine`, out of `pool`; `borrowed` where that is not the pool of its class; `affinity` is what
    came of its prompt's prefix."""

    __slots__ = (
        "_grows_at_tokens",
        "_holder",
        "_id",
        "_open",
        "_timer",
        "affinity",
        "borrowed",
        "demand",
        "engine",
        "pool",
    )

    def __init__(self, holder: LeaseHolder, admitted: Admitted, demand: Demand) -> None:
        self.engine = admitted.engine
        self.pool = admitted.pool
        self.borrowed = admitted.borrowed
        self.affinity = admitted.affinity
        self.demand = demand
        self._holder = holder
        self._id = admitted.request_id
        self._open = True
        self._timer: asyncio.TimerHandle | None = None
        self._grows_at_tokens = demand.output_tokens * demand.sequences

    def first_token(self) -> None:
        """Prefill is over. Only the first call counts."""
        if self._open:
            self._holder.first_token(self._id)

    def expect_first_token(self, after_s: float) -> None:
        """Take the prefill for over in `after_s` seconds, for an answer that will not show its first token."""
        if self._open and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(after_s, self._prefill_over)

    def _prefill_over(self) -> None:
        if self._open:
            self._holder.prefill_over(self._id)

    def produced(self, tokens: int) -> None:
        """`tokens` of output so far, over all sequences. Cheap; only an answer that outgrew its reserve is charged."""
        if tokens > self._grows_at_tokens and self._open:
            per_sequence = -(-tokens // self.demand.sequences) + _GROWTH_STEP_TOKENS
            self.demand = replace(self.demand, output_tokens=per_sequence)
            self._grows_at_tokens = per_sequence * self.demand.sequences
            self._holder.true_up(self._id, self.demand)

    def release(self) -> None:
        """Give everything back."""
        if self._open:
            self._open = False
            if self._timer is not None:
                self._timer.cancel()
            self._holder.release(self._id)
