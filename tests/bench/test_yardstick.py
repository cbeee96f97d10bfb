"""The yardstick counts what it says: its engine and its load generator agree, and time is charged to whom used it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.children import ChildFailed, running
from bench.proxies import mocks
from bench.yardstick.build import NoCompiler, program
from bench.yardstick.cost import CpuTime, cpu_time, family, pss_mib
from bench.yardstick.load import Load, chat_body, send
from bench.yardstick.measure import Slice, Spread, measure


def test_the_engine_saw_exactly_the_requests_that_the_generator_counts(tmp_path: Path) -> None:
    with mocks(tmp_path, 1) as (engine,):
        outcome = send(engine.port, Load(connections=4, seconds=5, requests_max=100))

        assert engine.stats()["chat_requests"] == outcome.ok == 100
    assert outcome.failures == 0
    assert outcome.latency_us["p50"] <= outcome.latency_us["p99"] <= outcome.latency_us["max"]


def test_a_stream_has_its_tokens_its_usage_and_its_end(tmp_path: Path) -> None:
    with mocks(tmp_path, 1) as (engine,):
        outcome = send(engine.port, Load(connections=2, seconds=5, requests_max=6, is_stream=True, tokens=10))

    assert outcome.events == 6 * (10 + 2)
    assert outcome.failures == 0
    assert outcome.ttft_us["p50"] > 0


def test_an_engine_that_answers_500_is_counted_as_failing_while_its_health_is_green(tmp_path: Path) -> None:
    with mocks(tmp_path, 1) as (engine,):
        engine.set(status=500)

        outcome = send(engine.port, Load(connections=1, seconds=5, requests_max=3))

    assert (outcome.ok, outcome.non200) == (0, 3)
    assert outcome.first_error is not None
    assert outcome.first_error.startswith("HTTP 500")


def test_nobody_who_listens_is_an_error_of_the_load_and_not_of_the_generator() -> None:
    outcome = send(1, Load(connections=1, seconds=0.1))

    assert outcome.ok == 0
    assert outcome.errors > 0


def test_a_body_has_the_size_that_was_asked_for() -> None:
    load = Load(connections=1, seconds=1, body_bytes=5000, is_stream=True)

    assert len(chat_body(load)) == 5000


def test_cpu_time_is_charged_to_the_process_that_used_it_and_to_its_parent(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ntime.sleep(60)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with running("burner", [sys.executable, "-c", nested], tmp_path) as child:
        child.wait_for(lambda: "burnt" in child.output, "done", 30.0)

        assert cpu_time(child.pid).total_s >= 0.25
        assert len(family(child.pid)) == 2
        assert pss_mib(child.pid) > 1
        os.kill(family(child.pid)[1], signal.SIGKILL)


def test_a_slice_is_work_over_the_time_used(tmp_path: Path) -> None:
    with mocks(tmp_path, 1) as (engine,):
        slice_ = measure(engine.port, engine.child.pid, Load(connections=8, seconds=0.3))

    assert slice_.requests_per_cpu_s is not None
    assert slice_.requests_per_cpu_s > 1000


def test_a_process_that_used_nothing_has_no_figure_rather_than_an_infinite_one(tmp_path: Path) -> None:
    with mocks(tmp_path, 1) as (engine,):
        outcome = send(engine.port, Load(connections=1, seconds=1, requests_max=1))

    assert Slice(outcome, CpuTime()).requests_per_cpu_s is None
    assert Spread.of([None]) is None


def test_a_child_that_ends_at_once_says_so_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('out of luck')"]

    with running("brief", command, tmp_path) as child, pytest.raises(ChildFailed, match="out of luck"):
        child.wait_for(lambda: False, "there", 30.0)


def test_a_child_that_ignores_the_question_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.children._STOP_MAX_S", 0.1)
    deaf = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('up', flush=True)\n"
        "time.sleep(600)"
    )
    with running("deaf", [sys.executable, "-c", deaf], tmp_path) as child:
        child.wait_for(lambda: "up" in child.output, "up", 30.0)
        started = family(child.pid)
    until_s = time.monotonic() + 30

    while any(_is_running(pid) for pid in started):
        assert time.monotonic() < until_s
        time.sleep(0.01)

    assert len(started) == 2


def test_without_a_compiler_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_BENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")

    with pytest.raises(NoCompiler, match="apt-get install gcc"):
        program("mock")


def test_a_bad_argument_ends_the_generator_before_it_sends(tmp_path: Path) -> None:
    done = subprocess.run(
        [program("loadgen"), "-p", "1", "-b", str(tmp_path / "none")], capture_output=True, check=False
    )

    assert done.returncode == 2


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] != "Z"
    except FileNotFoundError:
        return False
