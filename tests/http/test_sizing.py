"""What a request is taken for before a place is asked for, and what is remembered between requests."""

import asyncio
from typing import Any

from router.clock import SystemClock
from router.config.model import EngineConfig, ModelConfig, TokenizerConfig
from router.http.service import ModelService
from router.http.sizing import Sized, size_up
from router.policy.classify import Shapes
from router.request import ChatPrompt, Endpoint, ParsedRequest, RequestRecord
from router.tokens.count import Counter
from router.upstream.engine import Engine
from tests.flow.stack import BATCH, CHAT, pool

ESTIMATE = TokenizerConfig("estimate", None, None, "auto", image_tokens=1000, timeout_s=5.0)


class Flow:
    """A model's flow as far as sizing looks at it."""

    def __init__(self, *names: str) -> None:
        self.engines = {
            name: Engine(EngineConfig(name, "http://127.0.0.1:1", None, None, None), _upstream(), SystemClock())
            for name in names
        }


def _upstream() -> Any:
    return None


def service() -> ModelService:
    flow: Any = Flow("c", "l")
    config = ModelConfig(
        name="m",
        aliases=(),
        served_model_name="m",
        tokenizer=ESTIMATE,
        threshold_tokens=4_000,
        chat=pool(CHAT, ("c",)),
        batch=pool(BATCH, ("l",), max_model_len=65_536),
        chat_reserve_ratio=0.0,
        borrow=True,
        cap_unset_max_tokens=False,
        retry_started=False,
        attempts_max=3,
        commit_after_s=5.0,
    )
    return ModelService(config, Counter(None, ESTIMATE), flow)


def sized(it: ModelService, words: int, **fields: Any) -> Sized:
    prompt = ChatPrompt([{"role": "user", "content": "word " * words}], bytes_total=5 * words)
    request = ParsedRequest("id", Endpoint.CHAT, "/x", b"", "m", prompt, **fields)

    async def scenario() -> Sized:
        try:
            return await size_up(it, request, None, RequestRecord("id", 0.0))
        finally:
            await it.counter.aclose()

    return asyncio.run(scenario())


def test_the_shapes_are_those_of_the_configuration_until_an_engine_says_otherwise() -> None:
    it = service()

    before = it.shapes
    it.flow.engines["l"].learn_identity(None, None, 32_768)
    after = it.shapes

    assert before == Shapes(8_192, 65_536, 4_000)
    assert after == Shapes(8_192, 32_768, 4_000)


def test_a_request_is_classed_by_all_that_it_may_come_to_hold() -> None:
    short, long = sized(service(), 100, max_tokens=100), sized(service(), 100, max_tokens=100, n=20)

    assert (short.request_class, short.reason) == (CHAT, "below_threshold")
    assert (long.request_class, long.reason) == (BATCH, "above_threshold")
    assert long.demand.sequences == 20


def test_without_a_cap_the_class_that_was_chosen_says_what_is_reserved() -> None:
    it = service()
    for _ in range(64):
        it.outputs[BATCH].note(500)
        it.outputs[CHAT].note(50)

    chat, batch = sized(it, 100), sized(it, 4_000)

    assert (chat.request_class, chat.demand.output_tokens, chat.demand.output_is_capped) == (CHAT, 50, False)
    assert (batch.request_class, batch.demand.output_tokens) == (BATCH, 500)
