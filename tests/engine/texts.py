"""Seeded English prose of a wanted length, from the language reference that ships inside Python itself."""

import random
from functools import cache
from pydoc_data.topics import topics

#: Bytes a token of this prose with the test model's tokenizer, measured over all of it in Python 3.11.
BYTES_PER_TOKEN = 4.4


@cache
def _paragraphs() -> tuple[str, ...]:
    paragraphs = (" ".join(block.split()) for text in topics.values() for block in text.split("\n\n"))
    return tuple(sorted({paragraph for paragraph in paragraphs if len(paragraph) > 80}))


def prose(tokens: int, seed: int) -> str:
    """About `tokens` tokens (within a tenth); the same text for the same arguments, another for another seed."""
    rng = random.Random(seed)
    wanted_bytes = int(tokens * BYTES_PER_TOKEN)
    parts: list[str] = []
    size = 0
    while size < wanted_bytes:
        paragraph = rng.choice(_paragraphs())
        parts.append(paragraph)
        size += len(paragraph) + 2
    return "\n\n".join(parts)[:wanted_bytes]
