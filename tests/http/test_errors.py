"""Every way to fail has one shape, a status that is true, and words that an SDK shows."""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from tests.http.scripted import ScriptedEngine, chunk, says
from tests.http.setting import chat_body, model_config
from tests.http.stack import Stack, fresh
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, piece

ODD = {
    "vLLM's own": (
        b'{"error":{"message":"too hot","type":"BadRequestError","param":"temperature","code":400}}',
        "too hot",
    ),
    "older vLLM": (
        b'{"object":"error","message":"too hot","type":"BadRequestError","param":null,"code":400}',
        "too hot",
    ),
    "detail text": (b'{"detail":"too hot"}', "too hot"),
    "detail list": (b'{"detail":[{"loc":["body"],"msg":"field required"}]}', "field required"),
    "error text": (b'{"error":"too hot"}', "too hot"),
    "message text": (b'{"message":"too hot"}', "too hot"),
    "a string": (b'"too hot"', "too hot"),
    "plain text": (b"too hot", "too hot"),
    "HTML": (b"<html><body><h1>too hot</h1></body></html>", "refused"),
    "a list": (b"[1]", "refused"),
    "nothing": (b"", "refused"),
    "not UTF-8": (b'{"detail":"\xff\xfe"}', "refused"),
    "deep": (b'{"detail":' + b"[" * 5_000 + b"]" * 5_000 + b"}", "refused"),
}


@pytest.mark.parametrize("status", [400, 404, 422, 501])
@pytest.mark.parametrize("odd", ODD)
async def test_a_refusal_of_an_engine_keeps_its_status_and_is_readable(
    raw: tuple[Stack, ScriptedEngine], odd: str, status: int
) -> None:
    stack, engine = raw
    body, words = ODD[odd]
    engine.answering = says(body, status=status)

    answer = await stack.chat(max_tokens=2)

    assert answer.status_code == status
    error = answer.json()["error"]
    assert {"message", "type", "code"} <= set(error)
    assert words in error["message"]
    if odd == "vLLM's own":
        assert answer.content == body
    assert answer.headers["x-router-engine"] == "c"
    assert len(engine.calls) == 1


@pytest.mark.parametrize("odd", ODD)
async def test_a_refusal_on_anthropics_route_is_readable_there(raw: tuple[Stack, ScriptedEngine], odd: str) -> None:
    stack, engine = raw
    body, words = ODD[odd]
    engine.answering = says(body, status=400)

    answer = await stack.post("/v1/messages", chat_body(max_tokens=2))

    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]


async def test_anthropics_own_shape_of_an_engine_passes_as_it_is(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    body = b'{"type":"error","error":{"type":"invalid_request_error","message":"no"},"request_id":"r"}'
    engine.answering = says(body, status=400)

    answer = await stack.post("/v1/messages", chat_body(max_tokens=2))

    assert (answer.status_code, answer.content) == (400, body)


@pytest.mark.parametrize(
    ("status", "seen", "code"),
    [
        (500, 502, "engine_error"),
        (502, 502, "engine_error"),
        (504, 502, "engine_error"),
        (401, 502, "engine_refused_router"),
    ],
)
async def test_a_fault_of_an_engine_is_a_502_that_says_so(
    raw: tuple[Stack, ScriptedEngine], status: int, seen: int, code: str
) -> None:
    stack, engine = raw
    engine.answering = says(b'{"error":{"message":"secret-token was wrong"}}', status=status)

    answer = await stack.chat(max_tokens=2)

    assert (answer.status_code, answer.json()["error"]["code"]) == (seen, code)
    if status == 401:
        assert "secret-token" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_stays_silent_is_a_504_after_its_limit(stream: bool) -> None:
    async def silent(_: SeenRequest, connection: Connection) -> None:
        await connection.closed()

    limits = {"timeouts": {"first_byte_s": 0.2}, "default_output_tokens": 1}
    engine = ScriptedEngine(silent)
    async with fresh(c=engine, models=[model_config(chat=limits, borrow=False)]) as stack:
        answer = await stack.chat(max_tokens=None if stream else 1, stream=stream)

        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
        assert answer.json()["error"]["type"] == "server_error"
        assert len(engine.calls) == 1
        engine.answering = says()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"nonsense", "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        (b'{"model":"llama","messages":[{"role":"user","content":"\xff"}]}', "invalid_json"),
        (b"[]", "invalid_request"),
        (b'"text"', "invalid_request"),
        (b"null", "invalid_request"),
        (b"{}", "missing_required_parameter"),
        (b'{"model":"llama"}', "missing_required_parameter"),
        (b'{"model":"llama","messages":null}', "invalid_request"),
        (b'{"model":"llama","messages":"hi"}', "invalid_request"),
        (b'{"model":"llama","messages":[]}', "invalid_request"),
        (b'{"model":"llama","messages":["hi"]}', "invalid_request"),
        (b'{"model":5,"messages":[{"role":"user","content":"x"}]}', "invalid_request"),
        (b'{"model":"llama","messages":[{"role":"user","content":"x"}],"stream":"yes"}', "invalid_request"),
        (b'{"model":"llama","messages":[{"role":"user","content":"x"}],"n":0}', "invalid_request"),
        (b'{"model":"llama","messages":[{"role":"user","content":"x"}],"n":100000}', "invalid_request"),
        (b'{"model":"llama","messages":[{"role":"user","content":"x"}],"stream_options":[]}', "invalid_request"),
        (b'{"model":"llama","messages":[{"role":"user","content":"x"}],"tools":{}}', "invalid_request"),
        (b'{"model":"llama","messages":[{"role":"user","content":"x"}]} {}', "invalid_json"),
    ],
)
async def test_a_body_that_is_no_request_is_a_400_that_names_the_fault(stack: Stack, body: bytes, code: str) -> None:
    sent_before = len(stack.entries("c"))

    answer = await stack.post("/v1/chat/completions", body)

    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == code
    assert len(stack.entries("c")) == sent_before


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data; boundary=x"]
)
async def test_another_content_type_is_a_415(stack: Stack, kind: str) -> None:
    answer = await stack.post("/v1/chat/completions", chat_body(), headers={"content-type": kind})

    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON"])
async def test_json_by_any_of_its_names_is_read(stack: Stack, kind: str) -> None:
    answer = await stack.post("/v1/chat/completions", chat_body(max_tokens=2), headers={"content-type": kind})

    assert answer.status_code == 200
    assert stack.sent_for(answer).headers["content-type"] == kind


# -- what the official clients show ----------------------------------------------------------------------------------


def openai_client(stack: Stack, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)


async def said_by_openai(call: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return caught.value


async def test_the_openai_client_shows_the_message_of_each_kind_of_refusal(stack: Stack) -> None:
    async with openai_client(stack) as client:
        messages: Any = [{"role": "user", "content": "x"}]
        model = await said_by_openai(client.chat.completions.create(model="nope", messages=messages))
        cap = await said_by_openai(client.chat.completions.create(model="llama", messages=messages, max_tokens=-1))
        long = await said_by_openai(client.completions.create(model="llama", prompt=[1] * 20_000))
        path = await said_by_openai(client.files.list())

    assert isinstance(model, openai.NotFoundError)
    assert "'nope' does not exist" in model.message
    assert (model.code, model.param) == ("model_not_found", "model")
    assert isinstance(cap, openai.BadRequestError)
    assert "`max_tokens` is -1" in cap.message
    assert (long.code, "16384" in long.message) == ("context_length_exceeded", True)
    assert isinstance(path, openai.NotFoundError)
    assert "no route" in path.message
    assert path.request_id


async def test_the_openai_client_shows_the_error_inside_a_broken_stream(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    seen_first = asyncio.Event()

    async def breaks(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD + piece(chunk("a")))
        await seen_first.wait()
        connection.reset()

    texts = []

    async def read() -> None:
        async with openai_client(stack) as client:
            stream: Any = await client.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "x"}], stream=True
            )
            async for part in stream:
                texts.append(part.choices[0].delta.content)
                seen_first.set()

    engine.answering = breaks
    with pytest.raises(openai.APIError) as caught:
        await read()

    assert texts == ["a"]
    assert "lost amid its answer" in caught.value.message


async def test_the_anthropic_client_shows_the_message_of_each_kind_of_refusal(stack: Stack) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(model="nope", messages=messages, max_tokens=5)
        with pytest.raises(anthropic.BadRequestError) as long:
            await client.messages.create(model="llama", messages=[{"role": "user", "content": "x"}], max_tokens=20_000)

    assert "'nope' does not exist" in str(unknown.value)
    assert "maximum context length is 16384" in str(long.value)
    assert json.loads(long.value.response.content)["type"] == "error"


async def test_the_clients_show_what_a_missing_key_means() -> None:
    async with fresh(keys=[{"name": "k", "key": "right"}]) as stack:
        async with openai_client(stack, "wrong") as client:
            refused = await said_by_openai(client.models.list())
        async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="wrong", max_retries=0) as other:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await other.messages.create(model="llama", messages=[{"role": "user", "content": "x"}], max_tokens=5)

    assert isinstance(refused, openai.AuthenticationError)
    assert "valid API key" in refused.message
    assert "valid API key" in str(caught.value)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("value", ["7", "0", "-1", "9" * 400, "Fri, 31 Dec 2999 23:59:59 GMT", "1.5", "\xb2", ""])
async def test_whatever_time_an_engine_gives_the_client_is_told_whole_seconds(
    raw: tuple[Stack, ScriptedEngine], status: int, value: str
) -> None:
    stack, engine = raw
    engine.answering = says(b"{}", status=status, headers=f"retry-after: {value}\r\ncontent-type: application/json\r\n")

    answer = await stack.chat(max_tokens=2)

    assert answer.status_code in (429, 503)
    assert answer.headers["retry-after"].isdigit()
    assert 1 <= int(answer.headers["retry-after"]) <= 60
