"""The few text fields that the router needs of a multipart form; the form itself goes on byte for byte.

The parser is python-multipart's; only the wanted fields are kept, each bounded, so a 25 MB file costs no copy.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.errors import ApiError, bad_request

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_FIELD_MAX_BYTES = 1024


def form_fields(body: bytes, content_type: str, *, names: Iterable[str]) -> dict[str, str]:
    """The first value of each of `names` that is there.

    Raises: `ApiError` 415 where the content type is no form, 400 where the form cannot be read.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(
            415, "unsupported_media_type", "This route reads multipart/form-data with a boundary, as the SDKs send it."
        )
    wanted = frozenset(names)
    fields: dict[str, str] = {}
    reader = _FieldReader(wanted, fields)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise bad_request(f"The multipart form cannot be read: {error}.", code="invalid_form") from None
    return fields


class _FieldReader:
    """Collects the wanted fields; parts that carry a file name are files and are skipped."""

    def __init__(self, wanted: frozenset[str], fields: dict[str, str]) -> None:
        self._wanted = wanted
        self._fields = fields
        self._header_name = b""
        self._header_value = b""
        self._name: str | None = None
        self._value = b""

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
        }

    def _begin(self) -> None:
        self._name, self._value = None, b""

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(self._header_value)
            name = options.get(b"name", b"").decode("utf-8", "replace")
            if name in self._wanted and b"filename" not in options:
                self._name = name
        self._header_name = self._header_value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name is not None and len(self._value) < _FIELD_MAX_BYTES:
            self._value += data[start : min(end, start + _FIELD_MAX_BYTES)]

    def _end(self) -> None:
        if self._name is not None:
            self._fields.setdefault(self._name, self._value.decode("utf-8", "replace").strip())
