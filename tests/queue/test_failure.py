"""Every way in which a server says no, in the words of each version, becomes one code and one plain sentence."""

import pytest
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from router.queue.failure import Refused, as_queue_down, code_of


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ReadOnlyError("You can't write against a read only replica."), "READONLY"),
        # Redis 6.2 inside a script.
        (
            ResponseError(
                "Error running script (call to f_0): @user_script:1: @user_script: 1: -READONLY You can't write "
                "against a read only replica."
            ),
            "READONLY",
        ),
        (ResponseError("Error running script (call to f_0): -OOM command not allowed when used memory"), "OOM"),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "OOM"),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots, but it's unable to persist"), "MISCONF"),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), "NOREPLICAS"),
        (ResponseError("BUSY Redis is busy running a script."), "BUSY"),
        (ResponseError("something new"), "ERR"),
        (AuthenticationError("invalid username-password pair"), "WRONGPASS"),
        (BusyLoadingError("Redis is loading the dataset in memory"), "LOADING"),
        (_caused(RedisConnectionError("wrapped"), AuthenticationError("invalid")), "WRONGPASS"),
        (_caused(RedisClusterException("wrapped"), RedisConnectionError("refused by 10.0.0.1:1")), ""),
        (RedisConnectionError("Error 111 connecting to 10.0.0.1:6379"), ""),
        (OSError(111, "refused"), ""),
    ],
)
def test_a_server_s_no_has_one_code(error: Exception, code: str) -> None:
    assert code_of(error) == code

    down = as_queue_down(error, 2.0)

    assert isinstance(down, Refused) == bool(code)
    assert f"({code}" in str(down) if code else str(down) == "the queue's Redis cannot be reached"
    assert "10.0.0.1" not in str(down)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        RedisTimeoutError("Timeout reading from 10.0.0.1:6379"),
        _caused(RedisConnectionError("wrapped"), RedisTimeoutError("Timeout")),
    ],
)
def test_a_timeout_says_how_long_was_waited(error: Exception) -> None:
    assert str(as_queue_down(error, 0.25)) == "the queue's Redis did not answer within 0.25 s"
