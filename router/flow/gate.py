"""Where a request gets its place: the asyncio driver of the ledger of one model.

It has the dice, sets the one timer, wakes who was decided upon, and hands out `Lease`s. It decides nothing itself
(`policy/admission.py` does) and never touches Redis for chat. Every call runs on the event loop; between checking
and changing state nothing is awaited.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

from router.clock import Clock
from router.flow.lease import Lease
from router.policy.admission import Admission, AdmissionSnapshot
from router.policy.decision import Admitted, Decision, Held, Offer, RefusalCause, Refused, Waiting
from router.policy.demand import Demand, RequestClass


class NoPlace(Exception):
    """There is no place and there will be none in time. `retry_after_s` is when one is likely."""

    def __init__(self, cause: RefusalCause, retry_after_s: float) -> None:
        super().__init__(cause.value)
        self.cause = cause
        self.retry_after_s = retry_after_s


class Gate:
    """The door of one model. `on_room` is called whenever a batch request may have found room; None where no batch
    request ever waits. `draw` is the dice, for the `sample` of an `Offer`;
    `has_choice` says whether it can matter to a request of a class which engine it goes to."""

    def __init__(self, admission: Admission, clock: Clock, *, rng: random.Random) -> None:
        self._admission = admission
        self._clock = clock
        self.draw = rng.random
        self.has_choice = admission.has_choice
        self._held: dict[str, asyncio.Future[Admitted | Refused]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = float("inf")
        self.on_room: Callable[[], None] | None = None

    # -- places -------------------------------------------------------------------------------------------------

    def try_chat(self, offer: Offer) -> Lease | None:
        """A place for a chat request at once, or None: it is then held, and `hold` must be awaited next, with nothing
        awaited in between.

        Raises: `NoPlace`.
        """
        decision = self._admission.offer(offer, self._clock.now_s())
        if type(decision) is Admitted:
            return Lease(decision, offer.demand, self)
        return None if type(decision) is Held else self._lease(decision, offer.demand)

    async def hold(self, offer: Offer) -> Lease:
        """The place that a held request gets in the end.

        Raises: `NoPlace`. Cancelled, the request is withdrawn and holds nothing.
        """
        return self._lease(await self._wait_held(offer.request_id), offer.demand)

    def try_batch(self, offer: Offer) -> Lease | None:
        """A place for a batch request now, or None.

        Raises: `NoPlace` where the engines that may take it are gone.
        """
        decision = self._admission.offer(offer, self._clock.now_s())
        return None if type(decision) is Waiting else self._lease(decision, offer.demand)

    def room_tokens(self) -> int:
        """The largest batch demand that could start now."""
        return self._admission.room_tokens(self._clock.now_s())

    def is_serving(self, request_class: RequestClass) -> bool:
        return self._admission.is_serving(request_class)

    def may_ever_place(self, offer: Offer) -> bool:
        """Whether any engine that may take this request serves, busy or not."""
        return self._admission.is_serving(offer.request_class, excluded=offer.excluded, only=offer.only)

    def retry_after_s(self, request_class: RequestClass, missing_tokens: int) -> float:
        """When `missing_tokens` will have come back, by the measured drain, spread so that clients do not return
        together."""
        return self._admission.retry_after_s(request_class, missing_tokens, self._clock.now_s(), self.draw())

    # -- what leases report -------------------------------------------------------------------------------------

    def first_token(self, request_id: str) -> None:
        decisions = self._admission.first_token(request_id, self._clock.now_s())
        if decisions:
            self._carry_out(decisions)
        if self.on_room is not None:
            self.on_room()

    def prefill_over(self, request_id: str) -> None:
        self._make_known(self._admission.prefill_over(request_id, self._clock.now_s()))

    def true_up(self, request_id: str, demand: Demand) -> None:
        self._carry_out(self._admission.true_up(request_id, demand, self._clock.now_s()))

    def release(self, request_id: str, is_answered: bool = False) -> None:
        decisions = self._admission.finish(request_id, self._clock.now_s(), is_answered)
        if decisions:
            self._carry_out(decisions)
        if self.on_room is not None:
            self.on_room()

    # -- engines ------------------------------------------------------------------------------------------------

    def set_serving(self, engine: str, serving: bool, *, is_failing: bool = False) -> None:
        now_s = self._clock.now_s()
        self._make_known(self._admission.set_serving(engine, serving, now_s, is_failing=is_failing))

    def resize(self, engine: str, capacity_tokens: int, block_size_tokens: int) -> None:
        now_s = self._clock.now_s()
        self._make_known(self._admission.resize(engine, capacity_tokens, block_size_tokens, now_s))

    def pause(self, engine: str, seconds: float) -> None:
        """The engine said it is busy."""
        self._admission.pause(engine, self._clock.now_s() + seconds)
        self._set_timer()

    def snapshot(self) -> AdmissionSnapshot:
        return self._admission.snapshot()

    def close(self) -> None:
        """Stop the timer; to be called when nobody is held any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at_s = float("inf")

    # -- driving ------------------------------------------------------------------------------------------------

    async def _wait_held(self, request_id: str) -> Admitted | Refused:
        future: asyncio.Future[Admitted | Refused] = asyncio.get_running_loop().create_future()
        self._held[request_id] = future
        self._set_timer()
        try:
            return await future
        except asyncio.CancelledError:
            # Also the tick in which it was admitted and its client left: the place goes back at once.
            self.release(request_id)
            raise
        finally:
            self._held.pop(request_id, None)

    def _make_known(self, decisions: Sequence[Decision]) -> None:
        """Room was made: to the held ones it went to, and to batch."""
        self._carry_out(decisions)
        if self.on_room is not None:
            self.on_room()

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            assert isinstance(decision, Admitted | Refused), "a held request is admitted or refused"
            future = self._held.get(decision.request_id)
            if future is not None and not future.done():
                future.set_result(decision)

    def _set_timer(self) -> None:
        """One timer for all holds and pauses, at the earliest end."""
        now_s = self._clock.now_s()
        at_s = self._admission.next_expiry_s(now_s)
        if at_s is None or at_s >= self._timer_at_s:
            return
        self.close()
        self._timer_at_s = at_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - now_s), self._expire)

    def _expire(self) -> None:
        self.close()
        self._carry_out(self._admission.expire(self._clock.now_s()))
        self._set_timer()

    def _lease(self, decision: Decision, demand: Demand) -> Lease:
        """Raises: `NoPlace` where the decision is none."""
        if type(decision) is Admitted:
            return Lease(decision, demand, self)
        assert type(decision) is Refused, "a request that waits has no lease yet"
        raise NoPlace(decision.cause, decision.retry_after_s)
