"""A request is worked on once: sent again only where no engine can have begun it, or where the operator allows it."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from tests.cases.house import CaseEngine, house_of
from tests.cases.sockets import sockets
from tests.http.scripted import COMPLETION, DONE, chunk, says
from tests.http.setting import LONG_TOKENS, chat_body, outside_sim
from tests.http.stack import until
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, answer, piece

Play = Callable[[SeenRequest, Connection], Awaitable[None]]


class Pair:
    """Two engines of one pool. The first call, wherever it goes, is played by `first`, all others are answered."""

    def __init__(self, first: Play) -> None:
        self.engines = {"c": CaseEngine(self._answer), "d": CaseEngine(self._answer)}
        self.generated = 0
        self._first: Play | None = first

    async def _answer(self, request: SeenRequest, connection: Connection) -> None:
        first, self._first = self._first, None
        if first is not None:
            await first(request, connection)
            return
        self.generated += 1
        if json.loads(request.body).get("stream"):
            await connection.send(STREAM_HEAD + piece(chunk("yes")) + piece(DONE) + piece(b""))
        else:
            await connection.send(answer(COMPLETION))

    @property
    def calls(self) -> int:
        return sum(len(engine.calls) for engine in self.engines.values())


async def no_answer(_: SeenRequest, connection: Connection) -> None:
    connection.reset()


async def half_a_head(_: SeenRequest, connection: Connection) -> None:
    await connection.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
    connection.writer.close()


async def error_after_work(_: SeenRequest, connection: Connection) -> None:
    await connection.send(answer(b'{"error":{"message":"boom","code":500}}', status=500))


async def one_chunk(_: SeenRequest, connection: Connection) -> None:
    await connection.send(STREAM_HEAD + piece(chunk("one")))
    await asyncio.sleep(0.02)
    connection.reset()


async def full(_: SeenRequest, connection: Connection) -> None:
    headers = "content-type: application/json\r\nretry-after: 5\r\n"
    await connection.send(answer(b'{"error":{"message":"full"}}', status=503, headers=headers))


async def full_as_first_event(_: SeenRequest, connection: Connection) -> None:
    await connection.send(STREAM_HEAD + piece(b'data: {"error":{"message":"full","code":503}}\n\n') + piece(DONE))
    await connection.send(piece(b""))


async def aborted_at_once(_: SeenRequest, connection: Connection) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'
    await connection.send(STREAM_HEAD + piece(event) + piece(DONE) + piece(b""))


STARTED = {"no answer": no_answer, "half a head": half_a_head, "an error after work": error_after_work}
NOT_STARTED = {"full": full, "full as first event": full_as_first_event, "aborted at once": aborted_at_once}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("how", STARTED)
async def test_what_may_have_started_is_told_to_the_client_and_sent_to_nobody_else(how: str, stream: bool) -> None:
    pair = Pair(STARTED[how])
    async with house_of(chat=pair.engines, relay=outside_sim()) as house:
        answered = await house.chat(stream=stream)
        page = await house.metrics()

        assert answered.status_code == 502
        assert (pair.calls, pair.generated) == (1, 0)
        assert house.entries("x") == []
        assert page.value("router_attempts_total") == 1


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("how", STARTED)
async def test_where_the_operator_allows_it_what_may_have_started_is_sent_again_once(how: str, stream: bool) -> None:
    pair = Pair(STARTED[how])
    async with house_of(chat=pair.engines, model={"retry_started": True}) as house:
        answered = await house.chat(stream=stream)
        page = await house.metrics()

        assert (answered.status_code, b"error" in answered.content) == (200, False)
        assert (pair.calls, pair.generated) == (2, 1)
        assert page.value("router_attempts_total") == 2


@pytest.mark.parametrize("how", NOT_STARTED)
async def test_what_cannot_have_started_is_answered_by_another_engine_without_the_client_seeing_it(how: str) -> None:
    pair = Pair(NOT_STARTED[how])
    async with house_of(chat=pair.engines) as house:
        answered = await house.chat(stream=True)
        page = await house.metrics()

        assert (answered.status_code, answered.content) == (200, chunk("yes") + DONE)
        assert (pair.calls, pair.generated) == (2, 1)
        assert page.value("router_attempts_total", result="answered") == 1
        assert page.value("router_attempts_total") == 2
        assert page.value("router_requests_total", outcome="completed") == 1


@pytest.mark.parametrize("allowed", [False, True])
async def test_after_the_first_chunk_nothing_is_ever_sent_again(allowed: bool) -> None:
    pair = Pair(one_chunk)
    async with house_of(chat=pair.engines, relay=outside_sim(), model={"retry_started": allowed}) as house:
        answered = await house.chat(stream=True)

        assert answered.content.startswith(chunk("one"))
        assert answered.content.count(b'"error"') == 1
        assert (pair.calls, pair.generated) == (1, 0)
        assert house.entries("x") == []


async def test_an_engine_that_closes_its_kept_connections_costs_no_request() -> None:
    """Each answer promises a kept connection and is followed by its end."""
    pair = Pair(says())
    for engine in pair.engines.values():
        engine.keeps = False
    async with house_of(chat=pair.engines) as house:
        answers = []
        for number in range(30):
            answers.append(await house.chat(str(number)))
            # Its end is noticed before the connection is used again.
            await until(lambda: not any(sockets(engine.call_ports) for engine in pair.engines.values()))

        assert {answered.status_code for answered in answers} == {200}
        assert pair.calls == 30


async def test_an_engine_that_is_gone_costs_no_request_while_another_serves() -> None:
    pair = Pair(says())
    async with house_of(chat=pair.engines) as house:
        await pair.engines["d"].stop()
        answers = [await house.chat(str(number)) for number in range(12)]
        await until(lambda: not house.serves("d"))
        await pair.engines["d"].start()
        await until(lambda: house.serves("d"))

        assert {answered.status_code for answered in answers} == {200}
        assert len(pair.engines["d"].calls) == 0
        assert len(pair.engines["c"].calls) == 12


# -- the client's own mistakes ---------------------------------------------------------------------------------------

TOO_LONG = (
    b'{"error":{"message":"maximum context length is 4096 tokens, you asked for 6000","type":"BadRequestError",'
    b'"param":null,"code":400}}'
)
NOT_JSON = [
    {"role": "user", "content": "Call it."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{not json"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "?"},
]


@pytest.mark.parametrize(("how", "stream"), [("status", False), ("status", True), ("first event", True)])
async def test_a_clients_mistake_that_an_engine_tells_is_passed_on_and_nobody_else_is_asked(
    how: str, stream: bool
) -> None:
    async def refuses(_: SeenRequest, connection: Connection) -> None:
        if how == "status":
            await connection.send(answer(TOO_LONG, status=400))
        else:
            await connection.send(STREAM_HEAD + piece(b"data: " + TOO_LONG + b"\n\n") + piece(DONE) + piece(b""))

    engines = {"c": CaseEngine(refuses), "d": CaseEngine(refuses)}
    async with house_of(chat=engines, relay=outside_sim(), model={"retry_started": True}) as house:
        await house.engines["l"].stop()
        await until(lambda: not house.serves("l"))
        answers = [
            await house.post("/v1/chat/completions", {**chat_body(stream=stream), "messages": NOT_JSON})
            for _ in range(6)
        ]
        page = await house.metrics()
        for engine in engines.values():
            engine.answering = says()
        await house.engines["l"].start()

        assert {answered.status_code for answered in answers} == {400}
        assert {answered.json()["error"]["message"] for answered in answers} == {
            json.loads(TOO_LONG)["error"]["message"]
        }
        assert sum(len(engine.calls) for engine in engines.values()) == 6
        assert house.entries("x") == []
        assert house.serves("c", "d")
        assert page.value("router_requests_total", outcome="client_error") == 6


async def test_a_prompt_too_long_for_chat_is_not_squeezed_in_there_while_the_long_pool_is_away() -> None:
    body = {"model": "llama", "prompt": [1] * 3_000, "max_tokens": 2_000}
    async with house_of() as house:
        await house.engines["l"].stop()
        await until(lambda: not house.serves("l"))
        away = await house.post("/v1/completions", body)
        never = await house.post("/v1/completions", {**body, "prompt": [1] * 20_000})
        await house.engines["l"].start()
        await until(lambda: house.serves("l"))
        back = await house.post("/v1/completions", body)

        assert (away.status_code, away.json()["error"]["code"]) == (503, "no_engine_available")
        assert (never.status_code, never.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert all(number in never.json()["error"]["message"] for number in (str(LONG_TOKENS), "22000"))
        assert (back.status_code, back.headers["x-router-engine"]) == (200, "l")
        assert house.engines["c"].calls == []
