"""Whose key a client presents. Keys are known by their SHA-256 only; the keys themselves are nowhere kept."""

import hashlib
import hmac
from collections.abc import Iterable

from router.config.model import KeyConfig


class KeyRing:
    """The configured keys. Digests are unique (`config/load.py` sees to it)."""

    __slots__ = ("_by_digest",)

    def __init__(self, keys: Iterable[KeyConfig]) -> None:
        self._by_digest = {key.digest: key for key in keys}

    @property
    def is_open(self) -> bool:
        """There are no keys: everybody on this machine may ask."""
        return not self._by_digest

    def find(self, presented: bytes) -> KeyConfig | None:
        """The key that `presented` is (UTF-8, as it is configured), None for an unknown or empty one.

        Takes the same time whatever a wrong key has in common with a right one: only digests are compared, and what
        the lookup's time could tell of a digest says nothing of the key it came from.
        """
        if not presented:
            return None
        digest = hashlib.sha256(presented).digest()
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def __repr__(self) -> str:
        return f"KeyRing({len(self._by_digest)} keys)"
