"""The other calls of a real engine, through the router: what works, and what is refused by whom."""

import asyncio
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from tests.engine.client import ANSWER_MAX_S, chats
from tests.engine.stack import BATCH_CONTEXT_TOKENS, MODEL, Fleet, Router
from tests.engine.texts import prose
from tests.engine.vllm import SERVED_MODEL_NAME


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_MAX_S) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_for_every_pool_is_refused_with_the_true_numbers(
    router: Router, fleet: Fleet, stream: bool
) -> None:
    text = prose(BATCH_CONTEXT_TOKENS + 4_000, 1)
    messages = [{"role": "user", "content": text}]
    tokens = fleet.batch.tokens_of(messages)
    chat_before, batch_before = fleet.chat.counters(), fleet.batch.counters()

    body = {"model": MODEL, "messages": messages, "max_tokens": 5, "stream": stream}
    [answer] = asyncio.run(chats(router.url, [body], at_once=1))

    assert tokens > BATCH_CONTEXT_TOKENS
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    # Plain digits: programs read the limit out of this sentence.
    assert f"maximum context length is {BATCH_CONTEXT_TOKENS} tokens" in answer.error["message"]
    assert str(tokens) in answer.error["message"]
    fleet.chat.wait_until_in_flight(0)
    fleet.batch.wait_until_in_flight(0)
    fleet.chat.wait_until_counters(chat_before)
    fleet.batch.wait_until_counters(batch_before)


def test_an_output_cap_that_fits_no_pool_is_refused_and_not_clamped(router: Router, fleet: Fleet) -> None:
    chat_before, batch_before = fleet.chat.counters(), fleet.batch.counters()

    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": BATCH_CONTEXT_TOKENS}
    [answer] = asyncio.run(chats(router.url, [body], at_once=1))

    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {BATCH_CONTEXT_TOKENS} tokens" in answer.error["message"]
    fleet.chat.wait_until_counters(chat_before)
    fleet.batch.wait_until_counters(batch_before)


def test_embeddings_of_a_model_that_only_generates_give_the_engines_404_in_openais_shape(
    client: openai.OpenAI, fleet: Fleet
) -> None:
    body = {"model": SERVED_MODEL_NAME, "input": "Hello there."}
    engines_own = httpx.post(f"{fleet.batch.url}/v1/embeddings", json=body, timeout=60.0, trust_env=False)

    with pytest.raises(openai.NotFoundError) as refused:
        client.embeddings.create(model=MODEL, input="Hello there.")

    assert (engines_own.status_code, engines_own.json()) == (404, {"detail": "Not Found"})
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"] == "Not Found"
    assert refused.value.response.headers["x-router-engine"] in (fleet.chat.name, fleet.batch.name)


def test_plain_completions_work_with_text_with_several_prompts_and_with_token_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="Hello there.", max_tokens=3)
    several = client.completions.create(model=MODEL, prompt=["Hello.", "And you?"], max_tokens=3)
    ids = client.completions.create(model=MODEL, prompt=[100, 200, 300], max_tokens=3)

    assert text.usage is not None
    assert text.usage.completion_tokens == 3
    assert [choice.index for choice in several.choices] == [0, 1]
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_responses_work_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Hello there.", max_output_tokens=6)
    events = [
        event.type for event in client.responses.create(model=MODEL, input="Hi.", max_output_tokens=6, stream=True)
    ]

    assert whole.usage is not None
    assert whole.usage.output_tokens > 0
    assert events[0] == "response.created"
    assert events[-1] in ("response.completed", "response.incomplete")


def test_messages_work_streamed_and_whole_and_their_tokens_are_counted(router: Router) -> None:
    with anthropic.Anthropic(base_url=router.url, api_key="none", max_retries=0, timeout=ANSWER_MAX_S) as client:
        whole = client.messages.create(model=MODEL, messages=[{"role": "user", "content": "Hi."}], max_tokens=6)
        with client.messages.stream(model=MODEL, messages=[{"role": "user", "content": "Hi."}], max_tokens=6) as stream:
            streamed = stream.get_final_message()
        counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Hi."}])

    assert whole.usage.input_tokens == streamed.usage.input_tokens == counted.input_tokens
    assert whole.usage.output_tokens > 0


def test_tokenize_and_detokenize_are_each_others_inverse(router: Router) -> None:
    tokens = router.post("/tokenize", {"model": MODEL, "prompt": "Hello there.", "add_special_tokens": False}).json()

    text = router.post("/detokenize", {"model": MODEL, "tokens": tokens["tokens"]}).json()

    assert text["prompt"] == "Hello there."
    assert tokens["count"] == len(tokens["tokens"])


def test_the_list_of_models_tells_the_longest_context_of_any_pool(router: Router) -> None:
    listed = router.get("/v1/models").json()

    assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [(MODEL, BATCH_CONTEXT_TOKENS)]
