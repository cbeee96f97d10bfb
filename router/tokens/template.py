"""Renders a conversation with the model's own chat template, as the engine renders it.

Rules: only templates that the operator supplied are run, never a client's; rendering goes through transformers'
sandboxed `apply_chat_template` with `tokenize=False`, which behaves alike in transformers 4.57 and 5 (what it returns
with `tokenize=True` differs). Everything here may take long and belongs in a worker thread. Source: vLLM 0.32,
`vllm/renderers/hf.py`, `vllm/renderers/online_renderer.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from router.request import ChatPrompt
from router.tokens.content_format import ContentFormat, detect_content_format, parse_template, template_variables
from router.tokens.conversation import CannotRender, Message, engine_messages, engine_tools

#: Arguments of `apply_chat_template` itself that reach the rendered text. All else must be a variable of the template.
_RENDERING_ARGUMENTS = frozenset({"documents", "tools", "add_generation_prompt", "continue_final_message"})
#: The engine refuses a request that sets these.
_FORBIDDEN_ARGUMENTS = frozenset({"chat_template", "tokenize"})


class TemplateTokenizer(Protocol):
    """The part of a transformers tokenizer that rendering needs."""

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str: ...

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class _Template:
    """One template with what its syntax tree tells."""

    source: str
    content_format: ContentFormat
    variables: frozenset[str]
    knows_developer: bool


class ChatRenderer:
    """The model's templates: one for chats with tools and one for chats without, often the same.

    `processor_template`: a multimodal model's processor may bring its own, used where there are no tools.
    """

    def __init__(self, tokenizer: TemplateTokenizer, *, processor_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._with_tools = _template(_select(tokenizer, tools=[{}]))
        plain = processor_template if processor_template is not None else _select(tokenizer, tools=None)
        self._plain = _template(plain)

    @property
    def is_available(self) -> bool:
        """Whether chats can be rendered at all: the model has a template."""
        return self._plain is not None

    def content_format(self, *, has_tools: bool) -> ContentFormat | None:
        """The form of content that the template wants; None without a template."""
        template = self._with_tools if has_tools else self._plain
        return None if template is None else template.content_format

    def render(self, chat: ChatPrompt) -> str:
        """The text the engine would tokenize.

        Raises: CannotRender where the engine would refuse, and whatever a template raises.
        """
        if chat.chat_template is not None:
            raise CannotRender("a template of the client's own is not run here")
        tools = engine_tools(chat.tool_list())
        kwargs = _engine_kwargs(chat)
        tools = kwargs.pop("tools", tools)
        template = self._with_tools if tools is not None else self._plain
        if template is None:
            raise CannotRender("the model has no chat template")
        messages = engine_messages(chat.messages, template.content_format)
        if not template.knows_developer and any(message["role"] == "developer" for message in messages):
            messages = _one_system_message([_developer_as_system(message) for message in messages])
        accepted = {
            name: value for name, value in kwargs.items() if name in template.variables or name in _RENDERING_ARGUMENTS
        }
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template.source, tokenize=False, **accepted
        )
        if not isinstance(text, str):
            raise CannotRender("the template did not render to one text")
        return text


def _select(tokenizer: TemplateTokenizer, *, tools: list[Any] | None) -> str | None:
    """The template transformers would choose, or None where the model has none."""
    try:
        return tokenizer.get_chat_template(None, tools)
    except ValueError:
        return None


def _template(source: str | None) -> _Template | None:
    if source is None:
        return None
    return _Template(
        source=source,
        content_format=detect_content_format(source),
        variables=template_variables(parse_template(source)),
        knows_developer='"developer"' in source or "'developer'" in source,
    )


def _engine_kwargs(chat: ChatPrompt) -> dict[str, Any]:
    """What the engine passes on to the template besides the messages, in its precedence."""
    given: Mapping[str, Any] = chat.template_kwargs
    if not _FORBIDDEN_ARGUMENTS.isdisjoint(given):
        raise CannotRender("chat_template_kwargs that the engine refuses")
    kwargs = {name: value for name, value in given.items() if not (value is None and name in _SKIPPED_WHEN_NONE)}
    effort = kwargs.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in kwargs:
        kwargs["enable_thinking"] = effort != "none"
    kwargs["add_generation_prompt"] = chat.add_generation_prompt
    kwargs["continue_final_message"] = chat.continue_final_message
    return kwargs


_SKIPPED_WHEN_NONE = frozenset({"documents", "reasoning_effort"})


def _developer_as_system(message: Message) -> Message:
    """Templates that do not know the `developer` role are given `system`."""
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _one_system_message(messages: list[Message]) -> list[Message]:
    """Several or late system messages become one in front, texts joined by an empty line."""
    places = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if places in ([], [0]):
        return messages
    texts = (_plain_text(messages[place]["content"]) for place in places)
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _plain_text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, dict) and "text" in part)
    return str(content)
