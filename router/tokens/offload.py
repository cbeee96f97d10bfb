"""Runs blocking work beside the event loop: few threads, a bounded number waiting, a bounded wait.

Rules: a job that cannot be had in time, or fails in any way, gives None and is counted by reason; nothing a job raises
reaches the caller. A job that is running when its time is up cannot be stopped: it keeps its place until it ends, so
that stuck jobs show as `busy` and do not pile up.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")

#: Tokenizing is bound by the processor; two keep the next prompt going while one long prompt takes its second.
THREADS = 2
#: Jobs admitted beyond the threads. About a second's worth of 30k-token prompts.
WAITING_MAX = 64


class Missed(StrEnum):
    """Why work did not get done."""

    BUSY = "busy"
    TIMEOUT = "timeout"
    FAILED = "failed"
    CLOSED = "closed"


class Offload:
    """A small thread pool that never raises and never queues without bound."""

    def __init__(
        self, *, timeout_s: float, threads: int = THREADS, waiting_max: int = WAITING_MAX, name: str = "tokens"
    ) -> None:
        self._timeout_s = timeout_s
        self._places_max = threads + waiting_max
        self._places = 0
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._closed = threading.Event()
        self._missed: Counter[Missed] = Counter()

    @property
    def missed(self) -> Mapping[Missed, int]:
        """How often work was not done, by reason, since the start."""
        return dict(self._missed)

    async def run(self, job: Callable[[], T]) -> T | None:
        """The job's result, or None. Cancelling the caller gives the job up."""
        if self._closed.is_set():
            return self._miss(Missed.CLOSED)
        with self._lock:
            if self._places >= self._places_max:
                return self._miss(Missed.BUSY)
            self._places += 1
        future = self._executor.submit(_guarded, job)
        future.add_done_callback(self._give_back)
        try:
            results = await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except TimeoutError:
            return self._miss(Missed.TIMEOUT)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed.is_set() and future.cancelled() and task is not None and not task.cancelling():
                return self._miss(Missed.CLOSED)  # `close` dropped the job; the caller itself goes on
            raise
        return results[0] if results else self._miss(Missed.FAILED)

    def close(self) -> None:
        """Take no more work and drop what has not begun. Idempotent; does not wait for what runs."""
        self._closed.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _give_back(self, _future: "Future[list[T]]") -> None:
        # Called from a worker, or from the loop when a job is cancelled before it began.
        with self._lock:
            self._places -= 1

    def _miss(self, reason: Missed) -> T | None:
        self._missed[reason] += 1
        return None


def _guarded(job: Callable[[], T]) -> list[T]:
    """The job's result in a list, which is empty if it failed."""
    try:
        return [job()]
    except BaseException as error:  # a tokenizer's panic (pyo3_runtime.PanicException) is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return []
