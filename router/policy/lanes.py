"""How much of a shared engine chat keeps for itself, and when a prefill lane is free again.

    chat_reserve = max(floor_ratio * capacity, margin * q99(KV tokens chat held lately))

The floor serves a cold start; the quantile follows the workload. Batch commitments stay under the rest, so that chat
finds room without anybody being evicted. Source of shape and margin: routing-research, "One engine, two logical
pools" (R_c = q99 of chat KV over a sliding window x 1.3).
"""

from router.policy.quantile import RecentQuantile

MARGIN_RATIO = 1.3
#: Above the mean of all prompts, since attention makes a token of a long prompt dearer than one of a short one.
_PREFILL_MARGIN_RATIO = 1.25
#: Slower than any engine worth a batch pool (a 70B model on four 48 GB cards over PCIe: 1,500 tokens/s). An engine that
#: has computed little but one-token probes shows far less: it is their overhead that it measures.
_SLOWEST_PREFILL_S_PER_TOKEN = 1 / 500


def prefill_s(prompt_tokens: int, s_per_token: float | None) -> float:
    """How long the prefill of a prompt probably takes, in seconds, on an engine whose mean is `s_per_token` (None where
    it does not say).

    For answers that are not streamed: their first byte comes with their last token and says nothing of the prefill. Too
    short a guess lets two prefills overlap, too long a one leaves a lane idle; neither is an error.
    """
    pace_s = _SLOWEST_PREFILL_S_PER_TOKEN if s_per_token is None else min(s_per_token, _SLOWEST_PREFILL_S_PER_TOKEN)
    return prompt_tokens * pace_s * _PREFILL_MARGIN_RATIO


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
