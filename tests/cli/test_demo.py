"""`router demo` judges its run by the engines' own logs, and leaves nothing behind on any way out."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from router.cli import _stack
from router.cli.bench import bench
from router.cli.demo import demo

_STANDIN = Path(__file__).with_name("standin_router.py")


class _Run:
    """A command on the demo stack, with the stand-in for the router."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pid_file = folder / "pid"
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(tempfile, "tempdir", str(self._temporary))

    def __call__(self, mode: str, *arguments: str) -> Result:
        standin = (str(_STANDIN), mode, str(self._pid_file))
        self._monkeypatch.setattr(_stack, "_SERVE", standin)
        return self.with_the_router(*arguments)

    def with_the_router(self, *arguments: str) -> Result:
        """The real router, unless the stand-in was put in its place."""
        app = typer.Typer()
        app.command()(demo)
        app.command()(bench)
        return CliRunner().invoke(app, arguments)

    def temporary_files(self) -> list[Path]:
        return list(self._temporary.iterdir())

    def assert_nothing_is_left(self, *, has_begun: bool = True) -> None:
        assert self.temporary_files() == []
        if not has_begun and not self._pid_file.exists():
            return
        with pytest.raises(ProcessLookupError):
            os.kill(int(self._pid_file.read_text()), 0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Run:
    return _Run(tmp_path, monkeypatch)


def test_a_bounded_demo_prints_one_object_that_adds_up_and_exits_zero(run: _Run) -> None:
    result = run("good", "demo", "--once", "--json", "--duration", "2s", "--rate", "6")

    told = json.loads(result.stdout)

    assert result.exit_code == 0
    assert told["ok"] is True
    assert told["arrivals"] == told["outcomes_sum"] == told["totals"]["completed"] > 0
    assert told["misrouted"] == 0
    chat, batch = told["classes"]["chat"], told["classes"]["batch"]
    assert chat["sent"] == chat["by_pool"]["chat"] == told["engines"]["chat"]["requests"]
    assert batch["sent"] == told["engines"]["batch"]["batch_size"]
    assert chat["ttft_ms"]["p50"] > 0
    assert chat["queue_wait_ms"]["p50"] == 1.5
    run.assert_nothing_is_left()


def test_the_real_router_passes_its_demo(run: _Run) -> None:
    result = run.with_the_router("demo", "--once", "--json", "--duration", "4s")

    told = json.loads(result.stdout)

    assert result.exit_code == 0, told["problems"]
    assert told["arrivals"] == told["outcomes_sum"] > 0
    assert told["misrouted"] == 0
    assert told["classes"]["batch"]["by_engine"] == {"sim-batch": told["classes"]["batch"]["completed"]}
    assert told["engines"]["batch"]["batch_size"] == told["classes"]["batch"]["sent"] > 0
    assert told["engines"]["chat"]["batch_size"] == 0
    assert run.temporary_files() == []


def test_a_router_that_misroutes_is_found_out_by_the_engines_log(run: _Run) -> None:
    result = run("misroute", "demo", "--once", "--json", "--duration", "3s", "--rate", "6")

    told = json.loads(result.stdout)

    assert result.exit_code == 1
    assert told["ok"] is False
    assert told["misrouted"] == told["classes"]["batch"]["misrouted"] == told["classes"]["batch"]["sent"] > 0
    assert told["arrivals"] == told["outcomes_sum"]
    run.assert_nothing_is_left()


def test_a_router_that_does_not_start_is_quoted_and_nothing_stays(run: _Run) -> None:
    result = run("dies", "demo", "--once", "--json")

    assert result.exit_code == 1
    assert "ended with exit code 1" in result.stderr
    assert "pools.yaml is not to my taste" in result.stderr
    run.assert_nothing_is_left()


def test_a_router_that_never_serves_is_given_up(run: _Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stack, "_START_S", 1.0)

    result = run("silent", "demo", "--once", "--json")

    assert result.exit_code == 1
    assert "did not serve within 1 s" in result.stderr
    # On a busy machine a second may be over before the stand-in has said its process id.
    run.assert_nothing_is_left(has_begun=False)


def test_ctrl_c_amid_a_bounded_demo_prints_what_it_has_and_leaves_nothing(run: _Run) -> None:
    result = run("interrupt", "demo", "--once", "--json", "--duration", "1h", "--rate", "20")

    told = json.loads(result.stdout)

    assert result.exit_code == 130
    assert told["arrivals"] == told["outcomes_sum"] > 0
    assert told["totals"]["interrupted"] > 0
    run.assert_nothing_is_left()


def test_ctrl_c_is_how_a_demo_without_end_ends_well(run: _Run) -> None:
    result = run("interrupt", "demo", "--rate", "20")

    assert result.exit_code == 0
    assert "0 misrouted" in result.stdout
    assert "sim-chat" in result.stdout
    run.assert_nothing_is_left()


def test_ctrl_c_before_the_router_serves_leaves_nothing(run: _Run) -> None:
    result = run("interrupt-early", "demo")

    assert result.exit_code == 130
    run.assert_nothing_is_left()


def test_a_bench_without_a_target_runs_on_the_demo_stack(run: _Run) -> None:
    result = run("good", "bench", "--json", "--num-prompts", "5", "--rate", "20", "--mix", "chat:1")

    told = json.loads(result.stdout)

    assert result.exit_code == 0
    assert (told["target"], told["completed"], told["by_pool"]) == ("demo stack", 5, {"chat": 5})
    run.assert_nothing_is_left()


@pytest.mark.parametrize("arguments", [["--duration", "20"], ["--duration", "0s"], ["--rate", "0"]])
def test_a_usage_error_exits_two_and_starts_nothing(run: _Run, arguments: list[str]) -> None:
    result = run("good", "demo", "--once", *arguments)

    assert result.exit_code == 2
