"""A whole router before simulated engines, in one event loop: what the tests of this folder talk to over HTTP.

The router is the real one: `pools.yaml` on disk, `Runtime`, `serve_runtime` on a port that the kernel chose, an
embedded Valkey. Only signals are not sent: what they would set is set by hand.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from router.app import Runtime
from router.cli.listening import fitted_to_open_files, listen
from router.cli.queue_server import queue_url
from router.cli.serve import StopSignals, new_router_id, serve_runtime
from router.config.load import load
from router.sim.log import LogEntry
from router.sim.options import SimServerOptions
from router.sim.server import RunningSim, running
from tests.http.scrape import Metrics
from tests.http.scripted import ScriptedEngine
from tests.http.setting import chat_body, chat_sim, long_sim, relay_config, write_config
from tests.http.stage import GUARD_S
from tests.upstream.fakes import RawServer

T = TypeVar("T")

#: A piece that moves takes a pass for each task and socket on its way, some ten, unless the kernel holds it back for an
#: acknowledgement.
_STILL_PASSES = 3_000


@dataclass
class Stack:
    """A router that serves, and what stands behind it. `c`, `long` and `x` are there where the test asked for them."""

    url: str
    port: int
    runtime: Runtime
    client: httpx.AsyncClient
    serving: asyncio.Task[None]
    sims: dict[str, RunningSim] = field(default_factory=dict)

    @property
    def c(self) -> RunningSim:
        return self.sims["c"]

    @property
    def long(self) -> RunningSim:
        return self.sims["l"]

    @property
    def x(self) -> RunningSim:
        return self.sims["x"]

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.get(path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """`body`: bytes as they are, anything else as JSON."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return await self.client.post(path, content=body, headers=headers, **options)

    async def chat(self, text: str = "Hello.", *, headers: Mapping[str, str] | None = None, **fields: Any) -> Any:
        """One chat of one user message; the whole response."""
        return await self.post("/v1/chat/completions", chat_body(text, **fields), headers=headers or {})

    async def metrics(self) -> "Metrics":
        return Metrics((await self.get("/metrics")).text)

    def entries(self, engine: str, *, path: str | None = None) -> list[LogEntry]:
        """What the router sent to an engine for its clients, oldest first; its own probes are left out."""
        return [
            entry
            for entry in self.sims[engine].log.entries()
            if is_forwarded(entry, engine) and (path is None or entry.path == path)
        ]

    def sent_for(self, response: httpx.Response) -> LogEntry:
        """The one call that an answer of an engine came from."""
        request_id = response.headers["x-request-id"]
        found = [entry for name in ("c", "l") if name in self.sims for entry in self.sims[name].log.entries()]
        (entry,) = [entry for entry in found if entry.x_request_id == request_id]
        return entry

    async def check_at_rest(self, *, chats: bool = True) -> None:
        """Nothing is held any more and a plain chat works (`chats`): what every test leaves behind."""
        await until(lambda: self.runtime.state.in_flight == 0)
        state = self.runtime.state
        assert state.buffers.used_bytes == 0
        for service in state.models:
            snapshot = service.flow.gate.snapshot()
            assert (snapshot.held_requests, snapshot.held_tokens) == (0, 0)
            assert {ledger.committed_tokens for ledger in snapshot.engines.values()} == {0}
            assert {ledger.seats for ledger in snapshot.engines.values()} == {0}
            line = service.flow.line
            if line is not None:
                await until(lambda line=line: not line._waiters and not line._leaving)  # type: ignore[misc]  # bound
                assert (await line._store.stats(service.config.name)).requests == 0
        assert not self.serving.done()
        if chats:
            answer = await self.chat("Still there?", max_tokens=2)
            assert answer.status_code == 200, answer.text
            await until(lambda: self.runtime.state.in_flight == 0)
        page = await self.metrics()
        assert page.value("router_in_flight_requests") == 0
        assert page.value("router_ledger_committed_tokens") == 0
        assert page.value("router_arrivals_total") == page.value("router_requests_total")


def is_forwarded(entry: LogEntry, engine: str) -> bool:
    """A relay hears of no request id, an engine always does."""
    return engine == "x" or entry.x_request_id is not None


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that does not say when it changes. The guard of the test bounds it."""
    while not is_true():
        await asyncio.sleep(0.005)


async def still(value: Callable[[], T]) -> T:
    """What `value` is once it stays the same for `_STILL_PASSES` passes of the loop. For what moves only by the loop's
    work: both ends of every connection concerned are in this process."""
    seen, passes = value(), 0
    while passes < _STILL_PASSES:
        await asyncio.sleep(0)
        before, seen = seen, value()
        passes = passes + 1 if seen == before else 0
    return seen


async def serving_engines(runtime: Runtime, names: set[str]) -> None:
    flows = [service.flow for service in runtime.state.models]
    engines = {name: engine for flow in flows for name, engine in flow.engines.items()}
    await until(lambda: all(engines[name].status.can_serve for name in names))


@contextlib.asynccontextmanager
async def router(
    config: Path, *, serving: set[str], environ: Mapping[str, str] | None = None, key: str | None = None
) -> AsyncIterator[Stack]:
    """A router on `config`, once the engines of `serving` serve. Its client presents `key`."""
    loaded = fitted_to_open_files(load(config, environ=dict(environ or {}), overrides=None))
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen(loaded))
        port = listener.getsockname()[1]
        url = await stack.enter_async_context(queue_url(loaded))
        runtime = await stack.enter_async_context(Runtime(loaded, redis_url=url, router_id=new_router_id()))
        # Not entered: the events are set by hand, and several routers can live in one process.
        signals = StopSignals(is_worker=False)
        task = asyncio.create_task(serve_runtime(runtime, loaded, listener, signals))
        client = await stack.enter_async_context(new_client(f"http://127.0.0.1:{port}", key=key))
        try:
            await serving_engines(runtime, serving)
            yield Stack(f"http://127.0.0.1:{port}", port, runtime, client, task)
        finally:
            signals.stop.set()
            signals.hurry.set()
            await task


def new_client(url: str, *, key: str | None = None, **options: Any) -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=GUARD_S, headers=headers, **options)


@contextlib.asynccontextmanager
async def stack_of(
    *,
    c: SimServerOptions | ScriptedEngine | None = None,
    long: SimServerOptions | ScriptedEngine | None = None,
    x: SimServerOptions | ScriptedEngine | None = None,
    relay: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    serving: set[str] | None = None,
    **sections: Any,
) -> AsyncIterator[Stack]:
    """Engines C and L, relay X where it is asked for, and a router before them. `sections` go into the configuration;
    `relay` into its relay. The stack's client presents the first of `keys`. Unless `serving` names others, the router
    is waited for until both engines serve."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-http-")))
        kinds = {"c": c or chat_sim(), "l": long or long_sim()} | ({} if x is None else {"x": x})
        sims: dict[str, RunningSim] = {}
        urls: dict[str, str] = {}
        for name, kind in kinds.items():
            if isinstance(kind, ScriptedEngine):
                urls[name] = (await stack.enter_async_context(RawServer(kind.play))).url
            else:
                sims[name] = await stack.enter_async_context(running(kind))
                urls[name] = sims[name].url
        if x is not None:
            sections["relays"] = [relay_config(urls.pop("x"), **(relay or {}))]
        sections["server"] = {"port": 0, **sections.get("server", {})}
        config = write_config(folder, urls, **sections)
        names = {"c", "l"} if serving is None else serving
        key = next((key["key"] for key in sections.get("keys", ())), None)
        built = await stack.enter_async_context(router(config, serving=names, environ=environ, key=key))
        built.sims.update(sims)
        yield built


@contextlib.asynccontextmanager
async def fresh(*, chats: bool = True, **options: Any) -> AsyncIterator[Stack]:
    """`stack_of` for one test, at rest at its end; `chats`: an engine or relay serves then."""
    async with stack_of(**options) as stack:
        yield stack
        await stack.check_at_rest(chats=chats)
