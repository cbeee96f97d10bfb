"""Asks a server for /healthz every 20 ms and notes how long it takes: python bench/loop_probe.py PORT OUT.json

Independent of what the server says of itself: an event loop that stands still answers nobody. It is a process of its
own, so that whatever else a measurement does cannot delay it, and it notes by how much its own sleep was late: where
that is large too, the machine was busy, not the loop. Runs until SIGTERM; OUT.json then holds {answers, failures,
over_50ms, over_50ms_at_s, max_s, p99_s, own_late_max_s}; the first moments of those over 50 ms are seconds from its
own start.
"""

import http.client
import json
import signal
import sys
import time
from array import array
from pathlib import Path
from typing import Any

_INTERVAL_S = 0.02
_LIMIT_S = 30.0
_LONG_S = 0.05
_MOMENTS_MAX = 20
#: 14 hours of probing; the figures then speak of the first ones.
_SAMPLES_MAX = 2_500_000


class Probe:
    """One keep-alive connection, opened again where it breaks."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
        self._is_over = False
        self._took_s = array("f")
        self._failures = 0
        self._over = 0
        self._over_at_s: list[float] = []
        self._began_s = time.monotonic()
        self._own_late_max_s = 0.0

    def run(self) -> dict[str, Any]:
        signal.signal(signal.SIGTERM, self._end)
        while not self._is_over:
            began_s = time.monotonic()
            self._ask(began_s)
            pause_s = max(0.0, _INTERVAL_S - (time.monotonic() - began_s))
            slept_from_s = time.monotonic()
            time.sleep(pause_s)
            self._own_late_max_s = max(self._own_late_max_s, time.monotonic() - slept_from_s - pause_s)
        in_order = sorted(self._took_s)
        return {
            "answers": len(in_order),
            "failures": self._failures,
            "over_50ms": self._over,
            "over_50ms_at_s": self._over_at_s,
            "max_s": round(in_order[-1], 4) if in_order else 0.0,
            "p99_s": round(in_order[int((len(in_order) - 1) * 0.99)], 4) if in_order else 0.0,
            "own_late_max_s": round(self._own_late_max_s, 4),
        }

    def _ask(self, began_s: float) -> None:
        try:
            self._connection.request("GET", "/healthz")
            answer = self._connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            self._failures += not self._is_over
            return
        took_s = time.monotonic() - began_s
        self._failures += answer.status != 200
        if took_s > _LONG_S:
            self._over += 1
            if len(self._over_at_s) < _MOMENTS_MAX:
                self._over_at_s.append(round(began_s - self._began_s, 2))
        if len(self._took_s) < _SAMPLES_MAX:
            self._took_s.append(took_s)

    def _end(self, *_: object) -> None:
        self._is_over = True


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(Probe(int(sys.argv[1])).run()))
