"""Long prefills and pauses are waited for, and silence beyond its limit ends in words. Seconds stand for minutes."""

import asyncio
import json
from pathlib import Path

import pytest

from router.config.load import load
from tests.cases.house import CaseEngine, house_of
from tests.http.process import router_process
from tests.http.scripted import COMPLETION, DONE, chunk, says
from tests.http.setting import MODEL, chat_body, model_config, write_config
from tests.upstream.fakes import STREAM_HEAD, Connection, RawServer, SeenRequest, answer, piece

LONG_PROMPT = {"model": MODEL, "prompt": [1] * 3_000, "max_tokens": 4}
#: In the place of 90 s before the first byte and 60 s between two: longer than the chat pool would wait here.
PREFILL_S, GAP_S = 0.4, 0.3
LIMITS = {"first_byte_s": 2.0, "idle_s": 1.0}


async def patient(seen: SeenRequest, connection: Connection) -> None:
    """A long prefill, and in a stream a long pause after its first token."""
    if not json.loads(seen.body).get("stream"):
        await asyncio.sleep(PREFILL_S)
        await connection.send(answer(COMPLETION))
        return
    await connection.send(STREAM_HEAD)
    await asyncio.sleep(PREFILL_S)
    await connection.send(piece(chunk("a")))
    await asyncio.sleep(GAP_S)
    await connection.send(piece(chunk("b") + DONE) + piece(b""))


def test_by_default_a_long_prompt_may_take_an_hour_to_its_first_byte_and_each_limit_is_its_own(tmp_path: Path) -> None:
    config = load(
        write_config(tmp_path, {"c": "http://127.0.0.1:1", "l": "http://127.0.0.1:2"}), environ={}, overrides=None
    )

    (model,) = config.models.values()
    assert model.batch is not None
    assert model.chat is not None
    assert model.batch.timeouts.first_byte_s >= 600
    assert model.chat.timeouts.first_byte_s >= 60
    assert min(model.batch.timeouts.idle_s, model.chat.timeouts.idle_s) > 60
    assert max(model.batch.timeouts.connect_s, model.chat.timeouts.connect_s) <= 10


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("commit_after_s", [0.05, 30.0], ids=["headers early", "headers late"])
async def test_a_long_prefill_and_a_long_pause_are_delivered(stream: bool, commit_after_s: float) -> None:
    impatient = {"timeouts": {"first_byte_s": 0.1, "idle_s": 0.1}}
    settings = {"timeouts": LIMITS}
    async with house_of(
        batch={"l": CaseEngine(patient)},
        batch_settings=settings,
        chat_settings=impatient,
        model={"commit_after_s": commit_after_s},
    ) as house:
        answered = await house.post("/v1/completions", {**LONG_PROMPT, "stream": stream})

        assert answered.status_code == 200
        assert answered.content == (chunk("a") + chunk("b") + DONE if stream else COMPLETION)
        assert len(house.engines["l"].calls) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("said", [b"", STREAM_HEAD], ids=["nothing", "headers"])
async def test_silence_before_the_first_byte_is_a_504_at_its_limit(said: bytes, stream: bool) -> None:
    engine = CaseEngine()

    async def never(_: SeenRequest, connection: Connection) -> None:
        await connection.send(said)
        await engine.until_taken_back(connection)

    settings = {"timeouts": {"first_byte_s": 0.2}, "default_output_tokens": 1}
    async with house_of(batch={"l": engine}, batch_settings=settings) as house:
        engine.answering = never
        answered = await house.post("/v1/completions", {**LONG_PROMPT, "max_tokens": 1, "stream": stream})
        engine.answering = says()

        assert (answered.status_code, answered.json()["error"]["code"]) == (504, "engine_timeout")
        assert set(answered.json()["error"]) == {"message", "type", "param", "code"}
        assert (len(engine.calls), engine.taken_back) == (1, 1)


async def test_the_log_says_of_every_end_what_it_was_and_whose(tmp_path: Path) -> None:
    async def ends(seen: SeenRequest, connection: Connection) -> None:
        how = json.loads(seen.body)["messages"][0]["content"]
        if "amid" in how:
            await connection.send(STREAM_HEAD + piece(chunk("a")))
            await asyncio.sleep(0.02)
        if "reset" in how:
            connection.reset()
        await connection.closed()

    engine = CaseEngine(ends)
    timeouts = {"timeouts": {"first_byte_s": 0.2, "idle_s": 0.2}}
    async with RawServer(engine.play) as c, RawServer(engine.play) as long:
        models = [model_config(borrow=False, chat=timeouts)]
        config = write_config(tmp_path, {"c": c.url, "l": long.url}, models=models)
        async with router_process(config) as router:
            for how in ENDS:
                await router.client.post("/v1/chat/completions", json=chat_body(how, stream=True, max_tokens=1))
            while (output := router.output).count('"router.request"') < len(ENDS):
                await asyncio.sleep(0.01)

    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    told = [line for line in lines if line["logger"] == "router.request"]
    assert [(line["outcome"], line["error_code"]) for line in told] == list(ENDS.values())
    assert {line["engine"] for line in told} == {"c"}
    assert "Traceback" not in output


#: How a call ends, and what its line in the log says. Tokens come between the failures, so the engine stays.
ENDS = {
    "silence amid": ("engine_timeout_streaming", "engine_timeout"),
    "silence": ("engine_timeout", "engine_timeout"),
    "reset amid": ("engine_lost_streaming", "engine_lost"),
    "reset": ("engine_lost", "engine_lost"),
}
