"""One model's flow before engines of a test's choosing: real sockets, a real gate and line, no HTTP server.

What `app.py` puts together, without health probes: an engine serves until a test says otherwise.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from router.clock import Clock, SystemClock
from router.config.model import (
    EngineConfig,
    ModelConfig,
    PoolConfig,
    RelayConfig,
    Secret,
    TimeoutConfig,
    TokenizerConfig,
)
from router.flow.answer import Answer
from router.flow.attempt import ModelFlow
from router.flow.gate import Gate
from router.flow.job import Job
from router.flow.lease import Lease
from router.flow.line import BatchLine, LineBounds
from router.flow.relaying import Relays
from router.http.head import Head
from router.http.parsing import parse
from router.observe.metrics import Metrics
from router.policy.admission import Admission, AdmissionRules, PoolRules
from router.policy.decision import Offer
from router.policy.demand import Demand, RequestClass
from router.policy.ledger import ClassLimits, EngineLimits
from router.policy.lifecycle import LifecycleEvent
from router.queue.memory import MemoryQueue
from router.queue.store import QueueStore
from router.request import Endpoint, RequestRecord
from router.sim.engine import EngineShape
from router.sim.faults import FaultKind, FaultRule, Faults
from router.sim.options import SimServerOptions
from router.sim.relay import relay_options
from router.sim.server import RunningSim, running
from router.upstream.connection import EngineUpstream
from router.upstream.engine import Engine
from router.upstream.httpx_call import HttpxUpstream
from router.upstream.relay import Relay
from tests.upstream.fakes import RawServer, Script

T = TypeVar("T")
CHAT, BATCH = RequestClass.CHAT, RequestClass.BATCH

#: A bound on a hung test, not a measurement.
GUARD_S = 20.0
MODEL = "llama"
#: What the engines call it.
SERVED = "served-llama"
OWNER = "me"
QUICK = TimeoutConfig(5.0, 10.0, 10.0)


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run the body of a test, bounded."""

    async def bounded() -> T:
        async with asyncio.timeout(GUARD_S):
            return await test

    return asyncio.run(bounded())


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that does not say when it changes. The guard of the test bounds it."""
    while not is_true():
        await asyncio.sleep(0.002)


async def placed(gate: Gate, offer: Offer) -> Lease:
    """A place for chat, at once or after the hold."""
    return gate.try_chat(offer) or await gate.hold(offer)


def sim(*rules: FaultRule, time_scale: float = 0.0, seats: int = 8, **options: Any) -> SimServerOptions:
    """A simulated engine, as fast as the machine goes unless told otherwise."""
    shape = EngineShape(max_model_len=8_192, max_num_seqs=seats, kv_cache_tokens=65_536)
    return SimServerOptions(model=SERVED, shape=shape, time_scale=time_scale, faults=Faults(rules), **options)


def sim_relay(*rules: FaultRule, **options: Any) -> SimServerOptions:
    """A simulated provider."""
    fields = {"model": "vendor/big-1", "api_key": "relay-key", "time_scale": 0.0, "faults": Faults(rules), **options}
    return relay_options(**fields)


def fault(kind: FaultKind, value: float = 0.0, requests: int | None = None, after_requests: int = 0) -> FaultRule:
    return FaultRule(kind=kind, value=value, requests=requests, after_requests=after_requests)


def pool(request_class: RequestClass, engines: tuple[str, ...], **settings: Any) -> PoolConfig:
    plain = PoolConfig(
        request_class=request_class,
        engines=engines,
        max_model_len=8_192,
        max_num_seqs=8,
        kv_share_ratio=1.0,
        prefill_lanes=None if request_class is CHAT else 1,
        timeouts=QUICK,
        default_output_tokens=64,
        ttft_target_s=1.0,
        hold_ratio=0.05,
        hold_max_requests=8,
        queue_max_requests=100,
        queue_max_tokens=1_000_000,
        queue_wait_max_s=60.0,
    )
    return replace(plain, **settings)


def relay_config(url: str, **settings: Any) -> RelayConfig:
    plain = RelayConfig(
        name="x",
        url=url,
        api_key=Secret("relay-key"),
        models={MODEL: "vendor/big-1"},
        classes=frozenset(RequestClass),
        timeouts=QUICK,
        breaker_failures=5,
        breaker_open_s=30.0,
        proxy=None,
    )
    return replace(plain, **settings)


def body_of(text: str = "Hello.", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


@dataclass
class Stack:
    """A flow and what it stands on. Engines and relays that are simulated are in `sims`, by name."""

    flow: ModelFlow
    gate: Gate
    line: BatchLine
    store: QueueStore
    engines: dict[str, Engine]
    relays: tuple[Relay, ...]
    metrics: Metrics
    clock: Clock
    sims: dict[str, RunningSim]
    tasks_before: frozenset[asyncio.Task[Any]]
    ids: int = 0
    pump: asyncio.Task[None] | None = None
    records: list[RequestRecord] = field(default_factory=list)

    def job(
        self,
        request_class: RequestClass = CHAT,
        *,
        body: Mapping[str, Any] | None = None,
        tokens: int = 100,
        endpoint: Endpoint = Endpoint.CHAT,
        demand: Demand | None = None,
        **fields: Any,
    ) -> Job:
        """A parsed request of `tokens` KV tokens in all."""
        self.ids += 1
        raw = json.dumps(body_of(max_tokens=4) if body is None else body).encode()
        path = {Endpoint.CHAT: "/v1/chat/completions", Endpoint.COMPLETIONS: "/v1/completions"}[endpoint]
        head = Head(f"id-{self.ids}", None, frozenset(), {b"content-type": b"application/json"})
        request = parse(endpoint, path, head, raw)
        return Job(
            place_id=f"p-{self.ids}",
            request=request,
            headers=((b"content-type", b"application/json"),),
            request_class=request_class,
            demand=demand or Demand(tokens - 4, tokens - 4, 4),
            **fields,
        )

    def record(self) -> RequestRecord:
        record = RequestRecord("id", self.clock.now_s(), endpoint="chat_completions", model=MODEL)
        self.records.append(record)
        return record

    async def send(self, job: Job, record: RequestRecord | None = None) -> tuple[Answer, bytes]:
        """The whole answer, closed, and the bytes that the client got."""
        answer = await self.flow.send(job, record or self.record())
        with answer:
            return answer, await rest_of(answer)

    def all_serve(self) -> None:
        """Every engine gives tokens again, whatever was seen of it."""
        for engine in self.engines.values():
            engine.see(LifecycleEvent.PROBE_OK)
            engine.see(LifecycleEvent.WORK_OK)

    def running(self, name: str) -> int:
        """Sequences in a simulated engine, running or waiting."""
        snapshot = self.sims[name].engine.snapshot()
        return snapshot.running + snapshot.waiting

    def calls(self, name: str) -> int:
        """Requests that reached a simulated engine or relay."""
        return len(self.sims[name].log.entries())

    @property
    def committed_tokens(self) -> int:
        return sum(ledger.committed_tokens for ledger in self.gate.snapshot().engines.values())

    @property
    def busy_sockets(self) -> int:
        upstreams = [engine.upstream for engine in self.engines.values()] + [relay._upstream for relay in self.relays]
        assert all(isinstance(upstream, EngineUpstream | HttpxUpstream) for upstream in upstreams)
        return sum(len(u._busy) for u in upstreams if isinstance(u, EngineUpstream | HttpxUpstream))

    def attempts(self) -> dict[tuple[str, str], float]:
        """Tries so far, by target and result."""
        samples = [sample for metric in self.metrics.attempts.collect() for sample in metric.samples]
        return {
            (sample.labels["target"], sample.labels["result"]): sample.value
            for sample in samples
            if sample.name.endswith("_total")
        }

    async def check_at_rest(self) -> None:
        """Nothing is held, nothing waits, nothing runs: what every test leaves behind."""
        self.check_ledger()
        await until(lambda: not self.line._waiters and not self.line._leaving)
        assert (await self.store.stats(MODEL)).requests == 0
        await until(lambda: self.busy_sockets == 0)
        await until(lambda: not any(self.running(name) for name in self.sims))
        await until(lambda: not self._tasks())
        self.check_ledger()

    def check_ledger(self) -> None:
        snapshot = self.gate.snapshot()
        assert (snapshot.held_requests, snapshot.held_tokens) == (0, 0)
        held = [holding for ledger in snapshot.engines.values() for holding in ledger.held.values()]
        assert {(h.requests, h.seats, h.tokens, h.in_prefill) for h in held} == {(0, 0, 0, 0)}

    def _tasks(self) -> list[asyncio.Task[Any]]:
        """What runs beside the line's own two tasks and the servers of the test."""
        own = ("BatchLine._pump", "BatchLine._beat", "RawServer._accept")
        tasks = asyncio.all_tasks() - self.tasks_before - {self.pump}
        return [task for task in tasks if not any(name in repr(task.get_coro()) for name in own)]


@contextlib.asynccontextmanager
async def stack_of(
    *,
    chat: Mapping[str, SimServerOptions | Script | str] | None = None,
    batch: Mapping[str, SimServerOptions | Script | str] | None = None,
    relay: SimServerOptions | Script | str | None = None,
    relay_settings: Mapping[str, Any] | None = None,
    capacity_tokens: int = 10_000,
    store: QueueStore | None = None,
    clock: Clock | None = None,
    chat_settings: Mapping[str, Any] | None = None,
    batch_settings: Mapping[str, Any] | None = None,
    **model_settings: Any,
) -> AsyncIterator[Stack]:
    """Engines by name for each pool (one of a name in both is shared): simulated, scripted, or only a URL."""
    async with contextlib.AsyncExitStack() as opened:
        sims: dict[str, RunningSim] = {}

        async def url_of(name: str, kind: SimServerOptions | Script | str) -> str:
            if isinstance(kind, str):
                return kind
            if isinstance(kind, SimServerOptions):
                sims[name] = await opened.enter_async_context(running(kind))
                return sims[name].url
            return (await opened.enter_async_context(RawServer(kind))).url

        clock = clock or SystemClock()
        chat = {"c": sim()} if chat is None else chat
        batch = {"l": sim()} if batch is None else batch
        urls = {name: await url_of(name, kind) for name, kind in {**chat, **batch}.items()}
        relays: tuple[Relay, ...] = ()
        if relay is not None:
            relays = (Relay(relay_config(await url_of("x", relay), **(relay_settings or {})), clock),)
            opened.push_async_callback(relays[0].aclose)
        chat_pool = pool(CHAT, tuple(chat), **(chat_settings or {})) if chat else None
        batch_pool = pool(BATCH, tuple(batch), **(batch_settings or {})) if batch else None
        config = ModelConfig(
            **{
                "name": MODEL,
                "aliases": (),
                "served_model_name": SERVED,
                "tokenizer": TokenizerConfig("estimate", None, None, "auto", 1, 1.0),
                "threshold_tokens": 1_000,
                "chat": chat_pool,
                "batch": batch_pool,
                "chat_reserve_ratio": 0.0,
                "borrow": True,
                "cap_unset_max_tokens": False,
                "retry_started": False,
                "attempts_max": 3,
                "commit_after_s": 5.0,
                **model_settings,
            }
        )
        engines = {name: _engine(name, url, clock) for name, url in urls.items()}
        for engine in engines.values():
            opened.push_async_callback(engine.upstream.aclose)
        gate = _gate(config, capacity_tokens, clock)
        opened.callback(gate.close)
        for engine in engines.values():
            engine.watch(
                lambda changed: gate.set_serving(
                    changed.name, changed.status.can_serve, is_failing=changed.is_failing and not relays
                )
            )
        store = store or MemoryQueue(clock)
        bounds = LineBounds(1, 1, 1.0)
        if batch_pool is not None:
            bounds = LineBounds(batch_pool.queue_max_requests, batch_pool.queue_max_tokens, batch_pool.queue_wait_max_s)
        line = BatchLine(MODEL, bounds, store, gate, clock, owner=OWNER)
        metrics = Metrics()
        way_out = Relays(MODEL, relays, clock, metrics, commit_after_s=config.commit_after_s)
        flow = ModelFlow(config, gate, line, engines, way_out, clock, metrics)
        stack = Stack(flow, gate, line, store, engines, relays, metrics, clock, sims, frozenset(asyncio.all_tasks()))
        stack.all_serve()
        stack.pump = asyncio.create_task(line.run())
        opened.push_async_callback(_end, stack.pump)
        yield stack


@contextlib.asynccontextmanager
async def fresh(**options: Any) -> AsyncIterator[Stack]:
    """`stack_of` for one test, at rest at its end."""
    async with stack_of(**options) as stack:
        yield stack
        await stack.check_at_rest()


def _engine(name: str, url: str, clock: Clock) -> Engine:
    return Engine(EngineConfig(name, url, None, None, None), EngineUpstream(name, url, api_key=None), clock)


def _gate(config: ModelConfig, capacity_tokens: int, clock: Clock) -> Gate:
    limits: dict[str, EngineLimits] = {}
    for name in dict.fromkeys(name for each in config.pools for name in each.engines):
        classes = {
            each.request_class: ClassLimits(each.max_num_seqs, each.kv_share_ratio, each.prefill_lanes)
            for each in config.pools
            if name in each.engines
        }
        classes.setdefault(CHAT, ClassLimits(7, 0.5))
        limits[name] = EngineLimits(8, classes)

    def rules(each: PoolConfig | None) -> PoolRules | None:
        if each is None:
            return None
        return PoolRules(each.engines, each.ttft_target_s * each.hold_ratio, each.hold_max_requests)

    admission = Admission(
        AdmissionRules(rules(config.chat), rules(config.batch), config.borrow, config.chat_reserve_ratio),
        limits,
        dict.fromkeys(limits, capacity_tokens),
    )
    return Gate(admission, clock, rng=random.Random(1))


async def rest_of(answer: Answer) -> bytes:
    """What the client still gets of it."""
    parts: list[bytes] = []
    while part := await answer.read():
        parts.append(part)
    return b"".join(parts)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


class CancelledAt(Coroutine[Any, Any, T]):
    """Drives a coroutine and cancels its task at so many awaits from the Nth on; `waits` counts those that wait."""

    def __init__(self, work: Coroutine[Any, Any, T], at: int, times: int) -> None:
        self._work = work
        self._cancels = range(at, at + times)
        self.waits = 0

    def send(self, value: Any) -> Any:
        return self._counted(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        return self._counted(self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()

    def _counted(self, awaited: Any) -> Any:
        self.waits += 1
        if self.waits in self._cancels:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        return awaited


async def cancelled_at(work: Coroutine[Any, Any, T], at: int, *, times: int = 1) -> bool:
    """Run `work` with its task cancelled at its Nth wait, and at the next ones. False if it ended before."""
    drive = CancelledAt(work, at, times)
    task = asyncio.create_task(drive)
    await asyncio.wait({task})
    if task.cancelled():
        return True
    task.result()
    return drive.waits >= at
