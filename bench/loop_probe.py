"""Asks a server for /healthz every 20 ms and notes how long it takes: python bench/loop_probe.py PORT PID OUT.json

Independent of what the server says of itself: an event loop that stands still answers nobody. It is a process of its
own, so that whatever else a measurement does cannot delay it. Runs until SIGTERM; OUT.json then holds {answers,
failures, over_50ms, over_50ms_own, moments, max_s, p99_s, own_late_max_s}.

`moments` are the first answers over 50 ms: when (`at_s` from its own start), how long (`took_s`), and what the server's
first thread did meanwhile: `ran_s` is its own doing, `waited_s` was spent ready to run while others had the processor.
Where both are small the probe itself was late, as its sleep was by up to `own_late_max_s`. `over_50ms_own` counts the
answers that are over 50 ms even without the waiting.
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

    def __init__(self, port: int, pid: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
        self._is_over = False
        self._took_s = array("f")
        self._failures = 0
        self._over = 0
        self._over_own = 0
        self._moments: list[dict[str, float]] = []
        self._schedule = Path(f"/proc/{pid}/schedstat")
        self._began_s = time.monotonic()
        self._own_late_max_s = 0.0

    def run(self) -> dict[str, Any]:
        signal.signal(signal.SIGTERM, self._end)
        while not self._is_over:
            ran_s, waited_s = self._server_times_s()
            began_s = time.monotonic()
            took_s = self._ask(began_s)
            if took_s is not None and took_s > _LONG_S:
                self._note_long(began_s, took_s, ran_s, waited_s)
            pause_s = max(0.0, _INTERVAL_S - (time.monotonic() - began_s))
            slept_from_s = time.monotonic()
            time.sleep(pause_s)
            self._own_late_max_s = max(self._own_late_max_s, time.monotonic() - slept_from_s - pause_s)
        in_order = sorted(self._took_s)
        return {
            "answers": len(in_order),
            "failures": self._failures,
            "over_50ms": self._over,
            "over_50ms_own": self._over_own,
            "moments": self._moments,
            "max_s": round(in_order[-1], 4) if in_order else 0.0,
            "p99_s": round(in_order[int((len(in_order) - 1) * 0.99)], 4) if in_order else 0.0,
            "own_late_max_s": round(self._own_late_max_s, 4),
        }

    def _ask(self, began_s: float) -> float | None:
        """How long the answer took; None where there was none."""
        try:
            self._connection.request("GET", "/healthz")
            answer = self._connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            self._failures += not self._is_over
            return None
        took_s = time.monotonic() - began_s
        self._failures += answer.status != 200
        if len(self._took_s) < _SAMPLES_MAX:
            self._took_s.append(took_s)
        return took_s

    def _note_long(self, began_s: float, took_s: float, ran_s: float, waited_s: float) -> None:
        ran_after_s, waited_after_s = self._server_times_s()
        self._over += 1
        self._over_own += took_s - (waited_after_s - waited_s) > _LONG_S
        if len(self._moments) < _MOMENTS_MAX:
            moment = {"at_s": began_s - self._began_s, "took_s": took_s}
            moment |= {"ran_s": ran_after_s - ran_s, "waited_s": waited_after_s - waited_s}
            self._moments.append({name: round(value, 4) for name, value in moment.items()})

    def _server_times_s(self) -> tuple[float, float]:
        """What the server's first thread has run, and waited for a processor, so far; zeros once it is gone."""
        try:
            ran, waited, _ = self._schedule.read_text().split()
        except (OSError, ValueError):
            return 0.0, 0.0
        return int(ran) / 1e9, int(waited) / 1e9

    def _end(self, *_: object) -> None:
        self._is_over = True


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(Probe(int(sys.argv[1]), int(sys.argv[2])).run()))
