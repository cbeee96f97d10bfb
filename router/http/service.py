"""What the routes work with: the models by every name, and the state of this process."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from router.clock import Clock
from router.config.keys import KeyRing
from router.config.model import ModelConfig, RouterConfig
from router.errors import ApiError
from router.flow.attempt import ModelFlow
from router.http.upload import BufferBudget
from router.observe.metrics import Metrics
from router.policy.classify import Shapes
from router.policy.demand import RequestClass
from router.policy.quantile import RecentQuantile
from router.tokens.api import PromptCounter
from router.upstream.engine import Engine


class ModelService:
    """One model: its counter, its flow, and what was learned about its answers."""

    def __init__(self, config: ModelConfig, counter: PromptCounter, flow: ModelFlow) -> None:
        self.config = config
        self.counter = counter
        self.flow = flow
        #: The context limits as configured, or smaller where a serving engine says so.
        self.shapes = self._shapes()
        for engine in flow.engines.values():
            engine.watch(self._engine_changed)
        self.outputs = {pool.request_class: RecentQuantile(initial=pool.default_output_tokens) for pool in config.pools}

    def max_model_len(self) -> int:
        """The largest context of any pool, in tokens."""
        return self.shapes.largest_max_model_len

    def expected_output_tokens(self, request_class: RequestClass) -> int:
        """The recent q99 of this class's output; of the other class where the model has no such pool."""
        quantile = self.outputs.get(request_class) or next(iter(self.outputs.values()))
        return quantile.value

    def is_serving(self) -> bool:
        return any(self.flow.gate.is_serving(request_class) for request_class in RequestClass)

    def _engine_changed(self, _: Engine) -> None:
        self.shapes = self._shapes()

    def _shapes(self) -> Shapes:
        return Shapes(
            self._max_model_len(RequestClass.CHAT),
            self._max_model_len(RequestClass.BATCH),
            self.config.threshold_tokens,
        )

    def _max_model_len(self, request_class: RequestClass) -> int | None:
        pool = self.config.pool(request_class)
        if pool is None:
            return None
        said = [self.flow.engines[name].status.max_model_len for name in pool.engines]
        return min([pool.max_model_len, *(length for length in said if length is not None)])


class Models:
    """Models by name and alias."""

    def __init__(self, services: Iterable[ModelService]) -> None:
        self._services = tuple(services)
        #: By every name that clients may use.
        self.by_name = {name: s for s in self._services for name in (s.config.name, *s.config.aliases)}

    def __iter__(self) -> Iterator[ModelService]:
        return iter(self._services)

    def find(self, name: str) -> ModelService:
        """The model that `name` means; an empty name means the only model, as it does for vLLM.

        Raises: `ApiError` 404 for an unknown name, 400 for an empty one where there are several.
        """
        if not name and len(self._services) == 1:
            return self._services[0]
        if not name:
            raise ApiError(
                400,
                "missing_required_parameter",
                f"`model` is missing. Models here: {', '.join(self.by_name)[:500]}.",
                param="model",
            )
        service = self.by_name.get(name)
        if service is None:
            raise ApiError(
                404,
                "model_not_found",
                f"The model {name[:200]!r} does not exist here. Models: {', '.join(self.by_name)[:500]}.",
                param="model",
            )
        return service


@dataclass(slots=True)
class RouterState:
    """What all routes of one process share. `draining`: no new work is taken. `is_broken`: a part of this process is
    gone for good. `tasks`: calls being worked on, each of which puts its own in and takes it out; the last to go sets
    `idle`, if the router drains."""

    config: RouterConfig
    clock: Clock
    keys: KeyRing
    models: Models
    metrics: Metrics
    buffers: BufferBudget
    router_id: str
    process_id: str
    draining: bool = False
    is_broken: bool = False
    #: With the process's id before it, what a request is called in ledgers and queues: unique in all processes.
    place_numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def in_flight(self) -> int:
        return len(self.tasks)

    async def until_idle(self) -> None:
        """Wait until no call is being worked on."""
        assert self.draining, "calls tell of their end only then"
        while self.tasks:
            self.idle.clear()
            await self.idle.wait()

    def cut(self) -> None:
        """End every call that still runs."""
        for task in tuple(self.tasks):
            task.cancel()
