"""What the walk asks of a model's counter."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from router.policy.demand import RequestClass
from router.request import Count, Prompt


class PromptCounter(Protocol):
    """Counts the prompts of one model. Never raises for anything a client can send: a prompt that cannot be rendered
    or tokenized is bounded from above instead."""

    async def count(
        self, prompt: Prompt, *, decision_tokens: Sequence[int], request_class: RequestClass | None
    ) -> Count:
        """Count cheaply where that settles it, else exactly and off the event loop.

        `decision_tokens`: prompt lengths at which something is decided (threshold and context limits, each less the
        output budget). Where none of them lies between the cheap lower and upper bound, no tokenizer runs.
        """
        ...

    def learn(self, prompt: Prompt, count: Count, used_tokens: int, request_class: RequestClass | None) -> None:
        """Told what the engine really counted (`usage.prompt_tokens`), for the learned bytes per token."""
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
