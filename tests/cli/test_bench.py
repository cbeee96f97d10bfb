"""`router bench` tells the truth: failures by kind, exit codes, one load for one seed."""

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from router.cli import bench as bench_module
from router.cli.bench import bench

_CONCURRENCY = 300
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"data": [{"id": "found"}]}'


def _event(body: object) -> bytes:
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_DONE = b"e\r\ndata: [DONE]\n\n\r\n"
_END = b"0\r\n\r\n"
_ROLE = _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
_CONTENT = _event({"choices": [{"delta": {"content": "several tokens in one chunk"}}]})
_USAGE = _event({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 12}})
_ERROR = _event({"error": {"message": "engine died", "type": "InternalServerError", "code": 500}})
_BUSY = b'{"error": {"message": "busy", "code": "engine_busy"}}'
_503 = b"HTTP/1.1 503 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)


@dataclass
class _Fake:
    """An engine of which 40 of 100 answers are bad. It answers nobody until `together` requests are there at once."""

    together: int
    bad: bool = True
    interrupts_at: int | None = None
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    held: int = 0
    held_peak: int = 0
    _full: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if head.startswith(b"get"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS))
                continue
            if b"authorization: " in head:
                self.keys.add(head.split(b"authorization: ")[1].split(b"\r\n")[0].decode())
            size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            index = len(self.bodies)
            self.bodies.append(await reader.readexactly(size))
            await self._answer(index, writer)

    async def _answer(self, index: int, writer: asyncio.StreamWriter) -> None:
        self.held += 1
        self.held_peak = max(self.held_peak, self.held)
        if index == self.interrupts_at:
            os.kill(os.getpid(), signal.SIGINT)
        if len(self.bodies) % self.together == 0:
            self._full.set()
        await self._full.wait()
        self.held -= 1
        kind = index % 10 if self.bad else 9
        if kind == 0:
            writer.write(_503)
        elif kind == 1:
            writer.write(_HEAD + _ROLE + _CONTENT + _ERROR + _DONE + _END)
        elif kind == 2:
            writer.write(_HEAD + _ROLE + _DONE + _END)
        elif kind == 3:
            writer.write(_HEAD + _ROLE + _CONTENT)
            writer.close()
        else:
            writer.write(_HEAD + _ROLE)
            await writer.drain()
            writer.write(_CONTENT + _CONTENT + _CONTENT + _USAGE + _DONE + _END)


@contextlib.contextmanager
def _running(fake: _Fake) -> Iterator[_Fake]:
    """`fake` behind a port, on a loop and thread of its own, as the bench has its own loop."""
    loop = asyncio.new_event_loop()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(fake.serve, "127.0.0.1", 0, backlog=1024)

    async def stop(server: asyncio.Server) -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield fake
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _bench(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, arguments)


def _burst(fake: _Fake, *more: str) -> Result:
    """Everything at once: `together` chats."""
    return _bench(
        *("--url", fake.url, "--mix", "chat:1", "--rate", "inf", "--num-prompts", str(fake.together), "--json"),
        *("--lengths", "tiny", "--timeout", "60s", *more),
    )


def test_four_bad_answers_in_ten_are_four_failures_in_ten_by_kind_at_the_real_concurrency() -> None:
    with _running(_Fake(_CONCURRENCY)) as fake:
        result = _burst(fake)

    told = json.loads(result.stdout)

    assert result.exit_code == 1
    assert told["outcomes"] == {"completed": 180, "cut": 30, "empty_stream": 30, "error_in_stream": 30, "http_503": 30}
    assert (told["failed"], told["failed_ratio"]) == (120, 0.4)
    assert fake.held_peak == told["max_concurrent_requests"] == _CONCURRENCY
    assert told["total_output_tokens"] == 180 * 12
    assert told["total_input_tokens"] == 180 * 20
    assert 0 < told["mean_ttft_ms"] <= told["p99_ttft_ms"]
    assert told["ttft_all_arrivals_ms"]["p99"] is None
    assert {(error["outcome"], error["reason"]) for error in told["errors"]} >= {
        ("http_503", "engine_busy: busy"),
        ("error_in_stream", "500: engine died"),
        ("empty_stream", "ended without content"),
    }


def test_the_same_seed_gives_the_same_load_and_another_seed_does_not() -> None:
    sent = []
    for seed in ("3", "3", "4"):
        with _running(_Fake(20)) as fake:
            _burst(fake, "--seed", seed)
        sent.append(sorted(fake.bodies))

    assert sent[0] == sent[1]
    assert sent[0] != sent[2]


@pytest.mark.parametrize(("limit", "exit_code"), [("0.39", 1), ("0.4", 0), ("1", 0)])
def test_the_exit_code_is_decided_by_the_failure_limit(limit: str, exit_code: int) -> None:
    with _running(_Fake(10)) as fake:
        result = _burst(fake, "--max-failed-ratio", limit)

    assert result.exit_code == exit_code


def test_a_run_without_failures_exits_zero_and_writes_the_same_object_to_the_file(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    with _running(_Fake(10, bad=False)) as fake:
        result = _burst(fake, "--out", str(out), "--slo", "chat.e2e=1h")

    told = json.loads(result.stdout)

    assert result.exit_code == 0
    assert json.loads(out.read_text()) == told
    assert (told["completed"], told["model_id"], told["request_rate"]) == (10, "found", "inf")
    assert told["request_goodput"] == told["request_throughput"] > 0
    assert result.stderr == ""


def test_without_json_the_report_is_tables() -> None:
    with _running(_Fake(10)) as fake:
        result = _bench(
            *("--url", fake.url, "--model", "m", "--mix", "chat:1", "--rate", "inf", "--num-prompts", "10"),
            *("--lengths", "tiny"),
        )

    assert result.exit_code == 1
    for word in ("TTFT", "TPOT", "ITL", "E2EL", "goodput", "error_in_stream", "engine died"):
        assert word in result.stdout


def test_the_key_is_read_from_the_named_variable_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_BENCH_KEY", "sk-hidden")
    with _running(_Fake(5, bad=False)) as fake:
        result = _burst(fake, "--api-key-env", "A_BENCH_KEY")

    assert result.exit_code == 0
    assert fake.keys == {"bearer sk-hidden"}
    assert "sk-hidden" not in result.output


def test_a_target_that_does_not_answer_is_told_and_exits_one() -> None:
    with _running(_Fake(1)) as fake:
        gone = fake.url

    result = _bench("--url", gone, "--num-prompts", "1")

    assert result.exit_code == 1
    assert "does not answer" in result.stderr


def test_ctrl_c_prints_what_there_is_and_exits_as_interrupted() -> None:
    with _running(_Fake(10, bad=False, interrupts_at=14)) as fake:
        result = _bench("--url", fake.url, "--rate", "200", "--lengths", "tiny", "--mix", "chat:1", "--json")

    told = json.loads(result.stdout)

    assert result.exit_code == 130
    assert told["arrivals"] == sum(told["outcomes"].values()) > 10
    assert told["failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mix", "chat:0.9,batch:0.2"], "add up to 1.1"),
        (["--mix", "long:1"], "the classes are chat, batch"),
        (["--rate", "0"], "rate"),
        (["--rate", "inf"], "how many prompts"),
        (["--rate", "many"], "valid number"),
        (["--duration", "20"], "not a duration"),
        (["--duration", "8h", "--rate", "1000"], "more than"),
        (["--num-prompts", "0"], "num-prompts"),
        (["--num-prompts", "2000000"], "number of prompts"),
        (["--slo", "chat.ttft=fast"], "not a duration"),
        (["--lengths", "huge"], "neither full nor tiny"),
        (["--url", "localhost:8000"], "not an http"),
        (["--api-key-env", "A_VARIABLE_NOBODY_SETS"], "not set or empty"),
        (["--out", "/nowhere/at/all/result.json"], "no folder"),
        (["--max-failed-ratio", "1.5"], "max-failed-ratio"),
        (["--cv", "-1"], "cv"),
    ],
)
def test_a_usage_error_exits_two_and_says_what_is_wrong(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delattr(bench_module, "demo_stack")

    result = _bench(*arguments)

    assert result.exit_code == 2
    assert expected in result.stderr
