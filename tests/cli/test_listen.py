"""The listening socket, and what accepted ones inherit from it."""

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from router.cli.listening import BACKLOG, backlog_for, fitted_to_open_files, listen
from router.config.load import Overrides, load

EXAMPLE = Path(__file__).parents[2] / "pools.yaml"


def test_an_accepted_connection_is_given_up_by_the_kernel_where_its_client_is_gone_without_a_word() -> None:
    config = load(EXAMPLE, overrides=Overrides(host="127.0.0.1", port=0))

    with listen(config) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            asks = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            untaken_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    assert (asks, idle_s, untaken_ms) == (1, 60, 300_000)


@contextmanager
def may_open(files: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("hard", [3, 64, 200, 1_024, 4_096, 10_000])
def test_all_that_may_come_at_once_fits_into_the_files_that_there_are(
    hard: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(EXAMPLE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))

    fitted = fitted_to_open_files(config)

    calls, at_once = fitted.server.connections_max, backlog_for(fitted)
    assert 1 <= calls < config.server.connections_max
    assert 16 <= at_once <= BACKLOG
    assert calls * 2 + at_once <= max(hard, 18)
    assert f"it takes {calls} calls at one time" in caplog.text


def test_a_limit_that_can_be_raised_is_raised_and_nothing_else_changes(caplog: pytest.LogCaptureFixture) -> None:
    config = load(EXAMPLE)
    small = replace(config, server=replace(config.server, connections_max=100))

    with may_open(1_024):
        fitted = fitted_to_open_files(small)
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        at_once = backlog_for(fitted)

    assert fitted == small
    assert allowed == 2 * 100 + 256 + 4 * len(small.engines) + BACKLOG
    assert at_once == BACKLOG
    assert caplog.text == ""
