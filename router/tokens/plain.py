"""How few and how many tokens a plain chat can come to: the bounds of its texts and the template's measured words.

The same arithmetic as `limits.TextLimits`, with all that is known of the model worked out at load. What is plain says
`size.py`.
"""

from router.tokens.limits import TextLimits
from router.tokens.overhead import ChatOverhead
from router.tokens.size import ChatSize


class PlainBounds:
    """The bounds of one model's plain chats, in tokens."""

    __slots__ = (
        *("_base_tokens", "_longest_token_bytes", "_longest_wide_bytes", "_message_tokens", "_prefix_tokens"),
        *("_stretch", "_tokens_a_byte"),
    )

    def __init__(self, limits: TextLimits, overhead: ChatOverhead) -> None:
        #: Tokens more for each wide byte.
        self._stretch = limits.stretch - 1
        self._base_tokens = overhead.base.bytes + self._stretch * overhead.base.wide_bytes
        self._message_tokens = overhead.message.bytes + self._stretch * overhead.message.wide_bytes
        self._tokens_a_byte = 2 if limits.prefix_each_byte else 1
        self._prefix_tokens = limits.prefix_tokens
        #: 0 where no lower bound is proven.
        self._longest_token_bytes = limits.longest_token_bytes
        self._longest_wide_bytes = limits.longest_token_bytes * limits.shrink

    def of(self, size: ChatSize) -> tuple[int, int]:
        """Lower and upper bound, special tokens around the whole not counted."""
        longest = self._longest_wide_bytes if size.solid_wide_bytes else self._longest_token_bytes
        lower = -(-size.solid_bytes // longest) if longest else 0
        words = self._base_tokens + size.messages * self._message_tokens
        upper = size.text_bytes + self._stretch * size.wide_bytes + words
        return lower, self._tokens_a_byte * upper + self._prefix_tokens
