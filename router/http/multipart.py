"""The few text fields that the router needs of a multipart form; the form itself goes on byte for byte.

Only delimiters are looked for, so a 25 MB file costs one search and no copy. Source: RFC 7578 and RFC 2046, 5.1.1. Of
a repeated field the last one counts, as in the engine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from python_multipart.multipart import parse_options_header

from router.errors import ApiError, bad_request

_FIELD_MAX_BYTES = 1024
_PART_HEADERS_MAX_BYTES = 16 * 1024
_PARTS_MAX = 1000


@dataclass(frozen=True, slots=True)
class FormField:
    """A text field: its value, and where in the body that stands (`body[start:end]`)."""

    value: str
    start: int
    end: int


def form_fields(body: bytes, content_type: str, *, names: Iterable[str]) -> dict[str, FormField]:
    """Those of `names` that are there and are no files.

    Raises: `ApiError` 415 where the content type is no form, 400 where the form cannot be read.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(
            415, "unsupported_media_type", "This route reads multipart/form-data with a boundary, as the SDKs send it."
        )
    wanted = frozenset(names)
    fields: dict[str, FormField] = {}
    for headers, start, end in _parts(body, b"--" + boundary):
        name = _text_field_name(headers)
        if name in wanted:
            if end - start > _FIELD_MAX_BYTES:
                raise bad_request(f"The form's field `{name}` has more than {_FIELD_MAX_BYTES:,} bytes.", param=name)
            fields[name] = FormField(body[start:end].decode("utf-8", "replace"), start, end)
    return fields


def _parts(body: bytes, delimiter: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The header block of each part, and where its content begins and ends."""
    at = 0 if body.startswith(delimiter) else _next_delimiter(body, delimiter, 0) + 2
    for _ in range(_PARTS_MAX):
        at += len(delimiter)
        if body.startswith(b"--", at):
            return
        headers_end = body.find(b"\r\n\r\n", at, at + _PART_HEADERS_MAX_BYTES)
        if headers_end < 0:
            raise _unreadable("a part has no headers, or more than 16 KiB of them")
        start = headers_end + 4
        end = _next_delimiter(body, delimiter, start)
        yield body[at + 2 : headers_end], start, end
        at = end + 2
    raise _unreadable(f"it has more than {_PARTS_MAX:,} parts")


def _next_delimiter(body: bytes, delimiter: bytes, at: int) -> int:
    """Where the next line that is a delimiter begins, its line break included."""
    while (at := body.find(b"\r\n" + delimiter, at)) >= 0:
        if body.startswith((b"\r\n", b"--"), at + 2 + len(delimiter)):
            return at
        at += 2
    raise _unreadable("it ends without its boundary")


def _text_field_name(headers: bytes) -> str | None:
    """The name of a part that is a text field; None for a file."""
    for line in headers.split(b"\r\n"):
        header, _, value = line.partition(b":")
        if header.strip().lower() == b"content-disposition":
            _, options = parse_options_header(value.strip())
            if b"filename" in options or b"filename*" in options:
                return None
            return options.get(b"name", b"").decode("utf-8", "replace")
    return None


def _unreadable(why: str) -> ApiError:
    return bad_request(f"The multipart form cannot be read: {why}.", code="invalid_form")
