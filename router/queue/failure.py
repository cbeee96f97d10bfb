"""Says in the queue's words why Redis did not do what it was asked. The only place that reads its error texts.

No text of redis-py or of the server is passed on: they name addresses, users and sometimes arguments. What is passed
on is the server's own one-word code, where it gives one.
"""

import re

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from router.queue.store import QueueDown

#: Everything that a call over redis-py can end with, short of a cancel or a bug.
FOREIGN_ERRORS = (RedisError, RedisClusterException, OSError, EOFError)

#: redis-py takes the code off the text of those it has a type for.
_TYPED = (
    (AuthenticationError, "WRONGPASS"),
    (BusyLoadingError, "LOADING"),
    (NoPermissionError, "NOPERM"),
    (NoScriptError, "NOSCRIPT"),
    (OutOfMemoryError, "OOM"),
    (ReadOnlyError, "READONLY"),
)

#: Redis before 7 wraps the code of a command that failed inside a script in the text of the script's error.
_CODE = re.compile(r"\b(READONLY|OOM|MISCONF|NOREPLICAS|BUSY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|ASK|NOPERM|WRONGTYPE)\b")

_MEANS = {
    "ASK": "the keys are moving to another node",
    "BUSY": "it runs a long script",
    "LOADING": "it is still loading its data",
    "MISCONF": "it cannot save to disk",
    "NOPERM": "its user lacks a permission",
    "NOREPLICAS": "it has too few replicas to take writes",
    "OOM": "its memory is full",
    "READONLY": "it is a replica and takes no writes",
    "TRYAGAIN": "the keys are moving to another node",
    "WRONGPASS": "it wants another user name or password",
}


class Refused(QueueDown):
    """The store answered with an error. `code` is its word, such as `OOM`, or `ERR` where it has none."""

    def __init__(self, code: str) -> None:
        why = _MEANS.get(code)
        super().__init__(f"the queue's Redis refused a command ({code}{f': {why}' if why else ''})")
        self.code = code


def code_of(error: BaseException) -> str:
    """The server's one-word code in `error` or in what caused it; empty if it is no answer of a server."""
    error = _root(error)
    for kind, code in _TYPED:
        if isinstance(error, kind):
            return code
    if not isinstance(error, ResponseError):
        return ""
    match = _CODE.search(f"{getattr(error, 'status_code', '')} {error}")
    return match[1] if match else "ERR"


def as_queue_down(error: BaseException, timeout_s: float) -> QueueDown:
    """The same failure as the callers of the queue know it."""
    code = code_of(error)
    if code:
        return Refused(code)
    if isinstance(_root(error), TimeoutError | RedisTimeoutError):
        return QueueDown(f"the queue's Redis did not answer within {timeout_s:g} s")
    return QueueDown("the queue's Redis cannot be reached")


def _root(error: BaseException) -> BaseException:
    """redis-py wraps what goes wrong in a handshake, and in finding a cluster, in errors that say less."""
    while isinstance(error.__cause__, FOREIGN_ERRORS):
        error = error.__cause__
    return error
