"""Finished requests, as the walk leaves them."""

from typing import Any

from router.policy.demand import RequestClass
from router.policy.outcome import Outcome
from router.request import Count, RequestRecord

COUNT = Count(
    prompt_tokens=300, longest_tokens=300, lower_tokens=300, upper_tokens=300, prompts=1, exact=True, method="exact"
)


def finished(**changes: Any) -> RequestRecord:
    """A chat that an engine answered: 0.3 ms in the router, 20 ms to the first token, 0.5 s in all."""
    fields: dict[str, Any] = {
        "endpoint": "chat_completions",
        "model": "m",
        "tenant": "team",
        "request_class": RequestClass.CHAT,
        "reason": "below_threshold",
        "pool": "chat",
        "engine": "e",
        "count": COUNT,
        "status": 200,
        "outcome": Outcome.COMPLETED,
        "attempts": 1,
        "overhead_s": 0.0003,
        "first_token_at_s": 100.02,
        "ended_at_s": 100.5,
        "prompt_tokens_used": 300,
        "completion_tokens_used": 20,
    }
    return RequestRecord("req-1", 100.0, **{**fields, **changes})
