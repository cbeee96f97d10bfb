"""Keeps one engine's status true: registration, /health, /metrics, and a real token now and then.

    every interval   GET /health, then /metrics
    at first, after an absence, when the capacity changed, and every `register_interval_s`
                     GET /version and /v1/models
    not serving, idle for long, or slow while no traffic vouches for it
                     one request for one token, with a long limit of its own

Rules: what cannot be read never stops traffic; no more than one request for a token is out at a time; an engine whose
traffic gives tokens is not asked for one. Nothing here decides about the state: that is `policy/lifecycle.py`.
"""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from router.clock import Clock
from router.policy.lifecycle import EngineState, LifecycleEvent
from router.upstream.api import (
    ConnectFailed,
    ConnectTimedOut,
    NoConnectionToGive,
    UpstreamError,
    UpstreamRequest,
    UpstreamTimeout,
)
from router.upstream.behaviour import is_shutting_down
from router.upstream.engine import Engine
from router.upstream.partial import read_partly
from router.upstream.scrape import PAGE_MAX_BYTES, parse_metrics
from router.upstream.sse import FirstEvent, body_kind

_SMALL_BODY_BYTES = 1 << 20
_NAMES_MAX = 256

#: A token, an embedding or a score is real work; a route that the model does not have passes on to the next.
_WORK_PROBES: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/completions", {"prompt": "1", "max_tokens": 1, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "temperature": 0}),
    ("/v1/embeddings", {"input": "1"}),
    ("/pooling", {"input": "1"}),
    ("/classify", {"input": "1"}),
    ("/v1/score", {"text_1": "1", "text_2": "1"}),
)
#: vLLM's words, with 400, for a route that the model has no use for; newer versions leave the route out or say 501.
_UNSUPPORTED_TEXT = "does not support"


class _Full(Exception):
    """A serving engine had no place for the probe: no token, but no reason to take it out either."""


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """Limits and intervals of a monitor.

    `interval_s` lies between two rounds, with a tenth of jitter; `again_s` after a doubtful one and between any two.
    `work_s` is how long one token may take: on a busy engine it waits behind long prefills.
    """

    interval_s: float = 1.0
    again_s: float = 0.25
    connect_s: float = 1.0
    health_s: float = 3.0
    register_s: float = 5.0
    register_interval_s: float = 30.0
    metrics_stale_s: float = 15.0
    work_s: float = 120.0
    work_pause_max_s: float = 2.0


class EngineMonitor:
    """One for each engine; `run` is its one loop, to be supervised by the composition root."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        served_model_name: str,
        on_change: Callable[[Engine], None],
        times: ProbeTimes | None = None,
    ) -> None:
        """`on_change`: see `Engine.watch`."""
        self._engine = engine
        self._clock = clock
        self._model = served_model_name
        self._times = times or ProbeTimes()
        # Jitter only has to differ between engines; seeded by name, a run can be repeated.
        self._random = random.Random(engine.name)  # noqa: S311 -- no secret hangs on it
        self._register_at_s = clock.now_s()
        self._metrics_at_s = clock.now_s()
        self._work: asyncio.Task[None] | None = None
        self._work_at_s = clock.now_s()
        self._work_failures = 0
        engine.watch(on_change)

    async def run(self) -> None:
        """Probe until cancelled; the request for a token that is out then is taken back."""
        try:
            while True:
                await self._pause(is_doubtful=await self._round())
        finally:
            if self._work is not None:
                self._work.cancel()
                await asyncio.wait({self._work}, timeout=self._times.connect_s)

    async def _round(self) -> bool:
        """One look at the engine. Returns whether the next should follow soon."""
        event, detail = await self._probe_health()
        was_serving = self._engine.status.can_serve
        self._engine.see(event, detail)
        if event in (LifecycleEvent.PROBE_REFUSED, LifecycleEvent.PROBE_UNREACHABLE):
            self._register_at_s = self._clock.now_s()
            return was_serving
        capacity = self._engine.status.capacity_tokens
        await self._scrape()
        if self._clock.now_s() >= self._register_at_s or capacity != self._engine.status.capacity_tokens:
            await self._register()
        self._start_work()
        return was_serving and event is LifecycleEvent.PROBE_FAILED

    async def _pause(self, *, is_doubtful: bool) -> None:
        await asyncio.sleep(self._times.again_s)
        rest_s = self._times.interval_s * self._random.uniform(0.9, 1.1) - self._times.again_s
        if not is_doubtful and rest_s > 0:
            try:
                async with asyncio.timeout(rest_s):
                    await self._engine.attention.wait()
            except TimeoutError:
                pass
        self._engine.attention.clear()

    async def _probe_health(self) -> tuple[LifecycleEvent, str]:
        try:
            status, _ = await self._call("GET", "/health", self._times.health_s, _SMALL_BODY_BYTES)
        except NoConnectionToGive:
            return LifecycleEvent.PROBE_SLOW, ""
        except ConnectTimedOut:
            return LifecycleEvent.PROBE_UNREACHABLE, "no connection: unreachable"
        except ConnectFailed:
            return LifecycleEvent.PROBE_REFUSED, ""
        except UpstreamTimeout:
            return LifecycleEvent.PROBE_SLOW, ""
        except UpstreamError as error:
            return LifecycleEvent.PROBE_FAILED, str(error)
        # A 4xx is no vLLM's answer, but somebody answered.
        return (LifecycleEvent.PROBE_FAILED, f"HTTP {status}") if status >= 500 else (LifecycleEvent.PROBE_OK, "")

    async def _scrape(self) -> None:
        page = await self._read("/metrics", PAGE_MAX_BYTES, self._times.health_s)
        now_s = self._clock.now_s()
        if page is not None:
            self._metrics_at_s = now_s
            self._engine.learn_metrics(parse_metrics(page))
        elif now_s - self._metrics_at_s > self._times.metrics_stale_s:
            self._engine.learn_metrics(None)

    async def _register(self) -> None:
        self._register_at_s = self._clock.now_s() + self._times.register_interval_s
        version, models = await asyncio.gather(
            self._read("/version", _SMALL_BODY_BYTES, self._times.register_s),
            self._read("/v1/models", _SMALL_BODY_BYTES, self._times.register_s),
        )
        names, max_model_len = _model_cards(models, self._model)
        self._engine.learn_identity(_version(version), names, max_model_len)

    def _start_work(self) -> None:
        if self._work is not None:
            if not self._work.done():
                return
            # Raises what is a bug of ours, so that the supervisor sees it.
            self._work.result()
            self._work = None
        if self._engine.life.wants_work(self._clock.now_s()) and self._clock.now_s() >= self._work_at_s:
            self._work = asyncio.get_running_loop().create_task(self._ask_for_a_token())

    async def _ask_for_a_token(self) -> None:
        try:
            failure = await self._work_failure()
        except UpstreamTimeout:
            failure = f"it gave no token within {self._times.work_s:g} s when asked for one"
        except (_Full, NoConnectionToGive):
            self._work_at_s = self._clock.now_s() + self._times.work_pause_max_s
            return
        except UpstreamError as error:
            failure = f"asked for one token: {error}"
        if failure is None:
            self._work_failures = 0
            self._engine.see(LifecycleEvent.WORK_OK)
            return
        self._work_failures += 1
        pause_s = min(self._times.work_pause_max_s, self._times.interval_s * 2 ** min(self._work_failures - 1, 8))
        self._work_at_s = self._clock.now_s() + pause_s
        self._engine.see(LifecycleEvent.WORK_FAILED, self._mismatch() or failure)

    async def _work_failure(self) -> str | None:
        """Ask for one token. None where it came, else what came instead."""
        for path, fields in _WORK_PROBES:
            body = json.dumps({"model": self._model, **fields}).encode()
            status, answer = await self._call("POST", path, self._times.work_s, _SMALL_BODY_BYTES, body)
            said = body_kind(answer)
            if _is_route_missing(status, said):
                continue
            return self._judge_answer(status, said.kind, said.message)
        # A model with no route known here (speech) can only be taken at its word, if it has given it.
        if self._model in self._engine.status.served_model_names:
            return None
        return "it has no route that generates, embeds or scores, and does not list the model"

    def _judge_answer(self, status: int, kind: str, message: str) -> str | None:
        if kind == "abort" or is_shutting_down(status, message):
            self._engine.note_shutdown_seen()
            return "it is shutting down"
        if status == 503 and self._engine.status.state is EngineState.SERVING:
            raise _Full
        if status == 200 and kind == "data":
            return None
        if status in (401, 403):
            return f"it refuses the router's key (HTTP {status}): set its engines[].api_key to the engine's --api-key"
        return f"asked for one token it answered HTTP {status}: {message or kind}"

    def _mismatch(self) -> str | None:
        names = self._engine.status.served_model_names
        if not names or self._model in names:
            return None
        known = ", ".join(names[:5])
        return (
            f"it serves {known}, not {self._model}: set served_model_name to a name it serves, "
            f"or start it with --served-model-name {self._model}"
        )

    async def _read(self, path: str, limit_bytes: int, limit_s: float) -> bytes | None:
        """The body of a 200, or None for anything else."""
        try:
            status, body = await self._call("GET", path, limit_s, limit_bytes)
        except UpstreamError:
            return None
        return body if status == 200 else None

    async def _call(
        self, method: str, path: str, limit_s: float, limit_bytes: int, body: bytes = b""
    ) -> tuple[int, bytes]:
        """One bounded exchange: at most `limit_s` in all; a body longer than `limit_bytes` is cut there."""
        headers = ((b"content-type", b"application/json"),) if body else ()
        request = UpstreamRequest(method, path, headers, body)
        connect_s = min(self._times.connect_s, limit_s)
        try:
            async with asyncio.timeout(limit_s):
                response = await self._engine.upstream.open(
                    request, connect_s=connect_s, first_byte_s=limit_s, idle_s=limit_s
                )
                try:
                    if response.status >= 400:
                        return response.status, await read_partly(response, limit_bytes, limit_s)
                    answer = bytearray()
                    while len(answer) < limit_bytes and (chunk := await response.read()):
                        answer += chunk
                finally:
                    response.close()
        except TimeoutError as error:
            raise UpstreamTimeout("first_byte", limit_s) from error
        return response.status, bytes(answer[:limit_bytes])


def _is_route_missing(status: int, said: FirstEvent) -> bool:
    """Whether an answer says that there is no such route here. A 404 with an error object is about the model."""
    if status == 404:
        return said.kind != "error"
    return status in (405, 501) or (status == 400 and _UNSUPPORTED_TEXT in said.message)


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str


def _version(body: bytes | None) -> str | None:
    """What /version says, at most 64 characters of it; None where it says nothing of use."""
    try:
        return None if body is None else msgspec.json.decode(body, type=_Version).version[:64]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _model_cards(body: bytes | None, model: str) -> tuple[tuple[str, ...] | None, int | None]:
    """Names served, and the context of `model` (of the only base model where `model` is none of them)."""
    try:
        cards = [] if body is None else msgspec.json.decode(body, type=_Cards).data[:_NAMES_MAX]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        cards = []
    if not cards:
        return None, None
    lengths = {card.id: card.max_model_len for card in cards}
    stated = [length for length in lengths.values() if length]
    return tuple(lengths), lengths.get(model) or (stated[0] if len(stated) == 1 else None)
