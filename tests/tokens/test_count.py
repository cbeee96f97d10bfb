"""Counting prompts: cheaply where that settles it, exactly where not, and never raising."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import pytest

from router.config.model import TokenizerConfig
from router.policy.demand import RequestClass
from router.request import ChatPrompt, Count, OpaquePrompt, Prompt, TextPrompts, TokenPrompts
from router.tokens.api import Unsettled
from router.tokens.calibration import WARM_UPDATES
from router.tokens.count import FAR_MIN_BYTES, SHORT_MAX_BYTES, Counter, build_counter
from router.tokens.limits import TextSize, byte_bpe_limits
from router.tokens.offload import THREADS, Missed
from router.tokens.overhead import ChatOverhead
from tests.tokens.model_folder import loaded_model
from tests.tokens.varied_chats import chat_prompt, varied_chats

T = TypeVar("T")
PNG = "data:image/png;base64," + "A" * 200_000


class PanicLike(BaseException):
    """As pyo3's PanicException: no subclass of Exception."""


class StubTokenizer:
    """One token a word; notes what it was asked, and does what it is told instead where told."""

    def __init__(self, instead: Callable[[], int] | None = None) -> None:
        self.limits = byte_bpe_limits(longest_token_bytes=10)
        self.overhead: ChatOverhead | None = ChatOverhead(TextSize(10, 0), TextSize(10, 0))
        self.is_chat_exact = True
        self.counted: list[str] = []
        self._instead = instead

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        self.counted.append(text)
        return len(text.split()) if self._instead is None else self._instead()

    def render(self, chat: ChatPrompt) -> str:
        return " ".join(str(message.get("content")) for message in chat.messages)


def _config(
    path: Path | None = None,
    *,
    kind: Literal["huggingface", "tiktoken", "estimate"] = "huggingface",
    exact: Literal["always", "auto"] = "auto",
    timeout_s: float = 60.0,
) -> TokenizerConfig:
    return TokenizerConfig(kind, path, None, exact, image_tokens=1000, timeout_s=timeout_s)


def _with(counter: Counter, use: Callable[[Counter], Awaitable[T]]) -> T:
    async def scenario() -> T:
        try:
            return await use(counter)
        finally:
            await counter.aclose()

    return asyncio.run(scenario())


def _count(
    counter: Counter,
    prompt: Prompt,
    decisions: Sequence[int] = (),
    request_class: RequestClass | None = RequestClass.CHAT,
) -> Count:
    return _with(counter, lambda it: it.count(prompt, decision_tokens=decisions, request_class=request_class))


def _model(folder: Path, exact: Literal["always", "auto"] = "auto") -> Counter:
    return Counter(loaded_model(folder), _config(folder, exact=exact))


def _said(text: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text}], bytes_total=len(text), **fields)


def test_no_tokenizer_runs_where_no_decision_lies_between_the_bounds() -> None:
    tokenizer = StubTokenizer()

    count = _count(Counter(tokenizer, _config()), _said("word " * 10), [4096])

    assert tokenizer.counted == []
    assert not count.exact
    assert count.lower_tokens <= count.prompt_tokens <= count.upper_tokens < 4096


@pytest.mark.parametrize("decision", [5, 20, 69])
def test_the_tokenizer_runs_where_a_decision_lies_between_them(decision: int) -> None:
    count = _count(Counter(StubTokenizer(), _config()), _said("word " * 10), [decision, 4096])

    assert count == Count(10, 10, 10, 10, 1, exact=True, method="exact", text_bytes=82)


def test_what_the_bounds_settle_is_settled_at_once_and_the_rest_left_open() -> None:
    counter = Counter(StubTokenizer(), _config())

    settled = counter.settle(_said("word " * 10), decision_tokens=[4096], request_class=RequestClass.CHAT)
    open_one = counter.settle(_said("word " * 10), decision_tokens=[20], request_class=RequestClass.CHAT)

    assert isinstance(settled, Count)
    assert isinstance(open_one, Unsettled)
    assert open_one.bounds.lower_tokens <= 10 <= open_one.bounds.upper_tokens


@pytest.mark.parametrize("decisions", [[-5], [0], [-5, 4096]])
def test_decisions_below_any_length_leave_nothing_open(decisions: list[int]) -> None:
    count = _count(Counter(StubTokenizer(), _config()), _said("word " * 10), decisions)

    assert not count.exact


def test_a_short_prompt_does_not_wait_behind_long_ones() -> None:
    gate = threading.Event()

    class Stuck(StubTokenizer):
        def count(self, text: str, *, add_special_tokens: bool) -> int:
            if len(text) > SHORT_MAX_BYTES:
                gate.wait()
            return super().count(text, add_special_tokens=add_special_tokens)

    async def use(it: Counter) -> tuple[Count, list[Count]]:
        long = _said("word " * SHORT_MAX_BYTES)
        waiting = [
            asyncio.ensure_future(it.count(long, decision_tokens=(), request_class=None)) for _ in range(2 * THREADS)
        ]
        await asyncio.sleep(0)
        short = await it.count(_said("word"), decision_tokens=(), request_class=None)
        gate.set()
        return short, await asyncio.gather(*waiting)

    try:
        short, long = _with(Counter(Stuck(), _config(exact="always")), use)
    finally:
        gate.set()

    assert (short.prompt_tokens, short.exact) == (1, True)
    assert {count.prompt_tokens for count in long} == {SHORT_MAX_BYTES}


def test_tools_that_are_still_json_are_counted_like_the_objects_they_hold(model_folders: dict[str, Path]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "é": "ü"}}}]
    json = msgspec.Raw(msgspec.json.encode(tools))

    counts = [_count(_model(model_folders["tools"]), _said("hi", tools=form), [100]) for form in (tools, json)]

    assert counts[0].exact
    assert counts[0].prompt_tokens == counts[1].prompt_tokens


@pytest.mark.parametrize("json", [b'[{"a":1e400}]', b"[" + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]"])
def test_tools_that_cannot_be_read_leave_the_upper_bound(model_folders: dict[str, Path], json: bytes) -> None:
    count = _count(_model(model_folders["tools"]), _said("hi", tools=msgspec.Raw(json)), [100])

    assert (count.exact, count.method) == (False, "bytes")
    assert count.prompt_tokens > len(json)


def test_exact_always_counts_every_prompt_and_batch_is_always_counted() -> None:
    always = _count(Counter(StubTokenizer(), _config(exact="always")), _said("word " * 10), [4096])
    batch = _count(Counter(StubTokenizer(), _config()), _said("word " * 10), [4096], RequestClass.BATCH)

    assert always.exact
    assert batch.exact


def test_a_prompt_far_over_every_decision_is_settled_by_its_lower_bound() -> None:
    tokenizer = StubTokenizer()

    count = _count(Counter(tokenizer, _config(exact="always")), _said("x" * FAR_MIN_BYTES), [4096, 32768])

    assert tokenizer.counted == []
    assert count.lower_tokens > 32768


def test_a_prompt_too_large_to_tokenize_gets_its_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.tokens.count.EXACT_MAX_BYTES", 100)
    tokenizer = StubTokenizer()

    chat = _count(Counter(tokenizer, _config()), _said("word " * 100), [200])
    text = _count(Counter(tokenizer, _config()), TextPrompts(("word " * 100,)), [200])

    assert tokenizer.counted == []
    assert chat.prompt_tokens == chat.upper_tokens == 520
    assert text.prompt_tokens == text.upper_tokens == 500
    assert (chat.method, text.method) == ("bytes", "bytes")


def _panic() -> int:
    raise PanicLike


def _value_error() -> int:
    raise ValueError


@pytest.mark.parametrize("instead", [_panic, _value_error])
def test_a_tokenizer_that_raises_or_panics_leaves_the_upper_bound(instead: Callable[[], int]) -> None:
    counter = Counter(StubTokenizer(instead), _config())

    count = _count(counter, _said("word " * 10), [20])

    assert count.prompt_tokens == count.upper_tokens == 70
    assert not count.exact
    assert count.method == "bytes"
    assert counter.missed == {Missed.FAILED: 1}


def test_a_tokenizer_that_takes_too_long_leaves_the_upper_bound() -> None:
    gate = threading.Event()
    counter = Counter(StubTokenizer(lambda: int(gate.wait())), _config(timeout_s=0.0))

    try:
        count = _count(counter, _said("word " * 10), [20])
    finally:
        gate.set()

    assert count.prompt_tokens == count.upper_tokens
    assert counter.missed == {Missed.TIMEOUT: 1}


@pytest.mark.parametrize("name", ["simple", "tools", "strict", "parts"])
def test_counts_of_many_chats_at_once_equal_those_one_by_one(model_folders: dict[str, Path], name: str) -> None:
    prompts = [chat_prompt(body) for body in varied_chats(rounds=3)]

    async def use(counter: Counter) -> tuple[list[Count], list[Count]]:
        at_once = await asyncio.gather(
            *(counter.count(prompt, decision_tokens=(), request_class=None) for prompt in prompts)
        )
        return at_once, [await counter.count(prompt, decision_tokens=(), request_class=None) for prompt in prompts]

    at_once, one_by_one = _with(_model(model_folders[name], "always"), use)

    assert at_once == one_by_one
    assert sum(count.exact for count in at_once) >= (40 if name == "strict" else 54)


def test_bounds_hold_for_every_varied_chat(model_folders: dict[str, Path]) -> None:
    prompts = [chat_prompt(body) for body in varied_chats()]

    async def use(counter: Counter) -> list[tuple[Count, Count]]:
        return [
            (
                await counter.count(prompt, decision_tokens=[10**9], request_class=RequestClass.CHAT),
                await counter.count(prompt, decision_tokens=(), request_class=RequestClass.BATCH),
            )
            for prompt in prompts
        ]

    pairs = _with(_model(model_folders["simple"]), use)

    assert len(pairs) >= 120
    assert all(cheap.lower_tokens <= exact.prompt_tokens <= cheap.upper_tokens for cheap, exact in pairs)
    assert all(exact.exact for _, exact in pairs)
    assert sum(not cheap.exact for cheap, _ in pairs) >= 40


def test_quoted_special_tokens_are_counted_and_never_refused(model_folders: dict[str, Path]) -> None:
    text = "explain <｜end▁of▁sentence｜> and <|im_start|> in this file"
    tool = ChatPrompt([{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c", "content": text}])

    small = _count(_model(model_folders["simple"]), _said(text), [20])
    large = _count(_model(model_folders["simple"]), _said(text + " pad" * 75_000), [4096])
    result = _count(_model(model_folders["tools"]), tool, [20])

    assert small.exact
    assert large.exact
    assert result.exact
    assert large.prompt_tokens == small.prompt_tokens + 75_000


def test_tools_add_about_their_schema(model_folders: dict[str, Path]) -> None:
    description = "what the tool does, in plain words, over and over. " * 18
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "description": description}} for n in range(40)]
    counter = _model(model_folders["tools"])

    async def use(it: Counter) -> tuple[Count, Count]:
        bare = await it.count(_said("hi"), decision_tokens=[3], request_class=None)
        return bare, await it.count(_said("hi", tools=tools), decision_tokens=[4096], request_class=None)

    bare, laden = _with(counter, use)

    assert laden.exact
    assert laden.prompt_tokens - bare.prompt_tokens > 40 * 200


def test_pictures_cost_the_stated_tokens_and_are_not_exact(model_folders: dict[str, Path]) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": PNG}}]
    chat = ChatPrompt([{"role": "user", "content": parts}], bytes_total=len(PNG))

    count = _count(_model(model_folders["parts"]), chat, [4096])

    assert 1000 < count.prompt_tokens < 1030
    assert not count.exact
    assert count.lower_tokens <= count.prompt_tokens <= count.upper_tokens


def test_list_and_text_content_differ_by_three_tokens_at_most(model_folders: dict[str, Path]) -> None:
    listed = ChatPrompt(
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    )
    for name in ("simple", "parts"):
        as_list = _count(_model(model_folders[name], "always"), listed)
        as_text = _count(_model(model_folders[name], "always"), _said("one\ntwo"))

        assert abs(as_list.prompt_tokens - as_text.prompt_tokens) <= 3


def test_a_chat_that_the_template_refuses_is_bounded_from_above(model_folders: dict[str, Path]) -> None:
    twice = ChatPrompt([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])

    count = _count(_model(model_folders["strict"], "always"), twice)

    assert not count.exact
    assert count.method == "bytes"
    assert count.prompt_tokens == count.upper_tokens > 2


@pytest.mark.parametrize("text", ["\ud800" * 50, "\x00" * 50, "\U0010ffff" * 50, "a" * 100_000, " " * 100_000])
def test_hostile_texts_give_a_count_within_its_bounds(model_folders: dict[str, Path], text: str) -> None:
    count = _count(_model(model_folders["simple"], "always"), _said(text))

    assert count.lower_tokens <= count.prompt_tokens <= count.upper_tokens


def test_nesting_too_deep_to_print_is_bounded(model_folders: dict[str, Path]) -> None:
    deep: dict[str, Any] = {}
    for _ in range(50_000):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]

    count = _count(_model(model_folders["tools"]), _said("hi", tools=tools), [4096])

    assert not count.exact
    assert count.method == "bytes"


def test_a_clients_own_template_is_estimated_without_running_it() -> None:
    tokenizer = StubTokenizer()
    endless = "{% for i in range(10**12) %}x{% endfor %}"

    count = _count(Counter(tokenizer, _config(exact="always")), _said("word", chat_template=endless), [10])

    assert tokenizer.counted == []
    assert not count.exact
    assert count.prompt_tokens >= 4


def test_a_stored_history_is_never_exact() -> None:
    count = _count(Counter(StubTokenizer(), _config(exact="always")), _said("word", has_stored_history=True))

    assert not count.exact
    assert count.method == "opaque"


def test_token_ids_are_their_number_and_lists_keep_the_longest() -> None:
    count = _count(Counter(StubTokenizer(), _config()), TokenPrompts((5000, 3)), [4096])

    assert count == Count(5003, 5000, 5000, 5000, 2, exact=True, method="ids")


def test_each_text_of_a_list_is_counted_on_its_own() -> None:
    count = _count(Counter(StubTokenizer(), _config()), TextPrompts(("a b c", "d", "")), [2])

    assert count == Count(4, 3, 3, 3, 3, exact=True, method="exact", text_bytes=6)


def test_empty_prompts_count_nothing() -> None:
    counter = Counter(StubTokenizer(), _config())

    async def use(it: Counter) -> list[int]:
        prompts: list[Prompt] = [TextPrompts(("",)), TextPrompts(()), TokenPrompts(()), OpaquePrompt(0)]
        return [(await it.count(one, decision_tokens=[10], request_class=None)).prompt_tokens for one in prompts]

    assert _with(counter, use) == [0, 0, 0, 0]


def test_an_opaque_prompt_is_estimated_from_its_bytes() -> None:
    count = _count(Counter(StubTokenizer(), _config()), OpaquePrompt(1000), [10])

    assert count == Count(500, 500, 0, 1000, 1, exact=False, method="opaque")


def test_the_estimator_needs_no_files_and_learns() -> None:
    counter = build_counter(_config(kind="estimate"), model="m")
    assert isinstance(counter, Counter)
    chat = _said("word " * 2000)

    async def use(it: Counter) -> tuple[Count, Count]:
        cold = await it.count(chat, decision_tokens=[4096], request_class=RequestClass.CHAT)
        for _ in range(WARM_UPDATES):
            it.learn(cold, 2000, RequestClass.CHAT)
        return cold, await it.count(chat, decision_tokens=[4096], request_class=RequestClass.CHAT)

    cold, warm = _with(counter, use)

    assert (cold.method, warm.method) == ("bytes", "learned")
    assert cold.prompt_tokens > 5000
    assert 2000 <= warm.prompt_tokens < 2100


def test_misses_and_mismatches_of_the_engines_count_are_told() -> None:
    counter = Counter(StubTokenizer(), _config())
    estimated = Count(50, 50, 1, 90, 1, exact=False, method="learned", text_bytes=200)
    exact = Count(50, 50, 50, 50, 1, exact=True, method="exact", text_bytes=200)

    for used, count in ((60, estimated), (40, estimated), (51, exact), (50, exact)):
        counter.learn(count, used, RequestClass.CHAT)

    assert counter.misses == 1
    assert counter.exact_mismatches == 1


def test_prompts_without_text_teach_nothing() -> None:
    counter = Counter(None, _config(kind="estimate"))
    image = ChatPrompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}])

    for prompt in (TokenPrompts((5,)), OpaquePrompt(9), image, _said("x", has_stored_history=True)) * WARM_UPDATES:
        counter.learn(_count(counter, prompt), 40, None)

    assert _count(counter, _said("word")).method == "bytes"


def test_after_closing_counts_are_bounds_and_closing_again_is_harmless() -> None:
    counter = Counter(StubTokenizer(), _config(exact="always"))

    async def use(it: Counter) -> Count:
        await it.aclose()
        return await it.count(_said("word"), decision_tokens=(), request_class=None)

    count = _with(counter, use)

    assert count.prompt_tokens == count.upper_tokens
    assert counter.missed == {Missed.CLOSED: 1}
