"""Becomes the embedded server, tied to the life of the router: run as a script, never imported.

Arguments: the router's process id, the path of the server's lock, the server's binary, its options.

It runs between fork and exec in a process of its own, because neither call below may be made in the forked copy of a
threaded program. On Linux the kernel is asked to send SIGKILL when the thread that started this process ends; the
check of the parent after it closes the gap in which that had happened already. The lock's descriptor stays open over
exec, so the lock lasts exactly as long as the server. Standard library only; `router` cannot be imported here.
"""

import ctypes
import fcntl
import os
import signal
import sys

#: Source: linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, lock_path: str, command: list[str]) -> None:
    """Does not return. Exit code 75: the router is gone; 73: another server holds the lock; 71: the kernel refused."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(71)
    if os.getppid() != parent_pid:
        sys.exit(75)
    fd = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(73)
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    os.set_inheritable(fd, True)
    os.execv(command[0], command)  # noqa: S606  # becoming this very binary, without a shell, is the purpose


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
