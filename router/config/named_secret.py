"""A secret that a command is told by the name of its environment variable, so that it is in no shell history."""

import os

from router.config.model import Secret


def named_secret(name: str) -> Secret:
    """What the variable `name` holds.

    Raises: `ValueError` where it is not set or empty; the message has the name only.
    """
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"environment variable {name} is not set or empty")
    return Secret(value)
