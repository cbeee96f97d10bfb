"""What a prompt weighs, told in one bounded look on the event loop: bytes of text, pictures, and whether it is plain.

Plain means: nothing but system, user and assistant messages of one text each. Only of those it is known (measured, see
`overhead.py`) what the model's template adds; everything else is counted exactly or estimated from `estimate_bytes`.

Rules: at most `WALK_NODES_MAX` JSON values are looked at; past that the size of the client's JSON stands in, which is
never smaller than the text in it. It must never know of tokenizers.
"""

from collections.abc import Mapping

import msgspec

from router.request import ChatPrompt
from router.tokens.conversation import media_kind
from router.tokens.limits import size_of

#: Bound of the look, a few milliseconds. A chat with 100 tools of 1 KB has about 3,000 values.
WALK_NODES_MAX = 20_000
#: What JSON adds to each value once it is printed: quotes, colon, comma, indentation.
_JSON_VALUE_BYTES = 6
#: What a template adds to a message where that was not measured.
_MESSAGE_BYTES = 32
_PLAIN_ROLES = ("system", "user", "assistant")


class ChatSize(msgspec.Struct, frozen=True, gc=False):
    """The weight of one conversation.

    `text_bytes`: all message content that is text. `solid_bytes`: the user's texts without white space around them,
    which no known template leaves out. Of both, `wide` ones as `limits.TextSize` has them. `media`: images and the
    like. `estimate_bytes`: everything that looks like text, template words not included; the base of the learned
    estimate.
    """

    messages: int
    text_bytes: int
    wide_bytes: int
    solid_bytes: int
    solid_wide_bytes: int
    media: int
    is_plain: bool
    estimate_bytes: int


class _Walk:
    """Adds up JSON values until it has seen `WALK_NODES_MAX` of them."""

    __slots__ = ("bytes", "media", "nodes")

    def __init__(self, nodes: int) -> None:
        """`nodes`: how many values were looked at before."""
        self.bytes = 0
        self.media = 0
        self.nodes = nodes

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
    messages = chat.messages
    others: list[object] = []
    text_bytes = wide_bytes = solid_bytes = solid_wide_bytes = 0
    is_whole = len(messages) <= WALK_NODES_MAX
    for message in messages if is_whole else messages[:WALK_NODES_MAX]:
        content = message.get("content") if type(message) is dict and len(message) == 2 else None
        if type(content) is not str or message.get("role") not in _PLAIN_ROLES:
            content = _only_text(message)
            if content is None:
                others.append(message)
                continue
        is_users = message["role"] == "user"
        if content.isascii():
            text_bytes += len(content)
            if is_users:
                solid_bytes += len(content.strip())
        else:
            size = size_of(content)
            text_bytes += size.bytes
            wide_bytes += size.wide_bytes
            if is_users:
                solid = size_of(content.strip())
                solid_bytes += solid.bytes
                solid_wide_bytes += solid.wide_bytes
    is_more = (
        chat.tools
        or chat.template_kwargs
        or chat.chat_template is not None
        or chat.continue_final_message
        or chat.has_stored_history
    )
    if not (others or is_more) and is_whole and messages:
        estimate_bytes = text_bytes + _MESSAGE_BYTES * len(messages)
        return ChatSize(len(messages), text_bytes, wide_bytes, solid_bytes, solid_wide_bytes, 0, True, estimate_bytes)
    walk = _weigh(chat, others)
    estimate_bytes = text_bytes + walk.bytes
    if not is_whole or walk.is_spent:
        estimate_bytes = max(estimate_bytes, chat.bytes_total)
    estimate_bytes += _MESSAGE_BYTES * len(messages)
    return ChatSize(
        len(messages), text_bytes, wide_bytes, solid_bytes, solid_wide_bytes, walk.media, False, estimate_bytes
    )


def _weigh(chat: ChatPrompt, messages: list[object]) -> _Walk:
    """Messages that are more than one text, and what else reaches the template. Tools that are still JSON weigh what
    that does."""
    walk = _Walk(len(chat.messages) - len(messages))
    for message in messages:
        walk.add(message)
    if isinstance(chat.tools, msgspec.Raw):
        walk.bytes += memoryview(chat.tools).nbytes
    elif chat.tools:
        walk.add(chat.tools)
    for extra in (chat.template_kwargs, chat.chat_template):
        if extra:
            walk.add(extra)
    return walk


def _only_text(message: object) -> str | None:
    """The text of a plain message; None if there is anything else to it."""
    if not isinstance(message, dict) or message.get("role") not in _PLAIN_ROLES:
        return None
    content = message.get("content")
    if len(message) > 2 and any(
        value is not None for key, value in message.items() if key != "role" and key != "content"
    ):
        return None
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        content = part.get("text") if part.get("type") == "text" and len(part) == 2 else None
    return content if isinstance(content, str) else None
