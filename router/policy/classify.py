"""Which pool a request belongs to, and why.

Cases, in order:
 1. it fits no pool                                    -> too long, with the true limit
 2. an allowed hint names a pool that it fits          -> that pool
 3. its demand is at most the threshold, it fits chat  -> chat
 4. it fits batch                                      -> batch
 5. there is no other pool                             -> the one there is

What fits is about one sequence (`max_model_len` bounds a sequence), what is chat is about the whole demand.
"""

from enum import StrEnum

import msgspec
from msgspec.structs import force_setattr

from router.policy.demand import Demand, RequestClass


class Reason(StrEnum):
    """Why a request went to its pool; a metric label and the header `x-router-reason`."""

    BELOW_THRESHOLD = "below_threshold"
    ABOVE_THRESHOLD = "above_threshold"
    ABOVE_CHAT_CONTEXT = "above_chat_context"
    HINT_HEADER = "hint_header"
    HINT_SERVICE_TIER = "hint_service_tier"
    HINT_KEY = "hint_key"
    HINT_DOES_NOT_FIT = "hint_does_not_fit"
    ONLY_POOL = "only_pool"
    PINNED = "pinned_to_engine"


class Shapes(msgspec.Struct, frozen=True, gc=False):
    """The context limits (tokens, None: no such pool) and the threshold (tokens of demand) of one model. The largest
    of the limits follows from them and is never given."""

    chat_max_model_len: int | None
    batch_max_model_len: int | None
    threshold_tokens: int
    largest_max_model_len: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "largest_max_model_len", max(self.chat_max_model_len or 0, self.batch_max_model_len or 0))


class Hint(msgspec.Struct, frozen=True, gc=False):
    """A class asked for by somebody allowed to ask."""

    request_class: RequestClass
    source: Reason


class Classified(msgspec.Struct, frozen=True, gc=False):
    request_class: RequestClass
    reason: Reason


_ONLY_CHAT = Classified(RequestClass.CHAT, Reason.ONLY_POOL)
_ONLY_BATCH = Classified(RequestClass.BATCH, Reason.ONLY_POOL)
_BELOW_THRESHOLD = Classified(RequestClass.CHAT, Reason.BELOW_THRESHOLD)
_ABOVE_THRESHOLD = Classified(RequestClass.BATCH, Reason.ABOVE_THRESHOLD)
_ABOVE_CHAT_CONTEXT = Classified(RequestClass.BATCH, Reason.ABOVE_CHAT_CONTEXT)


class TooLong(msgspec.Struct, frozen=True, gc=False):
    """No pool can hold it. `limit_tokens` is the largest context there is."""

    limit_tokens: int


def classify(demand: Demand, shapes: Shapes, hint: Hint | None = None) -> Classified | TooLong:
    """Choose a pool for `demand`. See the module for the cases."""
    needed, chat_len, batch_len = demand.floor_context_tokens, shapes.chat_max_model_len, shapes.batch_max_model_len
    fits_chat = chat_len is not None and needed <= chat_len
    fits_batch = batch_len is not None and needed <= batch_len
    if not fits_batch:
        if not fits_chat:
            return TooLong(shapes.largest_max_model_len)
        chosen = _ONLY_CHAT if batch_len is None else _BELOW_THRESHOLD
    elif chat_len is None:
        chosen = _ONLY_BATCH
    elif demand.context_tokens > chat_len:
        # An uncapped answer that would probably outgrow the chat context goes where it has room.
        chosen = _ABOVE_CHAT_CONTEXT
    else:
        chosen = _ABOVE_THRESHOLD if demand.kv_tokens > shapes.threshold_tokens else _BELOW_THRESHOLD
    if hint is None:
        return chosen
    if fits_chat if hint.request_class is RequestClass.CHAT else fits_batch:
        return Classified(hint.request_class, hint.source)
    return Classified(chosen.request_class, Reason.HINT_DOES_NOT_FIT) if _exists(hint.request_class, shapes) else chosen


def _exists(request_class: RequestClass, shapes: Shapes) -> bool:
    length = shapes.chat_max_model_len if request_class is RequestClass.CHAT else shapes.batch_max_model_len
    return length is not None
