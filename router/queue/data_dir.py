"""The directory of the embedded server: who may use it, which server lives in it, where its socket lies.

Two locks, both `flock`, both given back by the kernel when their holder ends in whatever way: `lock` is the router's,
`server.lock` the server's. The text of each is its holder's process id, for messages and for ending an orphan; only
the lock itself says that the holder lives. Plain system calls, no event loop, no server.
"""

import contextlib
import fcntl
import os
import stat
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

#: Bytes of a socket path that `sockaddr_un.sun_path` holds beside its closing zero. Source: sys/un.h of each system.
_SOCKET_PATH_MAX_BYTES = 107 if sys.platform == "linux" else 103


class DataDirInUse(Exception):
    """Another live router holds the data directory. The message names its process id and the fix."""


class ValkeyFailed(Exception):
    """The embedded server did not start or did not end. The message says where its log is."""


def socket_path(data_dir: Path) -> Path:
    """In the data directory, or, where that path is too long for a socket, in a private directory named after it.

    The short place follows from the data directory alone, so that a start after a kill finds and clears it.
    """
    plain = data_dir / "valkey.sock"
    if len(os.fsencode(plain)) <= _SOCKET_PATH_MAX_BYTES:
        return plain
    name = sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"router-{os.geteuid()}-{name}" / "valkey.sock"


def make_private(directory: Path) -> None:
    """Make a directory that only this user enters, or prove that it is one already.

    Raises:
        ValkeyFailed: something else stands in its place.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValkeyFailed(f"{directory} must be a directory of this user with mode 700; remove it and start again")


def take(data_dir: Path) -> int:
    """Lock the directory for this process until the returned descriptor is closed."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    data_dir.chmod(0o700)
    fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode() or "unknown"
        os.close(fd)
        raise DataDirInUse(
            f"{data_dir} is in use by the router with process id {holder}; stop that one, or give this one "
            "another server.data_dir"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_holder(server_lock: Path) -> int | None:
    """The process that holds the server's lock: None if nobody does, 0 if it has not written its number yet."""
    try:
        fd = os.open(server_lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0)
        return int(text) if text.isdigit() else 0
    finally:
        os.close(fd)
    return None
