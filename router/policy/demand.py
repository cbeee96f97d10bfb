"""What one request asks of an engine, in KV tokens.

    demand = (prompt_tokens + output_tokens) * sequences

A request with several prompts (a list given to `/v1/completions`, or `n` > 1) becomes that many sequences in the
engine; the router charges each in full and does not bet on the prefix cache.
"""

from dataclasses import dataclass
from enum import StrEnum


class RequestClass(StrEnum):
    """The two workloads. Chat waits about a second, batch waits hours."""

    CHAT = "chat"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Demand:
    """The KV tokens and seats that one request may come to hold.

    `prompt_tokens`: the sum over all prompts. `longest_prompt_tokens`: the longest single one, which is what a context
    limit is about. `output_tokens`: the output budget of one sequence; the client's cap, or the class's recent q99
    where it set none (`output_is_capped` tells which). `prompts` >= 1 and `n` >= 1: sequences = prompts * n.
    """

    prompt_tokens: int
    longest_prompt_tokens: int
    output_tokens: int
    output_is_capped: bool = True
    prompts: int = 1
    n: int = 1

    @property
    def sequences(self) -> int:
        """Seats in the engine's running batch, at least 1."""
        return self.prompts * self.n

    @property
    def kv_tokens(self) -> int:
        """Everything the engine may hold for this request at its fullest."""
        return self.prompt_tokens * self.n + self.output_tokens * self.sequences

    @property
    def context_tokens(self) -> int:
        """Length of the longest single sequence: what must fit `max_model_len`."""
        return self.longest_prompt_tokens + self.output_tokens

    @property
    def floor_context_tokens(self) -> int:
        """The shortest context that can hold this request: one output token is enough where the client set no cap."""
        return self.longest_prompt_tokens + (self.output_tokens if self.output_is_capped else 1)
