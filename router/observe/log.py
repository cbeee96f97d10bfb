"""Log lines: one JSON object each, on stderr; one line per finished request.

Never in a line: prompts, answers, keys, URLs of engines or relays. Foreign libraries log through the same handler, so
their lines are JSON too, and httpx's (which hold URLs) are kept down.
"""

import json
import logging
import sys
import time
from typing import Any

from router.request import RequestRecord

_REQUEST_LOG = logging.getLogger("router.request")


class JsonFormatter(logging.Formatter):
    """`{"ts", "level", "logger", "message", ...}`; fields of a request line come in `record.fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(level: str) -> None:
    """Send everything to stderr as JSON lines, from `level` up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("httpx", "httpcore", "asyncio", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)


def log_request(record: RequestRecord) -> None:
    """The line of a finished request. Times in milliseconds, since people read them."""
    if not _REQUEST_LOG.isEnabledFor(logging.INFO):
        return
    ended_at_s = record.ended_at_s or record.arrived_at_s
    fields = {
        "request_id": record.request_id,
        "endpoint": record.endpoint,
        "model": record.model,
        "tenant": record.tenant,
        "class": record.request_class,
        "reason": record.reason,
        "pool": record.pool,
        "engine": record.engine,
        "relay": record.relay,
        "stream": record.stream,
        "status": record.status,
        "outcome": record.outcome,
        "error_code": record.error_code,
        "attempts": record.attempts,
        "prompt_tokens": record.count.prompt_tokens if record.count else None,
        "prompt_tokens_exact": record.count.exact if record.count else None,
        "prompt_tokens_used": record.prompt_tokens_used,
        "completion_tokens_used": record.completion_tokens_used,
        "queue_wait_ms": round(record.queue_wait_s * 1000, 1),
        "hold_wait_ms": round(record.hold_wait_s * 1000, 1),
        "ttft_ms": round((record.first_token_at_s - record.arrived_at_s) * 1000, 1)
        if record.first_token_at_s
        else None,
        "duration_ms": round((ended_at_s - record.arrived_at_s) * 1000, 1),
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    _REQUEST_LOG.info("request", extra={"fields": {name: value for name, value in fields.items() if value is not None}})
