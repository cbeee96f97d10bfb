"""Where a request gets its place: the asyncio driver of the ledger of one model.

It draws the dice, sets the one timer, wakes who was decided upon, and hands out `Lease`s. It decides nothing itself
(`policy/admission.py` does) and never touches Redis for chat. Every call runs on the event loop; between checking
and changing state nothing is awaited.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

import msgspec

from router.clock import Clock
from router.flow.lease import Lease
from router.policy.admission import Admission, AdmissionSnapshot
from router.policy.affinity import Prefix
from router.policy.decision import Admitted, Decision, Held, Offer, RefusalCause, Refused, Waiting
from router.policy.demand import Demand, RequestClass


class NoPlace(Exception):
    """There is no place and there will be none in time. `retry_after_s` is when one is likely."""

    def __init__(self, cause: RefusalCause, retry_after_s: float) -> None:
        super().__init__(cause.value)
        self.cause = cause
        self.retry_after_s = retry_after_s


class PlaceRequest(msgspec.Struct, frozen=True, gc=False):
    """What the gate is asked for. `excluded`: engines tried already; `only`: the one that can answer. `prefix`: how its
    prompt begins, where the engine that has it in its cache is to be preferred."""

    request_id: str
    request_class: RequestClass
    demand: Demand
    excluded: frozenset[str] = frozenset()
    only: str | None = None
    hold_until_s: float | None = None
    prefix: Prefix | None = None


class Gate:
    """The door of one model. `on_room` is called whenever a batch request may have found room."""

    def __init__(self, admission: Admission, clock: Clock, *, rng: random.Random) -> None:
        self._admission = admission
        self._clock = clock
        self._rng = rng
        self._held: dict[str, asyncio.Future[Admitted | Refused]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = float("inf")
        self.on_room: Callable[[], None] = lambda: None

    # -- places -------------------------------------------------------------------------------------------------

    async def admit_chat(self, request: PlaceRequest) -> Lease:
        """A place for a chat request, at once or after the bounded hold.

        Raises: `NoPlace`. Cancelled while held, the request is withdrawn and holds nothing.
        """
        lease = self.try_chat(request)
        return lease if lease is not None else await self.hold(request)

    def try_chat(self, request: PlaceRequest) -> Lease | None:
        """A place for a chat request at once, or None: it is then held, and `hold` must be awaited next, with nothing
        awaited in between.

        Raises: `NoPlace`.
        """
        decision = self._offer(request)
        if type(decision) is Held:
            return None
        assert type(decision) is not Waiting, "only batch waits in a line"
        return self._lease(decision, request.demand)

    async def hold(self, request: PlaceRequest) -> Lease:
        """The place that a held request gets in the end.

        Raises: `NoPlace`. Cancelled, the request is withdrawn and holds nothing.
        """
        return self._lease(await self._wait_held(request.request_id), request.demand)

    def try_batch(self, request: PlaceRequest) -> Lease | None:
        """A place for a batch request now, or None.

        Raises: `NoPlace` where the engines that may take it are gone.
        """
        decision = self._offer(request)
        assert type(decision) is not Held, "only chat is held"
        return None if type(decision) is Waiting else self._lease(decision, request.demand)

    def room_tokens(self) -> int:
        """The largest batch demand that could start now."""
        return self._admission.room_tokens(self._clock.now_s())

    def is_serving(self, request_class: RequestClass) -> bool:
        return self._admission.is_serving(request_class)

    def may_ever_place(self, request: PlaceRequest) -> bool:
        """Whether any engine that may take this request serves, busy or not."""
        return self._admission.is_serving(request.request_class, excluded=request.excluded, only=request.only)

    def retry_after_s(self, request_class: RequestClass, missing_tokens: int) -> float:
        """When `missing_tokens` will have come back, by the measured drain, spread so that clients do not return
        together."""
        return self._admission.retry_after_s(request_class, missing_tokens, self._clock.now_s(), self._rng.random())

    # -- what leases report -------------------------------------------------------------------------------------

    def first_token(self, request_id: str) -> None:
        self._carry_out(self._admission.first_token(request_id, self._clock.now_s()))
        self.on_room()

    def prefill_over(self, request_id: str) -> None:
        self._carry_out(self._admission.prefill_over(request_id, self._clock.now_s()))
        self.on_room()

    def true_up(self, request_id: str, demand: Demand) -> None:
        self._carry_out(self._admission.true_up(request_id, demand, self._clock.now_s()))

    def release(self, request_id: str) -> None:
        self._carry_out(self._admission.finish(request_id, self._clock.now_s()))
        self.on_room()

    # -- engines ------------------------------------------------------------------------------------------------

    def set_serving(self, engine: str, serving: bool, *, is_failing: bool = False) -> None:
        now_s = self._clock.now_s()
        self._carry_out(self._admission.set_serving(engine, serving, now_s, is_failing=is_failing))
        self.on_room()

    def resize(self, engine: str, capacity_tokens: int, block_size_tokens: int) -> None:
        now_s = self._clock.now_s()
        self._carry_out(self._admission.resize(engine, capacity_tokens, block_size_tokens, now_s))
        self.on_room()

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

    def _offer(self, request: PlaceRequest) -> Decision:
        draw = self._rng.random
        offer = Offer(
            request.request_id,
            request.request_class,
            request.demand,
            draw(),
            draw(),
            request.excluded,
            request.only,
            request.hold_until_s,
            request.prefix,
        )
        return self._admission.offer(offer, self._clock.now_s())

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
            return Lease(self, decision, demand)
        assert type(decision) is Refused, "a request that waits has no lease yet"
        raise NoPlace(decision.cause, decision.retry_after_s)
