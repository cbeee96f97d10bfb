"""Stopping: readiness goes first, what runs finishes or is told, what waits comes again, and the exit code is 0."""

import asyncio
import errno
import json
import resource
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router import app
from router.http.ops import Ops
from tests.http.process import RouterProcess, router_process
from tests.http.scripted import COMPLETION, DONE, ScriptedEngine, chunk
from tests.http.setting import LONG_TOKENS, MODEL, chat_body, model_config, write_config
from tests.http.stack import fresh, new_client, until
from tests.upstream.fakes import STREAM_HEAD, Connection, RawServer, SeenRequest, answer, piece

#: Calls at one time of a process that may open 400 files, before two engines: half of the files are for others, and a
#: third of the rest is for connections that come at once.
FITTING_400 = 67
LONG_PROMPT = {"model": MODEL, "prompt": [1] * 3_000, "max_tokens": 5}


class Slow(ScriptedEngine):
    """Begins to answer, and ends when it may."""

    def __init__(self) -> None:
        super().__init__(self._answer, max_model_len=LONG_TOKENS)
        self.may_end = asyncio.Event()

    async def _answer(self, request: SeenRequest, connection: Connection) -> None:
        if json.loads(request.body).get("stream"):
            await connection.send(STREAM_HEAD + piece(chunk("a")))
            await self.may_end.wait()
            await connection.send(piece(chunk("b") + DONE) + piece(b""))
        else:
            await self.may_end.wait()
            await connection.send(answer(COMPLETION))


@asynccontextmanager
async def slow_router(
    folder: Path, *, limits: int | None = None, seats: int = 16, **server: Any
) -> AsyncIterator[tuple[RouterProcess, Slow]]:
    """`limits`: how many files the router's process may open. `seats`: of chat."""
    engine = Slow()
    async with RawServer(engine.play) as c, RawServer(engine.play) as long:
        models = [model_config(chat={"max_num_seqs": seats}, batch={"max_num_seqs": 1}, borrow=False)]
        server = {"host": "127.0.0.1", "data_dir": str(folder / "data"), **server}
        config = write_config(folder, {"c": c.url, "l": long.url}, models=models, server=server)
        async with router_process(config, files_max=limits) as router:
            yield router, engine


async def stream_of(client: httpx.AsyncClient, seen: asyncio.Event) -> bytes:
    """A whole stream; `seen` is set with its first token."""
    body = b""
    async with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as stream:
        async for part in stream.aiter_raw():
            body += part
            seen.set()
    return body


async def test_on_sigterm_what_runs_finishes_and_everybody_else_is_sent_elsewhere(tmp_path: Path) -> None:
    async with slow_router(tmp_path) as (router, engine), new_client(router.url) as client:
        begun = asyncio.Event()
        stream = asyncio.create_task(stream_of(client, begun))
        plain = asyncio.create_task(client.post("/v1/chat/completions", json=chat_body()))
        running = asyncio.create_task(client.post("/v1/completions", json=LONG_PROMPT))
        await begun.wait()
        await until(lambda: len(engine.calls) == 3)
        queued = asyncio.create_task(client.post("/v1/completions", json=LONG_PROMPT))
        while (await router.metrics()).value("router_in_flight_requests") < 4:
            await asyncio.sleep(0.01)

        router.signal()
        sent_home = await queued
        ready, alive, refused = (
            await client.get("/readyz"),
            await client.get("/healthz"),
            await client.post("/v1/chat/completions", json=chat_body()),
        )
        engine.may_end.set()
        answers = await asyncio.gather(plain, running)
        code = await router.exit_code()

        assert (sent_home.status_code, sent_home.json()["error"]["code"]) == (503, "shutting_down")
        assert 1 <= int(sent_home.headers["retry-after"]) <= 60
        assert (ready.status_code, ready.json()["status"], alive.status_code) == (503, "draining", 200)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"]
        assert await stream == chunk("a") + chunk("b") + DONE
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(engine.calls) == 3
        assert code == 0
        assert "Traceback" not in router.output


async def test_a_second_sigterm_ends_streams_with_a_well_formed_error_at_once(tmp_path: Path) -> None:
    async with slow_router(tmp_path, shutdown_grace_s=600) as (router, engine), new_client(router.url) as client:
        begun = asyncio.Event()
        stream = asyncio.create_task(stream_of(client, begun))
        plain = asyncio.create_task(client.post("/v1/chat/completions", json=chat_body()))
        await begun.wait()
        await until(lambda: len(engine.calls) == 2)

        router.signal()
        while await router.is_ready():
            await asyncio.sleep(0.01)
        router.signal()
        code = await router.exit_code()

        events = (await stream).removeprefix(chunk("a")).split(b"\n\n")
        assert json.loads(events[0].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert events[1:] == [b"data: [DONE]", b""]
        assert ((await plain).status_code, (await plain).json()["error"]["code"]) == (503, "shutting_down")
        assert code == 0
        assert "Traceback" not in router.output


async def test_when_the_grace_is_over_the_rest_is_told_and_the_router_ends(tmp_path: Path) -> None:
    async with slow_router(tmp_path, shutdown_grace_s=0.2) as (router, _), new_client(router.url) as client:
        begun = asyncio.Event()
        stream = asyncio.create_task(stream_of(client, begun))
        await begun.wait()

        router.signal()
        code = await router.exit_code()

        assert b"shutting_down" in await stream
        assert (await stream).endswith(DONE)
        assert code == 0


async def test_a_low_limit_of_open_files_is_told_at_the_start_and_costs_refusals_only(tmp_path: Path) -> None:
    """A process that may open 200 files, before engines that hold 150 chats: some are refused, and it lives on."""
    async with slow_router(tmp_path, limits=200, connections_max=2_000) as (router, engine):
        async with new_client(router.url, limits=httpx.Limits(max_connections=150)) as client:
            calls = [asyncio.create_task(client.post("/v1/chat/completions", json=chat_body())) for _ in range(150)]
            await until(lambda: len(engine.calls) >= 10)
            engine.may_end.set()
            answers = await asyncio.gather(*calls, return_exceptions=True)
        alive = await router.client.get("/healthz")
        told = router.output

    statuses = {answer.status_code for answer in answers if isinstance(answer, httpx.Response)}
    assert 200 in statuses
    assert statuses <= {200, 429, 502, 503}
    assert alive.status_code == 200
    assert "this process may open 200 files" in told


@asynccontextmanager
async def no_file_to_open(pids: Iterable[int]) -> AsyncIterator[None]:
    """The processes may open nothing more; what they have open they keep."""
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids}
    for pid, (_, hard) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)


async def test_a_moment_without_files_ends_nothing(tmp_path: Path) -> None:
    """The gauges are refreshed each second; the loop's timer, which opens no file, rings 20 times a second."""
    rings = "router_loop_delay_seconds_count"
    async with slow_router(tmp_path) as (router, engine):
        engine.may_end.set()
        before = (await router.metrics()).value(rings)

        async with no_file_to_open([router.process.pid]):
            while (meanwhile := await router.metrics()).value(rings) < before + 30:
                await asyncio.sleep(0.05)
        while not await router.is_ready():
            assert "background task" not in router.output
            await asyncio.sleep(0.02)
        answer = await router.client.post("/v1/chat/completions", json=chat_body())
        after = await router.metrics()

    assert meanwhile.value("router_process_open_fds") > 0
    assert answer.status_code == 200
    assert after.value("router_process_cpu_seconds_total") > meanwhile.value("router_process_cpu_seconds_total")
    assert "Traceback" not in router.output


async def test_gauges_that_cannot_be_refreshed_for_a_moment_are_refreshed_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turns = 0

    def refresh(_: Ops) -> None:
        nonlocal turns
        turns += 1
        if turns <= 3:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Ops, "refresh_gauges", refresh)
    monkeypatch.setattr(app, "_GAUGES_EVERY_S", 0.0)
    async with fresh() as stack:
        await until(lambda: turns > 3)
        ready = await stack.get("/readyz")

    assert ready.status_code == 200
    assert caplog.text.count("the gauges are not refreshed: [Errno 24] Too many open files") == 1


async def test_with_few_files_calls_beyond_what_fits_are_refused_and_probes_are_answered(tmp_path: Path) -> None:
    at_once = httpx.Limits(max_connections=150)
    async with (
        slow_router(tmp_path, limits=400, seats=100) as (router, engine),
        new_client(router.url, limits=at_once) as client,
    ):
        calls = [asyncio.create_task(client.post("/v1/chat/completions", json=chat_body())) for _ in range(100)]
        await until(lambda: sum(call.done() for call in calls) >= 100 - FITTING_400)
        probes = [(await router.client.get(path)).status_code for path in ("/healthz", "/readyz", "/metrics")]
        engine.may_end.set()
        answers = await asyncio.gather(*calls)

    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code == 503]
    assert probes == [200, 200, 200]
    assert refused == ["too_many_connections"] * (100 - FITTING_400)
    assert f"it takes {FITTING_400} calls at one time" in router.output


DEAD_PROXIES = {
    "http": {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"},
    "socks": {"ALL_PROXY": "socks5://127.0.0.1:9", "all_proxy": "socks5://127.0.0.1:9", "NO_PROXY": "localhost"},
}


async def test_proxies_of_the_environment_are_used_for_nothing(tmp_path: Path) -> None:
    engine, relay = Slow(), Slow()
    for each in (engine, relay):
        each.may_end.set()
    env = DEAD_PROXIES["http"] | DEAD_PROXIES["socks"]
    async with RawServer(engine.play) as c, RawServer(engine.play) as long, RawServer(relay.play) as x:
        relays = [{"name": "x", "url": x.url, "api_key": "k", "models": {MODEL: MODEL}}]
        config = write_config(tmp_path, {"c": c.url, "l": long.url}, relays=relays, models=[model_config(borrow=False)])
        async with router_process(config, env=env) as router:
            served = await router.client.post("/v1/chat/completions", json=chat_body())
            await c.__aexit__()
            while (await router.metrics()).value("router_engine_up", engine="c") == 1:
                await asyncio.sleep(0.02)
            relayed = await router.client.post("/v1/chat/completions", json=chat_body())

            assert (served.status_code, relayed.status_code) == (200, 200)
            assert relayed.headers["x-router-relay"] == "x"
            assert len(relay.calls) == 1
