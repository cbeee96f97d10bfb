"""Counts prompts: by proof where that settles it, else exactly beside the event loop, else by what was learned.

For each prompt a lower and an upper bound are told from its bytes. Where no decision lies between them, no tokenizer
runs and the learned ratio gives the figure. Otherwise the prompt is rendered and tokenized in a worker thread. What
keeps that from happening (busy, slow, refused by the template, a panicking tokenizer, too large) leaves the upper
bound.

| prompt | lower bound | upper bound |
|---|---|---|
| text | bytes / longest token | bytes (times what the normalizer can add) |
| plain chat | the user's texts, likewise | texts, likewise, plus the template's measured words |
| any other chat | the user's texts | none: counted exactly; `FALLBACK_RATIO` times its bytes where that fails |
| a template of the client's own, stored history | 0 | as above; never rendered here |
| token ids | their number | their number |
| audio, embeddings | 0 | one token a byte |

It must never know of pools, engines or HTTP.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from router.config.model import TokenizerConfig
from router.policy.demand import RequestClass
from router.request import ChatPrompt, Count, OpaquePrompt, Prompt, TextPrompts, TokenPrompts
from router.tokens.api import PromptCounter, TokenizerUnavailable, Unsettled
from router.tokens.calibration import BytesPerToken
from router.tokens.limits import UNKNOWN, TextLimits, TextSize, size_of
from router.tokens.offload import Missed, Offload
from router.tokens.overhead import ChatOverhead
from router.tokens.plain import PlainBounds
from router.tokens.size import ChatSize, chat_size
from router.tokens.tokenizer import Tokenizer, load_huggingface, load_tiktoken

#: Prompts of up to this many bytes have a thread of their own, some 20 ms each: a chat with tools does not wait behind
#: a line of long prompts.
SHORT_MAX_BYTES = 64 * 1024
#: Never tokenized: 16 MiB take some ten seconds, and no context in use holds what they come to.
EXACT_MAX_BYTES = 16 * 2**20
#: From here on a prompt whose lower bound is beyond every decision is not tokenized even with `exact: always`.
FAR_MIN_BYTES = 2**20
#: Tokens a byte of a chat that could not be counted. Printing JSON with indentation can double it; twice that again.
FALLBACK_RATIO = 4


def build_counter(config: TokenizerConfig, *, model: str) -> PromptCounter:
    """The counter of one model, its tokenizer loaded. Takes up to a few seconds; never touches the network.

    Raises: TokenizerUnavailable with what is missing and how to supply it.
    """
    try:
        return Counter(_load(config), config)
    except TokenizerUnavailable as error:
        raise TokenizerUnavailable(f"model {model!r}: {error}") from error


def _load(config: TokenizerConfig) -> Tokenizer | None:
    if config.kind == "estimate":
        return None
    if config.kind == "huggingface":
        return load_huggingface(_required_path(config, "the model's folder, with tokenizer.json in it"))
    if config.encoding is None:
        raise TokenizerUnavailable("tokenizer.encoding is not set: name one, such as o200k_base")
    return load_tiktoken(config.encoding, _required_path(config, "the folder with the encoding's file"))


def _required_path(config: TokenizerConfig, what: str) -> Path:
    if config.path is None:
        raise TokenizerUnavailable(f"tokenizer.path is not set: set it to {what}")
    return config.path


class Counter:
    """The counter of one model. Made for one event loop; keeps nothing of any prompt."""

    def __init__(self, tokenizer: Tokenizer | None, config: TokenizerConfig) -> None:
        self._tokenizer = tokenizer
        self._limits: TextLimits = UNKNOWN if tokenizer is None else tokenizer.limits
        self._overhead: ChatOverhead | None = None if tokenizer is None else tokenizer.overhead
        self._plain = None if self._overhead is None else PlainBounds(self._limits, self._overhead)
        self._always_exact = config.exact == "always"
        self._image_tokens = config.image_tokens
        self._short = Offload(timeout_s=config.timeout_s, threads=1, name="tokens-short")
        self._long = Offload(timeout_s=config.timeout_s, name="tokens-long")
        self._learned = BytesPerToken()
        self._misses = 0
        self._exact_mismatches = 0

    @property
    def misses(self) -> int:
        """Estimated prompts that the engine counted higher than the estimate."""
        return self._misses

    @property
    def exact_mismatches(self) -> int:
        """Prompts counted exactly that the engine counted otherwise: a template or tokenizer unlike the engine's."""
        return self._exact_mismatches

    @property
    def missed(self) -> Mapping[str, int]:
        """Exact counts that were needed and not had, by reason."""
        short, long = self._short.missed, self._long.missed
        return {
            reason.value: short.get(reason, 0) + long.get(reason, 0)
            for reason in Missed
            if reason in short or reason in long
        }

    def settle(
        self, prompt: Prompt, *, decision_tokens: Sequence[int], request_class: RequestClass | None
    ) -> Count | Unsettled:
        """See `PromptCounter.settle`."""
        if not isinstance(prompt, ChatPrompt):
            return self._settle_other(prompt, decision_tokens, request_class)
        size = chat_size(prompt)
        extra = self._limits.special_tokens if prompt.add_special_tokens else 0
        media_tokens = size.media * self._image_tokens
        is_bounded = False
        if self._overhead is None:
            lower, upper = 0, FALLBACK_RATIO * size.estimate_bytes + media_tokens + extra
        elif size.is_plain and self._plain is not None:
            lower, upper = self._plain.of(size)
            upper += extra
            is_bounded = self._limits.is_proven
        else:
            lower, upper = self._loose_bounds(prompt, size, self._overhead)
            upper += media_tokens + extra
        text_bytes = 0 if size.media or prompt.has_stored_history else size.estimate_bytes
        if (
            self._tokenizer is None
            or prompt.chat_template is not None
            or prompt.has_stored_history
            or (is_bounded and self._is_settled(lower, upper, decision_tokens, request_class, size.text_bytes))
            or _is_far(size.text_bytes, lower, decision_tokens)
        ):
            figure = self._learned.estimate_tokens(size.estimate_bytes, request_class) + media_tokens
            if figure < lower:
                figure = lower
            elif figure > upper:
                figure = upper
            if prompt.has_stored_history:
                method = "opaque"
            else:
                method = "learned" if figure < upper and self._learned.is_warm else "bytes"
            return Count(figure, figure, lower, upper, 1, False, method, text_bytes)
        bounds = Count(upper, upper, lower, upper, 1, False, "bytes", text_bytes)
        return Unsettled(prompt, bounds, size.media, media_tokens, size.estimate_bytes)

    async def count_exactly(self, unsettled: Unsettled) -> Count:
        """See `PromptCounter.count_exactly`."""
        tokenizer = self._tokenizer
        assert tokenizer is not None, "without a tokenizer everything is settled"
        prompt = unsettled.prompt
        if unsettled.work_bytes > EXACT_MAX_BYTES:
            return unsettled.bounds
        offload = self._short if unsettled.work_bytes <= SHORT_MAX_BYTES else self._long
        if isinstance(prompt, TextPrompts):
            counted = await offload.run(partial(_count_texts, tokenizer, prompt))
        else:
            counted = await offload.run(partial(_count_chat, tokenizer, prompt))
        if counted is None:
            return unsettled.bounds
        total, longest = sum(counted), max(counted, default=0)
        bounds = unsettled.bounds
        if isinstance(prompt, ChatPrompt) and (unsettled.media or not tokenizer.is_chat_exact):
            figure = total + unsettled.media_tokens
            lower, upper = min(bounds.lower_tokens, figure), max(bounds.upper_tokens, figure)
            return Count(figure, figure, lower, upper, 1, False, "opaque", bounds.text_bytes)
        return Count(total, longest, longest, longest, bounds.prompts, True, "exact", bounds.text_bytes)

    async def count(
        self, prompt: Prompt, *, decision_tokens: Sequence[int], request_class: RequestClass | None
    ) -> Count:
        """Settle, else count exactly."""
        settled = self.settle(prompt, decision_tokens=decision_tokens, request_class=request_class)
        return settled if isinstance(settled, Count) else await self.count_exactly(settled)

    def learn(self, count: Count, used_tokens: int, request_class: RequestClass | None) -> None:
        """See `PromptCounter.learn`."""
        has_text = self._learned.learn(count.text_bytes, used_tokens, request_class)
        if count.exact:
            if used_tokens != count.prompt_tokens:
                self._exact_mismatches += 1
        elif has_text and used_tokens > count.prompt_tokens:
            self._misses += 1

    def estimate_tokens(self, text_bytes: int, request_class: RequestClass | None) -> int:
        """See `PromptCounter.estimate_tokens`."""
        return self._learned.estimate_tokens(text_bytes, request_class)

    async def aclose(self) -> None:
        """See `PromptCounter.aclose`."""
        self._short.close()
        self._long.close()

    def _count_opaque(self, prompt: OpaquePrompt, request_class: RequestClass | None) -> Count:
        tokens = self._learned.estimate_tokens(prompt.bytes_total, request_class)
        return Count(tokens, tokens, 0, max(tokens, prompt.bytes_total), 1, exact=False, method="opaque")

    def _settle_other(
        self,
        prompt: TextPrompts | TokenPrompts | OpaquePrompt,
        decision_tokens: Sequence[int],
        request_class: RequestClass | None,
    ) -> Count | Unsettled:
        """What is no conversation."""
        if isinstance(prompt, TextPrompts):
            return self._settle_texts(prompt, decision_tokens, request_class)
        if isinstance(prompt, TokenPrompts):
            return _count_ids(prompt)
        return self._count_opaque(prompt, request_class)

    def _settle_texts(
        self, prompt: TextPrompts, decision_tokens: Sequence[int], request_class: RequestClass | None
    ) -> Count | Unsettled:
        extra = self._limits.special_tokens if prompt.add_special_tokens else 0
        sizes = [size_of(text) for text in prompt.texts]
        lowers = [self._limits.lower(size) + extra for size in sizes] or [0]
        uppers = [self._limits.upper(size) + extra for size in sizes] or [0]
        total = sum([size.bytes for size in sizes])
        lower, upper = max(lowers), max(uppers)
        if self._tokenizer is None or self._is_settled(lower, upper, decision_tokens, request_class, total):
            estimates = [
                self._estimate(size.bytes, extra, low, high, request_class)
                for size, low, high in zip(sizes, lowers, uppers, strict=False)
            ] or [0]
            figure = sum(estimates)
            method = "learned" if figure < sum(uppers) and self._learned.is_warm else "bytes"
            return Count(figure, max(estimates), lower, upper, len(sizes), False, method, total)
        bounds = Count(sum(uppers), upper, lower, upper, len(sizes), False, "bytes", total)
        return Unsettled(prompt, bounds, work_bytes=total)

    def _loose_bounds(self, chat: ChatPrompt, size: ChatSize, overhead: ChatOverhead) -> tuple[int, int]:
        """Lower, and an upper one that is no proof, of a chat that is not plain."""
        words_bytes = overhead.of(size.messages).bytes
        lower = 0
        if chat.chat_template is None:
            lower = self._limits.lower(TextSize(size.solid_bytes, size.solid_wide_bytes))
        return lower, FALLBACK_RATIO * (size.estimate_bytes + words_bytes)

    def _is_settled(
        self,
        lower: int,
        upper: int,
        decision_tokens: Sequence[int],
        request_class: RequestClass | None,
        text_bytes: int,
    ) -> bool:
        """Whether every decision falls the same way for all counts between the bounds, so that none is needed."""
        if _is_far(text_bytes, lower, decision_tokens):
            return True
        if self._always_exact or request_class is RequestClass.BATCH or not self._limits.is_proven:
            return False  # batch budgets are large, its prompts wait anyway, and each is worth the milliseconds
        for limit in decision_tokens:  # noqa: SIM110 - a generator would cost as much as all the bounds
            if lower <= limit < upper:
                return False
        return True

    def _estimate(
        self, text_bytes: int, extra_tokens: int, lower: int, upper: int, request_class: RequestClass | None
    ) -> int:
        """The learned figure, held inside the bounds."""
        learned = self._learned.estimate_tokens(text_bytes, request_class) + extra_tokens
        return min(upper, max(lower, learned))


def _is_far(text_bytes: int, lower: int, decision_tokens: Sequence[int]) -> bool:
    """Whether a large prompt is longer than anything is decided about."""
    return text_bytes >= FAR_MIN_BYTES and len(decision_tokens) > 0 and lower > max(decision_tokens)


def _count_texts(tokenizer: Tokenizer, prompt: TextPrompts) -> list[int]:
    return [tokenizer.count(text, add_special_tokens=prompt.add_special_tokens) for text in prompt.texts]


def _count_chat(tokenizer: Tokenizer, chat: ChatPrompt) -> list[int]:
    return [tokenizer.count(tokenizer.render(chat), add_special_tokens=chat.add_special_tokens)]


def _count_ids(prompt: TokenPrompts) -> Count:
    longest = max(prompt.lengths_tokens, default=0)
    total = sum(prompt.lengths_tokens)
    return Count(total, longest, longest, longest, len(prompt.lengths_tokens), exact=True, method="ids")
