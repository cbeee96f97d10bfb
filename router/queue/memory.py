"""The queue inside one process: the contract's plainest reading, for tests, the simulator's twin and single replicas.

Same order, bounds, leases and answers as the Redis store. `seq` is the enqueue time in microseconds of the clock,
raised where needed so that it always grows: one number is both the place and the age. No await happens between
reading and changing a line, so calls are atomic under one event loop. It never raises `QueueDown`.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace

from router.clock import Clock
from router.queue.limits import OWNER_GRACE_S, check_place, check_ticket
from router.queue.store import Enqueued, EnqueueRefusal, QueueStats, Ticket

_Place = tuple[int, int, str]


@dataclass(slots=True)
class _Line:
    """One model's line. `order` is sorted; `tickets` has the same ids; `tokens` is their sum."""

    order: list[_Place] = field(default_factory=list)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    lease_ends_s: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    last_seq: int = 0

    def insert(self, ticket: Ticket) -> None:
        insort(self.order, _place(ticket))
        self.tickets[ticket.id] = ticket
        self.tokens += ticket.tokens

    def remove(self, ticket: Ticket) -> None:
        del self.order[self.rank(ticket)]
        del self.tickets[ticket.id]
        self.tokens -= ticket.tokens

    def rank(self, ticket: Ticket) -> int:
        return bisect_left(self.order, _place(ticket))


class MemoryQueue:
    """A `QueueStore` whose lines end with the process. Time is `clock.now_s()`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    async def enqueue(
        self, model: str, ticket: Ticket, *, max_requests: int, max_tokens: int
    ) -> Enqueued | EnqueueRefusal:
        check_ticket(ticket)
        line = self._line(model)
        known = line.tickets.get(ticket.id)
        if known is not None:
            return self._enqueued(line, known)
        if len(line.order) + 1 > max_requests:
            return EnqueueRefusal.FULL_REQUESTS
        if line.tokens + ticket.tokens > max_tokens:
            return EnqueueRefusal.FULL_TOKENS
        line.last_seq = max(line.last_seq + 1, int(self._clock.now_s() * 1e6))
        placed = replace(ticket, seq=line.last_seq)
        line.insert(placed)
        self._grant_grace(line, ticket.owner)
        return self._enqueued(line, placed)

    async def claim(self, model: str, owner: str, *, max_tokens: int) -> Ticket | None:
        line = self._line(model)
        mine = (line.tickets[ticket_id] for _, _, ticket_id in line.order)
        head = next((ticket for ticket in mine if ticket.owner == owner), None)
        if head is None or head.tokens > max_tokens:
            return None
        line.remove(head)
        return head

    async def put_back(self, model: str, ticket: Ticket) -> None:
        check_place(ticket)
        line = self._line(model)
        if ticket.id in line.tickets:
            return
        line.insert(ticket)
        line.last_seq = max(line.last_seq, ticket.seq)
        self._grant_grace(line, ticket.owner)

    async def leave(self, model: str, ticket_id: str, owner: str) -> bool:
        line = self._line(model)
        ticket = line.tickets.get(ticket_id)
        if ticket is None or ticket.owner != owner:
            return False
        line.remove(ticket)
        return True

    async def ahead(self, model: str, ticket_id: str) -> int | None:
        line = self._line(model)
        ticket = line.tickets.get(ticket_id)
        return None if ticket is None else line.rank(ticket)

    async def beat(self, model: str, owner: str, *, lease_s: float) -> None:
        self._line(model).lease_ends_s[owner] = self._clock.now_s() + lease_s

    async def reap(self, model: str, *, limit: int = 100) -> int:
        line = self._line(model)
        now_s = self._clock.now_s()
        dead = {owner for owner, end_s in line.lease_ends_s.items() if end_s <= now_s}
        doomed = [ticket for _, _, ticket_id in line.order if (ticket := line.tickets[ticket_id]).owner in dead]
        for ticket in doomed[:limit]:
            line.remove(ticket)
        for owner in dead - {ticket.owner for ticket in doomed[limit:]}:
            del line.lease_ends_s[owner]
        return min(limit, len(doomed))

    async def stats(self, model: str) -> QueueStats:
        line = self._line(model)
        if not line.order:
            return QueueStats(0, 0, 0.0)
        oldest_s = min(seq for _, seq, _ in line.order) / 1e6
        return QueueStats(len(line.order), line.tokens, max(0.0, self._clock.now_s() - oldest_s))

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        return

    def _line(self, model: str) -> _Line:
        """Models come from the configuration, so the number of lines is bounded by it."""
        return self._lines.setdefault(model, _Line())

    def _grant_grace(self, line: _Line, owner: str) -> None:
        line.lease_ends_s.setdefault(owner, self._clock.now_s() + OWNER_GRACE_S)

    def _enqueued(self, line: _Line, ticket: Ticket) -> Enqueued:
        before = line.order[: line.rank(ticket)]
        return Enqueued(ticket, len(before), sum(line.tickets[ticket_id].tokens for _, _, ticket_id in before))


def _place(ticket: Ticket) -> _Place:
    return (ticket.priority, ticket.seq, ticket.id)
