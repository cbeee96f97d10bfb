"""Count and classify: how long a request is, what it may come to hold, and which pool that makes it.

The output budget of a request without a cap is the class's recent q99; which class is only known afterwards, so chat's
figure decides the class and the chosen class's figure is charged.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from router.config.model import KeyConfig
from router.errors import ApiError
from router.http.service import ModelService
from router.policy.classify import Hint, Reason, Shapes, TooLong, classify
from router.policy.demand import Demand, RequestClass
from router.request import Count, Endpoint, ParsedRequest, RequestRecord

#: The field that caps the output, by endpoint, for `cap_unset_max_tokens`.
_CAP_FIELDS = {
    Endpoint.CHAT: "max_completion_tokens",
    Endpoint.COMPLETIONS: "max_tokens",
    Endpoint.RESPONSES: "max_output_tokens",
}

#: The field that holds the prompt, by endpoint; `input` in all others.
_PROMPT_FIELDS = {Endpoint.CHAT: "messages", Endpoint.MESSAGES: "messages", Endpoint.COMPLETIONS: "prompt"}


_CHAT = RequestClass.CHAT

_NO_EDITS: Mapping[str, Any] = MappingProxyType({})


class Sized(msgspec.Struct, frozen=True, gc=False):
    """What is known before a place is asked for."""

    count: Count
    demand: Demand
    request_class: RequestClass
    reason: str
    edits: Mapping[str, Any]


async def size_up(service: ModelService, request: ParsedRequest, key: KeyConfig | None, record: RequestRecord) -> Sized:
    """The count is in `record` also where the request is refused.

    Raises: `ApiError` 400 `context_length_exceeded` where no pool can hold the request.
    """
    shapes = service.shapes
    cap = request.max_tokens
    output = service.expected_output_tokens(_CHAT) if cap is None else cap
    default_class = key.default_class if key is not None else None
    settled = service.counter.settle(
        request.prompt,
        decision_tokens=_decision_points(shapes, request, output),
        request_class=request.hint or default_class,
    )
    count = settled if isinstance(settled, Count) else await service.counter.count_exactly(settled)
    record.count = count
    hint = _hint(request, default_class) if request.hint is not None or default_class is not None else None
    demand = _demand(request, count, output, shapes.largest_max_model_len, count.longest_tokens)
    classified = classify(demand, shapes, hint)
    if isinstance(classified, TooLong):
        limit = classified.limit_tokens
        if not count.exact and count.lower_tokens + _least_output(demand) <= limit:
            # Only its upper bound is too long, and it could not be counted: the engine has the last word.
            demand = _demand(request, count, output, limit, max(0, limit - _least_output(demand)))
            classified = classify(demand, shapes, hint)
        if isinstance(classified, TooLong):
            raise _too_long(request, classified.limit_tokens, demand, count)
    if cap is not None:
        return Sized(count, demand, classified.request_class, classified.reason, _NO_EDITS)
    if classified.request_class is not _CHAT:
        output = service.expected_output_tokens(classified.request_class)
        demand = _demand(request, count, output, shapes.largest_max_model_len, demand.longest_prompt_tokens)
    return Sized(count, demand, classified.request_class, classified.reason, _cap_edit(service, request, demand))


def _decision_points(shapes: Shapes, request: ParsedRequest, output: int) -> list[int]:
    """Lengths of a prompt at which the class or the fit changes, some below zero perhaps, where none is."""
    points = [shapes.threshold_tokens // request.n - output]
    for length in (shapes.chat_max_model_len, shapes.batch_max_model_len):
        if length is not None:
            points.append(length - output)
            if request.max_tokens is None:
                # One token of output is enough to fit, and the expected ones to belong there.
                points.append(length - 1)
    return points


def _demand(request: ParsedRequest, count: Count, output: int, largest: int, longest: int) -> Demand:
    """`largest`: tokens of the largest context there is; `longest`: of the longest prompt, perhaps fewer than were
    counted."""
    is_capped = request.max_tokens is not None
    if not is_capped:
        # An answer cannot outgrow the largest context.
        output = max(1, min(output, largest - longest))
    prompts = count.prompts or 1
    # Whatever a bound says, an engine holds no more than its context for one sequence.
    prompt_tokens = min(count.prompt_tokens, prompts * largest)
    return Demand(prompt_tokens, longest, output, is_capped, prompts, request.n)


def _least_output(demand: Demand) -> int:
    return demand.floor_context_tokens - demand.longest_prompt_tokens


def _hint(request: ParsedRequest, default_class: RequestClass | None) -> Hint | None:
    """A header or tier where the key may set the class, else the key's default."""
    if request.hint is not None and request.hint_source is not None:
        return Hint(request.hint, Reason(request.hint_source))
    return Hint(default_class, Reason.HINT_KEY) if default_class is not None else None


def _cap_edit(service: ModelService, request: ParsedRequest, demand: Demand) -> Mapping[str, Any]:
    """Where the operator wants answers without a cap (this one is) to have one, it is what the ledger reserved."""
    if not service.config.cap_unset_max_tokens:
        return _NO_EDITS
    field = _CAP_FIELDS.get(request.endpoint)
    return _NO_EDITS if field is None else {field: demand.output_tokens}


def _too_long(request: ParsedRequest, limit_tokens: int, demand: Demand, count: Count) -> ApiError:
    prompt = count.longest_tokens if count.exact else count.lower_tokens
    roughly = "" if count.exact else "at least "
    output = _least_output(demand)
    parts = f"{roughly}{prompt} in the prompt, {output} for the output" if prompt else f"{output} for the output alone"
    asked = f"{roughly}{prompt + output} tokens ({parts})"
    return ApiError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {limit_tokens} tokens. However, you requested {asked}. Shorten the "
        "prompt or ask for fewer output tokens.",
        param=_PROMPT_FIELDS.get(request.endpoint, "input"),
    )
