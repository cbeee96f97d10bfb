"""What is counted: one outcome for each arrival, and no series that a client can make."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.http.inbound import InboundProtocol
from router.policy.outcome import Outcome
from router.sim.faults import FaultKind, FaultRule, Faults
from tests.http.scripted import ScriptedEngine, chunk, says
from tests.http.setting import MODEL, chat_body, model_config
from tests.http.stack import Stack, fresh, new_client, until
from tests.http.wire import Wire, request
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, piece

KEYS = [{"name": "team", "key": "team-key"}]


async def test_after_a_mixed_run_arrivals_equal_the_sum_of_outcomes_and_each_ending_is_named() -> None:
    impatient = {"max_num_seqs": 1, "ttft_target_s": 0.01}
    async with fresh(keys=KEYS, models=[model_config(chat=impatient, borrow=False)]) as stack:
        before = await stack.metrics()
        async with new_client(stack.url) as nobody:
            await nobody.post("/v1/chat/completions", json=chat_body())
        await stack.chat(max_tokens=2)
        await stack.chat(max_tokens=2, stream=True)
        await stack.post("/v1/chat/completions", b"{")
        await stack.post("/v1/chat/completions", {**chat_body(), "model": "nope"})
        await stack.post("/v1/completions", {"model": MODEL, "prompt": [1] * 20_000})
        await stack.chat(max_tokens=0)
        await left_while_uploading(stack)
        await stack.c.set_faults(Faults((FaultRule(kind=FaultKind.SILENT),)))
        holder = asyncio.create_task(stack.chat())
        await until(lambda: any(b"Hello" in entry.body for entry in stack.entries("c")[-1:]))
        await until(lambda: stack.runtime.state.in_flight == 1)
        await stack.chat()
        holder.cancel()
        await asyncio.wait({holder})
        await until(lambda: stack.runtime.state.in_flight == 0)
        await stack.c.set_faults(Faults((FaultRule(kind=FaultKind.ERROR_500, requests=1),)))
        await stack.chat(max_tokens=2)
        await stack.c.set_faults(Faults((FaultRule(kind=FaultKind.CUT, value=2, requests=1),)))
        await stack.chat(max_tokens=50, stream=True)
        await stack.c.set_faults(Faults())
        await until(lambda: stack.runtime.state.in_flight == 0)
        after = await stack.metrics()

        outcomes = {
            outcome: count - before.by("router_requests_total", "outcome").get(outcome, 0)
            for outcome, count in after.by("router_requests_total", "outcome").items()
        }
        assert outcomes == {
            Outcome.REFUSED_UNAUTHENTICATED: 1,
            Outcome.COMPLETED: 2,
            Outcome.REFUSED_INVALID: 1,
            Outcome.REFUSED_NOT_FOUND: 1,
            Outcome.REFUSED_TOO_LONG: 1,
            Outcome.CLIENT_ERROR: 1,
            Outcome.CLIENT_LEFT_UPLOAD: 1,
            Outcome.CLIENT_LEFT_PREFILL: 1,
            Outcome.REFUSED_CHAT_FULL: 1,
            Outcome.ENGINE_ERROR: 1,
            Outcome.ENGINE_LOST_STREAMING: 1,
        }
        assert after.value("router_arrivals_total") - before.value("router_arrivals_total") == sum(outcomes.values())
        assert after.value("router_requests_total", outcome="internal_error") == 0


async def left_while_uploading(stack: Stack) -> None:
    whole = request(
        "/v1/chat/completions", json.dumps(chat_body()).encode(), headers=["authorization: Bearer team-key"]
    )
    async with Wire(stack.port) as wire:
        await wire.send(whole[:-10])
        await until(lambda: stack.runtime.state.in_flight == 1)
    await until(lambda: stack.runtime.state.in_flight == 0)


async def test_a_client_that_leaves_amid_a_stream_ends_it_at_the_engine_and_is_counted_so(
    raw: tuple[Stack, ScriptedEngine],
) -> None:
    stack, engine = raw
    closed = asyncio.Event()

    async def endless(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD + piece(chunk("a")))
        await connection.closed()
        closed.set()

    engine.answering = endless
    before = await stack.metrics()
    for how in ("close", "reset"):
        closed.clear()
        async with Wire(stack.port) as wire:
            await wire.send(request("/v1/chat/completions", json.dumps(chat_body(stream=True)).encode()))
            await wire.head()
            await wire.reader.readuntil(chunk("a"))
            if how == "reset":
                wire.reset()
        await closed.wait()
    await until(lambda: stack.runtime.state.in_flight == 0)
    after = await stack.metrics()

    name = "router_requests_total"
    left = after.value(name, outcome="client_left_streaming") - before.value(name, outcome="client_left_streaming")
    assert left == 2


async def test_a_client_that_leaves_while_back_in_line_after_a_refusal_left_waiting() -> None:
    async with fresh() as stack:
        await stack.long.set_faults(Faults((FaultRule(kind=FaultKind.REJECT_503, requests=1_000),)))
        call = asyncio.create_task(
            stack.post("/v1/completions", {"model": MODEL, "prompt": [1] * 2_000, "max_tokens": 8})
        )
        line = next(iter(stack.runtime.state.models)).flow.line
        assert line is not None
        await until(lambda: len(stack.entries("l")) >= 1 and len(line._waiters) == 1)
        call.cancel()
        await asyncio.wait({call})
        await until(lambda: stack.runtime.state.in_flight == 0)
        await stack.long.set_faults(Faults())
        after = await stack.metrics()

    assert after.value("router_requests_total", outcome="client_left_waiting") == 1
    assert after.value("router_requests_total", outcome="client_left_prefill") == 0


async def test_a_client_that_reads_nothing_any_more_is_given_up_and_its_engine_is_told(
    raw: tuple[Stack, ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InboundProtocol, "reader_stall_s", 0.1)
    stack, engine = raw
    closed = asyncio.Event()

    async def torrent(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        try:
            while True:
                await connection.send(piece(chunk("a" * 60_000)))
        except ConnectionError:
            closed.set()

    engine.answering = torrent
    before = await stack.metrics()
    async with Wire(stack.port) as wire:
        await wire.send(request("/v1/chat/completions", json.dumps(chat_body(stream=True)).encode()))
        await wire.head()
        await closed.wait()
        await until(lambda: stack.runtime.state.in_flight == 0)
        after = await stack.metrics()

        left = {"outcome": "client_left_streaming"}
        assert after.value("router_requests_total", **left) - before.value("router_requests_total", **left) == 1


async def test_the_connection_of_a_client_that_reads_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InboundProtocol, "reader_stall_s", 0.1)
    monkeypatch.setattr("router.cli.listening._READER_STALL_MS", 300)

    async def torrent(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD + piece(chunk("a" * 60_000)) * 200)

    engine = ScriptedEngine(torrent)
    async with fresh(c=engine) as stack, Wire(stack.port) as wire:
        await wire.send(request("/v1/chat/completions", json.dumps(chat_body(stream=True)).encode()))
        await wire.head()
        clients_port = wire.writer.get_extra_info("sockname")[1]
        await until(lambda: not has_connection(stack.port, clients_port))
        engine.answering = says()


def has_connection(local_port: int, remote_port: int) -> bool:
    """Whether this machine still holds the near end of a TCP connection."""
    ends = f":{local_port:04X}", f":{remote_port:04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any((row[1].endswith(ends[0]), row[2].endswith(ends[1])) == (True, True) for row in rows)


async def test_a_thousand_new_models_users_ids_paths_and_keys_make_no_new_series() -> None:
    engine = ScriptedEngine(says())
    async with fresh(c=engine, keys=KEYS) as stack:
        await provoke(stack, 0)
        before = await stack.metrics()
        for number in range(1, 250):
            await provoke(stack, number)
        after = await stack.metrics()

        # A prompt may come to be counted in another way once something was learned.
        assert len(after.samples) - len(before.samples) <= 5
        assert len(after.text) - len(before.text) < 2_000
        for marker in ("made-up", "team-key", "127.0.0.1", "http://"):
            assert marker not in after.text
        assert after.by("router_requests_total", "model").keys() == {"llama", "unknown", "none"}


async def provoke(stack: Stack, number: int) -> None:
    """Four requests in which everything a client can name is new."""
    name = f"made-up-{number}"
    ids = {"x-request-id": name, "x-team": name}
    fields: dict[str, Any] = {"user": name, "metadata": {name: name}, "session_id": name}
    await stack.chat(headers=ids, **fields)
    await stack.post("/v1/chat/completions", {**chat_body(**fields), "model": name}, headers=ids)
    await stack.get(f"/v1/{name}", headers=ids)
    await stack.chat(headers={**ids, "authorization": f"Bearer {name}"})
