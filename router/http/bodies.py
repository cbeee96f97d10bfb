"""What of each JSON body the router reads: one struct per endpoint, nothing more than is needed.

Unknown fields are skipped here and reach the engine untouched. A field of a wrong type is the client's error and is
named in the answer. Content that only the engine judges (roles, part types, schemas) stays unchecked.

Prompts are read in two steps: the body's decoder keeps them as JSON (`msgspec.Raw`, a view of the body), and `prompt`
decodes what has to be looked at.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from router.errors import bad_request
from router.http import convert
from router.http.decoding import LOOK_MIN_BYTES, decode, decoding_mistake, is_crowded
from router.http.texts import pairs, texts_or_tokens
from router.request import ChatPrompt, OpaquePrompt, Prompt, TextPrompts

#: A field of JSON that may be absent.
_Json = msgspec.Raw | msgspec.UnsetType


#: Most chats have no options for their template.
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class _AnyObject(msgspec.Struct, gc=False):
    """Some JSON object, of which nothing is read."""


_ANY = msgspec.json.Decoder(Any)
_MESSAGES = msgspec.json.Decoder(list[dict[str, Any]])
_OBJECTS = msgspec.json.Decoder(list[dict[str, Any]] | None)
_OBJECT = msgspec.json.Decoder(dict[str, Any] | None)
_ARE_OBJECTS = msgspec.json.Decoder(list[_AnyObject] | None)


class GenerationBody(msgspec.Struct, gc=False):
    """Fields that every generating endpoint shares."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    priority: _Json = msgspec.UNSET
    kv_transfer_params: _Json = msgspec.UNSET
    service_tier: str | None = None
    tools: _Json = msgspec.UNSET
    chat_template: str | None = None
    chat_template_kwargs: _Json = msgspec.UNSET

    def cap(self) -> int | None:
        """What the output is capped at; 0 where nothing is generated."""
        raise NotImplementedError

    def cap_field(self) -> str:
        """The field that `cap` was read from."""
        return "max_tokens"

    def prompt(self, raw: bytes, crowded: bool | None = None) -> Prompt:
        """The prompt as it is to be counted; `raw` is the body, `crowded` whether it `is_crowded`, where that is known.
        Conversations of too many parts are opaque: they are one sequence whatever is in them.

        Raises: `ApiError` 400, also where anything else that has to be there is missing; `RecursionError`.
        """
        raise NotImplementedError

    def prefix(self) -> tuple[msgspec.Raw, ...]:
        """See `ParsedRequest.prefix`."""
        return ()

    def template_options(self) -> dict[str, Any]:
        """`chat_template_kwargs`, empty where there are none."""
        if self.chat_template_kwargs is msgspec.UNSET:
            return {}
        return decode(_OBJECT, self.chat_template_kwargs, "chat_template_kwargs") or {}

    def tools_json(self) -> msgspec.Raw | None:
        """The tools undecoded, None where there are none; checked to be a list of objects."""
        if self.tools is msgspec.UNSET or not decode(_ARE_OBJECTS, self.tools, "tools"):
            return None
        return self.tools

    def tool_objects(self) -> list[dict[str, Any]] | None:
        """The tools decoded."""
        return None if self.tools is msgspec.UNSET else decode(_OBJECTS, self.tools, "tools")


class ChatBody(GenerationBody):
    messages: _Json = msgspec.UNSET
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: _Json = msgspec.UNSET
    reasoning_effort: str | None = None

    def cap(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def cap_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def prompt(self, raw: bytes, crowded: bool | None = None) -> Prompt:
        if self.messages is msgspec.UNSET:
            raise missing("messages")
        if (len(raw) >= LOOK_MIN_BYTES and is_crowded(raw)) if crowded is None else crowded:
            return OpaquePrompt(len(raw))
        try:
            messages = _MESSAGES.decode(self.messages)
        except (RecursionError, msgspec.DecodeError) as error:
            raise decoding_mistake(error, "messages") from None
        if not messages:
            raise bad_request("`messages` is empty: a chat needs at least one message.", param="messages")
        has_options = (
            self.chat_template_kwargs is not msgspec.UNSET
            or self.documents is not msgspec.UNSET
            or self.reasoning_effort is not None
        )
        return ChatPrompt(
            messages,
            None if self.tools is msgspec.UNSET else self.tools_json(),
            self.chat_template,
            self.template_options() if has_options else _NO_OPTIONS,
            self.add_generation_prompt,
            self.continue_final_message,
            self.add_special_tokens,
            len(raw),
        )

    def template_options(self) -> dict[str, Any]:
        """With what else reaches the template."""
        kwargs = super().template_options()
        if self.documents is not msgspec.UNSET:
            documents = decode(_OBJECTS, self.documents, "documents")
            if documents is not None:
                kwargs["documents"] = documents
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        return kwargs

    def prefix(self) -> tuple[msgspec.Raw, ...]:
        assert self.messages is not msgspec.UNSET, "checked to be there"
        return (self.messages,)


class CompletionsBody(GenerationBody):
    prompt_: _Json = msgspec.field(default=msgspec.UNSET, name="prompt")
    prompt_embeds: _Json = msgspec.UNSET
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    add_special_tokens: bool = True
    best_of: int | None = None

    #: vLLM's default where the field is absent; an explicit null means "to the end of the context".
    DEFAULT_MAX_TOKENS = 16

    def cap(self) -> int | None:
        return self.DEFAULT_MAX_TOKENS if self.max_tokens is msgspec.UNSET else self.max_tokens

    def prompt(self, raw: bytes, crowded: bool | None = None) -> Prompt:  # noqa: ARG002  # as its base
        if not _is_absent(self.prompt_embeds):
            return OpaquePrompt(len(raw))
        if self.prompt_ is msgspec.UNSET or _is_absent(self.prompt_):
            raise missing("prompt")
        return texts_or_tokens(self.prompt_, "prompt", add_special_tokens=self.add_special_tokens)

    def prefix(self) -> tuple[msgspec.Raw, ...]:
        return _given(self.prompt_)


class ResponsesBody(GenerationBody):
    input: _Json = msgspec.UNSET
    instructions: _Json = msgspec.UNSET
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    background: bool | None = None

    def cap(self) -> int | None:
        return self.max_output_tokens

    def cap_field(self) -> str:
        return "max_output_tokens"

    def prompt(self, raw: bytes, crowded: bool | None = None) -> Prompt:
        if _is_absent(self.input):
            raise missing("input")
        if self.background:
            raise bad_request(
                "`background: true` is not offered here: the answer would live in one engine's memory and be lost with "
                "it. Send the request without it.",
                param="background",
                code="unsupported_parameter",
            )
        if is_crowded(raw) if crowded is None else crowded:
            return OpaquePrompt(len(raw))
        given = _value(self.input)
        if not isinstance(given, str | list):
            raise bad_request("`input` must be a string or a list of items.", param="input")
        chat = convert.from_responses(_value(self.instructions), given, self.tool_objects())
        return ChatPrompt(
            messages=chat.messages,
            tools=chat.tools,
            template_kwargs=self.template_options(),
            bytes_total=len(raw),
            has_stored_history=self.previous_response_id is not None or not chat.complete,
        )

    def prefix(self) -> tuple[msgspec.Raw, ...]:
        return _given(self.instructions, self.input)


class MessagesBody(GenerationBody):
    messages: _Json = msgspec.UNSET
    system: _Json = msgspec.UNSET
    max_tokens: int | None = None

    def cap(self) -> int | None:
        return self.max_tokens

    def prompt(self, raw: bytes, crowded: bool | None = None) -> Prompt:
        if self.messages is msgspec.UNSET:
            raise missing("messages")
        if self.max_tokens is None:
            raise missing("max_tokens")
        if is_crowded(raw) if crowded is None else crowded:
            return OpaquePrompt(len(raw))
        messages = decode(_MESSAGES, self.messages, "messages")
        chat = convert.from_anthropic(_value(self.system), messages, self.tool_objects())
        return ChatPrompt(
            messages=chat.messages,
            tools=chat.tools,
            template_kwargs=self.template_options(),
            bytes_total=len(raw),
            has_stored_history=not chat.complete,
        )

    def prefix(self) -> tuple[msgspec.Raw, ...]:
        return _given(self.system, self.messages)


class PoolingBody(GenerationBody):
    """embeddings, pooling, classify: `input` or `messages`; score and rerank: pairs. Nothing is generated."""

    input: _Json = msgspec.UNSET
    messages: _Json = msgspec.UNSET
    text_1: _Json = msgspec.UNSET
    text_2: _Json = msgspec.UNSET
    queries: _Json = msgspec.UNSET
    query: _Json = msgspec.UNSET
    documents: _Json = msgspec.UNSET

    def cap(self) -> int | None:
        return 0

    def prompt(self, raw: bytes, crowded: bool | None = None) -> Prompt:
        if self.messages is not msgspec.UNSET:
            if is_crowded(raw) if crowded is None else crowded:
                return OpaquePrompt(len(raw))
            messages = decode(_MESSAGES, self.messages, "messages")
            return ChatPrompt(messages, bytes_total=len(raw))
        if self.input is not msgspec.UNSET:
            return texts_or_tokens(self.input, "input", add_special_tokens=True)
        sides = self._sides()
        if sides is None:
            raise missing("input")
        paired = pairs(*sides)
        return TextPrompts(paired) if paired else OpaquePrompt(len(raw))

    def _sides(self) -> tuple[msgspec.Raw, msgspec.Raw] | None:
        """What is compared with what; None where either is missing."""
        first, second = _given(self.query, self.text_1, self.queries), _given(self.documents, self.text_2)
        return (first[0], second[0]) if first and second else None


def _given(*fields: _Json) -> tuple[msgspec.Raw, ...]:
    return tuple([field for field in fields if field is not msgspec.UNSET])


def _value(field: _Json) -> Any:
    """The value of a field, None where it is absent."""
    return None if field is msgspec.UNSET else decode(_ANY, field)


def _is_absent(field: _Json) -> bool:
    """Whether the field is not there, or null."""
    return field is msgspec.UNSET or memoryview(field) == b"null"  # type: ignore[comparison-overlap]  # compares, uncopied


def missing(name: str) -> Exception:
    """400 for a field that has to be there."""
    return bad_request(f"`{name}` is missing.", param=name, code="missing_required_parameter")
