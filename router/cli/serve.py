"""`router serve`: read the configuration, start what it needs, serve until told to stop.

Stopping, on SIGTERM or SIGINT: `/readyz` turns 503, new work gets 503 with Retry-After, queued requests are sent away
to come again, what runs goes on for at most `server.shutdown_grace_s`; then streams get a last error event. A second
signal ends the grace at once. Exit codes: 0 stopped, 1 failed while running, 2 the configuration or a part of it is
unfit.
"""

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

import typer
import uvicorn
import uvloop

from router.app import Runtime
from router.cli.check import EXIT_UNUSABLE, note_on_proxies, report_problems
from router.cli.listening import announce, backlog_for, fitted_to_open_files, listen
from router.cli.queue_server import queue_url
from router.cli.workers import HURRY_SIGNAL, Launch, WorkerStart, exit_with_parent, run_workers
from router.config.environment import set_shared_metrics_dir
from router.config.load import Overrides, load
from router.config.model import RouterConfig
from router.config.problems import ConfigErrors
from router.http.inbound import counting_in
from router.observe import log as log_lines
from router.observe.metrics import share_between_processes
from router.queue.embedded import DataDirInUse, ValkeyFailed
from router.queue.redis import QueueUnfit
from router.tokens.api import TokenizerUnavailable

log = logging.getLogger(__name__)

#: uvicorn's own wait after the grace: the last error events still have to go out.
_LAST_WORDS_S = 2
#: Engines that are up have given a token by then, so that the first requests find them; others are not waited for.
_FIRST_LOOK_S = 2.0
#: Net new containers before the youngest of them are looked through for cycles; Python's own 700 are passed by a few
#: dozen calls under way. Calls leave no cycles behind, so little comes of looking: measured with 1,000 calls held and
#: 64 more at a time, 4.5 us a call at 700 and 3.9 at 5,000 and above.
_GC_YOUNG_MAX = 20_000
#: Connections beyond `server.connections_max`, for probes, scrapes, refusals, and clients between two calls.
_PROBE_CONNECTIONS = 64

UNFIT = (DataDirInUse, ValkeyFailed, QueueUnfit, TokenizerUnavailable)


def serve(
    config: Annotated[Path, typer.Option("--config", "-c", help="The pools.yaml to run.")] = Path("pools.yaml"),
    host: Annotated[str | None, typer.Option(help="Address to listen on; wins over server.host.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: one that is free.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=64, help="Processes that share the port.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the embedded Valkey keeps its data.")] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    overrides = Overrides(host=host, port=port, workers=workers, data_dir=data_dir)
    try:
        loaded = load(config, overrides=overrides)
        log_lines.set_up(loaded.server.log_level)
        if note := note_on_proxies():
            log.warning("%s", note)
        if loaded.server.workers > 1:
            code = run_workers(loaded, Launch(listen, queue_url, announce, new_router_id(), run_worker))
        else:
            code = _run_alone(loaded)
    except ConfigErrors as errors:
        report_problems(errors)
        raise typer.Exit(EXIT_UNUSABLE) from None
    except UNFIT as error:
        typer.echo(f"router serve: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from None
    except OSError as error:
        typer.echo(f"router serve: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from None
    raise typer.Exit(code)


def _run_alone(loaded: RouterConfig) -> int:
    """One process: the queue's server, the runtime and the listener, in one loop."""

    config = fitted_to_open_files(loaded)

    async def main() -> int:
        async with contextlib.AsyncExitStack() as stack:
            # Bound first: a port that is taken must not cost the start of everything else.
            listener = stack.enter_context(listen(config))
            signals = stack.enter_context(StopSignals(is_worker=False))
            redis_url = await stack.enter_async_context(queue_url(config))
            runtime = Runtime(config, redis_url=redis_url, router_id=new_router_id())
            await stack.enter_async_context(runtime)
            await runtime.first_look(_FIRST_LOOK_S)
            announce(config, listener)
            settle_memory()
            await serve_runtime(runtime, config, listener, signals)
        return 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def run_worker(start: WorkerStart) -> None:
    """The life of one worker process."""
    set_shared_metrics_dir(start.metrics_dir)
    share_between_processes(start.slot)
    log_lines.set_up(start.config.server.log_level)

    config = fitted_to_open_files(start.config)

    async def main() -> None:
        runtime = Runtime(
            config,
            redis_url=start.redis_url,
            router_id=start.router_id,
            slot=start.slot,
            slots=config.server.workers,
            metrics_dir=start.metrics_dir,
        )
        with StopSignals(is_worker=True) as signals:
            exit_with_parent(start)
            async with runtime:
                await runtime.first_look(_FIRST_LOOK_S)
                start.ready.send_bytes(b"1")
                settle_memory()
                await serve_runtime(runtime, config, start.listener, signals)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except UNFIT as error:
        typer.echo(f"router serve: {error}", err=True)
        sys.exit(EXIT_UNUSABLE)


def new_router_id() -> str:
    """Names this router in relay hops and queue tickets; the same in all its processes."""
    return "router-" + secrets.token_hex(6)


def settle_memory() -> None:
    """Take what the start has made out of the garbage collector's sight: it stays until the process ends.

    Measured: a full collection over the 117,000 objects of a router with its tokenizers stops the loop for 80 ms, and
    for nothing measurable once they are frozen.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_YOUNG_MAX, *gc.get_threshold()[1:])


class StopSignals:
    """What the operator wants: `stop` after what runs has finished, `hurry` up with that. Used as a context."""

    def __init__(self, *, is_worker: bool) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._is_worker = is_worker

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ask)
        loop.add_signal_handler(signal.SIGINT, self._ask)
        loop.add_signal_handler(HURRY_SIGNAL, self.hurry.set)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, HURRY_SIGNAL):
            loop.remove_signal_handler(number)

    def _ask(self) -> None:
        if self.stop.is_set() and not self._is_worker:
            self.hurry.set()
        self.stop.set()


async def serve_runtime(runtime: Runtime, config: RouterConfig, listener: socket.socket, signals: StopSignals) -> None:
    """Serve on `listener` until a signal, then stop gracefully."""
    server = _Server(
        uvicorn.Config(
            runtime.app,
            # The only one: uvicorn's others, h11 among them, read requests in other ways than the router relies on.
            http=counting_in(runtime.state.buffers),
            interface="asgi3",
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=backlog_for(config),
            # Calls are refused at `connections_max`; what may be open beside them is for probes, and for others to be
            # refused on. Past this many the connections without a call end.
            limit_concurrency=config.server.connections_max + _PROBE_CONNECTIONS,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(signals.stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await _drain(runtime, signals.hurry, config.server.shutdown_grace_s)
            server.should_exit = True
        await serving
    finally:
        stopping.cancel()


async def _drain(runtime: Runtime, hurry: asyncio.Event, grace_s: float) -> None:
    """Let what runs finish, at most `grace_s`, then cut it."""
    log.info("stopping: no new work is taken; what runs has %g s", grace_s)
    runtime.start_draining()
    waits = {asyncio.create_task(wait) for wait in (runtime.state.until_idle(), hurry.wait())}
    await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    runtime.cut()


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which knows no draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
