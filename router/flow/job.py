"""A request on its way through the flow, and the end of one that gets no answer."""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.errors import ApiError
from router.policy.demand import Demand, RequestClass
from router.policy.outcome import Outcome
from router.request import ParsedRequest
from router.upstream.api import Headers

_NO_DEMAND = Demand(prompt_tokens=0, longest_prompt_tokens=0, output_tokens=0)


class Refusal(Exception):
    """The request ends without an answer of an engine or relay."""

    def __init__(self, error: ApiError, outcome: Outcome) -> None:
        super().__init__(str(error))
        self.error = error
        self.outcome = outcome


class Job(msgspec.Struct, frozen=True):
    """A request on its way. `place_id` is unique in this process. `edits` change the body further. `only`: the one
    engine that can answer it. `may_relay`: not where another router relayed it already.
    `request_class` and `demand` are what sizing found; a call that only tokenizes keeps the defaults."""

    place_id: str
    request: ParsedRequest
    headers: Headers
    only: str | None = None
    may_relay: bool = True
    request_class: RequestClass = RequestClass.CHAT
    demand: Demand = _NO_DEMAND
    edits: Mapping[str, Any] = msgspec.field(default_factory=dict)
