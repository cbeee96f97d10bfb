"""What a prompt weighs, told in one bounded look on the event loop: bytes of text, pictures, and whether it is plain.

Plain means: nothing but system, user and assistant messages of one text each. Only of those it is known (measured, see
`overhead.py`) what the model's template adds; everything else is counted exactly or estimated from `estimate_bytes`.

Rules: at most `WALK_NODES_MAX` JSON values are looked at; past that the size of the client's JSON stands in, which is
never smaller than the text in it. It must never know of tokenizers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from router.request import ChatPrompt
from router.tokens.conversation import media_kind
from router.tokens.limits import EMPTY, TextSize, size_of

#: Bound of the look, a few milliseconds. A chat with 100 tools of 1 KB has about 3,000 values.
WALK_NODES_MAX = 20_000
#: What JSON adds to each value once it is printed: quotes, colon, comma, indentation.
_JSON_VALUE_BYTES = 6
#: What a template adds to a message where that was not measured.
_MESSAGE_BYTES = 32
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True, slots=True)
class ChatSize:
    """The weight of one conversation.

    `text`: all message content that is text. `solid`: the user's texts without white space around them, which no
    known template leaves out. `media`: images and the like. `estimate_bytes`: everything that looks like text,
    template words not included; the base of the learned estimate.
    """

    messages: int
    text: TextSize
    solid: TextSize
    media: int
    is_plain: bool
    estimate_bytes: int


class _Walk:
    """Adds up JSON values until it has seen `WALK_NODES_MAX` of them."""

    __slots__ = ("bytes", "media", "nodes")

    def __init__(self) -> None:
        self.bytes = 0
        self.media = 0
        self.nodes = 0

    @property
    def is_spent(self) -> bool:
        return self.nodes > WALK_NODES_MAX

    def add(self, root: object) -> None:
        """Every key and value under `root`, depth first and without recursion; media parts count as media only."""
        stack = [root]
        while stack and not self.is_spent:
            value = stack.pop()
            self.nodes += 1
            if isinstance(value, str):
                self.bytes += size_of(value).bytes + _JSON_VALUE_BYTES
            elif isinstance(value, Mapping):
                if "type" in value and media_kind(value) is not None:
                    self.media += 1
                    continue
                self.nodes += len(value)
                self.bytes += sum(len(str(key)) + _JSON_VALUE_BYTES for key in list(value)[:WALK_NODES_MAX])
                stack.extend(list(value.values())[:WALK_NODES_MAX])
            elif isinstance(value, list | tuple):
                stack.extend(value[:WALK_NODES_MAX])
            else:
                self.bytes += _JSON_VALUE_BYTES + 2


def chat_size(chat: ChatPrompt) -> ChatSize:
    """Weigh a conversation."""
    walk = _Walk()
    is_plain = not (
        chat.tools
        or chat.template_kwargs
        or chat.chat_template is not None
        or chat.continue_final_message
        or chat.has_stored_history
        or len(chat.messages) > WALK_NODES_MAX
    )
    text, solid = EMPTY, EMPTY
    for message in chat.messages[:WALK_NODES_MAX]:
        content = _only_text(message)
        if content is None:
            is_plain = False
            walk.add(message)
            continue
        walk.nodes += 1
        text += size_of(content)
        if message["role"] == "user":
            solid += size_of(content.strip())
    for extra in (chat.tools, chat.template_kwargs, chat.chat_template):
        if extra:
            walk.add(extra)
    estimate = text.bytes + walk.bytes
    if walk.is_spent or len(chat.messages) > WALK_NODES_MAX:
        is_plain, estimate = False, max(estimate, chat.bytes_total)
    return ChatSize(
        messages=len(chat.messages),
        text=text,
        solid=solid,
        media=walk.media,
        is_plain=is_plain and len(chat.messages) > 0,
        estimate_bytes=estimate + _MESSAGE_BYTES * len(chat.messages),
    )


def _only_text(message: object) -> str | None:
    """The text of a plain message; None if there is anything else to it."""
    if not isinstance(message, Mapping):
        return None
    role = message.get("role")
    if not isinstance(role, str) or role not in _PLAIN_ROLES:
        return None
    if any(value is not None for key, value in message.items() if key not in {"role", "content"}):
        return None
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        part = content[0]
        content = part.get("text") if part.get("type") == "text" and len(part) == 2 else None
    return content if isinstance(content, str) else None
