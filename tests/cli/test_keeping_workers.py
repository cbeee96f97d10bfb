"""A worker that the system does not let start, as for want of files or processes, is tried again."""

import asyncio
import errno
from pathlib import Path
from typing import Any, cast

import pytest

from router.cli import workers
from router.config.load import load

EXAMPLE = Path(__file__).parents[2] / "pools.yaml"

TRIES = 3


class Unable:
    """What makes processes, of which none can be started. The router stops with the last try."""

    def __init__(self) -> None:
        self.tries = 0
        self.stop = asyncio.Event()

    def Process(self, **_: Any) -> "Unable":  # noqa: N802  # multiprocessing's name
        return self

    def start(self) -> None:
        self.tries += 1
        if self.tries == TRIES:
            self.stop.set()
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_worker_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "_RESTART_PAUSE_S", 0.0)
    unable: Any = Unable()
    launch = workers.Launch(*cast("Any", (None, None, None, "r", None)))
    parent = workers._Parent(load(EXAMPLE), launch)
    parent._context, parent._stop = unable, unable.stop
    start = workers.WorkerStart(*cast("Any", (*(None,) * 7, 0)))

    asyncio.run(parent._keep(start))

    assert unable.tries == TRIES
    assert caplog.text.count("worker 0 could not be started: [Errno 24] Too many open files") == TRIES
