"""Which connections end where there are more than there may be: never one with a call under way.

First those that have said nothing, or are only read on after a refusal; then those between two requests for some time,
the longest idle one first; then those whose headers, or the rest of whose answered body, are still to come; then those
so new that their request may be on its way; and last those that had an answer a moment ago. What is written and not
taken yet is waited for, not cut.

A connection says for itself what it is about (`Guest`). Nothing here knows requests or answers.
"""

import heapq
from collections.abc import Collection
from enum import IntEnum
from typing import Protocol

#: A client sends its request together with the end of the connection's handshake, or nearly so.
YOUNG_S = 0.1
#: And its next one soon, if it has one: then a flood of new connections must not cost it its own.
RECENT_S = 5.0
#: Looking for a connection to end costs a look at all of them, some 2 ms for 4,000. So some more are ended at once
#: where they are of no use to anybody: one in so many.
_SPARE_RATIO = 64


class Use(IntEnum):
    """What a connection without a call is about, the first to end first."""

    SILENT = 0
    IDLE = 1
    SENDING = 2
    YOUNG = 3
    RECENT = 4


class Guest(Protocol):
    """One connection."""

    def may_end(self, now_s: float) -> tuple[Use, float] | None:
        """What it is about, and until when it may be, on the loop's clock; None where it has to stay."""

    def make_way(self) -> None:
        """End at once."""


def make_room(guests: Collection[Guest], newcomer: Guest, max_guests: int, now_s: float) -> None:
    """End connections, but never `newcomer`'s, until `max_guests` are left, or no more can be ended."""
    excess = len(guests) - max_guests
    found = [
        (*about, id(guest), guest)
        for guest in guests
        if guest is not newcomer and (about := guest.may_end(now_s)) is not None
    ]
    for rank, (use, _, _, guest) in enumerate(heapq.nsmallest(excess + max_guests // _SPARE_RATIO, found)):
        if rank < excess or use <= Use.IDLE:
            guest.make_way()
