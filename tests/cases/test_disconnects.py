"""Clients that leave: the engine hears of it every time, in whatever phase, and whoever was not sent is never run."""

import asyncio
import json
from typing import Any

import pytest

from tests.cases.house import CaseEngine, House, house_of, leave, sent
from tests.http.scripted import chunk, says
from tests.http.setting import MODEL, chat_body
from tests.http.stack import until
from tests.http.wire import request
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, answer, piece

CHAT = "/v1/chat/completions"
STREAM = request(CHAT, json.dumps(chat_body(stream=True, max_tokens=500)).encode())
PLAIN = request(CHAT, json.dumps(chat_body(max_tokens=500)).encode())
BATCH = request("/v1/completions", json.dumps({"model": MODEL, "prompt": [1] * 3_000, "max_tokens": 8}).encode())
ENDINGS = ("close", "reset")


async def test_of_a_hundred_clients_that_read_three_chunks_and_leave_each_ends_its_call_at_the_engine(
    house: House,
) -> None:
    engine = house.engines["c"]

    async def endless(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD + piece(chunk("a")) + piece(chunk("b")) + piece(chunk("c")))
        await engine.until_taken_back(connection)

    async def client(number: int) -> None:
        wire = await sent(house, STREAM)
        await wire.reader.readuntil(chunk("c"))
        await leave(wire, ENDINGS[number % 2])

    async def crowd() -> None:
        for first in range(0, 100, 10):
            await asyncio.gather(*(client(number) for number in range(first, first + 10)))
        await until(lambda: engine.taken_back == 100)

    engine.answering = endless
    outcomes = await house.outcomes_of(crowd)

    assert outcomes == {"client_left_streaming": 100}
    assert (len(engine.calls), engine.in_hand) == (100, 0)


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])
@pytest.mark.parametrize("said", [b"", STREAM_HEAD, STREAM_HEAD + piece(b": wait\n\n")], ids=["nothing", "head", "one"])
async def test_a_client_that_leaves_during_a_silent_prefill_ends_it_at_the_engine(
    house: House, said: bytes, body: bytes, how: str
) -> None:
    engine = house.engines["c"]

    async def prefill(_: SeenRequest, connection: Connection) -> None:
        await connection.send(said)
        await engine.until_taken_back(connection)

    async def client() -> None:
        wire = await sent(house, body)
        await until(lambda: engine.in_hand == 1)
        await leave(wire, how)
        await until(lambda: engine.taken_back == 1)

    engine.answering = prefill
    outcomes = await house.outcomes_of(client)

    assert outcomes == {"client_left_prefill": 1}


@pytest.mark.parametrize("how", ENDINGS)
async def test_a_client_that_leaves_during_a_long_plain_answer_ends_it_at_the_engine(house: House, how: str) -> None:
    engine = house.engines["c"]

    async def large(_: SeenRequest, connection: Connection) -> None:
        await connection.send(answer(b"x" * 8_000_000)[:4_000_000])
        await engine.until_taken_back(connection)

    async def client() -> None:
        wire = await sent(house, PLAIN)
        await wire.reader.readexactly(1_000)
        await leave(wire, how)
        await until(lambda: engine.taken_back == 1)

    engine.answering = large
    outcomes = await house.outcomes_of(client)

    assert outcomes == {"client_left_streaming": 1}


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize(
    ("body", "name"), [(STREAM, "c"), (PLAIN, "c"), (BATCH, "l")], ids=["stream", "plain", "batch"]
)
async def test_who_leaves_while_waiting_for_a_place_is_never_sent_and_the_next_one_is(
    body: bytes, name: str, how: str
) -> None:
    may_end = asyncio.Event()

    async def held(_: SeenRequest, connection: Connection) -> None:
        await may_end.wait()
        await says()(_, connection)

    one: dict[str, Any] = {"max_num_seqs": 1}
    async with house_of(chat_settings=one | {"ttft_target_s": 100.0}, batch_settings=one) as house:
        engine = house.engines[name]
        engine.answering = held
        holder = await sent(house, body)
        await until(lambda: engine.in_hand == 1)
        wires = []
        for waiting in (2, 3):
            wires.append(await sent(house, body))
            await until(lambda waiting=waiting: house.runtime.state.in_flight == waiting)  # type: ignore[misc]  # bound

        await leave(wires[0], how)
        await until(lambda: house.runtime.state.in_flight == 2)
        may_end.set()
        statuses = [(await wire.answer())[0] for wire in (holder, wires[1])]
        for wire in (holder, wires[1]):
            await leave(wire, "close")
        page = await house.metrics()

        assert statuses == [200, 200]
        assert len(engine.calls) == 2
        assert page.value("router_requests_total", outcome="client_left_waiting") == 1


async def test_clients_that_end_badly_in_every_way_give_all_places_back() -> None:
    """Four places and twenty calls: a quarter each ends in a 500, in silence, in a reset, and with its client gone."""
    engine = CaseEngine()

    async def ending(seen: SeenRequest, connection: Connection) -> None:
        how = json.loads(seen.body)["messages"][0]["content"]
        if how == "error":
            await connection.send(answer(b'{"error":{"message":"boom"}}', status=500))
        elif how == "silence":
            await engine.until_taken_back(connection)
        else:
            await connection.send(STREAM_HEAD + piece(chunk("a")))
            if how == "reset":
                connection.reset()
            else:
                await engine.until_taken_back(connection)

    async def client(how: str) -> None:
        wire = await sent(house, request(CHAT, json.dumps(chat_body(how, stream=True, max_tokens=5)).encode()))
        if how == "left":
            await wire.reader.readuntil(chunk("a"))
        else:
            await wire.answer()
        await leave(wire, "close")

    async def all_of_them() -> None:
        for _ in range(5):
            await until(lambda: house.serves("c"))
            await asyncio.gather(*(client(how) for how in ("error", "silence", "reset", "left")))

    settings = {"max_num_seqs": 4, "timeouts": {"first_byte_s": 0.25}, "ttft_target_s": 100.0}
    async with house_of(chat={"c": engine}, chat_settings=settings) as house:
        engine.answering = ending
        outcomes = await house.outcomes_of(all_of_them)
        await until(lambda: house.serves("c"))
        may_end = asyncio.Event()

        async def held(_: SeenRequest, connection: Connection) -> None:
            await may_end.wait()
            await connection.send(answer(b"{}"))

        engine.answering = held
        fresh = [asyncio.create_task(house.chat(max_tokens=5)) for _ in range(4)]
        await until(lambda: engine.in_hand == 4)
        may_end.set()
        answers = await asyncio.gather(*fresh)
        engine.answering = says()

        assert outcomes == {
            "engine_error": 5,
            "engine_timeout": 5,
            "engine_lost_streaming": 5,
            "client_left_streaming": 5,
        }
        assert {each.status_code for each in answers} == {200}
