"""What a chat template adds to a plain conversation, measured at load by rendering a few.

Of each probe it is checked that the template shows every text once, the user's surely; a template that repeats or
drops texts gets no measure, and its chats are counted exactly. The measure is not a proof (a template is a program),
so twice of what was seen is used as the bound.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.request import ChatPrompt
from router.tokens.limits import EMPTY, TextSize, size_of

#: Roles of the probes: each longer one lies beside a shorter, so that the growth a message is seen. Templates that
#: insist on an order refuse some; the first two are required.
_PROBES = ("u", "uau", "su", "ua", "suau", "uauau", "suauau", "suauauau", "sua", "uu", "ssu", "uauauauau")
_REQUIRED = 2
_ROLES = {"s": "system", "u": "user", "a": "assistant"}
#: Bytes, twofold: a template is a program, and what the probes did not make it do must still fit.
_MARGIN = 2


@dataclass(frozen=True, slots=True)
class ChatOverhead:
    """The most that the template adds: once, and for each message."""

    base: TextSize
    message: TextSize

    def of(self, messages: int) -> TextSize:
        """The bound for a conversation of so many messages."""
        return TextSize(
            self.base.bytes + messages * self.message.bytes, self.base.wide_bytes + messages * self.message.wide_bytes
        )


def measure_overhead(render: Callable[[ChatPrompt], str]) -> ChatOverhead | None:
    """Probe a template. None where it refuses simple chats, or drops or repeats their texts."""
    seen: list[tuple[int, TextSize]] = []
    for place, roles in enumerate(_PROBES):
        for add_generation_prompt in (True, False):
            chat = _probe(roles, add_generation_prompt=add_generation_prompt)
            try:
                rendered = render(chat)
            except Exception:  # noqa: BLE001 - a template may raise anything, and refusing a probe is an answer
                if place < _REQUIRED:
                    return None
                continue
            added = _added(rendered, chat)
            if added is None:
                return None
            seen.append((len(roles), added))
    return _bound(seen)


def _probe(roles: str, *, add_generation_prompt: bool) -> ChatPrompt:
    messages: list[dict[str, Any]] = [
        {"role": _ROLES[letter], "content": f"probe{place}text of one message, no{place}."}
        for place, letter in enumerate(roles)
    ]
    return ChatPrompt(messages=messages, add_generation_prompt=add_generation_prompt)


def _added(rendered: str, chat: ChatPrompt) -> TextSize | None:
    """The template's own words in `rendered`; None if it did not show each text once (the user's) or at most once."""
    rest = rendered
    for message in chat.messages:
        times = rendered.count(message["content"])
        if times > 1 or (times == 0 and message["role"] == "user"):
            return None
        rest = rest.replace(message["content"], "")
    return size_of(rest)


def _bound(seen: list[tuple[int, TextSize]]) -> ChatOverhead:
    """The smallest affine bound with a slope that covers every growth seen, times the margin."""

    def slope(pick: Callable[[TextSize], int]) -> int:
        growth = [
            -(-(pick(longer) - pick(shorter)) // (n_longer - n_shorter))
            for n_longer, longer in seen
            for n_shorter, shorter in seen
            if n_longer > n_shorter
        ]
        return max([0, *growth])

    def base(pick: Callable[[TextSize], int], per_message: int) -> int:
        return max(pick(added) - per_message * messages for messages, added in seen)

    message = TextSize(slope(_bytes), slope(_wide))
    start = TextSize(max(0, base(_bytes, message.bytes)), max(0, base(_wide, message.wide_bytes)))
    total = EMPTY
    for _ in range(_MARGIN):
        total += start
    return ChatOverhead(base=total, message=TextSize(_MARGIN * message.bytes, _MARGIN * message.wide_bytes))


def _bytes(size: TextSize) -> int:
    return size.bytes


def _wide(size: TextSize) -> int:
    return size.wide_bytes
