"""Many requests of all kinds, one after the other: nothing grows with their number."""

import asyncio
import gc
import json
import random
import tracemalloc

from tests.cases.house import CaseEngine, House, house_of, leave, sent
from tests.http.scripted import COMPLETION, DONE, chunk
from tests.http.setting import chat_body
from tests.http.stack import until
from tests.http.wire import request
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, answer, piece

ROUND = 40
#: What bounded memories (quantiles, prefixes) may still gain; one kept record of each request is several times as much.
LEFT_BYTES_A_REQUEST = 300


async def answering(seen: SeenRequest, connection: Connection) -> None:
    if b"fail" in seen.body:
        await connection.send(answer(b'{"error":{"message":"no"}}', status=500))
    elif b'"stream"' in seen.body:
        await connection.send(STREAM_HEAD + piece(chunk("a")))
        if b"leave" in seen.body:
            await connection.closed()
        await connection.send(piece(DONE) + piece(b""))
    else:
        await connection.send(answer(COMPLETION))


async def one(house: House, number: int, dice: random.Random) -> None:
    """A request that is new in everything a client can name: one in three leaves, one in twenty fails, some are
    large."""
    kind = dice.random()
    text = f"prompt {number} " + "word " * (2_000 if kind > 0.98 else dice.randrange(50))
    ids = {"x-request-id": f"id-{number}", "x-team": f"team-{number}"}
    if kind < 0.3:
        whole = request("/v1/chat/completions", body_of(f"leave {text}", stream=True))
        wire = await sent(house, whole)
        await wire.reader.readuntil(chunk("a"))
        await leave(wire, "reset" if number % 2 else "close")
    elif kind < 0.35:
        await house.chat(f"fail {text}", headers=ids, max_tokens=2)
    elif kind < 0.4:
        await house.post("/v1/chat/completions", {**chat_body(), "model": f"model-{number}"}, headers=ids)
    elif kind < 0.45:
        await house.get(f"/v1/models/model-{number}", headers=ids)
    else:
        await house.chat(text, headers=ids, user=f"user-{number}", stream=number % 2 == 0, max_tokens=2)


def body_of(text: str, **fields: object) -> bytes:
    return json.dumps(chat_body(text, max_tokens=2, **fields)).encode()


async def test_after_hundreds_of_requests_of_all_kinds_memory_tasks_and_sockets_are_what_they_were() -> None:
    dice = random.Random(3)
    engines = {name: CaseEngine(answering) for name in "cd"}
    async with house_of(chat=engines) as house:

        async def round_of(first: int) -> int:
            for number in range(first, first + ROUND, 5):
                await asyncio.gather(*(one(house, each, dice) for each in range(number, number + 5)))
                await until(lambda: house.serves("c", "d"))
            await until(lambda: house.runtime.state.in_flight == 0)
            for engine in house.engines.values():
                engine.calls.clear()
                engine.healthy.seen.clear()
            house.log.lines.clear()
            gc.collect()
            mine = tracemalloc.Filter(True, "*/router/*")
            sizes = tracemalloc.take_snapshot().filter_traces([mine]).statistics("filename")
            return sum(each.size for each in sizes)

        tracemalloc.start()
        rounds = [await round_of(number * ROUND) for number in range(4)]
        tracemalloc.stop()

        assert min(rounds[2:]) - rounds[1] < LEFT_BYTES_A_REQUEST * ROUND
