"""The waiting line of a model's batch requests: tickets in the shared queue, sockets here.

The store keeps the order and the bounds over all replicas; this process holds the clients. One pump takes this
replica's head ticket out of the line when the gate has room for it and wakes its waiter with a `Lease`.

Who owns what: a waiter's ticket belongs to the line until the waiter has its lease or is gone; a lease handed over in
the same tick in which its client left goes straight back. Redis away: nobody here loses a place, new requests are
refused, and when it is back every waiting ticket is put where it stood.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from itertools import islice

from router.clock import Clock
from router.flow.gate import Gate, NoPlace
from router.flow.lease import Lease
from router.policy.decision import Offer
from router.queue.limits import TOKENS_MAX
from router.queue.store import EnqueueRefusal, QueueDown, QueueStats, QueueStore, Ticket

log = logging.getLogger(__name__)

#: How often the pump looks even if nobody called: the bound on what a missed wake-up can cost.
_POLL_S = 1.0
#: A replica that is silent for this long is dead, and its tickets go. Far above a garbage collection or a slow disk.
_LEASE_S = 15.0
_BEAT_EVERY_S = 2.0
#: Tickets to take out early that are remembered at a time.
_LEAVING_MAX = 10_000
#: Waiting tickets that are looked after in a beat; a thousand of them within half a minute.
_LOOKED_AFTER = 64
#: Pause between tries while the store is away.
_DOWN_PAUSE_S = 0.5


class QueueFull(Exception):
    """The line is at a bound; nothing was added."""

    def __init__(self, refusal: EnqueueRefusal) -> None:
        super().__init__(refusal.value)
        self.refusal = refusal


class QueueClosed(Exception):
    """This process is stopping; the place is gone with it."""


class QueueWaitOver(Exception):
    """The longest wait the pool allows has passed."""


@dataclass(frozen=True, slots=True)
class LineBounds:
    """How many requests and KV tokens may wait over all replicas, and for how long one may."""

    max_requests: int
    max_tokens: int
    wait_max_s: float


@dataclass(slots=True)
class _Waiter:
    ticket: Ticket
    offer: Offer
    future: asyncio.Future[Lease]


@dataclass(frozen=True, slots=True)
class _Head:
    """The room that was not enough for this replica's head ticket, and until when that is believed: chat makes and
    takes room many times a second, and the store need not hear of each."""

    refused_tokens: int = 0
    until_s: float = float("inf")


class BatchLine:
    """One per model and process; `run` is its one task."""

    def __init__(
        self, model: str, bounds: LineBounds, store: QueueStore, gate: Gate, clock: Clock, *, owner: str
    ) -> None:
        self._model = model
        self._bounds = bounds
        self._store = store
        self._gate = gate
        self._clock = clock
        self._owner = owner
        self._waiters: dict[str, _Waiter] = {}
        self._leaving: set[str] = set()
        self._gone: set[str] = set()
        self._wake = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._is_down = False
        self._is_closed = False
        self._beaten_at_s = float("-inf")
        self._head = _Head()
        self.stats = QueueStats(0, 0, 0.0)
        gate.on_room = self._note_room

    @property
    def is_up(self) -> bool:
        """Whether the store answered last time."""
        return not self._is_down

    async def wait(self, offer: Offer, *, priority: int = 0, place: Ticket | None = None, age_s: float = 0.0) -> "Turn":
        """Stand in line until there is a place. `place`: the ticket of an earlier turn, to stand where it stood.
        `age_s`: how long ago the request came; the longest wait counts from then.

        Raises: `QueueFull`, `QueueDown`, `QueueWaitOver`, `QueueClosed`, `NoPlace`. Cancelled, ticket and place are
        given back.
        """
        tokens = min(max(1, offer.demand.kv_tokens), TOKENS_MAX)
        ticket = place or Ticket(offer.request_id, self._owner, tokens, priority)
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        # Known to the pump before the store knows the ticket: it may be claimed before we hear that it was taken.
        waiter = self._waiters[ticket.id] = _Waiter(ticket, offer, future)
        self._leaving.discard(ticket.id)
        try:
            async with asyncio.timeout(max(0.0, self._bounds.wait_max_s - age_s)):
                await self._enter(waiter)
                self._head = _Head()
                self._wake.set()
                lease = await future
        except TimeoutError:
            self._abandon(waiter)
            raise QueueWaitOver from None
        except BaseException:
            self._abandon(waiter)
            raise
        return Turn(lease, waiter.ticket)

    def send_home(self) -> None:
        """Wake every waiter with `QueueClosed`, and take no new ones: this process is stopping. Their tickets leave."""
        self._is_closed = True
        for waiter in tuple(self._waiters.values()):
            if not waiter.future.done():
                waiter.future.set_exception(QueueClosed())

    async def run(self) -> None:
        """Pump and heartbeat until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump())
            tasks.create_task(self._beat())

    # -- entering and leaving -----------------------------------------------------------------------------------

    async def _enter(self, waiter: _Waiter) -> None:
        if self._is_closed:
            raise QueueClosed
        if waiter.ticket.seq:
            try:
                await self._store.put_back(self._model, waiter.ticket)
            except QueueDown as error:
                self._note_down(error)  # `_restore` will put it back
            return
        if self._is_down:
            raise QueueDown("the queue is away")
        try:
            answer = await self._store.enqueue(
                self._model, waiter.ticket, max_requests=self._bounds.max_requests, max_tokens=self._bounds.max_tokens
            )
        except QueueDown as error:
            self._note_down(error)
            raise
        if isinstance(answer, EnqueueRefusal):
            raise QueueFull(answer)
        waiter.ticket = answer.ticket

    def _abandon(self, waiter: _Waiter) -> None:
        """The wait is over without a place: the ticket leaves the store (which may hold it although we never heard),
        and a lease granted in this very tick goes back."""
        self._waiters.pop(waiter.ticket.id, None)
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().release()
        else:
            future.cancel()
            self._forget(waiter.ticket.id)
        self._head = _Head()
        self._wake.set()

    def _forget(self, ticket_id: str) -> None:
        """Have the pump take a ticket out of the store. Past the bound it stays until its turn, where it is dropped."""
        if len(self._leaving) < _LEAVING_MAX:
            self._leaving.add(ticket_id)
            self._wake.set()

    def _note_room(self) -> None:
        """A place may have come free. Called for every request of the model, chat too: it has to be cheap."""
        if self._waiters:
            self._wake.set()

    # -- the pump -----------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._take_out_leavers()
                await self._dispatch()
            except QueueDown as error:
                self._note_down(error)
                await asyncio.sleep(_DOWN_PAUSE_S)

    async def _take_out_leavers(self) -> None:
        for ticket_id in tuple(self._leaving):
            await self._store.leave(self._model, ticket_id, self._owner)
            self._leaving.discard(ticket_id)
            if len(self._gone) < _LEAVING_MAX:
                self._gone.add(ticket_id)

    async def _dispatch(self) -> None:
        """Hand out places while the head fits. One claim is under way at a time, so order is the store's order; after
        a fault the one whose claim was lost is put back first."""
        while self._waiters and not self._is_down:
            room = self._gate.room_tokens()
            now_s = self._clock.now_s()
            if room <= self._head.refused_tokens and now_s < self._head.until_s:
                return
            self._head = _Head(room, now_s + _POLL_S)
            async with self._claiming:
                ticket = await self._store.claim(self._model, self._owner, max_tokens=room)
                if ticket is None:
                    return
                if not self._hand_over(ticket):
                    await self._store.put_back(self._model, ticket)
                    return
            self._head = _Head()

    def _hand_over(self, ticket: Ticket) -> bool:
        """Give the waiter of `ticket` its lease; False if the room went meanwhile. No await: nothing changes between
        the check and the grant."""
        waiter = self._waiters.get(ticket.id)
        if waiter is None or waiter.future.done():
            return True
        try:
            lease = self._gate.try_batch(waiter.offer)
        except NoPlace as none:
            waiter.future.set_exception(none)
            return True
        if lease is None:
            return False
        del self._waiters[ticket.id]
        waiter.ticket = replace(waiter.ticket, seq=ticket.seq)
        waiter.future.set_result(lease)
        return True

    # -- the store comes and goes -------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Say that we live, bury who does not, and read the length of the line."""
        while True:
            try:
                await self._store.beat(self._model, self._owner, lease_s=_LEASE_S)
                now_s = self._clock.now_s()
                if self._is_down or now_s - self._beaten_at_s > _LEASE_S:
                    await self._restore()
                self._beaten_at_s = now_s
                await self._take_out_again()
                await self._look_after_some()
                await self._store.reap(self._model)
                self.stats = await self._store.stats(self._model)
            except QueueDown as error:
                self._note_down(error)
            await asyncio.sleep(_BEAT_EVERY_S if not self._is_down else _DOWN_PAUSE_S)

    async def _take_out_again(self) -> None:
        """A call that was cancelled on its way may reach the store after the ticket was taken out, and bring it back
        for nobody; a beat later nothing is on its way any more."""
        for ticket_id in tuple(self._gone):
            if ticket_id not in self._waiters:
                await self._store.leave(self._model, ticket_id, self._owner)
            # Only now: what the store did not hear of because it went away is told it again when it is back.
            self._gone.discard(ticket_id)

    async def _look_after_some(self) -> None:
        """A store can lose tickets without a word (emptied, or failed over to a copy that lacks the last writes): each
        beat some of those who wait here are put where they stand, which does nothing where they still do."""
        for ticket_id in tuple(islice(self._waiters, _LOOKED_AFTER)):
            waiter = self._waiters.get(ticket_id)
            if waiter is not None:
                # To the end of the dict, so that the next beat looks after others.
                del self._waiters[ticket_id]
                self._waiters[ticket_id] = waiter
                await self._put_where_it_stood(ticket_id)

    async def _put_where_it_stood(self, ticket_id: str) -> None:
        """Not while a claim is under way: the ticket may be out of the store because its turn has come."""
        async with self._claiming:
            waiter = self._waiters.get(ticket_id)
            if waiter is None or not waiter.ticket.seq:
                return
            await self._store.put_back(self._model, waiter.ticket)
            if self._waiters.get(ticket_id) is not waiter:
                # It left meanwhile, and its ticket may have been taken out before it was put back.
                self._forget(ticket_id)

    async def _restore(self) -> None:
        """After a silence, ours or the store's: every waiting ticket stands where it stood."""
        for ticket_id in tuple(self._waiters):
            await self._put_where_it_stood(ticket_id)
        if self._is_down:
            log.warning("queue of %s is back; %d waiting requests kept their places", self._model, len(self._waiters))
            self._is_down = False
        self._head = _Head()
        self._wake.set()

    def _note_down(self, error: QueueDown) -> None:
        if not self._is_down:
            log.error("queue of %s is away: %s; new batch requests are refused, chat goes on", self._model, error)
            self._is_down = True


@dataclass(frozen=True, slots=True)
class Turn:
    """The end of a wait: the place, and the ticket to stand in line with again should the engine refuse."""

    lease: Lease
    ticket: Ticket
