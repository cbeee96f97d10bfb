"""Faults do what they say, to as many requests as they say; leaving clients leave nothing behind."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from router.sim.engine import EngineShape
from router.sim.faults import FaultBoard, FaultKind, FaultRule, Faults
from router.sim.options import SimServerOptions
from router.sim.relay import relay_options
from router.sim.server import RunningSim, running

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
STREAM = BODY | {"stream": True}
#: Seconds after which a test that hangs gives up.
GIVE_UP_S = 10.0


def with_server(
    test: Callable[[RunningSim, httpx.AsyncClient], Awaitable[None]],
    *rules: FaultRule,
    options: SimServerOptions | None = None,
) -> None:
    async def main() -> None:
        shape = EngineShape(max_model_len=4_096, max_num_seqs=2, max_num_queued_reqs=4)
        given = options or SimServerOptions(model="tiny", shape=shape, time_scale=0.0, faults=Faults(rules))
        async with (
            asyncio.timeout(GIVE_UP_S),
            running(given) as sim,
            httpx.AsyncClient(base_url=sim.url, timeout=GIVE_UP_S) as client,
        ):
            await test(sim, client)

    asyncio.run(main())


def slow() -> SimServerOptions:
    """A server in real time, so that a request of many tokens is there to be looked at."""
    shape = EngineShape(max_model_len=4_096, max_num_seqs=2, max_num_queued_reqs=4)
    return SimServerOptions(model="tiny", shape=shape, time_scale=1.0)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


def of(kind: FaultKind, **fields: Any) -> FaultRule:
    return FaultRule(kind=kind, **fields)


def test_a_client_that_leaves_amid_its_stream_gives_its_seat_and_blocks_back() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", CHAT, json=STREAM | {"max_tokens": 4_000}) as response:
            await anext(response.aiter_lines())
            assert sim.engine.snapshot().running == 1
        await until(lambda: sim.engine.is_idle)

        entry = sim.log.entries()[0]
        await until(lambda: entry.aborted)
        assert sim.engine.snapshot().kv_blocks_used == 0
        assert sim.engine.snapshot().finished == {"stop": 0, "length": 0}

    with_server(test, options=slow())


@pytest.mark.parametrize("body", [BODY | {"max_tokens": 4_000}, STREAM | {"max_tokens": 4_000, "n": 2}])
def test_a_client_that_leaves_before_its_answer_aborts_all_its_sequences(body: dict[str, Any]) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        call = asyncio.create_task(client.post(CHAT, json=body))
        await until(lambda: sim.engine.snapshot().running == body.get("n", 1))
        call.cancel()
        await until(lambda: sim.engine.is_idle)

        assert sim.engine.snapshot().aborted_total == body.get("n", 1)

    with_server(test, options=slow())


def test_a_client_that_leaves_while_it_waits_in_the_engine_is_forgotten() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        calls = [asyncio.create_task(client.post(CHAT, json=BODY | {"max_tokens": 4_000})) for _ in range(3)]
        await until(lambda: sim.engine.snapshot().waiting == 1)
        for call in calls:
            call.cancel()
        await until(lambda: sim.engine.is_idle)

        assert sim.engine.snapshot().kv_blocks_used == 0

    with_server(test, options=slow())


def test_headers_of_a_stream_go_out_before_the_first_token() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", CHAT, json=STREAM) as response:
            assert response.status_code == 200
            assert sim.log.entries()[0].output_tokens <= 1

    with_server(test, of(FaultKind.FIRST_TOKEN_DELAY, value=3_600.0))


def test_over_the_queue_limit_is_503_without_retry_after() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        calls = [asyncio.create_task(client.post(CHAT, json=BODY | {"max_tokens": 4_000})) for _ in range(4)]
        await until(lambda: sim.engine.snapshot().running + sim.engine.snapshot().waiting == 4)
        refused = await client.post(CHAT, json=STREAM)
        health = await client.get("/health")
        for call in calls:
            call.cancel()

        assert (refused.status_code, health.status_code) == (503, 200)
        assert refused.json()["error"]["type"] == "Service Unavailable"
        assert "retry-after" not in refused.headers
        assert sim.engine.snapshot().rejected_total == 1

    with_server(test, options=slow())


@pytest.mark.parametrize(
    ("kind", "status"), [(FaultKind.REJECT_503, 503), (FaultKind.ERROR_500, 500), (FaultKind.REJECT_429, 429)]
)
def test_a_counted_fault_hits_the_next_n_requests_after_those_it_spares(kind: FaultKind, status: int) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        seen = [(await client.post(CHAT, json=BODY)).status_code for _ in range(5)]

        assert seen == [200, status, status, 200, 200]

    with_server(test, of(kind, after_requests=1, requests=2))


def test_a_429_says_when_to_come_back() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        response = await client.post(CHAT, json=BODY)

        assert response.headers["retry-after"] == "7"

    with_server(test, of(FaultKind.REJECT_429, value=7.0))


def test_a_stream_error_is_the_first_event_inside_a_200() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        response = await client.post(CHAT, json=STREAM)

        first, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert response.status_code == 200
        assert json.loads(first)["error"]["code"] == 503
        assert done == "[DONE]"

    with_server(test, of(FaultKind.STREAM_ERROR))


def test_a_stream_error_gives_a_plain_answer_its_status() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        assert (await client.post(CHAT, json=BODY)).status_code == 500

    with_server(test, of(FaultKind.STREAM_ERROR, value=500.0))


def test_an_instant_abort_is_a_200_that_says_nothing() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        whole = (await client.post(CHAT, json=BODY)).json()
        streamed = await client.post(CHAT, json=STREAM)

        assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["message"]["content"]) == ("abort", "")
        assert whole["usage"]["completion_tokens"] == 0
        assert '"finish_reason":"abort"' in streamed.text

    with_server(test, of(FaultKind.ABORT))


@pytest.mark.parametrize("events", [0, 1, 2])
def test_a_cut_resets_the_connection_after_k_events(events: int) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        received: list[str] = []

        async def read() -> None:
            async with client.stream("POST", CHAT, json=STREAM) as response:
                lines = response.aiter_lines()
                while True:
                    received.append(await anext(lines))

        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await read()

        assert sum(line.startswith("data: ") for line in received) == events
        assert sim.log.entries()[0].aborted
        assert sim.engine.is_idle

    with_server(test, of(FaultKind.CUT, value=float(events)))


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.CUT])
def test_a_plain_answer_is_dropped_after_its_request_was_read(kind: FaultKind) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await client.post(CHAT, json=BODY)

        assert json.loads(sim.log.entries()[0].body) == BODY

    with_server(test, of(kind))


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_a_silent_server_reads_the_request_and_never_answers(body: dict[str, Any]) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        served = await client.post(CHAT, json=body)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=body, timeout=0.05)
        await until(lambda: sim.log.entries()[-1].aborted)

        assert served.status_code == 200
        assert sim.log.entries()[-1].status is None

    with_server(test, of(FaultKind.SILENT, after_requests=1))


def test_a_stall_stops_the_stream_and_keeps_the_connection() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        received = []
        with pytest.raises(httpx.ReadTimeout):
            async with client.stream("POST", CHAT, json=STREAM, timeout=0.05) as response:
                received += [line async for line in response.aiter_lines() if line]

        await until(lambda: sim.log.entries()[0].aborted)

    with_server(test, of(FaultKind.STALL, value=2.0))


def test_gzip_answers_are_compressed_whole_and_streamed() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", CHAT, json=BODY) as response:
            raw = b"".join([part async for part in response.aiter_raw()])
        streamed = await client.post(CHAT, json=STREAM)

        assert json.loads(gzip.decompress(raw))["object"] == "chat.completion"
        assert streamed.headers["content-encoding"] == "gzip"
        assert streamed.text.endswith("data: [DONE]\n\n")

    with_server(test, of(FaultKind.GZIP))


def test_refusing_stops_listening_and_healing_listens_on_the_same_port() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        port = sim.port
        await sim.set_faults(Faults((of(FaultKind.REFUSE_CONNECTIONS),)))
        with pytest.raises(httpx.ConnectError):
            await client.post(CHAT, json=BODY)
        await sim.set_faults(Faults())

        assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert sim.port == port

    with_server(test)


def test_refusing_closes_idle_connections_and_lets_running_answers_end() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        await client.get("/health")
        call = asyncio.create_task(client.post(CHAT, json=STREAM | {"max_tokens": 20}))
        await until(lambda: sim.engine.snapshot().running == 1)
        await sim.set_faults(Faults((of(FaultKind.REFUSE_CONNECTIONS),)))

        response = await call

        assert response.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            await client.get("/health")

    with_server(test, options=slow())


def test_refusing_for_a_time_ends_by_itself() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        fault = {"rules": [{"kind": "refuse_connections", "value": 0.05}]}
        assert (await client.post("/sim/faults", json=fault)).status_code == 200

        async def answers() -> bool:
            try:
                return (await client.get("/health")).status_code == 200
            except httpx.TransportError:
                return False

        assert not await answers()
        while not await answers():
            await asyncio.sleep(0)

    with_server(test)


def test_a_server_that_refuses_from_its_start_has_a_port_and_opens_when_healed() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        await sim.set_faults(Faults())

        assert (await client.get("/health")).status_code == 200

    with_server(test, of(FaultKind.REFUSE_CONNECTIONS, value=3_600.0))


def test_killing_resets_what_runs_and_refuses_what_comes() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        call = asyncio.create_task(client.post(CHAT, json=STREAM | {"max_tokens": 4_000}))
        await until(lambda: sim.engine.snapshot().running == 1)
        await sim.kill()

        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await call
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        await until(lambda: sim.engine.is_idle)

    with_server(test, options=slow())


def test_health_can_be_bad_or_slow() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        await sim.set_faults(Faults((of(FaultKind.HEALTH_503),)))
        bad = await client.get("/health")
        await sim.set_faults(Faults((of(FaultKind.SLOW_HEALTH, value=3_600.0),)))
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/health", timeout=0.05)

        assert bad.status_code == 503

    with_server(test)


def test_faults_and_the_log_are_reachable_over_http() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        rules = {"rules": [{"kind": "reject_503", "requests": 1}]}
        await client.post("/sim/faults", json=rules)
        unknown = await client.post("/sim/faults", json={"rules": [{"kind": "nope"}]})
        typo = await client.post("/sim/faults", json={"rules": [{"kind": "cut", "afterr": 1}]})
        await client.post(CHAT, json=BODY, headers={"authorization": "Bearer secret"})
        log = await client.get("/sim/log")

        assert (unknown.status_code, typo.status_code) == (400, 400)
        assert (await client.get("/sim/faults")).json()["rules"][0]["kind"] == "reject_503"
        assert [(entry["status"], entry["faults"]) for entry in log.json()] == [(503, ["reject_503"])]
        assert "secret" not in log.text

    with_server(test)


def test_a_ratio_hits_the_same_requests_for_the_same_seed() -> None:
    faults = Faults((of(FaultKind.REJECT_503, ratio=0.3),))
    first, second = FaultBoard(faults, seed=1), FaultBoard(faults, seed=1)

    hits = [FaultKind.REJECT_503 in first.decide() for _ in range(1_000)]

    assert hits == [FaultKind.REJECT_503 in second.decide() for _ in range(1_000)]
    assert 250 < sum(hits) < 350


def test_a_keep_alive_comment_goes_out_while_nothing_else_does() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body = {"prompt": [1] * 4_000, "max_tokens": 1, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            first = await anext(response.aiter_lines())

        assert first == ": keep-alive"

    shape = EngineShape(max_model_len=4_096)
    with_server(test, options=SimServerOptions(shape=shape, time_scale=5.0, sse_keep_alive_s=0.01))


def test_what_a_body_holds_beyond_the_bound_is_not_kept() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        for _ in range(3):
            await client.post("/v1/completions", json={"prompt": "x" * 100, "max_tokens": 1})

        entries = sim.log.entries()
        assert [len(entry.body) for entry in entries] == [10, 10]
        assert entries[0].body_bytes > 100

    shape = EngineShape(max_model_len=4_096)
    options = SimServerOptions(shape=shape, time_scale=0.0, log_entries_max=2, log_body_max_bytes=10)
    with_server(test, options=options)


def test_a_relay_asks_for_its_key_and_answers_as_a_provider() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        key = {"authorization": "Bearer relay-key"}
        without = await client.post(CHAT, json=BODY)
        unknown = await client.post(CHAT, json=BODY | {"model": "tiny"}, headers=key)
        served = await client.post(CHAT, json=BODY | {"model": "big"}, headers=key)
        metrics = await client.get("/metrics")

        assert (without.status_code, without.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert (served.status_code, served.json()["model"]) == (200, "big")
        assert metrics.status_code == 404

    with_server(test, options=relay_options(model="big", api_key="relay-key", time_scale=0.0))


def test_a_relay_can_be_rate_limited_and_reject_stream_options() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        key = {"authorization": "Bearer k"}
        limited = await client.post(CHAT, json=BODY, headers=key)
        options = await client.post(CHAT, json=STREAM | {"stream_options": {"include_usage": True}}, headers=key)
        served = await client.post(CHAT, json=STREAM, headers=key)

        assert (limited.status_code, limited.headers["retry-after"]) == (429, "2")
        assert limited.json()["error"]["code"] == "rate_limit_exceeded"
        assert (options.status_code, options.json()["error"]["param"]) == (400, "stream_options")
        assert served.status_code == 200

    relay = relay_options(
        model="big",
        api_key="k",
        time_scale=0.0,
        rate_limited_requests=1,
        retry_after_s=2.0,
        rejects_stream_options=True,
    )
    with_server(test, options=relay)
