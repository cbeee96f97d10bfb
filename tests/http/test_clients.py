"""The official clients, as their users use them."""

from typing import Any

import anthropic
import openai
import pytest

from tests.http.setting import MODEL
from tests.http.stack import Stack

MESSAGES: Any = [{"role": "user", "content": "Hello."}]


@pytest.fixture
def client(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


async def test_openai_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    async with client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, n=2)
        stream = await client.chat.completions.create(
            model="small",
            messages=MESSAGES,
            max_completion_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_openai_streams_without_usage_have_a_choice_in_every_chunk(client: openai.AsyncOpenAI) -> None:
    async with client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True)
        chunks = [chunk async for chunk in stream]

    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


async def test_openai_completions_responses_and_embeddings(client: openai.AsyncOpenAI) -> None:
    async with client:
        text = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=3)
        pieces = [
            piece async for piece in await client.completions.create(model=MODEL, prompt="a", max_tokens=3, stream=True)
        ]
        response = await client.responses.create(model=MODEL, input="Hello.", max_output_tokens=4)
        events = [
            event.type
            async for event in await client.responses.create(
                model=MODEL, input="Hello.", max_output_tokens=4, stream=True
            )
        ]
        vectors = await client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")

    assert len(text.choices) == 2
    assert "".join(piece.choices[0].text for piece in pieces)
    assert response.output_text
    assert (events[0], events[-1]) == ("response.created", "response.incomplete") or events[-1] == "response.completed"
    assert len(vectors.data) == 2


async def test_openai_lists_models_and_shows_the_request_id(client: openai.AsyncOpenAI) -> None:
    async with client:
        models = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("small")
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=2)

    assert models == [MODEL, "small"]
    assert one.id == "small"
    assert raw.request_id == raw.headers["x-request-id"]


async def test_anthropic_messages_whole_streamed_and_counted(stack: Stack) -> None:
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=4, system="Be brief.")
        async with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=4) as stream:
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model=MODEL, messages=MESSAGES)

    assert whole.usage.output_tokens == streamed.usage.output_tokens == 4
    assert streamed.content[0].type == "text"
    assert counted.input_tokens == streamed.usage.input_tokens
