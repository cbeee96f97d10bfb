"""What this process takes of the machine: memory, open files, CPU time. Linux only, as the router is.

A process that may open no file at the moment cannot look everything up: None then, and no error.
"""

import os
import time
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")
_FILES = Path("/proc/self/fd")


def resident_bytes() -> int | None:
    """Memory of the process that is in RAM, shared pages included."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        return None


def open_files() -> int | None:
    """Files and sockets that the process has open."""
    # Since Linux 6.2 the size of the folder is their number; before, it is 0, and each has to be listed.
    try:
        return _FILES.stat().st_size or sum(1 for _ in _FILES.iterdir()) - 1
    except OSError:
        return None


def cpu_s() -> float:
    """CPU time of all threads since the process began, in seconds."""
    return time.process_time()
