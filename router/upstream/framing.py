"""Cuts a byte stream into server-sent events and keeps every byte.

Rules of this file:
- The raw bytes of all events, in order, are the bytes that were fed: wherever the network cut them.
- Lines end in LF, CRLF or CR; an event ends with its blank line. A CR at the end of what has arrived waits for its LF,
  except on the blank line of an event whose other lines end in a bare CR.
- No more than `max_event_bytes` of an unfinished event are held: a bigger one passes in opaque pieces until it ends.

It must never know what an event says, save the words (`_TELLING`) that make one worth a look: that look is `sse.py`'s.
Source of the format: WHATWG HTML, "Server-sent events".
"""

import re
from typing import Literal

import msgspec

MAX_EVENT_BYTES = 1 << 20

_BOM = b"\xef\xbb\xbf"

#: Lines that are a `data` or an `event` field, after a line end, and the values of these.
_DATA = re.compile(rb"[\r\n]data(?::[ ]?([^\r\n]*))?(?=[\r\n]|\Z)")
_EVENT = re.compile(rb"[\r\n]event(?::[ ]?([^\r\n]*))?(?=[\r\n]|\Z)")

#: An event without any of these has nothing to say but its tokens. Inside a JSON string the quotes would be escaped.
_TELLING = re.compile(rb'"(?:error|abort|usage)"')
#: What some engines put into every chunk until the last.
_NO_USAGE = b'"usage":null'

EventKind = Literal["data", "comment", "opaque"]


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event as it came.

    kind `data`: it has a `data` field. `comment`: it has none, so no client is handed anything (comments, blank lines,
    a lone `retry`). `opaque`: an event, or a piece of one, that is bigger than the splitter reads.
    """

    raw: bytes
    kind: EventKind

    @property
    def is_comment(self) -> bool:
        return self.kind == "comment"

    @property
    def data(self) -> bytes:
        """The `data` lines joined by LF; empty where there is none or the event is opaque."""
        raw = self.raw
        if raw.startswith(b"data: ") and raw.endswith(b"\n\n") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
            return raw[6:-2]
        return b"\n".join(_values(_DATA, raw)) if self.kind == "data" else b""

    @property
    def event(self) -> str:
        """The last `event` field, or `message`, which is the default of the format."""
        if self.kind != "data" or b"event" not in self.raw:
            return "message"
        names = [value for value in _values(_EVENT, self.raw) if value]
        return names[-1].decode("utf-8", "replace") if names else "message"


_STRAY_LF = Event(b"\n", "comment")


class EventSplitter:
    """Incremental and bounded; one for each stream."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._buffer = bytearray()
        #: Bytes of `_buffer` already looked at; they hold no end of the event.
        self._scanned = 0
        #: Between `_scanned` and this there is no LF.
        self._lf_at = 0
        self._is_at_line_start = True
        self._ended_in_bare_cr = False
        self._is_opaque = False

    def split_plain(self, chunk: bytes) -> int | None:
        """How many events `chunk` is, where they need no look: nothing was pending, each begins with `data:` and is
        whole, lines end in LF, no blank line is stray, and none of the words that make an event worth a look is in it.
        `chunk` may then be passed on as it is and must not be fed.

        None in any other case: then it has to be fed. Only for a stream whose first token was seen.
        """
        if self._buffer or self._is_opaque or len(chunk) > self._max_event_bytes:
            return None
        if not chunk.startswith(b"data:") or not chunk.endswith(b"\n\n") or b"\r" in chunk:
            return None
        if _TELLING.search(chunk) is not None and len(_TELLING.findall(chunk)) != chunk.count(_NO_USAGE):
            return None
        if chunk.find(b"\n") == len(chunk) - 2:
            return 1
        events = chunk.count(b"\n\n")
        return events if b"\n\n\n" not in chunk and chunk.count(b"\n\ndata:") == events - 1 else None

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that `chunk` completes, oldest first, and pieces of an event that is too big to hold."""
        events: list[Event] = []
        if self._buffer or self._is_opaque or b"\r" in chunk:
            self._buffer += chunk
        else:
            rest = self._split_lf(chunk, events)
            if not rest:
                return events
            self._buffer += rest
        while (end := self._scan()) is not None:
            events.append(self._take(end))
        if len(self._buffer) > self._max_event_bytes:
            self._is_opaque = True
        if self._is_opaque and self._scanned:
            events.append(Event(bytes(self._buffer[: self._scanned]), "opaque"))
            del self._buffer[: self._scanned]
            self._lf_at -= self._scanned
            self._scanned = 0
        return events

    def flush(self) -> list[Event]:
        """The unfinished tail at a clean end of the stream, with the blank line that it lacks.

        Not for a stream that broke: its tail is half an event. The splitter is empty afterwards.
        """
        if not self._buffer and not self._is_opaque:
            return []
        tail = bytes(self._buffer)
        kind: EventKind = "opaque" if self._is_opaque else _kind(tail)
        ends_in_lf = tail.endswith(b"\n") or (not tail and self._is_at_line_start)
        self._buffer.clear()
        self._lf_at = 0
        self._reset()
        return [Event(tail + (b"\n" if ends_in_lf else b"\n\n"), kind)]

    def _split_lf(self, chunk: bytes, events: list[Event]) -> bytes:
        """The common case, nothing pending and no CR: append whole events, return the rest."""
        start, size = 0, len(chunk)
        while start < size:
            if chunk[start] == 0x0A:
                events.append(_STRAY_LF)
                start += 1
                continue
            found = chunk.find(b"\n\n", start)
            if found < 0:
                break
            end = found + 2
            raw = chunk[start:end]
            events.append(Event(raw, "opaque" if len(raw) > self._max_event_bytes else _kind(raw)))
            start = end
        return chunk[start:]

    def _scan(self) -> int | None:
        """Where the event at the head of the buffer ends (exclusive), or None until more arrives."""
        buffer = self._buffer
        size = len(buffer)
        while self._scanned < size:
            # What was searched is not searched again: with lines that end in CR, an LF may be far away.
            lf = buffer.find(b"\n", max(self._scanned, self._lf_at))
            self._lf_at = lf if lf >= 0 else size
            cr = buffer.find(b"\r", self._scanned, lf if lf >= 0 else size)
            at = cr if cr >= 0 else lf
            if at < 0:
                self._is_at_line_start = False
                self._scanned = size
                return None
            is_blank = self._is_at_line_start and at == self._scanned
            if cr < 0:
                end = lf + 1
            elif is_blank and self._ended_in_bare_cr:
                end = cr + 1
            elif cr + 1 == size:
                self._is_at_line_start = is_blank
                self._scanned = cr
                return None
            else:
                end = cr + 2 if buffer[cr + 1] == 0x0A else cr + 1
            if is_blank:
                return end
            self._ended_in_bare_cr = cr >= 0 and end == cr + 1
            self._is_at_line_start = True
            self._scanned = end
        return None

    def _take(self, end: int) -> Event:
        raw = bytes(self._buffer[:end])
        kind: EventKind = "opaque" if self._is_opaque or len(raw) > self._max_event_bytes else _kind(raw)
        del self._buffer[:end]
        self._lf_at -= end
        self._reset()
        return Event(raw, kind)

    def _reset(self) -> None:
        self._scanned = 0
        self._is_at_line_start = True
        self._ended_in_bare_cr = False
        self._is_opaque = False


def _kind(raw: bytes) -> EventKind:
    if raw.startswith(b"data:"):
        return "data"
    return "comment" if b"data" not in raw or _DATA.search(_behind_line_end(raw)) is None else "data"


def _values(field: re.Pattern[bytes], raw: bytes) -> list[bytes]:
    return field.findall(_behind_line_end(raw))


def _behind_line_end(raw: bytes) -> bytes:
    return b"\n" + raw.removeprefix(_BOM)
