"""Rules on client keys: each opens the door for one tenant, and none is empty, doubtful or there twice."""

import hashlib

from router.config.document import Document
from router.config.problems import KeyPath
from router.config.schema import File, Key

_EMPTY_DIGEST = hashlib.sha256(b"").digest()


def key_digest(key: Key) -> bytes | None:
    """SHA-256 of the key, None where it is not given in exactly one form."""
    if (key.key is None) == (key.key_sha256 is None):
        return None
    if key.key_sha256 is not None:
        return bytes.fromhex(key.key_sha256)
    assert key.key is not None
    return hashlib.sha256(key.key.encode()).digest()


def tenant(key: Key) -> str:
    return key.tenant if key.tenant is not None else key.name


def check_keys(document: Document, file: File) -> None:
    """Notes every broken rule in `document`. No text holds a key or a digest."""
    names: dict[str, int] = {}
    digests: dict[bytes, int] = {}
    weights: dict[str, int] = {}
    for number, key in enumerate(file.keys):
        path: KeyPath = ("keys", number)
        if names.setdefault(key.name, number) != number:
            document.note((*path, "name"), f"keys[{names[key.name]}] has this name already", "Give each key its own.")
        _check_form(document, path, key)
        _check_weight(document, file, number, weights)
        digest = key_digest(key)
        if digest is None:
            continue
        form = (*path, "key" if key.key is not None else "key_sha256")
        if digest == _EMPTY_DIGEST:
            document.note(form, "is the SHA-256 of an empty key", "Write the digest of a real key.")
        earlier = digests.setdefault(digest, number)
        if earlier != number:
            message = f"is the same key as that of keys[{earlier}]"
            depends = [("keys", earlier, "key"), ("keys", earlier, "key_sha256")]
            document.note(form, message, "Give each entry a key of its own, or remove one.", depends=depends)


def _check_form(document: Document, path: KeyPath, key: Key) -> None:
    forms = [(*path, "key"), (*path, "key_sha256")]
    if key.key is None and key.key_sha256 is None:
        document.note(path, "has no key", "Set key to ${A_VARIABLE}, or key_sha256 to a digest.", depends=forms)
    elif key.key is not None and key.key_sha256 is not None:
        document.note(path, "has both key and key_sha256", "Keep one of the two.", depends=forms)


def _check_weight(document: Document, file: File, number: int, weights: dict[str, int]) -> None:
    key = file.keys[number]
    earlier = weights.setdefault(tenant(key), number)
    if file.keys[earlier].weight != key.weight:
        message = f"tenant {tenant(key)} has weight {file.keys[earlier].weight:g} in keys[{earlier}]"
        depends = [("keys", earlier, "weight"), ("keys", earlier, "tenant"), ("keys", number, "tenant")]
        document.note(("keys", number, "weight"), message, "Give all keys of a tenant one weight.", depends=depends)
