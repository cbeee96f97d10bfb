"""The contract of the batch queue: what every store promises, in memory or in Redis.

A synchronous caller's entry is a *ticket*: the replica that holds the client's socket (`owner`) is the only one that
can send it, so a ticket is claimed by its owner alone and dies with it. The store keeps the order, the bounds (count
and tokens, over all replicas) and the time; it never sees a prompt.

Rules every implementation keeps (`tests/queue/test_contract.py` runs over all of them):
 - order: lower `priority` first, then first in, first out; a ticket put back keeps its place;
 - `enqueue` past a bound changes nothing and says which bound;
 - nobody passes the head: `claim` gives the owner's first ticket or nothing, however small the second one is;
 - an owner that has not beaten for its lease is dead: `reap` removes its tickets, at most `limit` a call;
 - every call ends within the configured timeout or raises `QueueDown`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class QueueDown(Exception):
    """The store cannot be reached, or refuses writes. The message has no address or password."""


class EnqueueRefusal(StrEnum):
    """Why a ticket was not taken."""

    FULL_REQUESTS = "full_requests"
    FULL_TOKENS = "full_tokens"


@dataclass(frozen=True, slots=True)
class Ticket:
    """One waiting request. `tokens` is its demand in KV tokens, `seq` its place (given by the store, 0 before)."""

    id: str
    owner: str
    tokens: int
    priority: int = 0
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Enqueued:
    """Taken: how many tickets and tokens were ahead at that moment."""

    ticket: Ticket
    ahead_requests: int
    ahead_tokens: int


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The line over all replicas. `oldest_age_s` is 0 when nobody waits."""

    requests: int
    tokens: int
    oldest_age_s: float


class QueueStore(Protocol):
    """One line a model. All methods may raise `QueueDown`."""

    async def enqueue(
        self, model: str, ticket: Ticket, *, max_requests: int, max_tokens: int
    ) -> Enqueued | EnqueueRefusal:
        """Add at the end of its priority, if both bounds allow. Twice with one id: the first place stays."""
        ...

    async def claim(self, model: str, owner: str, *, max_tokens: int) -> Ticket | None:
        """Take this owner's head ticket out of the line, if it asks for at most `max_tokens`."""
        ...

    async def put_back(self, model: str, ticket: Ticket) -> None:
        """Return a claimed ticket to the place it had. Bounds do not apply."""
        ...

    async def leave(self, model: str, ticket_id: str, owner: str) -> bool:
        """Remove a waiting ticket; False if it was not there any more."""
        ...

    async def ahead(self, model: str, ticket_id: str) -> int | None:
        """How many tickets stand before this one; None if it is not in the line."""
        ...

    async def beat(self, model: str, owner: str, *, lease_s: float) -> None:
        """Say that `owner` lives for another `lease_s` seconds, by the store's clock."""
        ...

    async def reap(self, model: str, *, limit: int = 100) -> int:
        """Remove tickets of owners whose lease ended; how many went."""
        ...

    async def stats(self, model: str) -> QueueStats: ...

    async def ping(self) -> None:
        """Cheapest proof that the store answers."""
        ...

    async def close(self) -> None:
        """Give back every connection. Idempotent."""
        ...
