"""What one request asks of an engine, in KV tokens.

    demand = (prompt_tokens + output_tokens) * sequences

A request with several prompts (a list given to `/v1/completions`, or `n` > 1) becomes that many sequences in the
engine; the router charges each in full and does not bet on the prefix cache.
"""

from enum import StrEnum

import msgspec
from msgspec.structs import force_setattr


class RequestClass(StrEnum):
    """The two workloads. Chat waits about a second, batch waits hours."""

    CHAT = "chat"
    BATCH = "batch"


class Demand(msgspec.Struct, frozen=True, gc=False):
    """The KV tokens and seats that one request may come to hold.

    `prompt_tokens`: the sum over all prompts. `longest_prompt_tokens`: the longest single one, which is what a context
    limit is about. `output_tokens`: the output budget of one sequence; the client's cap, or the class's recent q99
    where it set none (`output_is_capped` tells which). `prompts` >= 1 and `n` >= 1.

    What follows from these is worked out once, when the demand is made, and never given: `sequences` are its seats in
    the engine's running batch, at least 1; `kv_tokens` everything the engine may hold for it at its fullest;
    `context_tokens` the length of the longest single sequence, which must fit `max_model_len`; `floor_context_tokens`
    the shortest context that can hold it, since one output token is enough where the client set no cap.
    """

    prompt_tokens: int
    longest_prompt_tokens: int
    output_tokens: int
    output_is_capped: bool = True
    prompts: int = 1
    n: int = 1
    sequences: int = 0
    kv_tokens: int = 0
    context_tokens: int = 0
    floor_context_tokens: int = 0

    def __post_init__(self) -> None:
        sequences = self.prompts * self.n
        output = self.output_tokens
        longest = self.longest_prompt_tokens
        force_setattr(self, "sequences", sequences)
        force_setattr(self, "kv_tokens", self.prompt_tokens * self.n + output * sequences)
        force_setattr(self, "context_tokens", longest + output)
        force_setattr(self, "floor_context_tokens", longest + (output if self.output_is_capped else 1))
