"""Names the queue's Redis keys, and nothing else does.

All keys of one model share the hash tag `{m:<model>}`, so that a cluster keeps them in one slot and one script may
touch them all. A model name is percent-encoded, a long one is hashed: any name is safe, no two names meet. Braces of
the prefix are encoded too, or the prefix would choose the slot.
"""

from hashlib import sha256
from urllib.parse import quote, unquote_to_bytes

#: The keys of the tickets' line, in the order of KEYS in every script (`lua/_line.lua` says what each holds).
_TICKET_PARTS = ("order", "heads", "tickets", "sums", "owners", "seq")

#: Longer names are hashed, so that keys stay short however long a configured name is.
_MODEL_MAX_CHARS = 128


def ticket_keys(prefix: str, model: str) -> tuple[str, ...]:
    """The six keys of a model's line of tickets, in one hash slot."""
    safe_prefix = prefix.replace("{", "%7B").replace("}", "%7D")
    return tuple(f"{safe_prefix}:{{m:{_model_tag(model)}}}:ticket:{part}" for part in _TICKET_PARTS)


def escape(text: str) -> str:
    """`text` as printable ASCII without spaces, reversible by `unescape`; lone surrogates survive."""
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


def unescape(text: bytes) -> str:
    return unquote_to_bytes(text).decode("utf-8", "surrogatepass")


def _model_tag(model: str) -> str:
    tag = escape(model)
    if len(tag) <= _MODEL_MAX_CHARS:
        return tag
    # `escape` never yields '!', so a hashed name cannot equal a plain one.
    return "!" + sha256(tag.encode()).hexdigest()
