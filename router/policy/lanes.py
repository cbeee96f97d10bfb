"""How much of a shared engine chat keeps for itself.

    chat_reserve = max(floor_ratio * capacity, margin * q99(KV tokens chat held lately))

The floor serves a cold start; the quantile follows the workload. Batch commitments stay under the rest, so that chat
finds room without anybody being evicted. Source of shape and margin: routing-research, "One engine, two logical
pools" (R_c = q99 of chat KV over a sliding window x 1.3).
"""

from router.policy.quantile import RecentQuantile

MARGIN_RATIO = 1.3


class ChatReserve:
    """The reserve of one engine in KV tokens. Fed with what chat holds whenever that grows."""

    __slots__ = ("_floor_ratio", "_held")

    def __init__(self, floor_ratio: float) -> None:
        self._floor_ratio = floor_ratio
        self._held = RecentQuantile(initial=0)

    def note(self, held_tokens: int) -> None:
        self._held.note(held_tokens)

    def tokens(self, capacity_tokens: int) -> int:
        """At most the capacity itself."""
        learned = int(self._held.value * MARGIN_RATIO)
        return min(capacity_tokens, max(int(capacity_tokens * self._floor_ratio), learned))
