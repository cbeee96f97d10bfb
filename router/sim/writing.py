"""Bytes of one answer to its client: status, events, compression, and the point where a fault ends it."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from router.sim.faults import FaultKind, RequestFaults
from router.sim.log import LogEntry


class AnswerCut(Exception):
    """A fault resets the connection here."""


class AnswerStalls(Exception):
    """A fault silences the answer here."""


class AnswerWriter:
    """Writes one answer, whole or streamed. The k-th event of `cut` and `stall` is counted here."""

    def __init__(self, send: Send, entry: LogEntry, faults: RequestFaults) -> None:
        self._send = send
        self._entry = entry
        self._faults = faults
        self._events_sent = 0
        self._has_begun = False
        self._packer = zlib.compressobj(wbits=31) if FaultKind.GZIP in faults else None

    @property
    def has_begun(self) -> bool:
        """Whether a status is out."""
        return self._has_begun

    async def whole(self, content: Mapping[str, Any]) -> None:
        """A complete answer of 200. Raises: `AnswerCut`, `AnswerStalls` where a fault says so."""
        if FaultKind.CUT in self._faults:
            raise AnswerCut
        if FaultKind.STALL in self._faults:
            raise AnswerStalls
        await self.json(200, content)

    async def json(self, status: int, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """A complete answer, whatever the faults for streams."""
        body = self._pack(encode(content), is_last=True)
        named = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        await self._start(status, named)
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        """200 and the headers of an event stream, before anything is computed."""
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8"})
        # Some servers hold the headers back until the first body message.
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def events(self, events: list[bytes]) -> None:
        """The next events, flushed. Raises: `AnswerCut`, `AnswerStalls` before the event that a fault forbids."""
        allowed: list[bytes] = []
        ending: Exception | None = None
        for each in events:
            ending = self._ending()
            if ending is not None:
                break
            allowed.append(each)
            self._events_sent += 1
        if allowed:
            await self._part(b"".join(allowed))
        if ending is not None:
            raise ending

    async def comment(self, text: str) -> None:
        """A comment that keeps the connection alive; it is no event."""
        await self._part(f": {text}\n\n".encode())

    async def end(self) -> None:
        """Finish the stream."""
        await self._send({"type": "http.response.body", "body": self._pack(b"", is_last=True)})

    async def _part(self, raw: bytes) -> None:
        await self._send({"type": "http.response.body", "body": self._pack(raw, is_last=False), "more_body": True})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._has_begun = True
        self._entry.status = status
        named = dict(headers) | ({} if self._packer is None else {"content-encoding": "gzip"})
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def _pack(self, raw: bytes, *, is_last: bool) -> bytes:
        if self._packer is None:
            return raw
        return self._packer.compress(raw) + self._packer.flush(zlib.Z_FINISH if is_last else zlib.Z_SYNC_FLUSH)

    def _ending(self) -> Exception | None:
        if FaultKind.CUT in self._faults and self._events_sent >= self._faults.value(FaultKind.CUT):
            return AnswerCut()
        if FaultKind.STALL in self._faults and self._events_sent >= self._faults.value(FaultKind.STALL):
            return AnswerStalls()
        return None


def encode(content: Mapping[str, Any]) -> bytes:
    """Compact JSON; text that is no Unicode is replaced."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
