"""What an engine's or relay's failing answer means, and the error a client would get for it.

Cases of an answer that is not a success, in order:
    503, 429                         busy: backpressure, not a fault
    500 "shutting down"              cannot have started
    401, 402, 403                    the other side refuses the router's own key, or its bill; its words may echo the
                                     key and stay here
    501, other 4xx                   the client's own: passed on, made readable for SDKs where it is not
    other 5xx                        the other side failed on it
"""

import zlib
from dataclasses import dataclass

import msgspec

from router.errors import ApiError, ErrorShape
from router.policy.outcome import Outcome
from router.policy.retry import Failure
from router.upstream.api import ConnectFailed, UpstreamError, UpstreamTimeout
from router.upstream.behaviour import cannot_have_started
from router.upstream.engine import Engine

_MESSAGE_MAX_CHARS = 1000
_FAULTS_MAX = 10
#: Where a busy engine or relay gives no time of its own in seconds.
_RETRY_AFTER_S = 2.0
_RETRY_AFTER_MAX_DIGITS = 9
#: What a compressed error body is unpacked to at most.
_UNPACKED_MAX_BYTES = 256 * 1024
#: zlib's window bits for gzip and deflate, told apart by the header.
_GZIP_OR_DEFLATE = 47


class AttemptFailed(Exception):
    """One attempt is over without a byte to the client. `error` and `outcome` are what the client gets if it was the
    last."""

    def __init__(self, failure: Failure, error: ApiError, outcome: Outcome) -> None:
        super().__init__(failure.value)
        self.failure = failure
        self.error = error
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class PassOn:
    """The client's own mistake: this body and status go to it."""

    status: int
    body: bytes


def from_transport(error: UpstreamError, name: str) -> AttemptFailed:
    """The connection to `name` failed before the client got a byte."""
    if isinstance(error, ConnectFailed):
        api = ApiError(
            503, "engine_unreachable", f"{name} cannot be reached and no other took over. Try again.", retry_after_s=5
        )
        return AttemptFailed(Failure.CONNECT_FAILED, api, Outcome.REFUSED_NO_ENGINE)
    if isinstance(error, UpstreamTimeout):
        api = ApiError(
            504,
            "engine_timeout",
            f"{name} was silent for {error.limit_s:g} s ({error.phase} limit). It may have worked on the request, so "
            "it was not sent again.",
        )
        return AttemptFailed(Failure.FIRST_BYTE_LATE, api, Outcome.ENGINE_TIMEOUT)
    api = ApiError(
        502,
        "engine_lost",
        f"{name} was lost after it took the request and before it answered. It may have worked on it, so it was not "
        "sent again.",
    )
    return AttemptFailed(Failure.LOST, api, Outcome.ENGINE_LOST)


def from_answer(
    status: int,
    body: bytes,
    name: str,
    *,
    retry_after: str | None = None,
    content_encoding: str = "",
    shape: ErrorShape = ErrorShape.OPENAI,
    is_relay: bool = False,
) -> AttemptFailed | PassOn:
    """`name` answered `status` (>= 400) with `body`, or said so in the first event of a stream. `shape` is the one
    that the client reads. A relay's words about its own faults are none of the client's: they may quote our key."""
    if content_encoding.strip().lower() not in ("", "identity"):
        body = _unpacked(body)
    message = _message(body)
    if status in (429, 503):
        wait_s = _RETRY_AFTER_S
        if retry_after is not None and retry_after.isdecimal() and len(retry_after) <= _RETRY_AFTER_MAX_DIGITS:
            wait_s = float(retry_after)
        api = ApiError(429, "engine_busy", f"{name} is busy. Try again.", retry_after_s=wait_s)
        return AttemptFailed(Failure.BUSY, api, Outcome.REFUSED_CHAT_FULL)
    if cannot_have_started(status, message):
        api = ApiError(503, "engine_shutting_down", f"{name} is shutting down. Try again.", retry_after_s=5)
        return AttemptFailed(Failure.SHUTTING_DOWN, api, Outcome.REFUSED_NO_ENGINE)
    if status in (401, 402, 403):
        api = ApiError(
            502, "engine_refused_router", f"{name} refused the router's own key or bill; its operator has to mend it."
        )
        return AttemptFailed(Failure.REFUSED_OUR_KEY, api, Outcome.ENGINE_ERROR)
    if status < 500 or status == 501:
        return PassOn(status, _readable(status, body, message, shape))
    reason = "no reason given" if is_relay or not message else message
    api = ApiError(502, "engine_error", f"{name} failed on the request ({status}): {reason}")
    return AttemptFailed(Failure.SERVER_ERROR, api, Outcome.ENGINE_ERROR)


def empty_abort(name: str) -> AttemptFailed:
    """A 200 that ended as aborted without one token: an engine that is shutting down."""
    api = ApiError(
        503, "engine_shutting_down", f"{name} gave the request up before it began. Try again.", retry_after_s=5
    )
    return AttemptFailed(Failure.ABORTED_EMPTY, api, Outcome.REFUSED_NO_ENGINE)


def _unpacked(body: bytes) -> bytes:
    """The body without its compression, which nobody asked for; empty where it cannot be read."""
    try:
        return zlib.decompressobj(_GZIP_OR_DEFLATE).decompress(body, _UNPACKED_MAX_BYTES)
    except zlib.error:
        return b""


def _readable(status: int, body: bytes, message: str, shape: ErrorShape) -> bytes:
    """The body as it is if the client's SDK can read it, else its message in `shape`."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        value = None
    is_marked = shape is ErrorShape.OPENAI or (isinstance(value, dict) and value.get("type") == "error")
    if is_marked and isinstance(value, dict) and isinstance(value.get("error"), dict):
        return body
    error = ApiError(status, "engine_refused", message or "The engine refused the request without a reason.")
    return error.body(shape)


def _message(body: bytes) -> str:
    """The words of an error body of any known shape, shortened; empty where there are none a person can read."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        found = body.decode("utf-8", "replace").strip()
        if found.startswith(("<", "{", "[")) or "\ufffd" in found:
            return ""
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    if isinstance(found, list):
        # FastAPI's list of faults.
        faults = [fault.get("msg") for fault in found[:_FAULTS_MAX] if isinstance(fault, dict)]
        found = "; ".join(fault for fault in faults if isinstance(fault, str))
    return found[:_MESSAGE_MAX_CHARS] if isinstance(found, str) else ""


def tell(engine: Engine, failed: AttemptFailed) -> None:
    """What a failed attempt says about the engine itself."""
    match failed.failure:
        case Failure.CONNECT_FAILED:
            cause = failed.__cause__
            engine.note_connect_failed(cause if isinstance(cause, ConnectFailed) else None)
        case Failure.LOST:
            engine.note_request_lost()
        case Failure.SERVER_ERROR:
            engine.note_request_failed()
        case Failure.FIRST_BYTE_LATE:
            engine.note_request_timeout()
        case Failure.SHUTTING_DOWN | Failure.ABORTED_EMPTY:
            engine.note_shutdown_seen()
        case Failure.BUSY:
            pass  # full, and therefore alive
        case Failure.REFUSED_OUR_KEY:
            pass  # a mistake in the configuration, not the engine's health
