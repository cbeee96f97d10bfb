"""One HTTP call: what was asked (`ParsedRequest`) and what became of it (`RequestRecord`).

Raw dicts end here. The client's bytes are kept and forwarded unless a field must change.

Values made for every request are msgspec structs, whose making costs a tenth of a frozen dataclass's. `gc=False`: none
of them can be part of a reference cycle.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from router.errors import ErrorShape
from router.policy.demand import RequestClass
from router.policy.outcome import Outcome

#: How much of a prompt tells conversations apart; some 16,000 tokens, more than system prompts have.
PREFIX_MAX_BYTES = 64 * 1024


class Endpoint(StrEnum):
    """The kinds of inference call. The value is the metric label."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    EMBEDDINGS = "embeddings"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    SCORE = "score"
    RERANK = "rerank"
    POOLING = "pooling"
    CLASSIFY = "classify"
    AUDIO = "audio"

    @property
    def generates(self) -> bool:
        """Whether the engine decodes tokens for it, so that an output budget is needed."""
        return self in _GENERATING

    @property
    def error_shape(self) -> ErrorShape:
        """Which family of clients reads its errors."""
        return ErrorShape.ANTHROPIC if self in _ANTHROPIC else ErrorShape.OPENAI


_GENERATING = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES})
_ANTHROPIC = frozenset({Endpoint.MESSAGES, Endpoint.COUNT_TOKENS})


class ChatPrompt(msgspec.Struct, frozen=True, gc=False):
    """A conversation, as the chat template takes it.

    `messages` and `tools` are the client's own objects in OpenAI's chat form (Anthropic and Responses bodies are
    converted by `http/parsing.py` the way the engine does it). `tools` may still be the JSON they came in, a list of
    objects: most chats with tools are never rendered here, see `tool_list`. `template_kwargs` holds
    `chat_template_kwargs` merged with what else reaches the template (`documents`, `reasoning_effort`). `bytes_total`
    is the size of the JSON the conversation came in, an upper bound of the rendered text less the template's own words.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | msgspec.Raw | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    bytes_total: int = 0
    #: A conversation the engine keeps (`previous_response_id`): what is here is not all that will be in the prompt.
    has_stored_history: bool = False

    def tool_list(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools as objects. Takes a while for many of them.

        Raises: `msgspec.DecodeError` for a number that is too large, `RecursionError`.
        """
        return _TOOLS_DECODER.decode(self.tools) if isinstance(self.tools, msgspec.Raw) else self.tools


_TOOLS_DECODER = msgspec.json.Decoder(list[dict[str, Any]] | None)


class TextPrompts(msgspec.Struct, frozen=True, gc=False):
    """One or more plain texts, each a prompt of its own."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True


class TokenPrompts(msgspec.Struct, frozen=True, gc=False):
    """Prompts given as token ids: nothing to count, only their lengths (in tokens)."""

    lengths_tokens: tuple[int, ...]


class OpaquePrompt(msgspec.Struct, frozen=True, gc=False):
    """Something whose tokens only the engine can know (audio, prompt embeddings). `bytes_total` is its size."""

    bytes_total: int


Prompt = ChatPrompt | TextPrompts | TokenPrompts | OpaquePrompt


class ParsedRequest(msgspec.Struct, frozen=True, gc=False):
    """One inference call after parsing.

    `path` is what the engine is asked for, query string included. `body` is exactly what the client sent. `model` is
    the name it used (an alias perhaps), `max_tokens` its output cap (the newer name wins) or None, `n` sequences per
    prompt. `asked_include_usage`: the client itself wants the usage chunk. `hint` is the class asked for in a header
    or by `service_tier: flex`, `hint_source` says which. `edits` are top-level fields that must change in the
    forwarded body: a new JSON value, or None to remove the field.
    """

    request_id: str
    endpoint: Endpoint
    path: str
    body: bytes
    model: str
    prompt: Prompt
    stream: bool = False
    max_tokens: int | None = None
    n: int = 1
    asked_include_usage: bool = False
    hint: RequestClass | None = None
    hint_source: str | None = None
    previous_response_id: str | None = None
    edits: Mapping[str, Any] = {}
    prefix: tuple[msgspec.Raw, ...] = ()
    #: Of a multipart form: where in `body` the model's name begins and ends.
    model_span: tuple[int, int] | None = None

    def prefix_bytes(self) -> bytes:
        """The beginning of the prompt as JSON, at most 64 KiB; empty where it is not known.

        Two turns of one conversation begin alike, up to the bracket that closes the shorter one. Not what a template
        makes of it, and without tools: an engine's cache may know more prompts as alike, or fewer.
        """
        if len(self.prefix) == 1:
            return bytes(memoryview(self.prefix[0])[:PREFIX_MAX_BYTES])
        room = PREFIX_MAX_BYTES
        parts: list[bytes] = []
        for value in self.prefix:
            parts.append(bytes(memoryview(value)[:room]))
            room -= len(parts[-1])
        return b"".join(parts)


class Count(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a prompt, and how sure we are.

    `prompt_tokens`: the sum over all prompts; exact, or the figure to budget with. `longest_tokens`: the longest
    single prompt. `lower_tokens` and `upper_tokens` bound `longest_tokens`; all three are equal where `exact`.
    `method` is a small label: `exact`, `ids`, `bytes`, `learned`, `engine`, `opaque`. `text_bytes`: what was weighed,
    for the learned bytes per token; 0 where the prompt says nothing about them (ids, media, a stored history).
    """

    prompt_tokens: int
    longest_tokens: int
    lower_tokens: int
    upper_tokens: int
    prompts: int
    exact: bool
    method: str
    text_bytes: int = 0


class RequestRecord(msgspec.Struct, gc=False):
    """What became of one call; filled along the walk, read once at the end by `observe/`.

    Times are monotonic seconds. `engine` and `relay` are names from the configuration, never URLs.
    """

    request_id: str
    arrived_at_s: float
    endpoint: str = "none"
    model: str = "none"
    tenant: str = "none"
    request_class: RequestClass | None = None
    reason: str = "none"
    pool: str = "none"
    engine: str | None = None
    relay: str | None = None
    count: Count | None = None
    stream: bool = False
    status: int | None = None
    outcome: Outcome | None = None
    error_code: str | None = None
    attempts: int = 0
    hold_wait_s: float = 0.0
    queue_wait_s: float = 0.0
    #: When the attempt under way was sent; None while the request waits for a place, also after a failed attempt.
    sent_at_s: float | None = None
    #: Seconds from arrival to the first sending, waits for a place left out: what the router itself took.
    overhead_s: float | None = None
    first_token_at_s: float | None = None
    ended_at_s: float | None = None
    prompt_tokens_used: int | None = None
    completion_tokens_used: int | None = None
    #: Only where a whole answer told no usage. The prompt's estimate is then its `count`.
    completion_tokens_estimated: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0

    def note_sent(self, now_s: float) -> None:
        """The request goes out, to an engine or relay; once for each attempt."""
        self.sent_at_s = now_s
        if self.overhead_s is None:
            self.overhead_s = max(0.0, now_s - self.arrived_at_s - self.hold_wait_s - self.queue_wait_s)
