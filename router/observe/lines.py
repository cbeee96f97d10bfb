"""Writes lines to stderr without ever waiting for whoever reads it.

A log that is a pipe fills up when its reader stops (a collector that hangs, a terminal that is held). Waiting for it
would stop the event loop, and with it every stream. So a line that has no room is dropped and counted. What is written
is whole lines, one write each: on a pipe that other processes write to as well, up to 4 KiB (PIPE_BUF), which the
kernel does not divide. Between the parts of a longer line theirs can stand, never one of this process.

O_NONBLOCK belongs to an open file, which stderr shares with the shell, the other workers and the store: a pipe is
opened a second time for it. What cannot be opened twice (a socket, another user's pipe) is asked for room first; there
two processes that write into the last room at the same moment can still wait.
"""

import contextlib
import fcntl
import os
import select
import stat
import threading

#: As much as the system lets everybody have: a reader may pause for some 2,000 lines.
_PIPE_BYTES = 2**20


class LineWriter:
    """Lines to an open file, stderr if nothing else is said, from any thread. The file stays the caller's."""

    def __init__(self, file: int = 2) -> None:
        self.dropped_lines = 0
        self._rest = b""
        self._lock = threading.Lock()
        self._room: select.poll | None = None
        try:
            self._file = _opened_again(file)
        except OSError:
            self._file = os.dup(file)
            self._room = select.poll()
            self._room.register(self._file, select.POLLOUT)
        with contextlib.suppress(OSError):  # no pipe, or all the memory for pipes that one user may have is taken
            fcntl.fcntl(self._file, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def write(self, line: bytes) -> None:
        """Write a line, its end included, or count it as dropped. Never raises for what the file does."""
        with self._lock:
            if self._rest and not self._finish_rest():
                self.dropped_lines += 1
                return
            written = self._try(line)
            if not written:
                self.dropped_lines += 1
            elif written < len(line):
                # Only lines above a pipe's 4 KiB are written in part; the end comes before anything else.
                self._rest = line[written:]

    def close(self) -> None:
        os.close(self._file)

    def _finish_rest(self) -> bool:
        self._rest = self._rest[self._try(self._rest) :]
        return not self._rest

    def _try(self, line: bytes) -> int:
        """Bytes that went out."""
        if self._room is not None and not self._room.poll(0):
            return 0
        try:
            return os.write(self._file, line)
        except OSError:  # no room (EAGAIN), no reader (EPIPE), no space: the line is lost
            return 0


def _opened_again(file: int) -> int:
    """A pipe or terminal as an open file of its own that does not block; a file on disk never does, in this sense.

    Raises: `OSError` where it cannot be opened again.
    """
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return os.dup(file)
    return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
