"""A compressed request body, made plain step by step: never more at once than a step, never longer on the loop.

Only gzip, and once: every client that compresses can send that, and each further coding is one more way to make a
small upload large. Who counts the bytes decides when they are too many.
"""

import zlib
from collections.abc import Iterator

from router.errors import ApiError, bad_request

#: What `content-encoding` may say, besides nothing and `identity`. Source: RFC 9110, 8.4.1.3 (`x-gzip` is the same).
GZIP_NAMES = frozenset({b"gzip", b"x-gzip"})

#: Plain bytes of one step: some 0.2 ms.
STEP_MAX_BYTES = 64 * 1024
#: Compressed bytes looked at in one step; what a step leaves of them is copied.
_SLICE_BYTES = 16 * 1024
#: A gzip may consist of several, one after the other (RFC 1952, 2.2). Tools that cut their input make one of 64 KiB;
#: empty ones would cost much time for few bytes.
_MEMBERS_MAX = 4_096
#: zlib's word for a gzip header and trailer around the data.
_GZIP_WBITS = 16 + zlib.MAX_WBITS


class Inflater:
    """One gzip body."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=_GZIP_WBITS)
        self._members = 1

    def feed(self, compressed: bytes) -> Iterator[bytes]:
        """The plain bytes of the next piece, in steps of at most `STEP_MAX_BYTES`, empty ones at the ends of members;
        the caller may stop at any.

        Raises: `ApiError` 400 for what is no gzip, or has something else after it, or too many members.
        """
        for start in range(0, len(compressed), _SLICE_BYTES):
            rest = compressed[start : start + _SLICE_BYTES]
            # A step that fills up may leave output inside zlib even when all input is taken.
            is_full = False
            while rest or is_full:
                if self._stream.eof:
                    self._begin_member()
                try:
                    plain = self._stream.decompress(rest, STEP_MAX_BYTES)
                except zlib.error as error:
                    raise _broken(f"it is damaged, or no gzip ({error})") from None
                rest = self._stream.unconsumed_tail or self._stream.unused_data
                is_full = len(plain) == STEP_MAX_BYTES and not self._stream.eof
                if plain or self._stream.eof:
                    yield plain

    def _begin_member(self) -> None:
        self._members += 1
        if self._members > _MEMBERS_MAX:
            raise _broken(f"it has more than {_MEMBERS_MAX:,} members")
        self._stream = zlib.decompressobj(wbits=_GZIP_WBITS)

    def end(self) -> None:
        """The body is over. Raises: `ApiError` 400 if the gzip in it is not."""
        if not self._stream.eof:
            raise _broken("it ends too early")


def check_coding(value: bytes) -> bool:
    """Whether a `content-encoding` means gzip; False for a plain body.

    Raises: `ApiError` 415 for any other coding, and for several.
    """
    coding = value.strip().lower()
    if coding in GZIP_NAMES:
        return True
    if coding in (b"", b"identity"):
        return False
    raise ApiError(
        415,
        "unsupported_content_encoding",
        f"The body's encoding is {value.decode('latin-1')[:40]!r}; only one `gzip`, or `identity`, is read.",
    )


def _broken(how: str) -> ApiError:
    return bad_request(f"The gzip body cannot be read: {how}. Send it again, or uncompressed.", code="invalid_gzip")
