"""The simulated server's answers have the shapes that a live vLLM 0.32.0 gave."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.sim.engine import EngineShape
from router.sim.options import OutputLengths, SimServerOptions
from router.sim.server import RunningSim, create_app, running
from router.sim.text import ByteTokenizer

MESSAGES = [{"role": "user", "content": "Hello, who are you?"}]
SHAPE = EngineShape(max_model_len=4_096, max_num_seqs=16)


def with_server(
    test: Callable[[RunningSim, httpx.AsyncClient], Awaitable[None]], options: SimServerOptions | None = None
) -> None:
    """Run `test` against a fresh server that does not wait."""

    async def main() -> None:
        given = options or SimServerOptions(model="tiny", shape=SHAPE, time_scale=0.0)
        async with running(given) as sim, httpx.AsyncClient(base_url=sim.url, timeout=10.0) as client:
            await test(sim, client)

    asyncio.run(main())


def data_of(text: str) -> list[Any]:
    """What the `data:` lines hold; `[DONE]` as a string."""
    raw = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in raw]


def test_a_chat_answer_has_the_fields_of_vllm() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        response = await client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES, "max_tokens": 3}
        )

        answer = response.json()
        assert response.status_code == 200
        assert list(answer)[:5] == ["id", "object", "created", "model", "choices"]
        assert answer["id"].startswith("chatcmpl-")
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"] == {
            "prompt_tokens": 12,
            "total_tokens": 15,
            "completion_tokens": 3,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }

    with_server(test)


def test_a_chat_stream_begins_with_the_role_and_ends_with_reason_and_done() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "stream": True}
        response = await client.post("/v1/chat/completions", json=body)

        *chunks, done = data_of(response.text)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant", None, None, None]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
        assert all("usage" not in chunk for chunk in chunks)
        assert done == "[DONE]"

    with_server(test)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_include_usage_adds_one_chunk_without_choices_before_done(path: str) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {"max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
        response = await client.post(path, json=body | {"messages": MESSAGES, "prompt": "hello you"})

        *chunks, usage, done = data_of(response.text)
        assert all(chunk["choices"] for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2
        assert done == "[DONE]"

    with_server(test)


def test_n_sequences_of_every_prompt_are_numbered_prompt_by_prompt() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body = {"prompt": ["abcd", "efghijkl"], "max_tokens": 1, "n": 2, "echo": True}
        answer = (await client.post("/v1/completions", json=body)).json()

        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"][:4] for choice in answer["choices"]] == ["abcd", "abcd", "efgh", "efgh"]
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 4

    with_server(test)


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens"),
    [("12345678", 2), ("123456789", 3), (["1234", "5678"], 2), ([1, 2, 3], 3), ([[1, 2], [3]], 3), ("ééé", 2)],
)
def test_completion_prompts_are_counted_by_the_stated_rule(prompt: object, prompt_tokens: int) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        answer = (await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})).json()

        assert answer["usage"]["prompt_tokens"] == prompt_tokens

    with_server(test)


def test_completions_without_a_cap_generate_at_most_sixteen() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body = {"prompt": "x", "ignore_eos": True}
        unset = (await client.post("/v1/completions", json=body)).json()
        null = (await client.post("/v1/completions", json=body | {"max_tokens": None})).json()

        assert unset["usage"]["completion_tokens"] == 16
        assert null["usage"]["completion_tokens"] == 4_095

    with_server(test)


def test_a_chat_without_a_cap_stops_of_itself_at_a_seeded_length() -> None:
    lengths = []

    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        answer = (await client.post("/v1/chat/completions", json={"messages": MESSAGES})).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        lengths.append(answer["usage"]["completion_tokens"])

    options = SimServerOptions(shape=SHAPE, time_scale=0.0, output_lengths=OutputLengths(median_tokens=20.0), seed=3)
    with_server(test, options)
    with_server(test, options)

    assert lengths[0] == lengths[1] > 0


def test_an_answer_quoted_in_the_next_prompt_counts_as_it_was() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        answer = (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 50})).json()
        text = answer["choices"][0]["text"]

        assert ByteTokenizer().count(text) == 50

    with_server(test)


def test_a_responses_stream_numbers_its_events_around_one_message() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body = {"model": "tiny", "input": "Hello", "max_output_tokens": 2, "stream": True}
        response = await client.post("/v1/responses", json=body)

        events = data_of(response.text)
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event["sequence_number"] for event in events] == list(range(10))
        last = events[-1]["response"]
        assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert last["usage"]["output_tokens"] == 2
        assert last["output"][0]["content"][0]["text"] == events[6]["text"]

    with_server(test)


def test_a_messages_stream_has_anthropics_events_and_no_done() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "stream": True}
        response = await client.post("/v1/messages", json=body)

        assert [line for line in response.text.splitlines() if line.startswith("event: ")] == [
            "event: message_start",
            "event: content_block_start",
            "event: content_block_delta",
            "event: content_block_delta",
            "event: content_block_stop",
            "event: message_delta",
            "event: message_stop",
        ]
        assert data_of(response.text)[-2]["delta"]["stop_reason"] == "max_tokens"

    with_server(test)


def test_messages_answers_and_counts_the_system_text() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "system": "Be terse"}
        answer = (await client.post("/v1/messages", json=body)).json()
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()

        assert answer["content"][0]["type"] == "text"
        assert answer["usage"] == {"input_tokens": counted["input_tokens"], "output_tokens": 2}
        assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}
        assert counted["input_tokens"] > 12

    with_server(test)


def test_embeddings_have_a_vector_for_every_input() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        answer = (await client.post("/v1/embeddings", json={"input": ["one", "two more"]})).json()

        assert [len(each["embedding"]) for each in answer["data"]] == [8, 8]
        assert answer["usage"]["prompt_tokens"] == 3

    with_server(test)


def test_tokenize_counts_what_usage_counts_and_detokenize_undoes_it() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        chat = (await client.post("/tokenize", json={"model": "tiny", "messages": MESSAGES})).json()
        text = (await client.post("/tokenize", json={"prompt": "grüße, 世界"})).json()
        back = (await client.post("/detokenize", json={"tokens": text["tokens"]})).json()

        assert (chat["count"], chat["max_model_len"]) == (12, 4_096)
        assert back == {"prompt": "grüße, 世界"}

    with_server(test)


def test_the_client_request_id_becomes_the_id() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        response = await client.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}, headers={"X-Request-Id": "abc"}
        )

        assert response.json()["id"] == "chatcmpl-abc"
        assert "x-request-id" not in response.headers
        assert sim.log.entries()[0].x_request_id == "abc"

    with_server(test)


def test_the_plain_routes_answer_as_vllm() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        models = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"], card["root"]) for card in models] == [("tiny", 4_096, "tiny")]
        assert (await client.get("/version")).json() == {"version": "0.32.0"}
        assert (await client.get("/load")).json() == {"server_load": 0}
        for method, path, status in [("GET", "/health", 200), ("HEAD", "/health", 405), ("POST", "/ping", 200)]:
            response = await client.request(method, path)
            assert (response.status_code, path) == (status, path)

    with_server(test)


def test_metrics_have_vllms_names_and_the_engines_numbers() -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        await client.post("/v1/completions", json={"prompt": "12345678", "max_tokens": 5})

        families = list(text_string_to_metric_families((await client.get("/metrics")).text))
        samples = {
            sample.name: sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("finished_reason", "length") == "length"
        }
        assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
        assert samples["vllm:kv_cache_usage_perc"] == 0
        assert samples["vllm:prompt_tokens_total"] == 2
        assert samples["vllm:generation_tokens_total"] == 5
        assert samples["vllm:request_success_total"] == 1
        assert samples["vllm:num_preemptions_total"] == 0
        info = next(family for family in families if family.name == "vllm:cache_config_info").samples[0].labels
        assert (info["kv_cache_size_tokens"], info["num_gpu_blocks"], info["block_size"]) == ("131072", "8192", "16")

    with_server(test)


@pytest.mark.parametrize(("version", "is_there"), [("0.25.0", False), ("0.26.0", True)])
def test_the_cache_size_in_tokens_is_there_from_the_version_that_has_it(version: str, is_there: bool) -> None:
    async def test(sim: RunningSim, client: httpx.AsyncClient) -> None:
        assert ("kv_cache_size_tokens" in (await client.get("/metrics")).text) is is_there

    with_server(test, SimServerOptions(shape=SHAPE, version=version))


def test_the_app_runs_under_any_asgi_server_with_lifespan() -> None:
    async def main() -> None:
        app = create_app(SimServerOptions(shape=SHAPE, time_scale=0.0))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://sim") as client:
                response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})

        assert response.json()["usage"]["completion_tokens"] == 2

    asyncio.run(main())
