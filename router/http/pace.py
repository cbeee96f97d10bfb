"""How a client keeps up: how much longer its upload may take, and how much of what was written it has not taken yet."""

import asyncio
import fcntl
import socket
import struct
import termios

from router.errors import ApiError


class UploadPace:
    """The pace of a body that somebody waits for. Times are the event loop's."""

    __slots__ = ("_idle_s", "_last_s", "_min_bytes_per_s", "_since_s", "_whole_s")

    def __init__(self, now_s: float, idle_s: float, whole_s: float, min_bytes_per_s: float) -> None:
        """From now on it has to come. It may pause for `idle_s`, and take `whole_s` and a second more for each
        `min_bytes_per_s` bytes."""
        self._idle_s = idle_s
        self._whole_s = whole_s
        self._min_bytes_per_s = min_bytes_per_s
        self._since_s = self._last_s = now_s

    def came(self, now_s: float) -> None:
        """Some of it did, or more of it is waited for only now."""
        self._last_s = now_s

    def left_s(self, now_s: float, size_bytes: int) -> float:
        """Until it is too slow, where `size_bytes` of it came so far."""
        allowed_s = self._whole_s + size_bytes / self._min_bytes_per_s
        return min(self._last_s + self._idle_s, self._since_s + allowed_s) - now_s

    def too_slow(self, now_s: float, size_bytes: int) -> ApiError:
        taken_s = now_s - self._since_s
        return ApiError(
            408,
            "upload_timeout",
            f"{size_bytes:,} bytes of the body came in {taken_s:.0f} s; the request was given up. A body may "
            f"pause for {self._idle_s:g} s and take {self._whole_s:g} s, and a second more for each "
            f"{self._min_bytes_per_s:,} bytes.",
            headers={"connection": "close"},
        )


def untaken_bytes(transport: asyncio.Transport) -> int:
    """Written for the client and not acknowledged by it: what waits here, and in the kernel where that tells.

    What waits here alone would not do: a kernel with a large buffer lets nothing out of it for minutes while the client
    reads slowly.
    """
    waiting = transport.get_write_buffer_size()
    near: socket.socket | None = transport.get_extra_info("socket")
    if near is None:
        return waiting
    try:
        (unacknowledged,) = struct.unpack("i", fcntl.ioctl(near.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    except OSError:
        return waiting
    return waiting + int(unacknowledged)
