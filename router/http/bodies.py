"""What of each JSON body the router reads: one struct per endpoint, nothing more than is needed.

Unknown fields are skipped here and reach the engine untouched. A field of a wrong type is the client's error and is
named in the answer. Content that only the engine judges (roles, part types, schemas) stays unchecked.
"""

from typing import Any

import msgspec

from router.errors import bad_request
from router.http import convert
from router.request import ChatPrompt, OpaquePrompt, Prompt, TextPrompts, TokenPrompts

#: Pairs of texts are written out to be counted up to here: a long query times many documents is far more than the body.
_PAIRS_MAX_CHARS = 32 * 2**20


class GenerationBody(msgspec.Struct):
    """Fields that every generating endpoint shares."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    priority: Any = msgspec.UNSET
    kv_transfer_params: Any = msgspec.UNSET
    service_tier: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def cap(self) -> tuple[str, int | None]:
        """The field that caps the output, and its value."""
        raise NotImplementedError

    def prompt(self, size_bytes: int) -> Prompt:
        """The prompt as it is to be counted; `size_bytes` is the body's size."""
        raise NotImplementedError


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    def cap(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def prompt(self, size_bytes: int) -> Prompt:
        if self.messages is msgspec.UNSET:
            raise missing("messages")
        if not self.messages:
            raise bad_request("`messages` is empty: a chat needs at least one message.", param="messages")
        kwargs = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            kwargs["documents"] = self.documents
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        return ChatPrompt(
            messages=self.messages,
            tools=self.tools,
            chat_template=self.chat_template,
            template_kwargs=kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            bytes_total=size_bytes,
        )


class CompletionsBody(GenerationBody):
    prompt_: Any = msgspec.field(default=msgspec.UNSET, name="prompt")
    prompt_embeds: Any = None
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    add_special_tokens: bool = True
    best_of: int | None = None

    #: vLLM's default where the field is absent; an explicit null means "to the end of the context".
    DEFAULT_MAX_TOKENS = 16

    def cap(self) -> tuple[str, int | None]:
        return "max_tokens", self.DEFAULT_MAX_TOKENS if self.max_tokens is msgspec.UNSET else self.max_tokens

    def prompt(self, size_bytes: int) -> Prompt:
        if self.prompt_embeds is not None:
            return OpaquePrompt(size_bytes)
        if self.prompt_ is msgspec.UNSET or self.prompt_ is None:
            raise missing("prompt")
        return texts_or_tokens(self.prompt_, "prompt", add_special_tokens=self.add_special_tokens)


class ResponsesBody(GenerationBody):
    input: Any = msgspec.UNSET
    instructions: Any = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    background: bool | None = None

    def cap(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    def prompt(self, size_bytes: int) -> Prompt:
        if self.input is msgspec.UNSET or self.input is None:
            raise missing("input")
        if not isinstance(self.input, str | list):
            raise bad_request("`input` must be a string or a list of items.", param="input")
        chat = convert.from_responses(self.instructions, self.input, self.tools)
        return ChatPrompt(
            messages=chat.messages,
            tools=chat.tools,
            template_kwargs=self.chat_template_kwargs or {},
            bytes_total=size_bytes,
            has_stored_history=self.previous_response_id is not None or not chat.complete,
        )


class MessagesBody(GenerationBody):
    messages: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    system: Any = None
    max_tokens: int | None = None

    def cap(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    def prompt(self, size_bytes: int) -> Prompt:
        if self.messages is msgspec.UNSET:
            raise missing("messages")
        chat = convert.from_anthropic(self.system, self.messages, self.tools)
        return ChatPrompt(
            messages=chat.messages,
            tools=chat.tools,
            template_kwargs=self.chat_template_kwargs or {},
            bytes_total=size_bytes,
            has_stored_history=not chat.complete,
        )


class PoolingBody(GenerationBody):
    """embeddings, pooling, classify: `input` or `messages`; score and rerank: pairs. Nothing is generated."""

    input: Any = msgspec.UNSET
    messages: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    text_1: Any = msgspec.UNSET
    text_2: Any = msgspec.UNSET
    queries: Any = msgspec.UNSET
    query: Any = msgspec.UNSET
    documents: Any = msgspec.UNSET

    def cap(self) -> tuple[str, int | None]:
        return "max_tokens", 0

    def prompt(self, size_bytes: int) -> Prompt:
        if self.messages is not msgspec.UNSET:
            return ChatPrompt(messages=self.messages, bytes_total=size_bytes)
        if self.input is not msgspec.UNSET:
            return texts_or_tokens(self.input, "input", add_special_tokens=True)
        pairs = self._pairs()
        if pairs is None:
            raise missing("input")
        return TextPrompts(pairs) if pairs else OpaquePrompt(size_bytes)

    def _pairs(self) -> tuple[str, ...] | None:
        """Query and document share one sequence; None where neither is given, empty where they are not texts or
        too long to be paired here."""
        first = next((v for v in (self.query, self.text_1, self.queries) if v is not msgspec.UNSET), None)
        second = next((v for v in (self.documents, self.text_2) if v is not msgspec.UNSET), None)
        if first is None or second is None:
            return None
        firsts, seconds = (value if isinstance(value, list) else [value] for value in (first, second))
        if not all(isinstance(value, str) for value in (*firsts, *seconds)) or not firsts or not seconds:
            return ()
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if sum(map(len, firsts)) + sum(map(len, seconds)) > _PAIRS_MAX_CHARS:
            return ()
        return tuple(a + b for a, b in zip(firsts, seconds, strict=False))


def texts_or_tokens(value: Any, name: str, *, add_special_tokens: bool) -> Prompt:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return TextPrompts((value,), add_special_tokens)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return TextPrompts(tuple(value), add_special_tokens)
        if _are_ids(value):
            return TokenPrompts((len(value),))
        if all(isinstance(item, list) and item and _are_ids(item) for item in value):
            return TokenPrompts(tuple(len(item) for item in value))
    raise bad_request(
        f"`{name}` must be a string, a non-empty list of strings, a non-empty list of token ids, or a list of such "
        "lists; the kinds may not be mixed.",
        param=name,
    )


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def missing(name: str) -> Exception:
    """400 for a field that has to be there."""
    return bad_request(f"`{name}` is missing.", param=name, code="missing_required_parameter")
