"""Engines that accept and do not answer, that are slow to say that they are well, that drain, sleep, or come back:
those in trouble are left, those that work are not, and only a real token brings one back."""

import asyncio
import json
from typing import Any

import pytest

from router.upstream.engine import Engine
from tests.cases.house import CaseEngine, House, house_of
from tests.http.scripted import DONE, chunk, streams
from tests.http.stack import until
from tests.upstream.fakes import Connection, SeenRequest, answer

QUICK = {"timeouts": {"first_byte_s": 0.3, "idle_s": 5.0}}
ANSWER = streams(chunk("a"), DONE)


async def silent(_: SeenRequest, connection: Connection) -> None:
    await connection.closed()


async def crowd(house: House, calls: int, at_once: int) -> list[Any]:
    """So many streamed chats, some at a time; their answers."""
    answers: list[Any] = []
    for first in range(0, calls, at_once):
        numbers = range(first, first + at_once)
        answers += await asyncio.gather(*(house.chat(f"chat {n}", stream=True, max_tokens=4) for n in numbers))
    return answers


@pytest.mark.parametrize("health", ["answers", "mute"])
async def test_an_engine_that_accepts_and_never_answers_costs_a_few_requests_and_no_other_engine_anything(
    health: str,
) -> None:
    engines = {"c": CaseEngine(ANSWER), "d": CaseEngine(ANSWER)}
    async with house_of(chat=engines, chat_settings=QUICK) as house:
        hung = engines["c"]
        hung.answering = silent
        hung.healthy.completion_status = 500
        hung.is_mute = health == "mute"
        answers = await crowd(house, 60, at_once=6)
        left_at = len(hung.calls)
        later = await crowd(house, 20, at_once=5)
        seen_while_away = len(hung.calls)
        hung.answering, hung.is_mute, hung.healthy.completion_status = ANSWER, False, 200
        await until(lambda: house.serves("c"))
        again = await crowd(house, 20, at_once=5)

        late = [each for each in answers if each.status_code != 200]
        assert {(each.status_code, each.json()["error"]["code"]) for each in late} == {(504, "engine_timeout")}
        # Three in a row, and those that were with it meanwhile.
        assert 3 <= len(late) <= 9
        assert {each.headers["x-router-engine"] for each in answers if each.status_code == 200} == {"d"}
        assert {each.status_code for each in (*later, *again)} == {200}
        assert seen_while_away == left_at
        assert len(hung.calls) > left_at or health == "mute"
        assert {each.headers["x-router-engine"] for each in again} == {"c", "d"}


async def test_an_engine_that_stops_amid_its_streams_is_left_and_taken_back_once_it_gives_a_token() -> None:
    """As on SIGTERM: sockets stay open, no more tokens come, the health page is green."""
    engines = {"c": CaseEngine(ANSWER), "d": CaseEngine(ANSWER)}

    async def stops(request: SeenRequest, connection: Connection) -> None:
        await connection.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await connection.closed()

    async with house_of(chat=engines, chat_settings=QUICK) as house:
        hung = engines["c"]
        hung.answering = stops
        hung.healthy.completion_status = 500
        answers = await crowd(house, 60, at_once=6)
        state = house.engine("c").status.state
        later = await crowd(house, 12, at_once=6)
        hung.answering, hung.healthy.completion_status = ANSWER, 200
        await until(lambda: house.serves("c"))

        assert {each.status_code for each in answers} == {200, 504}
        assert state.value == "down"
        assert {each.headers["x-router-engine"] for each in later} == {"d"}


@pytest.mark.parametrize("names", ["c", "cd"], ids=["the only engine", "two that alternate"])
async def test_slow_health_pages_take_no_working_engine_out(names: str) -> None:
    engines = {name: CaseEngine(ANSWER) for name in names}
    left: list[str] = []

    def watch(engine: Engine) -> None:
        if not engine.status.can_serve:
            left.append(engine.name)

    async with house_of(chat=dict(engines), batch={}) as house:
        for name in names:
            house.engine(name).watch(watch)
        answers = []
        for turn in range(6):
            slow = [engine for number, engine in enumerate(engines.values()) if len(names) == 1 or turn % 2 == number]
            gate = asyncio.Event()
            for engine in slow:
                engine.healthy.health_gate = gate
            goals = [engine.healthy.asked("/health") + 2 for engine in slow]
            while any(engine.healthy.asked("/health") < goal for engine, goal in zip(slow, goals, strict=True)):
                answers.append(await house.chat(stream=True, max_tokens=2))
            for engine in slow:
                engine.healthy.health_gate = None
            gate.set()

        assert left == []
        assert {each.status_code for each in answers} == {200}


async def test_an_engine_that_refuses_connections_is_left_at_once_and_nobody_notices() -> None:
    engines = {"c": CaseEngine(ANSWER), "d": CaseEngine(ANSWER)}
    async with house_of(chat=engines) as house:
        await crowd(house, 6, at_once=3)
        await engines["c"].stop()
        answers = await crowd(house, 30, at_once=3)
        is_down = not house.serves("c")
        await engines["c"].start()
        await until(lambda: house.serves("c"))

        assert {each.status_code for each in answers} == {200}
        assert is_down


async def test_the_list_of_models_is_whole_and_at_once_with_engines_down_or_mute() -> None:
    for trouble in ("down", "mute"):
        async with house_of(chats=trouble == "mute", keys=[{"name": "team", "key": "the-secret-key"}]) as house:
            long = house.engines["l"]
            if trouble == "down":
                await long.stop()
                await until(lambda house=house: not house.serves("l"))  # type: ignore[misc]  # bound
            long.is_mute = True
            lists = await asyncio.gather(*(house.get("/v1/models") for _ in range(50)))
            cards = await asyncio.gather(*(house.get("/v1/models/small") for _ in range(50)))
            unknown = await house.get("/v1/models/nope")

            assert {each.status_code for each in (*lists, *cards)} == {200}
            assert len({each.content for each in lists}) == len({each.content for each in cards}) == 1
            ids = [card["id"] for card in lists[0].json()["data"]]
            assert ids == ["llama", "small"]
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            assert not any(text in lists[0].text for text in ("127.0.0.1", "http", "secret"))


async def test_an_engine_put_to_sleep_gets_nothing_until_it_wakes() -> None:
    engines = {"c": CaseEngine(ANSWER), "d": CaseEngine(ANSWER)}
    page = b'vllm:cache_config_info{engine="0",kv_cache_size_tokens="65536"} 1.0\n'
    asleep = page + b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
    asleep += b'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0\n'
    async with house_of(chat=engines) as house:
        engines["c"].healthy.metrics = asleep
        await until(lambda: not house.serves("c"))
        answers = await crowd(house, 12, at_once=3)
        engines["c"].healthy.metrics = page + asleep.partition(page)[2].replace(b" 0.0", b" 2").replace(
            b" 1.0", b" 0.0"
        ).replace(b" 2", b" 1.0")
        await until(lambda: house.serves("c"))

        assert {each.headers["x-router-engine"] for each in answers} == {"d"}


async def test_an_engine_that_shuts_down_answers_with_an_abort_and_another_serves() -> None:
    async def shuts_down(request: SeenRequest, connection: Connection) -> None:
        if json.loads(request.body).get("stream"):
            await streams(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n', DONE)(
                request, connection
            )
        else:
            await connection.send(answer(b'{"choices":[{"message":{"content":""},"finish_reason":"abort"}]}'))

    engines = {"c": CaseEngine(shuts_down), "d": CaseEngine(ANSWER)}
    async with house_of(chat=engines) as house:
        engines["c"].healthy.completion_status = 500
        answers = await crowd(house, 12, at_once=1)
        engines["c"].answering = ANSWER

        assert {(each.status_code, each.content) for each in answers} == {(200, chunk("a") + DONE)}
        assert len(engines["c"].calls) <= 1
        assert {each.headers["x-router-engine"] for each in answers} == {"d"}
