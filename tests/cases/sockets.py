"""The TCP sockets of this process, as the kernel knows them: their state, their ends, and what went through them."""

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import struct
import termios
from collections import Counter
from collections.abc import Iterator

#: States of a TCP socket, as Linux numbers them.
TCP_ESTABLISHED, TCP_LISTEN = 1, 10


def tcp_sockets() -> list[tuple[int, int, int]]:
    """State, near and far port of every TCP socket of this process; the far one is 0 where it has no peer."""
    return [(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0], *ends) for own, *ends in _open()]


def sockets(ports: set[int]) -> Counter[int]:
    """The sockets of this process with one of `ports` at either end by their state; each end counts, listeners do
    not."""
    return Counter(state for state, *ends in tcp_sockets() if state != TCP_LISTEN and ports & {*ends})


def bytes_read(far: int) -> int:
    """What was read from the connection to port `far` on which most was."""
    return max(_passed(own)[1] - _queued(own, termios.FIONREAD) for own, _, to in _open() if to == far)


def bytes_written(near: int, far: int) -> int:
    """What was written on the connection from port `near` to port `far`, be it acknowledged or not."""
    (written,) = [_passed(own)[0] + _queued(own, termios.TIOCOUTQ) for own, *ends in _open() if ends == [near, far]]
    return written


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a RST, whatever was read or not."""
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _open() -> Iterator[tuple[socket.socket, int, int]]:
    """Every TCP socket, open for as long as it is looked at, and its near and far port."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  hundreds of times a test, and only the names are wanted
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family != socket.AF_INET or own.type != socket.SOCK_STREAM:
                    continue
                near, far = own.getsockname()[1], 0
                with contextlib.suppress(OSError):
                    far = own.getpeername()[1]
                yield own, near, far


def _passed(own: socket.socket) -> tuple[int, int]:
    """Bytes that the other end acknowledged, and bytes that came. Source: `struct tcp_info` of linux/tcp.h."""
    acknowledged, received = struct.unpack("120xQQ", own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136))
    return acknowledged, received


def _queued(own: socket.socket, which: int) -> int:
    (size_bytes,) = struct.unpack("i", fcntl.ioctl(own, which, bytes(4)))
    return int(size_bytes)
