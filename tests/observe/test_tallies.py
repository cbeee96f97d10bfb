"""Tallies of several processes: they add up, survive their process, and never make counting fail."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.observe.tallies import Series, Tallies, observe
from tests.http.scrape import Metrics as Page

BOUNDS = (0.1, 1.0)


class Worker:
    """One process's tallies: a bare counter, one with a label, and a histogram."""

    def __init__(self, folder: Path | None, slot: int = 0) -> None:
        self.tallies = Tallies(folder, slot=slot)
        self.calls = self.tallies.counter("calls", "Calls", ())
        self.by_model: Series = self.tallies.counter("by_model", "By model", ("model",))
        self.wait = self.tallies.histogram("wait", "Wait", ("model",), BOUNDS)

    def count(self, model: str, wait_s: float) -> None:
        self.calls.cells()[0] += 1
        self.by_model.cells(model)[0] += 1
        observe(self.wait.cells(model), BOUNDS, wait_s)

    def page(self) -> Page:
        registry = CollectorRegistry()
        registry.register(self.tallies)
        return Page(generate_latest(registry).decode())


def test_any_worker_shows_the_sum_of_all(tmp_path: Path) -> None:
    one, other = Worker(tmp_path, 0), Worker(tmp_path, 1)

    one.count("a", 0.5)
    one.count("b", 0.05)
    other.count("a", 7.0)

    for page in (one.page(), other.page()):
        assert page.value("calls_total") == 3
        assert page.by("by_model_total", "model") == {"a": 2, "b": 1}
        assert page.value("wait_sum", model="a") == 7.5
        assert page.by("wait_bucket", "le") == {"0.1": 1, "1.0": 2, "+Inf": 3}
        assert "_created" not in page.text


def test_the_next_process_of_a_slot_goes_on_with_its_counts(tmp_path: Path) -> None:
    other = Worker(tmp_path, 1)
    for _ in range(3):
        Worker(tmp_path, 0).count("a", 0.5)

    Worker(tmp_path, 0).count("b", 0.5)

    page = other.page()
    assert page.value("calls_total") == 4
    assert page.by("by_model_total", "model") == {"a": 3, "b": 1}
    assert page.value("wait_count") == 4


def test_what_a_killed_process_counted_stays(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from tests.observe.test_tallies import Worker; "
        f"w = Worker(Path({str(tmp_path)!r}), 0); [w.count('a', 0.5) for _ in range(100)]; "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    killed = subprocess.run([sys.executable, "-c", script], check=False)

    assert killed.returncode == -signal.SIGKILL
    assert Worker(tmp_path, 1).page().value("by_model_total", model="a") == 100


def test_a_line_that_a_killed_process_did_not_finish_is_as_if_never_begun(tmp_path: Path) -> None:
    Worker(tmp_path, 0).count("a", 0.5)
    with (tmp_path / "0.index").open("ab") as index:
        index.write(b'["by_model",["torn')

    meanwhile = Worker(tmp_path, 1).page()
    next_one = Worker(tmp_path, 0)
    next_one.count("torn", 0.5)

    assert meanwhile.by("by_model_total", "model") == {"a": 1}
    assert next_one.page().by("by_model_total", "model") == {"a": 1, "torn": 1}


@pytest.mark.parametrize("shared", [True, False])
def test_label_sets_beyond_one_segment_of_memory_count_as_well(shared: bool, tmp_path: Path) -> None:
    worker = Worker(tmp_path if shared else None)
    models = [f"model-{number}" for number in range(3_000)]

    for model in models:
        worker.count(model, 0.5)
        worker.count(model, 0.5)

    page = worker.page()
    assert page.value("calls_total") == 6_000
    assert set(page.by("by_model_total", "model").values()) == {2}
    assert page.value("wait_count") == 6_000


def test_without_room_nothing_fails_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    worker = Worker(tmp_path)

    worker.count("a", 0.5)
    worker.count("a", 0.5)

    assert worker.page().value("by_model_total") == 0
    assert caplog.text.count("no room for the metric by_model") == 1


@pytest.mark.parametrize("gone", ["*", "*.cells"])
def test_with_the_folder_gone_the_page_is_empty_and_counting_goes_on(gone: str, tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.count("a", 0.5)
    for file in tmp_path.glob(gone):
        file.unlink()

    worker.count("a", 0.5)

    assert worker.page().samples == []


def test_a_label_set_of_which_nothing_was_counted_is_not_shown() -> None:
    worker = Worker(None)

    worker.by_model.cells("a")
    worker.wait.cells("a")

    assert {sample.name for sample in worker.page().samples} == {"calls_total", "calls_created"}
