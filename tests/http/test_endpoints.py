"""Every other endpoint of an engine: the same path, query and body, at a pool that serves the model."""

import json
import tracemalloc
from typing import Any

import pytest

from tests.http.scripted import ScriptedEngine, says
from tests.http.setting import LONG_TOKENS, chat_body
from tests.http.stack import Stack

OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hello."},
    "/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/v1/score": {"queries": "a", "documents": ["b", "c"]},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/pooling": {"input": [1, 2, 3]},
    "/classify": {"input": ["a", "b"]},
    "/tokenize": {"prompt": "Hello."},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}


@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.parametrize("query", ["", "?a=1&b=%20x"])
async def test_a_documented_endpoint_arrives_with_path_query_and_body_unchanged(
    raw: tuple[Stack, ScriptedEngine], path: str, query: str
) -> None:
    stack, engine = raw
    engine.answering = says(b'{"ok":1}')
    body = json.dumps({"model": "llama", **OTHERS[path], "made_up": [1.50]}).encode()

    answer = await stack.post(path + query, body)

    assert (answer.status_code, answer.content) == (200, b'{"ok":1}')
    (call,) = engine.calls
    assert (call.path, call.body) == (path + query, body)
    assert answer.headers["x-router-engine"] in ("c", "l")
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("Hello.", None), (["a", "b", "c"], None), ([1, 2, 3], 3), ([[1, 2], [3]], 3)],
)
async def test_embeddings_take_texts_and_ids_and_every_option_reaches_the_engine(
    stack: Stack, given: Any, tokens: int | None
) -> None:
    body = {"model": "llama", "input": given, "encoding_format": "base64", "dimensions": 4, "truncate_prompt_tokens": 9}

    answer = await stack.post("/v1/embeddings", body)

    assert answer.status_code == 200
    assert json.loads(stack.sent_for(answer).body) == body
    if tokens is not None:
        assert int(answer.headers["x-router-prompt-tokens"]) == tokens


async def test_each_input_of_an_embeddings_call_is_held_against_the_limit_on_its_own(stack: Stack) -> None:
    many = await stack.post("/v1/embeddings", {"model": "llama", "input": [[1] * 500] * 60})
    long = await stack.post("/v1/embeddings", {"model": "llama", "input": [[1] * (LONG_TOKENS + 1)]})

    assert (many.status_code, many.headers["x-router-prompt-tokens"]) == (200, "30000")
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert long.json()["error"]["param"] == "input"


async def test_an_endpoint_that_the_engine_has_not_gives_the_engines_own_404_in_readable_form(stack: Stack) -> None:
    answer = await stack.post("/v1/rerank", {"model": "llama", "query": "a", "documents": ["b"]})

    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "Not Found"
    assert answer.headers["x-router-engine"]


async def test_a_long_query_times_many_documents_is_not_written_out(stack: Stack) -> None:
    body = json.dumps({"model": "llama", "query": "q" * 1_000_000, "documents": ["d"] * 10_000}).encode()

    tracemalloc.start()
    answer = await stack.post("/rerank", body)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert answer.status_code in (400, 404)
    assert peak_bytes < 40 * len(body)


async def test_tokenize_and_detokenize_are_each_others_inverse_and_hold_no_place(stack: Stack) -> None:
    tokens = (await stack.post("/tokenize", {"model": "llama", "prompt": "Hello there."})).json()["tokens"]
    text = await stack.post("/detokenize", {"model": "llama", "tokens": tokens})

    assert text.json()["prompt"] == "Hello there."
    assert "x-router-pool" not in text.headers
    assert text.headers["x-router-engine"] == "l"


# -- multipart -------------------------------------------------------------------------------------------------------


def form(
    parts: list[tuple[str, bytes]], *, boundary: str = "----WebKitFormBoundary7MA4YWxkTrZu0gW", quoted: bool = False
) -> tuple[bytes, str]:
    """A form of `(what stands behind 'form-data; ', content)`, and its content type."""
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
        for head, content in parts
    )
    shown = f'"{boundary}"' if quoted else boundary
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={shown}"


FILE = (
    'name="file"; filename="speech \U0001f600 模.wav"\r\nContent-Type: audio/wav',
    b"RIFF\x00\r\n--\r\n--x\xff" * 1_000,
)
MODEL_PART = ('name="model"', b"llama")


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
@pytest.mark.parametrize("parts", [[MODEL_PART, FILE], [FILE, MODEL_PART]], ids=["model first", "file first"])
@pytest.mark.parametrize(
    ("boundary", "quoted"), [("x", False), ("a b'()+_,-./:=?", True), ("=_bound", True), ("-" * 60 + "1", False)]
)
async def test_a_form_arrives_byte_for_byte_wherever_the_model_stands_and_whatever_the_boundary(
    raw: tuple[Stack, ScriptedEngine], path: str, parts: Any, boundary: str, quoted: bool
) -> None:
    stack, engine = raw
    body, kind = form(parts, boundary=boundary, quoted=quoted)

    answer = await stack.post(path, body, headers={"content-type": kind})

    assert answer.status_code == 200
    (call,) = engine.calls
    assert (call.path, call.body, call.all("content-type")) == (path, body, [kind])


async def test_of_a_form_that_names_an_alias_only_the_models_name_changes(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    body, kind = form([('name="language"', b"small"), ('name="model"', b"small"), FILE])

    answer = await stack.post("/v1/audio/transcriptions", body, headers={"content-type": kind})

    assert answer.status_code == 200
    assert engine.calls[0].body == body.replace(b'name="model"\r\n\r\nsmall', b'name="model"\r\n\r\nllama')
    assert engine.calls[0].all("content-length") == [str(len(body))]


async def test_of_two_models_in_a_form_the_last_one_counts(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    first, kind = form([('name="model"', b"nope"), MODEL_PART, FILE])
    second, _ = form([MODEL_PART, ('name="model"', b"nope"), FILE])

    taken = await stack.post("/v1/audio/transcriptions", first, headers={"content-type": kind})
    refused = await stack.post("/v1/audio/transcriptions", second, headers={"content-type": kind})

    assert (taken.status_code, refused.status_code) == (200, 404)
    assert len(engine.calls) == 1


async def test_a_form_by_a_content_type_in_capitals_is_a_form(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    body, kind = form([('name="model"', b"small"), FILE])

    answer = await stack.post(
        "/v1/audio/transcriptions",
        body,
        headers={"content-type": kind.replace("multipart/form-data", "Multipart/Form-Data")},
    )

    assert answer.status_code == 200
    assert b"\r\nllama\r\n" in engine.calls[0].body


BAD_FORMS = {
    "no model": (form([FILE])[0], 400, "missing_required_parameter"),
    "empty model": (form([('name="model"', b""), FILE])[0], 400, "missing_required_parameter"),
    "a model as a file": (form([('name="model"; filename="x"', b"llama"), FILE])[0], 400, "missing_required_parameter"),
    "unknown model": (form([('name="model"', b"whisper-9"), FILE])[0], 404, "model_not_found"),
    "a model that is no text": (form([('name="model"', b"\xff\xfe"), FILE])[0], 404, "model_not_found"),
    "a model without end": (form([('name="model"', b"m" * 5_000), FILE])[0], 400, "invalid_request"),
    "no form at all": (b"hello", 400, "invalid_form"),
    "nothing": (b"", 400, "invalid_form"),
    "cut off": (form([MODEL_PART, FILE])[0][:-70], 400, "invalid_form"),
    "endless headers": (form([('name="model"; x="' + "y" * 20_000 + '"', b"llama")])[0], 400, "invalid_form"),
    "thousands of parts": (form([('name="a"', b"1")] * 1_500 + [MODEL_PART])[0], 400, "invalid_form"),
}


@pytest.mark.parametrize("case", BAD_FORMS)
async def test_a_form_that_cannot_be_routed_is_refused_with_the_reason(stack: Stack, case: str) -> None:
    body, status, code = BAD_FORMS[case]
    kind = form([])[1]

    answer = await stack.post("/v1/audio/transcriptions", body, headers={"content-type": kind})

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/mixed; boundary=x", ""])
async def test_audio_that_is_no_form_is_a_415(stack: Stack, kind: str) -> None:
    answer = await stack.post("/v1/audio/transcriptions", chat_body(), headers={"content-type": kind})

    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_large_form_costs_no_more_memory_than_a_few_copies_of_it(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    size = 5_000_000
    body, kind = form([('name="file"; filename="a.wav"', b"\r\n-" * (size // 3)), ('name="model"', b"small")])

    tracemalloc.start()
    answer = await stack.post("/v1/audio/transcriptions", body, headers={"content-type": kind})
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert answer.status_code == 200
    assert len(engine.calls[0].body) == len(body)
    # The client, the router and the engine are all in this process.
    assert peak_bytes < 8 * size


async def test_a_streamed_transcription_is_a_stream(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    events = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'
    engine.answering = says(events, headers="content-type: text/event-stream; charset=utf-8\r\n")
    body, kind = form([MODEL_PART, ('name="stream"', b"true"), FILE])

    answer = await stack.post("/v1/audio/transcriptions", body, headers={"content-type": kind})

    assert (answer.status_code, answer.content) == (200, events)
    assert answer.headers["x-accel-buffering"] == "no"
