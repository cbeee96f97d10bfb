"""What reached the simulated server, for tests and for `GET /sim/log`. Bounded in entries and in kept body bytes."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class LogEntry:
    """One inference call. Made when its headers are read and filled in as it goes; None or 0 is "not yet".

    `id` is the id in the answer. `prompt_tokens` sums over prompts, `output_tokens` over sequences. `max_tokens` is the
    client's own cap, `priority` what the engine scheduled by. `status` is what was sent. `aborted`: the client left, or
    a fault ended it. `body` holds at most the first `log_body_max_bytes`, `body_bytes` is the true size.
    """

    endpoint: str
    path: str
    headers: dict[str, str]
    x_request_id: str | None = None
    id: str = ""
    model: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int | None = None
    stream: bool = False
    priority: int = 0
    status: int | None = None
    finish_reason: str | None = None
    aborted: bool = False
    body: bytes = b""
    body_bytes: int = 0
    faults: tuple[str, ...] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        """For `GET /sim/log`: without headers, which may hold keys; the body as text."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in {"headers", "body"}} | {
            "body": self.body.decode("utf-8", "replace")
        }


class RequestLog:
    """The last `entries_max` calls."""

    def __init__(self, entries_max: int, body_max_bytes: int) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=entries_max)
        self._body_max_bytes = body_max_bytes

    def begin(self, endpoint: str, path: str, headers: dict[str, str]) -> LogEntry:
        """A new entry, to be filled in by the caller."""
        entry = LogEntry(endpoint=endpoint, path=path, headers=headers, x_request_id=headers.get("x-request-id"))
        self._entries.append(entry)
        return entry

    def keep_body(self, entry: LogEntry, body: bytes) -> None:
        entry.body = body[: self._body_max_bytes]
        entry.body_bytes = len(body)

    def entries(self) -> tuple[LogEntry, ...]:
        """Oldest first."""
        return tuple(self._entries)

    def clear(self) -> None:
        self._entries.clear()
