"""The composition root: a configuration becomes a running router, and everything it started ends with it.

The only place that knows all parts. `Runtime` owns the queue's connections, the engines, the relays, the counters and
every background task; `async with` gives them back on every path, in the reverse order.
"""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Self

from starlette.types import ASGIApp

from router.clock import Clock, SystemClock
from router.config.keys import KeyRing
from router.config.model import ModelConfig, PoolConfig, RouterConfig
from router.flow.attempt import ModelFlow
from router.flow.gate import Gate
from router.flow.line import BatchLine, LineBounds
from router.flow.relaying import Relays
from router.http.routes import build
from router.http.service import Models, ModelService, RouterState
from router.http.upload import BufferBudget
from router.observe.metrics import Metrics
from router.observe.stalls import LoopWatch
from router.policy.admission import Admission, AdmissionRules, PoolRules
from router.policy.demand import RequestClass
from router.policy.ledger import ClassLimits, EngineLimits
from router.policy.lifecycle import EngineState
from router.policy.shares import share_of
from router.queue.open import open_queue
from router.queue.redis import QueueUnfit, RedisQueue
from router.queue.store import QueueDown
from router.tokens.count import build_counter
from router.upstream.connection import EngineUpstream, connections_for
from router.upstream.engine import Engine
from router.upstream.health import EngineMonitor
from router.upstream.relay import Relay

log = logging.getLogger(__name__)

_GAUGES_EVERY_S = 1.0
_PROVE_AGAIN_S = 2.0
#: What a borrowed chat request may take of a batch engine's KV tokens, all of them together.
_BORROW_SHARE_RATIO = 0.5


class Runtime:
    """One process of the router. `slot` of `slots`: which share of each engine's capacity is this worker's."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        redis_url: str,
        router_id: str,
        slot: int = 0,
        slots: int = 1,
        clock: Clock | None = None,
        metrics_dir: Path | None = None,
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._router_id = router_id
        # Unique to this life of this process: a worker that was killed and started again must not be taken for the one
        # before, whose tickets nobody can serve any more, and two workers' requests must not share an id.
        self._process_id = f"{router_id}-{slot}-{secrets.token_hex(4)}"
        self._slot, self._slots = slot, slots
        self._queue: RedisQueue | None = None
        self._redis_url = redis_url
        self._metrics = Metrics(shared_dir=metrics_dir, slot=slot)
        self._cleanup = contextlib.AsyncExitStack()
        self._engine_news = asyncio.Event()
        # Not started before everything is made: a start that fails leaves nothing behind.
        self._background: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self.state: RouterState
        self.app: ASGIApp

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as starting:
            self._cleanup = starting
            await self._start()
            self._cleanup = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cleanup.aclose()

    async def first_look(self, within_s: float) -> None:
        """Wait until every model has an engine that serves, at most `within_s`: engines that are up should not be
        reported missing in the first moment. Those that are down are not waited for any longer."""
        waiting = [service for service in self.state.models if not service.is_serving()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while waiting:
                    await self._engine_news.wait()
                    self._engine_news.clear()
                    waiting = [service for service in waiting if not service.is_serving()]

    def start_draining(self) -> None:
        """Refuse new work from now on; whoever waits in the batch queue is sent away to come back elsewhere."""
        self.state.draining = True
        for service in self.state.models:
            if service.flow.line is not None:
                service.flow.line.send_home()

    def cut(self) -> None:
        """End what still runs: streams get one last error event."""
        self.state.cut()

    async def _start(self) -> None:
        config = self._config
        if any(model.batch is not None for model in config.models.values()):
            self._queue = open_queue(config.redis, url=self._redis_url)
            self._cleanup.push_async_callback(self._queue.close)
            await self._prove_queue(self._queue)
        relays = [Relay(relay, self._clock, router_id=self._router_id) for relay in config.relays]
        for relay in relays:
            self._cleanup.push_async_callback(relay.aclose)
        services = [await self._model_service(model, relays) for model in config.models.values()]
        self.state = RouterState(
            config=config,
            clock=self._clock,
            keys=KeyRing(config.keys),
            models=Models(services),
            metrics=self._metrics,
            buffers=BufferBudget(config.server.buffered_max_bytes),
            router_id=self._router_id,
            process_id=self._process_id,
        )
        self.app, ops = build(self.state)
        self._background.append(("gauges", partial(_every, _GAUGES_EVERY_S, ops.refresh_gauges)))
        self._cleanup.enter_context(LoopWatch(self._metrics.loop_was_late))
        tasks = [asyncio.create_task(work(), name=name) for name, work in self._background]
        for task in tasks:
            task.add_done_callback(self._report)
        self._cleanup.push_async_callback(_end, tasks)

    async def _prove_queue(self, queue: RedisQueue) -> None:
        """Refuse a store that is unfit. One that is away must not keep chat from starting: it is asked again later.

        Raises: `QueueUnfit`.
        """
        try:
            await queue.start()
        except QueueDown as error:
            log.error("the batch queue is away: %s; batch requests are refused until it is back", error)
            self._background.append(("proof of the queue", partial(_prove_later, queue)))

    async def _model_service(self, model: ModelConfig, relays: list[Relay]) -> ModelService:
        names = dict.fromkeys(name for pool in model.pools for name in pool.engines)
        engines = {name: self._engine(name, model) for name in names}
        gate = Gate(
            Admission(
                self._rules(model), self._limits(model), dict.fromkeys(names, self._share(_least_capacity(model)))
            ),
            self._clock,
            rng=random.Random(),  # noqa: S311 because choosing an engine is no secret
        )
        self._cleanup.callback(gate.close)
        line = self._line(model, gate)
        has_relay = any(
            relay.model_for(model.name) is not None and RequestClass.CHAT in relay.config.classes for relay in relays
        )
        for engine in engines.values():
            self._watch(model, engine, gate, has_relay=has_relay)
        # Loading a tokenizer takes seconds of CPU; the loop has nothing else to do yet, but signals want an answer.
        counter = await asyncio.to_thread(build_counter, model.tokenizer, model=model.name)
        self._cleanup.push_async_callback(counter.aclose)
        way_out = Relays(model.name, relays, self._clock, self._metrics, commit_after_s=model.commit_after_s)
        flow = ModelFlow(model, gate, line, engines, way_out, self._clock, self._metrics)
        return ModelService(model, counter, flow)

    def _engine(self, name: str, model: ModelConfig) -> Engine:
        config = self._config.engines[name]
        seats = sum(pool.max_num_seqs for pool in model.pools if name in pool.engines)
        upstream = EngineUpstream(name, config.url, api_key=config.api_key, connections_max=connections_for(seats))
        self._cleanup.push_async_callback(upstream.aclose)
        return Engine(config, upstream, self._clock)

    def _line(self, model: ModelConfig, gate: Gate) -> BatchLine | None:
        if model.batch is None:
            return None
        assert self._queue is not None, "a model with a batch pool has a queue"
        bounds = LineBounds(model.batch.queue_max_requests, model.batch.queue_max_tokens, model.batch.queue_wait_max_s)
        line = BatchLine(model.name, bounds, self._queue, gate, self._clock, owner=self._process_id)
        self._background.append((f"queue of {model.name}", line.run))
        return line

    def _watch(self, model: ModelConfig, engine: Engine, gate: Gate, *, has_relay: bool) -> None:
        """Keep the gate told of what the engine says, and one monitor on it. A relay is a better last resort than an
        engine that fails."""

        told = (EngineState.UNKNOWN, "")
        told_context: int | None = None

        def on_change(changed: Engine) -> None:
            nonlocal told, told_context
            status = changed.status
            if status.capacity_tokens is not None:
                block = status.metrics.block_size_tokens if status.metrics is not None else None
                share = share_of(status.capacity_tokens, slot=self._slot, slots=self._slots)
                gate.resize(changed.name, share, block or 1)
            gate.set_serving(changed.name, status.can_serve, is_failing=changed.is_failing and not has_relay)
            self._engine_news.set()
            news = (status.state, status.reason)
            if told != news:
                told = news
                level = logging.INFO if status.can_serve or status.state is EngineState.LOADING else logging.WARNING
                log.log(level, "engine %s of %s: %s (%s)", changed.name, model.name, status.state.value, status.reason)
            if told_context != status.max_model_len:
                told_context = status.max_model_len
                _warn_of_short_context(model, changed)

        monitor = EngineMonitor(engine, self._clock, served_model_name=model.served_model_name, on_change=on_change)
        self._background.append((f"engine {engine.name}", monitor.run))

    def _rules(self, model: ModelConfig) -> AdmissionRules:
        def rules(pool: PoolConfig | None) -> PoolRules | None:
            if pool is None:
                return None
            return PoolRules(pool.engines, pool.ttft_target_s * pool.hold_ratio, pool.hold_max_requests)

        return AdmissionRules(
            rules(model.chat), rules(model.batch), borrow=model.borrow, chat_reserve_ratio=model.chat_reserve_ratio
        )

    def _limits(self, model: ModelConfig) -> dict[str, EngineLimits]:
        """Seats, shares and lanes of this worker on every engine of the model."""
        limits: dict[str, EngineLimits] = {}
        for name in dict.fromkeys(name for pool in model.pools for name in pool.engines):
            pools = {pool.request_class: pool for pool in model.pools if name in pool.engines}
            classes = {request_class: self._class_limits(pool) for request_class, pool in pools.items()}
            batch = pools.get(RequestClass.BATCH)
            if batch is not None and RequestClass.CHAT not in classes and model.chat is not None:
                # Borrowed places: never all seats, so that chat cannot shut batch out of its own pool.
                seats = max(1, self._share(batch.max_num_seqs) - 1)
                classes[RequestClass.CHAT] = ClassLimits(seats, _BORROW_SHARE_RATIO)
            configured = self._config.engines[name].max_num_seqs
            most = max(pool.max_num_seqs for pool in pools.values())
            limits[name] = EngineLimits(self._share(configured if configured is not None else most), classes)
        return limits

    def _class_limits(self, pool: PoolConfig) -> ClassLimits:
        lanes = None if pool.prefill_lanes is None else self._share(pool.prefill_lanes)
        return ClassLimits(self._share(pool.max_num_seqs), pool.kv_share_ratio, lanes)

    def _report(self, task: asyncio.Task[None]) -> None:
        """A background task ends by being cancelled, or with nothing left to prove; anything else is a bug. The process
        still answers what it can, and says that it must be replaced."""
        if not task.cancelled() and task.exception() is not None:
            self.state.is_broken = True
            log.critical("background task %r ended: it is a bug", task.get_name(), exc_info=task.exception())

    def _share(self, whole: int) -> int:
        return share_of(whole, slot=self._slot, slots=self._slots)


def _least_capacity(model: ModelConfig) -> int:
    """Until an engine says what it has: one request of full length, which every vLLM that starts can hold."""
    return max(pool.max_model_len for pool in model.pools)


def _warn_of_short_context(model: ModelConfig, engine: Engine) -> None:
    """An engine started with less context than its pool claims makes the pool that short."""
    said = engine.status.max_model_len
    for pool in model.pools:
        if said is not None and engine.name in pool.engines and said < pool.max_model_len:
            log.warning(
                "engine %s of %s: its max_model_len %d is below the %d of the %s pool; %d holds for the pool. Start "
                "the engine with --max-model-len %d, or lower the pool's",
                *(engine.name, model.name, said, pool.max_model_len, pool.name, said, pool.max_model_len),
            )


async def _prove_later(queue: RedisQueue) -> None:
    while True:
        await asyncio.sleep(_PROVE_AGAIN_S)
        try:
            await queue.start()
        except QueueDown:
            continue
        except QueueUnfit as unfit:
            log.critical("the batch queue is back, but unfit: %s", unfit)
        return


async def _every(seconds: float, work: Callable[[], None]) -> None:
    """Do `work` again and again. A moment in which no file can be opened, or a disk is full, ends nothing: the next
    turn does it."""
    is_failing = False
    while True:
        try:
            work()
        except OSError as error:
            if not is_failing:
                log.warning("the gauges are not refreshed: %s", error)
            is_failing = True
        else:
            is_failing = False
        await asyncio.sleep(seconds)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
