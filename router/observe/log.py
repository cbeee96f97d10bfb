"""Log lines: one JSON object each, on stderr; one line per finished request.

Never in a line: prompts, answers, keys, URLs of engines or relays. Foreign libraries log through the same handler, so
their lines are JSON too, and httpx's (which hold URLs) are kept down.

A finished request's line is made by one encoder call and written without logging's records and formatters, which cost
more than the rest of its ending. It obeys the levels and goes where the others go, in order; a handler that is not ours
gets an ordinary record.
"""

import functools
import json
import logging
import sys
import time
from typing import Any

import msgspec

from router.observe.lines import LineWriter
from router.request import RequestRecord

_REQUEST_LOG = logging.getLogger("router.request")


class JsonFormatter(logging.Formatter):
    """`{"ts", "level", "logger", "message", ...}`; fields of a request line come in `record.fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str, separators=(",", ":"))


class LineHandler(logging.Handler):
    """Every record as one JSON line."""

    def __init__(self, lines: LineWriter) -> None:
        super().__init__()
        self.lines = lines
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  # logging's own boundary: a log call must not raise
            self.handleError(record)
            return
        self.lines.write(line.encode("utf-8", "backslashreplace") + b"\n")


class RequestLine(msgspec.Struct, omit_defaults=True, rename={"request_class": "class"}, gc=False):
    """The fields of a finished request's line, in order. None: left out. Times in milliseconds, since people read
    them."""

    ts: str
    level: str
    logger: str
    message: str
    request_id: str | None = None
    endpoint: str | None = None
    model: str | None = None
    tenant: str | None = None
    request_class: str | None = None
    reason: str | None = None
    pool: str | None = None
    engine: str | None = None
    relay: str | None = None
    stream: bool | None = None
    status: int | None = None
    outcome: str | None = None
    error_code: str | None = None
    attempts: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_exact: bool | None = None
    prompt_tokens_used: int | None = None
    completion_tokens_used: int | None = None
    queue_wait_ms: float | None = None
    hold_wait_ms: float | None = None
    ttft_ms: float | None = None
    duration_ms: float | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None


_encode = msgspec.json.Encoder().encode


def set_up(level: str) -> None:
    """Send everything to stderr as JSON lines, from `level` up. Without a stderr its number may be any file's."""
    root = logging.getLogger()
    root.handlers[:] = [logging.NullHandler() if sys.stderr is None else LineHandler(LineWriter())]
    root.setLevel(level.upper())
    for name in ("httpx", "httpcore", "asyncio", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)


def dropped_lines() -> int:
    """Lines of this process so far that whoever reads stderr had no room for."""
    return sum(handler.lines.dropped_lines for handler in logging.root.handlers if isinstance(handler, LineHandler))


def log_request(record: RequestRecord) -> None:
    """The line of a finished request."""
    if not _REQUEST_LOG.isEnabledFor(logging.INFO):
        return
    line = _request_line(record)
    for handler in logging.root.handlers:
        if handler.level > logging.INFO:
            continue
        if isinstance(handler, LineHandler):
            handler.lines.write(_encode(line) + b"\n")
        else:
            handler.handle(_as_log_record(line))


def _request_line(record: RequestRecord) -> RequestLine:
    arrived_at_s, count = record.arrived_at_s, record.count
    return RequestLine(
        _utc(time.time()),
        "info",
        _REQUEST_LOG.name,
        "request",
        request_id=record.request_id,
        endpoint=record.endpoint,
        model=record.model,
        tenant=record.tenant,
        request_class=record.request_class,
        reason=record.reason,
        pool=record.pool,
        engine=record.engine,
        relay=record.relay,
        stream=record.stream,
        status=record.status,
        outcome=record.outcome,
        error_code=record.error_code,
        attempts=record.attempts,
        prompt_tokens=None if count is None else count.prompt_tokens,
        prompt_tokens_exact=None if count is None else count.exact,
        prompt_tokens_used=record.prompt_tokens_used,
        completion_tokens_used=record.completion_tokens_used,
        queue_wait_ms=_ms(record.queue_wait_s),
        hold_wait_ms=_ms(record.hold_wait_s),
        ttft_ms=None if record.first_token_at_s is None else _ms(record.first_token_at_s - arrived_at_s),
        duration_ms=_ms((record.ended_at_s or arrived_at_s) - arrived_at_s),
        bytes_in=record.bytes_in,
        bytes_out=record.bytes_out,
    )


def _as_log_record(line: RequestLine) -> logging.LogRecord:
    fields: dict[str, Any] = msgspec.to_builtins(line)
    for name in ("ts", "level", "logger", "message"):
        del fields[name]
    return _REQUEST_LOG.makeRecord(
        line.logger, logging.INFO, __file__, 0, line.message, (), None, extra={"fields": fields}
    )


def _ms(seconds: float) -> float:
    """Milliseconds with one decimal place. `round` would cost as much as the rest of the line."""
    return int(seconds * 10_000 + 0.5) / 10


def _utc(unix_s: float) -> str:
    """`2026-01-31T23:59:59.123Z`."""
    second = int(unix_s)
    return f"{_second_as_text(second)}.{int((unix_s - second) * 1000):03d}Z"


@functools.lru_cache(maxsize=2)  # the same for thousands of lines
def _second_as_text(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
