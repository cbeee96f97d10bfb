"""An engine's status follows what it does: up, busy, down, back, asleep, misnamed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from router.clock import SystemClock
from router.config.model import EngineConfig
from router.policy.lifecycle import EngineState, LifecycleEvent, LifecycleRules
from router.upstream.api import ConnectFailed, ConnectionsBusy
from router.upstream.connection import EngineUpstream
from router.upstream.engine import Engine, EngineStatus
from router.upstream.health import EngineMonitor, ProbeTimes

from .fakes import Connection, FakeEngine, RawServer, answer, run

QUICK = ProbeTimes(
    interval_s=0.01,
    again_s=0.001,
    connect_s=5,
    health_s=5,
    register_s=5,
    register_interval_s=0.02,
    work_s=5,
    work_pause_max_s=0.02,
)


@dataclass
class Watched:
    """An engine under its monitor, and a way to wait for what it becomes."""

    engine: Engine
    changed: asyncio.Condition

    async def until(self, is_so: Callable[[EngineStatus], bool]) -> EngineStatus:
        async with self.changed:
            await self.changed.wait_for(lambda: is_so(self.engine.status))
        return self.engine.status

    async def becomes(self, state: EngineState) -> EngineStatus:
        return await self.until(lambda status: status.state is state)


@asynccontextmanager
async def watched(
    url: str,
    *,
    times: ProbeTimes = QUICK,
    rules: LifecycleRules | None = None,
    capacity_tokens: int | None = None,
) -> AsyncIterator[Watched]:
    clock = SystemClock()
    upstream = EngineUpstream("e", url, api_key=None)
    config = EngineConfig("e", url, None, capacity_tokens, None)
    it = Watched(Engine(config, upstream, clock, rules), asyncio.Condition())
    news = asyncio.Event()
    monitor = EngineMonitor(
        it.engine,
        clock,
        served_model_name="m",
        on_change=lambda _: news.set(),
        times=times,
    )

    async def tell() -> None:
        while True:
            await news.wait()
            news.clear()
            async with it.changed:
                it.changed.notify_all()

    tasks = [asyncio.create_task(monitor.run()), asyncio.create_task(tell())]
    try:
        yield it
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await upstream.aclose()
        assert monitor._work is None or monitor._work.done()


def test_an_engine_that_comes_up_is_registered_and_serves_after_its_first_token() -> None:
    async def body() -> None:
        fake = FakeEngine()
        async with RawServer(fake.script()) as server, watched(server.url) as it:
            status = await it.becomes(EngineState.SERVING)

            assert status.can_serve
            assert (status.version, status.served_model_names, status.max_model_len) == ("0.32.0", ("m",), 4096)
            assert (status.capacity_tokens, status.behaviour.clamps_output) == (1000, True)
            assert status.metrics is not None
            assert fake.asked("/v1/completions") == 1

    run(body())


def test_an_engine_not_there_at_start_is_loading_and_serves_once_it_is() -> None:
    async def body() -> None:
        async with RawServer(FakeEngine().script()) as server:
            url, port = server.url, server.port
        async with watched(url) as it:
            await it.becomes(EngineState.LOADING)
            late = RawServer(FakeEngine().script())
            late.port = port
            async with late:
                await it.becomes(EngineState.SERVING)

    run(body())


def test_a_killed_engine_goes_down_and_comes_back_only_with_a_token() -> None:
    async def body() -> None:
        fake = FakeEngine()
        async with RawServer(fake.script()) as server:
            port = server.port
            async with watched(server.url) as it:
                await it.becomes(EngineState.SERVING)
                await server.__aexit__()
                await it.becomes(EngineState.DOWN)
                fake.completion_status, fake.completion = 500, b'{"error":{"message":"broken","code":500}}'
                again = RawServer(fake.script())
                again.port = port
                async with again:
                    await fake.asked_again("/v1/completions", 2)
                    assert it.engine.status.state is EngineState.DOWN
                    assert "broken" in it.engine.status.reason
                    fake.completion_status, fake.completion = 200, FakeEngine.completion
                    await it.becomes(EngineState.SERVING)

    run(body())


def test_one_failed_connection_of_traffic_hurries_the_probe_that_settles_it() -> None:
    async def body() -> None:
        fake = FakeEngine()
        slow = replace(QUICK, interval_s=1000)
        async with RawServer(fake.script()) as server, watched(server.url, times=slow) as it:
            await it.becomes(EngineState.SERVING)
            await server.__aexit__()
            it.engine.note_connect_failed(ConnectFailed("refused"))
            await it.becomes(EngineState.DOWN)

    run(body())


def test_a_health_page_that_hangs_leaves_a_working_engine_in() -> None:
    async def body() -> None:
        fake = FakeEngine()
        impatient = replace(QUICK, health_s=0.01)
        async with RawServer(fake.script()) as server, watched(server.url, times=impatient) as it:
            await it.becomes(EngineState.SERVING)
            fake.health_gate = asyncio.Event()
            for _ in range(5):
                it.engine.note_request_ok()
                await fake.asked_again("/health", 2)

            assert it.engine.status.state is EngineState.SERVING
            assert fake.asked("/v1/completions") == 1
            fake.health_gate.set()

    run(body())


def test_an_idle_engine_whose_health_page_hangs_is_asked_for_a_token_and_stays_in_on_it() -> None:
    async def body() -> None:
        fake = FakeEngine()
        impatient = replace(QUICK, health_s=0.01)
        rules = LifecycleRules(lately_s=0)
        async with RawServer(fake.script()) as server, watched(server.url, times=impatient, rules=rules) as it:
            await it.becomes(EngineState.SERVING)
            fake.health_gate = asyncio.Event()
            await fake.asked_again("/v1/completions", 3)

            assert it.engine.status.state is EngineState.SERVING
            fake.health_gate.set()

    run(body())


def test_an_engine_that_accepts_and_never_answers_never_serves() -> None:
    async def script(connection: Connection) -> None:
        await connection.closed()

    async def body() -> None:
        hasty = replace(QUICK, health_s=0.01, work_s=0.01, register_s=0.01)
        async with RawServer(script) as server, watched(server.url, times=hasty) as it:
            status = await it.until(lambda status: "gave no token" in status.reason)

            assert status.state is EngineState.LOADING

    run(body())


def test_odd_metrics_and_missing_pages_never_stop_traffic() -> None:
    async def body() -> None:
        fake = FakeEngine(metrics=b"\xff\x00{{{", missing=frozenset({"/version", "/v1/models"}))
        async with RawServer(fake.script()) as server, watched(server.url, capacity_tokens=77) as it:
            status = await it.becomes(EngineState.SERVING)

            assert (status.version, status.served_model_names, status.max_model_len) == ("", (), None)
            assert status.capacity_tokens == 77

    run(body())


def test_an_engine_that_serves_another_name_says_how_to_mend_it() -> None:
    async def body() -> None:
        refusal = b'{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","code":404}}'
        fake = FakeEngine(names=("other",), completion=refusal, completion_status=404)
        async with RawServer(fake.script()) as server, watched(server.url) as it:
            status = await it.until(lambda status: "other" in status.reason)

            assert not status.can_serve
            assert "it serves other, not m" in status.reason
            assert "--served-model-name m" in status.reason

    run(body())


def test_an_engine_restarted_with_another_shape_is_registered_anew() -> None:
    async def body() -> None:
        fake = FakeEngine()
        rare = replace(QUICK, register_interval_s=1000)
        async with RawServer(fake.script()) as server, watched(server.url, times=rare) as it:
            await it.becomes(EngineState.SERVING)
            fake.capacity_tokens, fake.version, fake.max_model_len = 5000, "0.33.0", 8192
            status = await it.until(lambda status: status.version == "0.33.0")

            assert (status.capacity_tokens, status.max_model_len) == (5000, 8192)

    run(body())


def test_an_engine_asleep_takes_no_requests_until_it_wakes() -> None:
    async def body() -> None:
        fake = FakeEngine()
        async with RawServer(fake.script()) as server, watched(server.url) as it:
            await it.becomes(EngineState.SERVING)
            fake.metrics = b'vllm:engine_sleep_state{sleep_state="discard_all"} 1.0\n'
            await it.becomes(EngineState.ASLEEP)
            fake.metrics = b'vllm:engine_sleep_state{sleep_state="awake"} 1.0\n'
            await it.becomes(EngineState.SERVING)

    run(body())


def test_a_model_without_completions_is_probed_by_chat_and_one_that_embeds_by_embedding() -> None:
    async def body() -> None:
        chat = FakeEngine(missing=frozenset({"/v1/completions"}))
        async with RawServer(chat.script()) as server, watched(server.url) as it:
            await it.becomes(EngineState.SERVING)
        vector = b'{"data":[{"embedding":[0.1]}]}'
        found_out = FakeEngine(completion=vector, missing=frozenset({"/v1/completions", "/v1/chat/completions"}))
        async with RawServer(found_out.script()) as server, watched(server.url) as it:
            await it.becomes(EngineState.SERVING)

        assert chat.asked("/v1/chat/completions") == 1
        assert found_out.asked("/v1/embeddings") == 1

    run(body())


def test_tokens_that_an_engine_gives_to_others_vouch_for_it() -> None:
    async def body() -> None:
        fake = FakeEngine(metrics=b"vllm:generation_tokens_total 1\n")
        async with RawServer(fake.script()) as server, watched(server.url) as it:
            await it.becomes(EngineState.SERVING)
            before = it.engine.life.last_ok_at_s
            fake.metrics = b"vllm:generation_tokens_total 2\n"
            await fake.asked_again("/metrics", 2)

            assert it.engine.life.last_ok_at_s != before
            assert it.engine.status.state is EngineState.SERVING

    run(body())


def test_an_empty_abort_is_no_token() -> None:
    async def body() -> None:
        fake = FakeEngine(completion=b'{"choices":[{"text":"","finish_reason":"abort"}]}')
        async with RawServer(fake.script()) as server, watched(server.url) as it:
            await it.until(lambda status: "shutting down" in status.reason)

            assert it.engine.status.state is EngineState.LOADING

    run(body())


def test_a_full_engine_that_breaks_off_amid_its_refusal_stays_in_too() -> None:
    async def body() -> None:
        rules = LifecycleRules(lately_s=0, work_interval_s=0)
        fake = FakeEngine()
        is_full = False

        async def script(connection: Connection) -> None:
            while (request := await connection.request()) is not None:
                if is_full and request.path == "/v1/completions":
                    fake.seen.append(request)
                    fake.news.set()
                    await connection.send(b"HTTP/1.1 503 X\r\ncontent-length: 99\r\n\r\nbusy")
                    connection.writer.close()
                    return
                await connection.send(await fake.handle(request))

        async with RawServer(script) as server, watched(server.url, rules=rules) as it:
            await it.becomes(EngineState.SERVING)
            is_full = True
            await fake.asked_again("/v1/completions", 3)

            assert it.engine.status.state is EngineState.SERVING

    run(body())


def test_a_full_engine_that_refuses_the_probe_stays_in() -> None:
    async def body() -> None:
        busy = b'{"error":{"message":"The engine is currently busy","code":503}}'
        rules = LifecycleRules(lately_s=0, work_interval_s=0)
        fake = FakeEngine()
        async with RawServer(fake.script()) as server, watched(server.url, rules=rules) as it:
            await it.becomes(EngineState.SERVING)
            fake.completion_status, fake.completion = 503, busy
            await fake.asked_again("/v1/completions", 3)

            assert it.engine.status.state is EngineState.SERVING

    run(body())


def test_an_engine_that_loses_what_it_is_sent_goes_down_without_a_probe() -> None:
    clock = SystemClock()
    engine = Engine(
        EngineConfig("e", "http://x", None, None, None), EngineUpstream("e", "http://x", api_key=None), clock
    )
    changes: list[EngineState] = []
    engine.watch(lambda it: changes.append(it.status.state))
    engine.note_request_ok()

    for _ in range(3):
        engine.note_connect_failed(ConnectionsBusy("ours"))
    assert not engine.attention.is_set()
    engine.undrain()
    engine.drain()
    engine.note_request_lost()

    assert changes == [EngineState.DRAINING]
    assert engine.attention.is_set()


def test_a_probe_that_is_out_when_the_monitor_stops_is_taken_back() -> None:
    async def body() -> None:
        left = asyncio.Event()
        asked = asyncio.Event()

        async def script(connection: Connection) -> None:
            while (request := await connection.request()) is not None:
                if request.path == "/v1/completions":
                    asked.set()
                    await connection.closed()
                    left.set()
                    return
                await connection.send(answer(b""))

        async with RawServer(script) as server:
            async with watched(server.url):
                await asked.wait()
            await left.wait()

    run(body())


def test_tokens_of_many_requests_are_one_sighting_unless_something_was_wrong() -> None:
    now_s = 100.0

    class Clock:
        def now_s(self) -> float:
            return now_s

        unix_s = now_s

    engine = Engine(
        EngineConfig("e", "http://x", None, None, None), EngineUpstream("e", "http://x", api_key=None), Clock()
    )
    engine.see(LifecycleEvent.PROBE_OK)
    engine.see(LifecycleEvent.WORK_OK)
    life = engine.life

    engine.note_request_ok()
    same = engine.life
    engine.note_request_lost()
    engine.note_request_ok()
    after_loss = engine.life.losses
    now_s += 0.2
    engine.note_request_ok()

    assert same is life
    assert after_loss == 0
    assert engine.life.last_ok_at_s == now_s
