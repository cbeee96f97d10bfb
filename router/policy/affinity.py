"""Which engine has the beginning of a prompt in its cache, and how far that may decide.

A prompt's beginning is known by *marks*: hashes of its first 512 bytes, its first 1,024, and so on (`BOUNDS_BYTES`).
Each mark covers everything before it, so two prompts share a mark only where they are alike from the start. The engine
that a prompt went to last is kept under each of its marks; the longest mark found says where its prefix was computed.

Steps grow with the distance from the start: 512 bytes up to 8 KiB, then about an eighth of what is before, to 64 KiB.
Even steps would be 128 marks for a long prompt, and doubling ones could not tell a conversation from another with the
same system prompt before it is twice as long. Below 512 bytes, some hundred tokens, no prefill is worth following.

The bound (after Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018): the engine is
followed while its committed share of its capacity, with this request, stays within

    (1 + EXCESS_RATIO * share) * that of the less loaded of two drawn engines, with this request
    + SLACK_RATIO * share

`share` is the part of the prompt that the mark covers. So a turn that is all known may lean on its engine far more than
a question that has only a short system prompt in common with thousands: that one spreads like any other.

It is a preference among engines that may take the request anyway, kept for each model alone; nothing is shared by it,
and a wrong one costs a prefill. It must never know what the bytes mean.
"""

from collections import OrderedDict
from enum import StrEnum

import msgspec

#: Loads may differ by a quarter for the sake of the cache: the usual c = 1.25.
EXCESS_RATIO = 0.25
#: What an engine may hold more of its capacity than an idle one; without it nothing could be followed in an idle pool.
SLACK_RATIO = 0.02
#: About 2,000 conversations of eight marks each, 3 MB.
ENTRIES_MAX = 16_384
#: An engine that computed a prefix this long ago has probably evicted it.
AGE_MAX_S = 600.0

_FIRST_STEP_BYTES = 512
_STEP_RATIO = 8
PREFIX_MAX_BYTES = 64 * 1024


def _bounds() -> tuple[int, ...]:
    bounds: list[int] = []
    at = 0
    while True:
        at += max(_FIRST_STEP_BYTES, at // _STEP_RATIO // _FIRST_STEP_BYTES * _FIRST_STEP_BYTES)
        if at > PREFIX_MAX_BYTES:
            return tuple(bounds)
        bounds.append(at)


BOUNDS_BYTES = _bounds()


class AffinityResult(StrEnum):
    """What came of it; a metric label. `hit`: sent where its prefix is. `moved`: that engine is full, too loaded, or
    may not take it. `none`: nobody is known to have it."""

    HIT = "hit"
    MOVED = "moved"
    NONE = "none"


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """The marks of a prompt, shortest first, and the bytes they were taken from."""

    marks: tuple[int, ...]
    size_bytes: int


def prefix_of(beginning: bytes) -> Prefix:
    """The marks of `beginning`, the first bytes of a prompt; what is beyond 64 KiB is not looked at."""
    size = len(beginning)
    if size > PREFIX_MAX_BYTES:
        size = PREFIX_MAX_BYTES
    marks: list[int] = []
    start = mark = 0
    for end in BOUNDS_BYTES:
        if end > size:
            break
        # Python's own hash: the fastest there is here, 64 bits, and keyed anew in each process.
        mark = hash((mark, beginning[start:end]))
        marks.append(mark)
        start = end
    return Prefix(tuple(marks), size)


def may_follow(load_ratio: float, least_load_ratio: float, share_ratio: float) -> bool:
    """Whether an engine at `load_ratio` may be followed rather than one at `least_load_ratio`, both with the request.
    `share_ratio` (0..1) of the prompt is known there."""
    return load_ratio <= least_load_ratio * (1 + EXCESS_RATIO * share_ratio) + SLACK_RATIO * share_ratio


class Affinity:
    """Where prefixes went lately, for one model. Bounded: at most `entries_max` marks, the least used go first."""

    __slots__ = ("_age_max_s", "_engines", "_entries_max")

    def __init__(self, *, entries_max: int = ENTRIES_MAX, age_max_s: float = AGE_MAX_S) -> None:
        self._engines: OrderedDict[int, tuple[str, float]] = OrderedDict()
        self._entries_max = entries_max
        self._age_max_s = age_max_s

    def __len__(self) -> int:
        return len(self._engines)

    def find(self, prefix: Prefix, now_s: float) -> tuple[str, float] | None:
        """The engine that has the most of `prefix`, and the share of it (0..1) that it has."""
        marks = prefix.marks
        index = len(marks)
        while index > 0:
            index -= 1
            found = self._engines.get(marks[index])
            if found is not None and now_s - found[1] <= self._age_max_s:
                return found[0], BOUNDS_BYTES[index] / prefix.size_bytes
        return None

    def note(self, prefix: Prefix, engine: str, now_s: float) -> None:
        """`prefix` goes to `engine` and will be in its cache."""
        engines = self._engines
        known = (engine, now_s)
        for mark in prefix.marks:
            engines[mark] = known
            engines.move_to_end(mark)
        while len(engines) > self._entries_max:
            engines.popitem(last=False)
