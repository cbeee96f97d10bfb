"""Who holds a key is found by its digest, and nobody else."""

import hashlib

import pytest

from router.config.keys import KeyRing
from router.config.model import KeyConfig


def key_of(name, secret):
    return KeyConfig(
        name=name,
        digest=hashlib.sha256(secret.encode()).digest(),
        tenant=name,
        weight=1.0,
        default_class=None,
        may_set=frozenset(),
        admin=False,
    )


def test_a_presented_key_is_found_and_no_other():
    web, nightly = key_of("web", "sk-web"), key_of("nightly", "schlüssel")

    ring = KeyRing([web, nightly])

    assert ring.find(b"sk-web") is web
    assert ring.find("schlüssel".encode()) is nightly
    assert not ring.is_open


@pytest.mark.parametrize("presented", [b"", b"sk-we", b"sk-web ", b"SK-WEB", b"\xff", b"\x00", b"x" * 100_000])
def test_anything_else_opens_nothing(presented):
    assert KeyRing([key_of("web", "sk-web")]).find(presented) is None


def test_the_key_of_an_empty_text_opens_nothing():
    assert KeyRing([key_of("bad", "")]).find(b"") is None


def test_a_ring_without_keys_is_open_and_finds_nobody():
    ring = KeyRing([])

    assert ring.is_open
    assert ring.find(b"anything") is None


def test_a_key_given_as_a_digest_is_found_by_its_text(folder, valid):
    digest = hashlib.sha256(b"sk-1").hexdigest()

    config = folder.load(valid + f"keys: [{{name: k, key_sha256: {digest.upper()}}}]\n")

    found = KeyRing(config.keys).find(b"sk-1")
    assert found is not None
    assert (found.name, found.tenant) == ("k", "k")
