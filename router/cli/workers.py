"""Several processes behind one port: the parent owns the socket, the embedded Valkey and the workers.

A worker that dies is started again in its slot, after a pause that grows while it keeps dying. Workers end when the
parent does, however it ends: each watches a pipe whose other end only the parent holds.
"""

import asyncio
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from router.cli.check import EXIT_UNUSABLE
from router.config.model import RouterConfig

log = logging.getLogger(__name__)

#: From the parent to a worker: end the grace now. Its own signal, because a terminal or a service manager may send
#: SIGTERM and SIGINT to all processes of the group, so that a second one at a worker need not be a second request.
HURRY_SIGNAL = signal.SIGUSR1

_RESTART_PAUSE_S = 0.5
_RESTART_PAUSE_MAX_S = 30.0
#: A worker that lived this long has started well; its next death is a first one.
_HEALTHY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """All that a worker process is given. `alive`: reads end of file once the parent is gone. `ready`: takes one byte
    when the worker serves."""

    config: RouterConfig
    redis_url: str
    router_id: str
    metrics_dir: Path
    listener: socket.socket
    alive: Connection
    ready: Connection
    slot: int


def run_workers(config: RouterConfig, launch: "Launch") -> int:
    """Serve with `config.server.workers` processes until a signal. Returns the exit code."""
    return asyncio.run(_Parent(config, launch).run())


@dataclass(frozen=True, slots=True)
class Launch:
    """What the parent does itself, and what a worker runs; `cli/serve.py` gives both."""

    listen: Callable[[RouterConfig], socket.socket]
    queue_url: Callable[[RouterConfig], AbstractAsyncContextManager[str]]
    announce: Callable[[RouterConfig, socket.socket], None]
    router_id: str
    worker: Callable[[WorkerStart], None]


class _Parent:
    """Supervises the workers from one event loop."""

    def __init__(self, config: RouterConfig, launch: Launch) -> None:
        self._config = config
        self._launch = launch
        self._stop = asyncio.Event()
        self._is_unfit = False
        self._is_announced = False
        self._running: dict[int, SpawnProcess] = {}
        self._context = multiprocessing.get_context("spawn")

    async def run(self) -> int:
        config, launch = self._config, self._launch
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(launch.listen(config))
            redis_url = await stack.enter_async_context(launch.queue_url(config))
            metrics_dir = _new_metrics_dir()
            stack.callback(shutil.rmtree, metrics_dir, ignore_errors=True)
            alive, held_open = self._context.Pipe(duplex=False)
            stack.callback(held_open.close)
            stack.callback(alive.close)
            ready_here, ready_there = self._context.Pipe(duplex=False)
            stack.callback(ready_here.close)
            stack.callback(ready_there.close)
            loop = asyncio.get_running_loop()
            loop.add_reader(ready_here.fileno(), self._on_ready, ready_here, listener)
            stack.callback(loop.remove_reader, ready_here.fileno())
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
                stack.callback(loop.remove_signal_handler, number)

            starts = [
                WorkerStart(config, redis_url, launch.router_id, metrics_dir, listener, alive, ready_there, slot)
                for slot in range(config.server.workers)
            ]
            keepers = [asyncio.create_task(self._keep(start)) for start in starts]
            await self._stop.wait()
            await asyncio.gather(*keepers)
        return EXIT_UNUSABLE if self._is_unfit else 0

    def _on_ready(self, ready: Connection, listener: socket.socket) -> None:
        """A worker serves; the first one that does makes the router one that serves."""
        ready.recv_bytes()
        if not self._is_announced:
            self._is_announced = True
            self._launch.announce(self._config, listener)

    def _on_signal(self) -> None:
        """The first one lets the workers drain, a second one ends their grace."""
        number = HURRY_SIGNAL if self._stop.is_set() else signal.SIGTERM
        self._stop.set()
        for process in self._running.values():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    async def _keep(self, start: WorkerStart) -> None:
        """One slot: a worker, and the next one when it dies."""
        pause_s = _RESTART_PAUSE_S
        while not self._stop.is_set():
            process = self._context.Process(
                target=self._launch.worker, args=(start,), name=f"router-worker-{start.slot}"
            )
            try:
                process.start()
            except OSError as error:
                log.error("worker %d could not be started: %s; trying again", start.slot, error)
                pause_s = min(_RESTART_PAUSE_MAX_S, pause_s * 2)
                await self._pause(pause_s)
                continue
            self._running[start.slot] = process
            started_at_s = time.monotonic()
            await _ended(process)
            del self._running[start.slot]
            code = process.exitcode
            process.close()
            if self._stop.is_set():
                return
            if code == EXIT_UNUSABLE:
                # What one worker finds unfit, the others do too; trying again mends nothing.
                self._is_unfit = True
                self._on_signal()
                return
            log.error("worker %d ended with code %s; starting it again", start.slot, code)
            lived_s = time.monotonic() - started_at_s
            pause_s = _RESTART_PAUSE_S if lived_s > _HEALTHY_AFTER_S else min(_RESTART_PAUSE_MAX_S, pause_s * 2)
            await self._pause(pause_s)

    async def _pause(self, seconds: float) -> None:
        """Until it is over, or the router stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


def _new_metrics_dir() -> Path:
    """In memory where the system has such a place: a page of a file on a disk that is being written back makes whoever
    adds to it wait for the disk."""
    in_memory = "/dev/shm"  # noqa: S108  # mkdtemp makes a folder of our own in it
    return Path(tempfile.mkdtemp(prefix="router-metrics-", dir=in_memory if os.access(in_memory, os.W_OK) else None))


async def _ended(process: SpawnProcess) -> None:
    """Until the process is gone. Its sentinel is a file descriptor that turns readable then."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(process.sentinel, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


def exit_with_parent(start: WorkerStart) -> None:
    """In a worker: stop at once when the parent is gone, since this process holds the port that the next one needs.
    Call with the event loop running."""
    loop = asyncio.get_running_loop()
    alive = start.alive.fileno()

    def gone() -> None:
        loop.remove_reader(alive)
        shutil.rmtree(start.metrics_dir, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), HURRY_SIGNAL)

    loop.add_reader(alive, gone)
