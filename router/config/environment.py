"""The process environment, touched nowhere else but here and in `load.py`."""

import os
from pathlib import Path

from router.config.model import Secret

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


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


def ignored_proxies() -> tuple[str, ...]:
    """Names, as they are spelt, of the set variables that would send other programs' requests through a proxy. Their
    values, which may hold a password, stay here."""
    spellings = [spelling for name in _PROXIES for spelling in (name, name.lower())]
    return tuple([name for name in spellings if os.environ.get(name)])
