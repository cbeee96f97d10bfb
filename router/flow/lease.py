"""The right to have one request on one engine: KV tokens, seats, and for batch a prefill lane.

Whoever got a `Lease` from the gate owns it and releases it, once or more often: release is synchronous and
idempotent, so that no cancellation can lose it.
"""

import asyncio
from typing import Protocol

import msgspec
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

    def release(self, request_id: str, is_answered: bool) -> None: ...


class Lease(msgspec.Struct, eq=False):
    """What was admitted, as `place` says, and has to be given back."""

    place: Admitted
    demand: Demand
    holder: LeaseHolder
    is_open: bool = True
    timer: asyncio.TimerHandle | None = None

    def first_token(self) -> None:
        """Prefill is over. Only the first call counts."""
        if self.is_open:
            self.holder.first_token(self.place.request_id)

    def expect_first_token(self, after_s: float) -> None:
        """Take the prefill for over in `after_s` seconds, for an answer that will not show its first token."""
        if self.is_open and self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(after_s, self._prefill_over)

    def _prefill_over(self) -> None:
        if self.is_open:
            self.holder.prefill_over(self.place.request_id)

    def produced(self, tokens: int) -> None:
        """`tokens` of output so far, over all sequences. Cheap; only an answer that outgrew its reserve is charged."""
        demand = self.demand
        if tokens > demand.output_tokens * demand.sequences and self.is_open:
            per_sequence = -(-tokens // demand.sequences) + _GROWTH_STEP_TOKENS
            self.demand = replace(demand, output_tokens=per_sequence)
            self.holder.true_up(self.place.request_id, self.demand)

    def release(self, *, is_answered: bool = False) -> None:
        """Give everything back. `is_answered`: because the engine gave its whole answer."""
        if self.is_open:
            self.is_open = False
            if self.timer is not None:
                self.timer.cancel()
            self.holder.release(self.place.request_id, is_answered)
