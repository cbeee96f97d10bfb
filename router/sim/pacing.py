"""One asyncio task that lets a `SimEngine` live in real time, and the calls that wait for its tokens.

A step is planned, its scaled duration is slept, then its tokens are handed out; deadlines are absolute, so late
wake-ups do not add up. Where the process falls further behind than `_LAG_MAX_S` the lag is dropped and counted:
simulated time was then slower than asked for, and `lag_dropped_s` says by how much.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from router.clock import Clock
from router.sim.engine import EngineBusy, SimEngine, SimRequest, TokenEvent

#: Beyond this the machine, not the model, sets the pace; catching up would then come as a burst no engine makes.
_LAG_MAX_S = 0.25


class EngineTask:
    """Drives one engine. `start` and `aclose` are its whole life; the task it starts is its own."""

    def __init__(self, engine: SimEngine, clock: Clock, time_scale: float) -> None:
        self.engine = engine
        self.lag_dropped_s = 0.0
        self._clock = clock
        self._time_scale = time_scale
        self._sinks: dict[str, Callable[[TokenEvent | None], None]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name="sim-engine")

    @property
    def is_alive(self) -> bool:
        """False before `start`, after `aclose`, and when a bug ended the task."""
        return self._task is not None and not self._task.done()

    async def aclose(self) -> None:
        """Stop stepping. Idempotent. Raises what the task died of, if it did."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    def submit(self, request: SimRequest, sink: Callable[[TokenEvent | None], None]) -> None:
        """Queue a sequence; `sink` is called for each of its tokens, on the loop, and with None if the engine dies.

        Raises: as `SimEngine.submit`.
        """
        self.engine.submit(request, self._clock.now_s())
        self._sinks[request.id] = sink
        self._wake.set()

    def abort(self, request_id: str) -> bool:
        """Forget a sequence; its sink is not called again. False if it had ended."""
        self._sinks.pop(request_id, None)
        return self.engine.abort(request_id, self._clock.now_s())

    async def _run(self) -> None:
        try:
            await self._live()
        finally:
            # However the engine ends, nobody waits for it.
            sinks, self._sinks = self._sinks, {}
            for sink in sinks.values():
                sink(None)

    async def _live(self) -> None:
        due_s = self._clock.now_s()
        while True:
            if self.engine.is_idle:
                self._wake.clear()
                await self._wake.wait()
                due_s = self._clock.now_s()
            duration_s = self.engine.plan_step(self._clock.now_s())
            assert duration_s is not None, "a busy engine has a step to make"
            due_s += duration_s * self._time_scale
            wait_s = due_s - self._clock.now_s()
            if wait_s < -_LAG_MAX_S:
                self.lag_dropped_s -= wait_s if self._time_scale > 0 else 0.0
                due_s -= wait_s
            await asyncio.sleep(max(0.0, wait_s))
            for event in self.engine.finish_step():
                self._hand_out(event)

    def _hand_out(self, event: TokenEvent) -> None:
        sink = self._sinks.get(event.id)
        if event.finish_reason is not None:
            self._sinks.pop(event.id, None)
        if sink is not None:
            sink(event)


class Generation:
    """The sequences of one HTTP call. They are submitted together or not at all, and whoever holds this closes it.

    Tokens wait in a queue that the sequences' own `max_tokens` bound.
    """

    def __init__(self, task: EngineTask, requests: Sequence[SimRequest]) -> None:
        """Raises: `EngineBusy` where they do not all fit; then none is in."""
        self._task = task
        self._index_by_id = {request.id: index for index, request in enumerate(requests)}
        self._live = set(self._index_by_id)
        self._events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        task.engine.check_admission(len(requests))
        try:
            for request in requests:
                task.submit(request, self._events.put_nowait)
        except (EngineBusy, ValueError):
            self.close()
            raise

    @property
    def is_finished(self) -> bool:
        return not self._live

    def wake(self) -> None:
        """Make a waiting `next` return None: the client is gone."""
        self._events.put_nowait(None)

    async def next(self) -> tuple[int, TokenEvent] | None:
        """The next token with the index of its sequence; None after `wake`, and when the engine died."""
        event = await self._events.get()
        if event is None:
            return None
        if event.finish_reason is not None:
            self._live.discard(event.id)
        return self._index_by_id[event.id], event

    def close(self) -> bool:
        """Abort what still runs. Synchronous and idempotent; True if anything was aborted."""
        live, self._live = self._live, set()
        aborted = [self._task.abort(each) for each in live]
        return any(aborted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
