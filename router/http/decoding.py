"""JSON of a client's to values, with its mistakes as 400 and the field named.

Rules: what only the engine judges stays undecoded (`msgspec.Raw`): it is then checked to be JSON, no more, and costs a
look a byte. What has so many arrays, objects or values that making them would hold the event loop is not decoded at
all (`is_crowded`). It must never know of endpoints.
"""

import asyncio
import codecs
from typing import TypeVar

import msgspec

from router.errors import ApiError, bad_request, nested_too_deeply

T = TypeVar("T")

#: Above this a body is read with turns of the event loop in between; reading so much takes 5 ms.
LARGE_BYTES = 2 * 2**20
#: Looked at in one turn: 1 to 3 ms.
_SLICE_BYTES = 2**20
#: Below this a body is decoded without a look at what is in it: 3 ms at most.
LOOK_MIN_BYTES = 64 * 1024
#: Arrays and objects that are made at most, 0.13 us each with the garbage collector's part; and values, 0.03 us each.
#: A chat with 200 tools has some 20,000 of the first.
_CONTAINERS_MAX = 100_000
_COMMAS_MAX = 1_000_000
#: Characters of texts written as escapes, 3 ns each. Bodies that are not `LARGE_BYTES` cannot have as many.
_ESCAPES_MAX = 8_000_000


def decode(decoder: msgspec.json.Decoder[T], json: bytes | msgspec.Raw, field: str = "") -> T:
    """The value of `json`, which stands in the body's field `field` (empty: it is the body).

    Raises: `ApiError` 400.
    """
    try:
        return decoder.decode(json)
    except (RecursionError, msgspec.DecodeError) as error:
        raise decoding_mistake(error, field) from None


def decoding_mistake(error: Exception, field: str = "") -> ApiError:
    """400 for what a decoder raised (`RecursionError`, `msgspec.DecodeError`) at `field`; empty: it is the body."""
    if isinstance(error, RecursionError):
        return nested_too_deeply()
    if isinstance(error, msgspec.ValidationError):
        return _wrong_type(str(error), field)
    return bad_request(f"The body is not valid JSON: {error}.", code="invalid_json")


def check_text(body: bytes) -> None:
    """Raises: `ApiError` 400 where `body` is empty or not UTF-8, which the decoder would not see everywhere."""
    if not body:
        raise bad_request("The body is empty; a JSON object is needed.", code="invalid_json")
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise bad_request(
                f"The body is not UTF-8: byte {error.start} cannot be read.", code="invalid_json"
            ) from None


def is_crowded(body: bytes) -> bool:
    """Whether decoding `body` could take more than some 40 ms. Brackets and commas inside of texts count too."""
    if len(body) < LOOK_MIN_BYTES:
        return False
    return body.count(b"[") + body.count(b"{") > _CONTAINERS_MAX or body.count(b",") > _COMMAS_MAX


async def look_through(body: bytes) -> bool:
    """`check_text` and `is_crowded` of a large body, in slices, each in a turn of the event loop of its own."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    containers = commas = escapes = 0
    for start in range(0, len(body), _SLICE_BYTES):
        end = start + _SLICE_BYTES
        part = body[start:end]
        if not part.isascii() or decoder.getstate()[0]:
            try:
                decoder.decode(part, final=end >= len(body))
            except UnicodeDecodeError:
                # Once more in one piece, for the place of the mistake.
                check_text(body)
        if containers <= _CONTAINERS_MAX and commas <= _COMMAS_MAX:
            containers += part.count(b"[") + part.count(b"{")
            commas += part.count(b",")
            escapes += part.count(b"\\")
        await asyncio.sleep(0)
    return containers > _CONTAINERS_MAX or commas > _COMMAS_MAX or escapes > _ESCAPES_MAX


def _wrong_type(error: str, field: str) -> ApiError:
    what, _, where = error.partition(" - at `$")
    name = (field + where.strip("`")).lstrip(".") or None
    return bad_request(f"{what}{f' in `{name}`' if name else ''}.", param=name)
