"""Time, given from outside so that tests and the simulator can jump.

Intervals come only from `now_s` (monotonic, arbitrary origin). `unix_s` is wall time and is used only where a
protocol asks for it (OpenAI `created` fields, log lines).
"""

import time
from typing import Protocol


class Clock(Protocol):
    """What the router asks of time."""

    def now_s(self) -> float:
        """Monotonic seconds; only differences mean something."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    # Asked some eight times a request: the functions themselves, not methods around them.
    now_s = staticmethod(time.monotonic)
    unix_s = staticmethod(time.time)
