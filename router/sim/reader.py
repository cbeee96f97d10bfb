"""What one streamed chat answer said, and whether it is an answer at all.

Decides the outcome of a 200: completed, error in the stream, aborted, empty or cut. Rules: pure (bytes and their times
are given); reads as the official clients do, so an event without its blank line is lost; the first token is the first
chunk with content, not the first chunk. It must never know where the bytes come from, and it shares no code with the
router's own reading of streams: a fault there must not hide from what measures it.
"""

from array import array
from enum import StrEnum
from typing import Any

import msgspec

#: A longer event than this is no token: the reader stops there instead of growing.
_EVENT_MAX_BYTES = 4 * 1024 * 1024
#: Gaps kept for one answer. Later ones are counted, not kept.
GAPS_MAX = 4096
#: Characters kept of a reason.
REASON_MAX_CHARS = 200


class Ending(StrEnum):
    """How a request of the load ended. A status other than 200 is `http_<status>` instead (see `http_ending`)."""

    COMPLETED = "completed"
    ERROR_IN_STREAM = "error_in_stream"
    ABORT_FINISH = "abort_finish"
    EMPTY_STREAM = "empty_stream"
    CUT = "cut"
    CONNECT_FAILED = "connect_failed"
    TIMEOUT = "timeout"
    #: Never sent: the bench's own bound on requests in flight was reached.
    CLIENT_LIMIT = "client_limit"
    #: The user stopped the run while it was under way. Neither served nor failed.
    INTERRUPTED = "interrupted"


def http_ending(status: int) -> str:
    """The outcome of an answer that was refused with `status`."""
    return f"http_{status}"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


class AnswerReader:
    """Takes the bytes of one event stream as they come. Times are seconds on the caller's clock."""

    __slots__ = (
        "_data",
        "_error",
        "_line",
        "completion_tokens",
        "content_chunks",
        "finish_reason",
        "first_content_at_s",
        "gaps_s",
        "is_done",
        "last_content_at_s",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._error: str | None = None
        self.is_done = False
        self.finish_reason: str | None = None
        self.first_content_at_s: float | None = None
        self.last_content_at_s: float | None = None
        self.content_chunks = 0
        self.gaps_s = array("d")
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def feed(self, data: bytes, at_s: float) -> None:
        """More of the body, in pieces of any size, each with the time it came."""
        self._line += data
        if b"\n" not in data:
            if len(self._line) > _EVENT_MAX_BYTES:
                self._line.clear()
                self._error = self._error or f"event longer than {_EVENT_MAX_BYTES} bytes"
            return
        *lines, rest = bytes(self._line).split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            self._take_line(line.removesuffix(b"\r"), at_s)

    def ending(self, *, broke: str | None) -> tuple[Ending, str]:
        """The outcome and its reason, once no more bytes come. `broke` says how the connection failed, if it did."""
        if self._error is not None:
            return Ending.ERROR_IN_STREAM, self._error[:REASON_MAX_CHARS]
        if self.finish_reason == "abort":
            return Ending.ABORT_FINISH, "finish_reason abort"
        if self.finish_reason == "error":
            return Ending.ERROR_IN_STREAM, "finish_reason error"
        if broke is not None:
            return Ending.CUT, broke[:REASON_MAX_CHARS]
        if not self.content_chunks:
            return Ending.EMPTY_STREAM, "ended without content"
        if not self.is_done:
            return Ending.CUT, "ended before [DONE]"
        return Ending.COMPLETED, ""

    def _take_line(self, line: bytes, at_s: float) -> None:
        if not line:
            if self._data:
                self._take_event(b"\n".join(self._data), at_s)
                self._data.clear()
        elif line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))

    def _take_event(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _CHUNKS.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._error = self._error or "event that is not a chat chunk"
            return
        if chunk.error is not None:
            self._error = self._error or error_reason({"error": chunk.error})
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.completion_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        if any(_has_content(choice) for choice in chunk.choices):
            self._take_content(at_s)

    def _take_content(self, at_s: float) -> None:
        self.content_chunks += 1
        if self.last_content_at_s is None:
            self.first_content_at_s = at_s
        elif len(self.gaps_s) < GAPS_MAX:
            self.gaps_s.append(at_s - self.last_content_at_s)
        self.last_content_at_s = at_s


def _has_content(choice: _Choice) -> bool:
    """Whether a choice carries anything that was generated; the role alone was not."""
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def error_reason(body: object) -> str:
    """Code and message of a JSON error body in any of the shapes servers use, or an empty string."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body.get("detail"))
    if isinstance(error, dict):
        code = error.get("code") or error.get("type") or ""
        message = error.get("message") or ""
        return f"{code}: {message}".strip(": ")[:REASON_MAX_CHARS]
    return str(error)[:REASON_MAX_CHARS] if error else ""
