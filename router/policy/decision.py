"""What is asked of admission, and what it may decide. Values only; who decides what is `admission.py`."""

from enum import StrEnum

import msgspec

from router.policy.affinity import AffinityResult, Prefix
from router.policy.demand import Demand, RequestClass


class RefusalCause(StrEnum):
    """Why there is no place: the engines that may take the request are full, or none of them serves."""

    SATURATED = "saturated"
    NO_ENGINE = "no_engine"


class Offer(msgspec.Struct, frozen=True, gc=False):
    """One request at the door. `sample` is random in [0, 1), drawn by the driver: the policy has no dice. It chooses
    two of several engines; for one that is refused, it spreads the return. `excluded`: engines already tried. `only`:
    the one engine that can answer it. `hold_until_s`: end of a hold begun earlier, so that attempts share one.
    `prefix`: how the prompt begins, where an engine that has it in its cache is to be preferred."""

    request_id: str
    request_class: RequestClass
    demand: Demand
    sample: float = 0.0
    excluded: frozenset[str] = frozenset()
    only: str | None = None
    hold_until_s: float | None = None
    prefix: Prefix | None = None


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """Committed on `engine`. `pool` is the pool the place belongs to; another than its class means borrowed.
    `affinity`: what came of the prompt's prefix, None where there was no choice or nothing to go by."""

    request_id: str
    engine: str
    pool: RequestClass
    borrowed: bool
    affinity: AffinityResult | None = None


class Held(msgspec.Struct, frozen=True, gc=False):
    """Waits here, at most until `until_s`; the driver calls `expire` then."""

    request_id: str
    until_s: float


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """Batch without a place now: the line is where it waits. One that stands there already keeps its place while no
    engine of its pool serves; a new one is then not let in: the driver asks `may_ever_place` first, and relays or
    refuses it with 503."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, gc=False):
    """No place, and no more waiting. `retry_after_s`: when one is likely, from the measured drain."""

    request_id: str
    cause: RefusalCause
    retry_after_s: float


Decision = Admitted | Held | Waiting | Refused
