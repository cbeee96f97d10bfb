"""How the lines of an answer's head are written: each name and each status is looked at once and kept as bytes."""

from http import HTTPStatus

#: What may stand in no value of a header: all control characters but the tab.
CONTROLS = bytes(set(range(32)) - {9}) + b"\x7f"
#: And in no name. Source: RFC 9110, 5.6.2 (what a token may hold).
_TOKEN_MARKS = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
#: Names already checked, as they are written. Bounded, because an engine may make up names.
FIELDS: dict[bytes, bytes] = {}
_FIELDS_MAX = 512


class StatusLines:
    """The first lines of every answer: its status, and the server's default headers (its date, renewed each second)."""

    def __init__(self) -> None:
        self._defaults: list[tuple[bytes, bytes]] = []
        self._lines: dict[int, bytes] = {}

    def of(self, status: int, defaults: list[tuple[bytes, bytes]]) -> bytes:
        """Without the line end after them. `defaults` is another list whenever something in it is new."""
        if defaults is not self._defaults:
            self._defaults = defaults
            self._lines = {}
        line = self._lines.get(status)
        if line is None:
            try:
                phrase = HTTPStatus(status).phrase
            except ValueError:
                phrase = ""
            line = b"".join(
                [b"HTTP/1.1 %d %b" % (status, phrase.encode()), *(b"\r\n%b: %b" % pair for pair in defaults)]
            )
            self._lines[status] = line
        return line


def new_field(name: bytes) -> bytes:
    """How `name`, in lower case, is written between two values. Raises: `RuntimeError` for what is no name."""
    if not name or not _TOKEN_MARKS.issuperset(name):
        raise RuntimeError(f"{name[:100]!r} is no name of a header")
    field = b"\r\n" + name + b": "
    if len(FIELDS) < _FIELDS_MAX:
        FIELDS[name] = field
    return field


#: Shared by all connections, which have one server.
STATUS_LINES = StatusLines()
