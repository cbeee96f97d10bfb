"""What a result was measured on: without it no figure can be compared with another."""

import os
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["describe"]

#: What the router's cost hangs on.
_PACKAGES = ("uvicorn", "uvloop", "httptools", "starlette", "msgspec", "prometheus-client")


def describe() -> dict[str, Any]:
    """Cores, memory, kernel, Python, packages and the tree's commit, as JSON values; null where not known."""
    return {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_model": _first(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)"),
        "memory_gib": _gib(_first(Path("/proc/meminfo"), r"MemTotal:\s*(\d+)")),
        "load_average_1_min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "router_commit": _commit(),
    }


def _first(page: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, page.read_text())
    except OSError:
        return None
    return found[1].strip() if found else None


def _gib(kib: str | None) -> float | None:
    return None if kib is None else round(int(kib) / 2**20, 1)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit that is checked out, with a `+` where files differ from it; None outside a git tree."""
    root = Path(__file__).parent.parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")
