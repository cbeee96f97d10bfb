"""Answers that an engine keeps: continued, read and cancelled where they are."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.scripted import ScriptedEngine
from tests.http.setting import LONG_TOKENS, MODEL
from tests.http.stack import Stack, fresh, new_client, stack_of
from tests.http.stage import Stage
from tests.upstream.fakes import Connection, SeenRequest, answer

KEPT = {"c": "resp_on_c", "l": "resp_on_l"}


class Keeping(ScriptedEngine):
    """An engine that keeps one answer."""

    def __init__(self, kept: str, **options: Any) -> None:
        super().__init__(self._answer, **options)
        self._kept = kept

    async def _answer(self, request: SeenRequest, connection: Connection) -> None:
        path, method = request.path.partition("?")[0], request.line.split(" ")[0]
        if path == "/v1/responses" and method == "POST":
            asked = json.loads(request.body).get("previous_response_id")
            if asked not in (None, self._kept):
                await connection.send(answer(b'{"error":{"message":"not here","type":"x","code":404}}', status=404))
                return
            await connection.send(answer(json.dumps({"id": "resp_new", "kept": self._kept}).encode()))
        elif path == f"/v1/responses/{self._kept}" and method == "GET":
            await connection.send(answer(json.dumps({"id": self._kept}).encode()))
        elif path == f"/v1/responses/{self._kept}/cancel" and method == "POST":
            said = b'{"error":{"message":"Cannot cancel a synchronous response.","type":"x","code":400}}'
            await connection.send(answer(said, status=400))
        elif path.startswith("/v1/responses/"):
            await connection.send(answer(b'{"error":{"message":"not here","type":"x","code":404}}', status=404))
        else:
            await connection.send(answer(b'{"choices":[{"message":{"content":"x"}}]}'))


@pytest.fixture(scope="module")
def engines() -> dict[str, Keeping]:
    return {"c": Keeping(KEPT["c"]), "l": Keeping(KEPT["l"], max_model_len=LONG_TOKENS)}


@pytest.fixture(scope="module")
def keeping_stack(stage: Stage, engines: dict[str, Keeping]) -> Stack:
    return stage.start(stack_of(c=engines["c"], long=engines["l"], keys=[{"name": "k", "key": "the-key"}]))


@pytest.fixture
def keeping(stage: Stage, keeping_stack: Stack, engines: dict[str, Keeping]) -> Iterator[Stack]:
    for engine in engines.values():
        engine.calls.clear()
    yield keeping_stack
    stage.run(keeping_stack.check_at_rest())


@pytest.mark.parametrize("engine", KEPT)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_at_the_engine_that_keeps_it(keeping: Stack, engine: str, stream: bool) -> None:
    body = {"model": MODEL, "input": "And?", "previous_response_id": KEPT[engine], "stream": stream}

    told = await keeping.post("/v1/responses", body)

    assert (told.status_code, told.json()["kept"]) == (200, KEPT[engine])
    assert told.headers["x-router-engine"] == engine
    assert told.headers["x-router-reason"].startswith("pinned_to_engine")


async def test_a_conversation_that_nobody_keeps_gets_an_engines_own_refusal(keeping: Stack) -> None:
    told = await keeping.post("/v1/responses", {"model": MODEL, "input": "And?", "previous_response_id": "resp_gone"})

    assert (told.status_code, told.json()["error"]["message"]) == (404, "not here")


@pytest.mark.parametrize("engine", KEPT)
async def test_a_kept_answer_is_read_and_cancelled_where_it_is(
    keeping: Stack, engines: dict[str, Keeping], engine: str
) -> None:
    read = await keeping.get(f"/v1/responses/{KEPT[engine]}")
    cancelled = await keeping.post(f"/v1/responses/{KEPT[engine]}/cancel", b"")

    assert (read.status_code, read.json()["id"]) == (200, KEPT[engine])
    assert read.headers["x-router-engine"] == engine
    assert (cancelled.status_code, cancelled.json()["error"]["message"]) == (
        400,
        "Cannot cancel a synchronous response.",
    )
    asked = [call.path for call in engines[engine].calls]
    assert asked.count(f"/v1/responses/{KEPT[engine]}/cancel") == 1
    assert not any(call.all("authorization") for engine in engines.values() for call in engine.calls)


@pytest.mark.parametrize(
    "response_id",
    [
        "resp_gone",
        "a" * 500,
        "..",
        "%2e%2e%2fmodels",
        "x%0d%0aHost:%20evil",
        "resp%3fx=1",
        "r%00",
        "resp_模",
        "%e6%a8%a1",
    ],
)
@pytest.mark.parametrize("suffix", ["", "/cancel"])
async def test_an_id_that_nobody_keeps_or_that_is_none_is_a_404(
    keeping: Stack, engines: dict[str, Keeping], response_id: str, suffix: str
) -> None:
    method = "POST" if suffix else "GET"

    told = await keeping.client.request(method, f"/v1/responses/{response_id}{suffix}")

    assert told.status_code in (404, 405)
    assert told.json()["error"]["message"]
    asked = {call.path for engine in engines.values() for call in engine.calls}
    assert asked <= {"/v1/responses/resp_gone"}


class Large(Keeping):
    """Keeps an answer of many megabytes; `whole` is how often all of it went out."""

    def __init__(self, kept: str, size_bytes: int, **options: Any) -> None:
        super().__init__(kept, **options)
        self._size_bytes = size_bytes
        self.whole = 0

    async def _answer(self, request: SeenRequest, connection: Connection) -> None:
        if not request.line.startswith("GET"):
            await super()._answer(request, connection)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        try:
            await connection.send(head % self._size_bytes)
            for _ in range(0, self._size_bytes, 2**20):
                await connection.send(b" " * 2**20)
        except ConnectionError:
            return
        self.whole += 1


async def test_of_an_answer_that_is_only_looked_for_the_status_is_enough() -> None:
    kept = KEPT["l"]
    engine = Large(kept, 64 * 2**20, max_model_len=LONG_TOKENS)
    async with fresh(long=engine) as stack:
        cancelled = await stack.post(f"/v1/responses/{kept}/cancel", b"")
        told = await stack.post("/v1/responses", {"model": MODEL, "input": "And?", "previous_response_id": kept})

        assert (cancelled.status_code, told.status_code) == (400, 200)
        assert told.headers["x-router-engine"] == "l"
        assert engine.whole == 0


async def test_a_kept_answer_of_more_than_16_mib_is_not_fetched_and_the_reason_is_told() -> None:
    async with fresh(long=Large(KEPT["l"], 17 * 2**20, max_model_len=LONG_TOKENS)) as stack:
        told = await stack.get(f"/v1/responses/{KEPT['l']}")

        assert (told.status_code, told.json()["error"]["code"]) == (502, "engine_lost")
        assert "16 MiB" in told.json()["error"]["message"]


async def test_a_kept_answer_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.flow.reading._FETCH_S", 0.05)

    class Trickling(Keeping):
        async def _answer(self, request: SeenRequest, connection: Connection) -> None:
            await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{")
            await connection.closed()

    async with fresh(long=Trickling(KEPT["l"], max_model_len=LONG_TOKENS), chats=False) as stack:
        told = await stack.get(f"/v1/responses/{KEPT['l']}")

        assert (told.status_code, told.json()["error"]["code"]) == (502, "engine_lost")


async def test_kept_answers_ask_for_a_key(keeping: Stack) -> None:
    async with new_client(keeping.url) as client:
        read = await client.get(f"/v1/responses/{KEPT['c']}")
        cancelled = await client.post(f"/v1/responses/{KEPT['c']}/cancel")

    assert (read.status_code, cancelled.status_code) == (401, 401)


async def test_an_answer_in_the_background_is_refused_with_the_reason(keeping: Stack) -> None:
    told = await keeping.post("/v1/responses", {"model": MODEL, "input": "x", "background": True})

    error = told.json()["error"]
    assert (told.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "background")
    assert "lost with it" in error["message"]
