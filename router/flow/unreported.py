"""Tokens of a whole answer that came without `usage`: how many it probably has.

A stream has about one token an event. The text of a plain answer is put at the bytes per token that the model's prompts
have. Of a body that is no JSON, or was too long to keep, all bytes count as text.
"""

from typing import Any

import msgspec

from router.flow.answer import Answer
from router.policy.demand import RequestClass
from router.request import Endpoint
from router.tokens.api import PromptCounter

#: Fields of answers, in any of the shapes, whose strings are generated.
_GENERATED = frozenset({"content", "text", "reasoning", "reasoning_content", "thinking", "refusal", "arguments"})


def probable_tokens(answer: Answer, counter: PromptCounter, request_class: RequestClass) -> int | None:
    """The estimate; 0 where nothing is generated, None for speech, whose cost is not in tokens."""
    endpoint = answer.request.endpoint
    if endpoint is Endpoint.AUDIO:
        return None
    if not endpoint.generates:
        return 0
    if answer.is_stream:
        return answer.output_events
    size_bytes = _generated_bytes(answer.preface) if answer.preface else answer.record.bytes_out
    return counter.estimate_tokens(size_bytes, request_class)


def _generated_bytes(body: bytes) -> int:
    """Bytes of what is generated in a whole body."""
    try:
        open_ends: list[Any] = [msgspec.json.decode(body)]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return len(body)
    size_bytes = 0
    while open_ends:
        value = open_ends.pop()
        if isinstance(value, list):
            open_ends += value
        elif isinstance(value, dict):
            for name, inner in value.items():
                if not isinstance(inner, str):
                    open_ends.append(inner)
                elif name in _GENERATED:
                    size_bytes += len(inner.encode("utf-8", "surrogatepass"))
    return size_bytes
