"""What the walk asks of a model's counter."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from router.policy.demand import RequestClass
from router.request import ChatPrompt, Count, Prompt, TextPrompts


class Unsettled(msgspec.Struct, frozen=True, gc=False):
    """A prompt whose bounds leave a decision open. `bounds` is what is known of it without a tokenizer, in the shape of
    the count that stands in where an exact one cannot be had."""

    prompt: TextPrompts | ChatPrompt
    bounds: Count
    #: Images and the like, each charged by a rule; and their tokens.
    media: int = 0
    media_tokens: int = 0
    #: What a tokenizer would be given, about.
    work_bytes: int = 0


class PromptCounter(Protocol):
    """Counts the prompts of one model. Never raises for anything a client can send: a prompt that cannot be rendered
    or tokenized is bounded from above instead."""

    def settle(
        self, prompt: Prompt, *, decision_tokens: Sequence[int], request_class: RequestClass | None
    ) -> Count | Unsettled:
        """Count cheaply where that settles it: a few microseconds for a short chat.

        `decision_tokens`: prompt lengths at which something is decided (threshold and context limits, each less the
        output budget). Where none of them lies between the cheap lower and upper bound, no tokenizer need run.
        """
        ...

    async def count_exactly(self, unsettled: Unsettled) -> Count:
        """Count what `settle` could not, exactly and off the event loop."""
        ...

    def learn(self, count: Count, used_tokens: int, request_class: RequestClass | None) -> None:
        """Told what the engine really counted (`usage.prompt_tokens`) for a prompt counted as `count`."""
        ...

    def estimate_tokens(self, text_bytes: int, request_class: RequestClass | None) -> int:
        """Tokens of a text of this size by the learned bytes per token; rather more than fewer, and 0 for none."""
        ...

    @property
    def misses(self) -> int:
        """How many prompts turned out longer than the figure they were budgeted with."""
        ...

    @property
    def exact_mismatches(self) -> int:
        """Prompts counted exactly that the engine counted otherwise: a template or tokenizer unlike the engine's."""
        ...

    @property
    def missed(self) -> Mapping[str, int]:
        """Exact counts that were needed and not had, by reason (a small fixed set of words)."""
        ...

    async def aclose(self) -> None:
        """Stop the threads. Idempotent."""
        ...


class TokenizerUnavailable(Exception):
    """A counter cannot start. The message names what is missing and how to supply it; raised at load only."""
