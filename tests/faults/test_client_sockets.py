"""The client's connection ends after the Nth byte of its request or of its answer, for N = 1, 2, 3 ... in steps, with
a FIN and with a RST: whoever has the call in hand lets it go, and nothing is left behind."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.house import House, house_of, leave, sent
from tests.faults.faulty import FaultyEngine, check, run
from tests.http.setting import MODEL, chat_body
from tests.http.stack import until
from tests.http.wire import request

ENDINGS = ("close", "reset")
CALLS: dict[str, bytes] = {
    "chat": request("/v1/chat/completions", json.dumps(chat_body(max_tokens=2)).encode()),
    "chat stream": request("/v1/chat/completions", json.dumps(chat_body(max_tokens=2, stream=True)).encode()),
    "batch": request("/v1/completions", json.dumps({"model": MODEL, "prompt": [1] * 1_500, "max_tokens": 2}).encode()),
}
LIMITS = {"max_num_seqs": 4}


def pools_of(call: str) -> dict[str, Any]:
    engine = {"c": FaultyEngine(keeps=True, read_bytes=4_096)}
    limits = {"chat_settings": LIMITS, "batch_settings": LIMITS}
    return limits | ({"chat": engine, "batch": {}} if "chat" in call else {"chat": {}, "batch": engine})


def steps(length: int, runs: int) -> Iterator[int]:
    """0, the whole, what is one byte short of it, and about so many places between."""
    yield from sorted({*range(0, length, max(1, length // runs)), length - 1, length})


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("call", CALLS)
def test_a_client_that_goes_at_any_byte_of_its_request_leaves_nothing_behind(call: str, how: str) -> None:
    async def test() -> None:
        async with house_of(**pools_of(call)) as house:
            for at in steps(len(CALLS[call]), 25):
                wire = await sent(house, CALLS[call][:at])
                await leave(wire, how)
                await check(house)

    run(test)


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("call", CALLS)
def test_a_client_that_goes_once_any_part_of_its_request_was_read_leaves_nothing_behind(call: str, how: str) -> None:
    async def test() -> None:
        async with house_of(**pools_of(call)) as house:
            head = CALLS[call].index(b"\r\n\r\n") + 4
            for at in steps(len(CALLS[call]) - head - 1, 10):
                wire = await sent(house, CALLS[call][: head + at])
                await until(lambda: house.runtime.state.in_flight == 1)
                await leave(wire, how)
                await until(lambda: house.runtime.state.in_flight == 0)
                await check(house)
            page = await house.metrics()

            left = page.value("router_requests_total", outcome="client_left_upload")
            assert left == len(list(steps(len(CALLS[call]) - head - 1, 10)))

    run(test)


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("call", CALLS)
def test_a_client_that_goes_at_any_byte_of_its_answer_leaves_nothing_behind(call: str, how: str) -> None:
    async def test() -> None:
        async with house_of(**pools_of(call)) as house:
            length = await length_of_answer(house, CALLS[call])
            for at in steps(length, 25):
                wire = await sent(house, CALLS[call])
                await wire.reader.readexactly(at)
                await leave(wire, how)
                await check(house)

    run(test)


async def length_of_answer(house: House, call: bytes) -> int:
    wire = await sent(house, call)
    _, headers = await wire.head()
    if "content-length" in headers:
        rest = await wire.reader.readexactly(int(headers["content-length"]))
    else:
        rest = await wire.reader.readuntil(b"\r\n0\r\n\r\n")
    await leave(wire, "close")
    # About as long: ids and times of the headers vary, and a shorter answer than asked for would be waited for.
    return len(rest) + 200


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("call", ["chat stream", "batch"])
def test_a_client_that_goes_in_any_tick_of_its_call_leaves_nothing_behind(call: str, how: str) -> None:
    """Ticks of the loop from the last byte of the request on, until an answer is whole before its client goes."""

    async def test() -> None:
        async with house_of(**pools_of(call)) as house:
            engine = house.engines["c"]
            assert isinstance(engine, FaultyEngine)
            for ticks in range(0, 600, 3):
                before = engine.answered
                wire = await sent(house, CALLS[call])
                for _ in range(ticks):
                    await asyncio.sleep(0)
                is_whole = engine.answered > before
                await leave(wire, how)
                await check(house)
                if is_whole:
                    break
            assert ticks > 5

    run(test)


@pytest.mark.parametrize("how", ENDINGS)
def test_clients_in_line_that_go_one_after_the_other_leave_no_ticket_and_the_last_is_served(how: str) -> None:
    async def test() -> None:
        engine = FaultyEngine(keeps=True)
        engine.may_answer.clear()
        async with house_of(chat={}, batch={"c": engine}, batch_settings={"max_num_seqs": 1}) as house:
            wires = []
            for number in range(8):
                wires.append(await sent(house, CALLS["batch"]))
                await until(lambda number=number: house.runtime.state.in_flight == number + 1)  # type: ignore[misc]  # bound
            for wire in wires[1:-1]:
                await leave(wire, how)
            await until(lambda: house.runtime.state.in_flight == 2)
            engine.may_answer.set()
            statuses = [(await wire.answer())[0] for wire in (wires[0], wires[-1])]
            for wire in (wires[0], wires[-1]):
                await leave(wire, "close")
            await check(house)

            assert statuses == [200, 200]

    run(test)
