"""What an answer says: its first event, its usage chunk, the tokens it used.

Rules of this file: it never raises on what an engine sends (NaN, bad JSON, wrong types: then nothing is known), reads
in bounded memory, decodes only the few events that can matter, and imports only msgspec and the standard library, since
the simulator reads its own answers with it. `endpoint` is the value of `request.Endpoint`.

It must never know what is done about an answer: retry, relay and metering are decided by whoever reads it.
"""

import json
import re
from typing import Annotated, Any, Literal

import msgspec

from router.upstream.framing import MAX_EVENT_BYTES, Event, EventSplitter

__all__ = [
    "MAX_EVENT_BYTES",
    "Event",
    "EventSplitter",
    "FirstEvent",
    "Usage",
    "UsageReader",
    "body_kind",
    "first_event_kind",
    "is_usage_only",
    "usage_of",
]

BODY_MAX_BYTES = 1 << 20
TAIL_BYTES = 64 << 10

#: A `"usage"` key whose value is an object. Inside a JSON string the quotes would be escaped, so this is always a key.
_USAGE_KEY = re.compile(rb'"usage"\s*:\s*(?=\{)')
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')

_BAD_JSON = (msgspec.MsgspecError, ValueError, RecursionError)


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens that the engine says it used. `cached_tokens` is the part of the prompt found in its prefix cache, or None
    where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class FirstEvent(msgspec.Struct, frozen=True, gc=False):
    """What an event, or a whole JSON body, means for a request of which nothing was forwarded yet.

    `comment`: nothing is said yet. `data`: an answer; `has_output` is False where it holds no token, as vLLM's
    role-only first chunk, after which an error or an empty abort can still come. `error`: with the status the engine
    means (`code`, None if it gives no number). `abort`: it ended as aborted without a token. `done`: `[DONE]`.
    """

    kind: Literal["data", "error", "abort", "comment", "done"]
    code: int | None = None
    message: str = ""
    has_output: bool = False


_COMMENT = FirstEvent("comment")
_DONE = FirstEvent("done")
_OUTPUT = FirstEvent("data", has_output=True)
_NO_OUTPUT = FirstEvent("data")
_ABORT = FirstEvent("abort")

#: Events of /v1/messages and /v1/responses that come before any token.
_PREAMBLE = frozenset(
    {
        "message_start",
        "content_block_start",
        "ping",
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_part.added",
    }
)


def first_event_kind(event: Event) -> FirstEvent:
    """What `event` means where it is among the first of its stream. See `FirstEvent`."""
    if event.is_comment:
        return _COMMENT
    data = event.data
    if data.strip() == b"[DONE]":
        return _DONE
    return _meaning(_decode(data), is_error=event.event == "error")


def body_kind(body: bytes) -> FirstEvent:
    """The same question for the body of an answer that is not a stream. What is not a JSON object counts as data."""
    return _meaning(_decode(body), is_error=False) if len(body) <= BODY_MAX_BYTES else _OUTPUT


def is_usage_only(event: Event) -> bool:
    """True exactly for the chunk that `stream_options.include_usage` adds: no choices, and a usage object."""
    if event.kind != "data" or b'"usage"' not in event.raw:
        return False
    data = event.data
    value = _decode(data)
    if not value:
        # A NaN or too deep an object somewhere: it is told by how it looks.
        is_plain = data.count(b'"choices"') == 1 and b'"error"' not in data
        return is_plain and _NO_CHOICES.search(data) is not None and _USAGE_KEY.search(data) is not None
    return value.get("choices") == [] and isinstance(value.get("usage"), dict) and value.get("error") is None


def usage_of(body: bytes, endpoint: str) -> Usage | None:
    """The tokens used that a whole answer tells of; None where it does not say."""
    if endpoint != "messages" and len(body) <= BODY_MAX_BYTES:
        try:
            said = _DECODE_PLAIN(body).usage
        except _BAD_JSON:
            pass
        else:
            details = said.prompt_tokens_details
            return Usage(said.prompt_tokens, said.completion_tokens, None if details is None else details.cached_tokens)
    reader = UsageReader(endpoint)
    reader.see_body_tail(body)
    return reader.usage


class UsageReader:
    """Reads the tokens used out of one answer: events go to `see`, pieces of any other body to `see_body_tail`.

    Holds at most 1 MiB of a body; of a longer one only the last 64 KiB, and there the last `"usage"` object.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        #: Anthropic counts what the cache held apart.
        self._may_be_plain = endpoint != "messages"
        self._usage: Usage | None = None
        #: A body that came in one piece, or what of it is held where it came in several.
        self._body = b""
        self._tail = bytearray()
        self._is_cut = False

    def see(self, event: Event) -> Usage | None:
        """Look at one event of a stream; returns what is known so far (the last usage seen wins)."""
        if event.kind == "opaque":
            self._keep(event.raw, TAIL_BYTES)
            self._learn(_last_usage(bytes(self._tail)))
        elif event.kind == "data" and b'"usage"' in event.raw:
            self._read(event.data)
        return self._usage

    def see_body_tail(self, chunk: bytes) -> None:
        """Look at the next piece of a body that is not a stream; `usage` tells the result."""
        if not self._body and not self._tail and len(chunk) <= BODY_MAX_BYTES:
            self._body = chunk
            return
        if self._body:
            self._tail += self._body
            self._body = b""
        self._keep(chunk, TAIL_BYTES if self._is_cut else BODY_MAX_BYTES)

    @property
    def usage(self) -> Usage | None:
        """What the answer says it used, or None where it does not say (or not where it can be found)."""
        if self._usage is None and (self._body or self._tail):
            body = self._body or bytes(self._tail)
            if not self._is_cut:
                self._read(body)
            if self._usage is None:
                self._learn(_last_usage(body))
            self._body = b""
            self._tail.clear()
        return self._usage

    def _read(self, data: bytes) -> None:
        """A whole event or body."""
        if self._may_be_plain:
            try:
                said = _DECODE_PLAIN(data).usage
            except _BAD_JSON:
                pass
            else:
                details = said.prompt_tokens_details
                cached = None if details is None else details.cached_tokens
                if cached is None and self._usage is not None:
                    cached = self._usage.cached_tokens
                self._usage = Usage(said.prompt_tokens, said.completion_tokens, cached)
                return
        self._learn(_usage_in(data))

    def _keep(self, chunk: bytes, limit_bytes: int) -> None:
        self._tail += chunk[-BODY_MAX_BYTES - 1 :]
        if len(self._tail) > limit_bytes or len(chunk) > limit_bytes:
            self._is_cut = True
            del self._tail[:-TAIL_BYTES]

    def _learn(self, found: dict[str, Any] | None) -> None:
        if found is None:
            return
        before = self._usage or Usage(0, 0)
        prompt = _tokens(found, "prompt_tokens", "input_tokens")
        cached = _cached_tokens(found)
        if prompt is not None and self._endpoint == "messages":
            # Anthropic's input_tokens leave out what the cache held; the prompt is all three together.
            prompt += (cached or 0) + (_tokens(found, "cache_creation_input_tokens") or 0)
        if prompt is None:
            prompt = _tokens(found, "total_tokens")
        completion = _tokens(found, "completion_tokens", "output_tokens")
        if prompt is None and completion is None:
            return
        self._usage = Usage(
            before.prompt_tokens if prompt is None else prompt,
            before.completion_tokens if completion is None else completion,
            before.cached_tokens if cached is None else cached,
        )


def _decode(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, empty where it is none."""
    try:
        value = msgspec.json.decode(data)
    except _BAD_JSON:
        return {}
    return value if isinstance(value, dict) else {}


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _meaning(value: dict[str, Any], *, is_error: bool) -> FirstEvent:
    """Listed from the most to the least telling: error, abort, output, preamble."""
    kind = value.get("type")
    error = value.get("error")
    if kind == "response.failed":
        error = _object(value.get("response")).get("error") or "response.failed"
    if error or is_error or kind == "error":
        return _error(error or value)
    choices = value.get("choices")
    if isinstance(choices, list):
        return _meaning_of_choices(choices)
    return _NO_OUTPUT if isinstance(kind, str) and kind in _PREAMBLE else _OUTPUT


def _meaning_of_choices(choices: list[Any]) -> FirstEvent:
    """Any output counts first, then an abort, then any other reason to finish."""
    found = _NO_OUTPUT
    for each in choices:
        choice = _object(each)
        if _has_output(choice):
            return _OUTPUT
        reason = choice.get("finish_reason")
        if reason == "abort":
            found = _ABORT
        elif reason and found is _NO_OUTPUT:
            found = _OUTPUT
    return found


def _error(error: object) -> FirstEvent:
    fields = _object(error)
    code = fields.get("code")
    message = fields.get("message") if fields else error
    status = code if isinstance(code, int) and not isinstance(code, bool) else None
    if isinstance(code, str) and code.isdecimal() and len(code) == 3:
        status = int(code)
    if status is None and fields.get("type") == "overloaded_error":
        # /v1/messages gives no number; this is its word for 503.
        status = 503
    return FirstEvent("error", status, message[:1000] if isinstance(message, str) else "")


def _has_output(choice: dict[str, Any]) -> bool:
    """Whether a choice carries anything that was generated."""
    if choice.get("text") or choice.get("token_ids"):
        return True
    said = _object(choice.get("delta")) or _object(choice.get("message"))
    said_something = said.get("content") or said.get("tool_calls") or said.get("reasoning")
    return bool(said_something or said.get("reasoning_content") or said.get("refusal") or said.get("audio"))


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _PlainDetails(msgspec.Struct, gc=False):
    cached_tokens: _Tokens | None = None


class _PlainUsage(msgspec.Struct, gc=False):
    """The usage that chat and text completions have. Of the other shapes' fields it may have none; it lacks its own
    where it is theirs."""

    prompt_tokens: _Tokens
    completion_tokens: _Tokens
    prompt_tokens_details: _PlainDetails | None = None
    input_tokens_details: None = None
    cache_read_input_tokens: None = None
    cache_creation_input_tokens: None = None


class _Plain(msgspec.Struct, gc=False):
    usage: _PlainUsage


#: Nearly every answer is of this shape: read in one step, and what is not falls back on a look at each field.
_DECODE_PLAIN = msgspec.json.Decoder(_Plain).decode


class _Holder(msgspec.Struct, gc=False):
    """What of an event or body can hold its usage; all else is skipped, not built."""

    usage: Any = None
    response: Any = None
    message: Any = None


_HOLDER_DECODER = msgspec.json.Decoder(_Holder)


def _usage_in(data: bytes) -> dict[str, Any] | None:
    """The usage of an event or body: its own, or that of the `response` or `message` it carries."""
    try:
        holder = _HOLDER_DECODER.decode(data)
    except _BAD_JSON:
        return None
    for usage in (holder.usage, _object(holder.response).get("usage"), _object(holder.message).get("usage")):
        if isinstance(usage, dict):
            return usage
    return None


def _last_usage(tail: bytes) -> dict[str, Any] | None:
    """The last `"usage"` object in a piece of JSON that may begin anywhere."""
    starts = [match.end() for match in _USAGE_KEY.finditer(tail)]
    if not starts:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(tail[starts[-1] :].decode("utf-8", "replace"))
    except _BAD_JSON:
        return None
    return value if isinstance(value, dict) else None


def _tokens(usage: dict[str, Any], *names: str) -> int | None:
    """The first of `names` that holds a sane count (0 to 2**53)."""
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 53:
            return value
    return None


def _cached_tokens(usage: dict[str, Any]) -> int | None:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        found = _tokens(_object(usage.get(name)), "cached_tokens")
        if found is not None:
            return found
    return _tokens(usage, "cache_read_input_tokens")
