"""The process environment, touched nowhere else but here and in `load.py`."""

import os
from pathlib import Path

from router.config.model import Secret


def set_shared_metrics_dir(path: Path) -> None:
    """Tell prometheus-client where processes share their series; it takes this from the environment only."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(path)


def named_secret(name: str) -> Secret:
    """What the variable `name` holds: a secret that a command is told by name, so that it is in no shell history.

    Raises: `ValueError` where it is not set or empty; the message has the name only.
    """
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"environment variable {name} is not set or empty")
    return Secret(value)
