"""One run of the load generator: what is sent, and what came of it.

Closed loop: each connection sends its next request when the last one is answered. That finds what a proxy costs; it is
not how users behave, which is what `router bench` is for.
"""

import asyncio
import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.yardstick.build import program

__all__ = ["BODY_BYTES", "Load", "Outcome", "chat_body", "send", "send_beside"]

#: A short chat turn with its system prompt.
BODY_BYTES = 1024
_FILLER = "Explain how a load balancer chooses between several replicas of one model. "


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. `stagger_us` lies between the starts of connections: 0 starts all streams at once, and their
    tokens then come together, as those of one engine's step do."""

    connections: int
    seconds: float
    is_stream: bool = False
    tokens: int = 100
    body_bytes: int = BODY_BYTES
    stagger_us: int = 0
    requests_max: int | None = None
    headers: Sequence[str] = ()
    #: How long requests that still run at the end are waited for.
    last_answers_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came back. Latencies are microseconds by name of percentile (`p50`, `p99`, `max`), over answers of 200."""

    ok: int
    non200: int
    errors: int
    unfinished: int
    truncated_streams: int
    events: int
    elapsed_s: float
    first_error: str | None = None
    latency_us: Mapping[str, float] = field(default_factory=dict)
    ttft_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        return self.non200 + self.errors + self.unfinished + self.truncated_streams


def chat_body(load: Load, model: str = "mock") -> bytes:
    """A chat completion request of `load.body_bytes` bytes."""
    system = "You are a helpful assistant. Answer briefly and precisely, and say when you are not sure."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    fields: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0.7, "max_tokens": load.tokens}
    if load.is_stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    missing = max(0, load.body_bytes - len(json.dumps(fields)))
    messages[1]["content"] = (_FILLER * (missing // len(_FILLER) + 1))[:missing]
    return json.dumps(fields).encode()


def send(port: int, load: Load) -> Outcome:
    """Run the load against 127.0.0.1:`port`. Raises: `subprocess.CalledProcessError` where the generator fails."""
    with _body_file(load) as body:
        done = subprocess.run(
            _command(port, load, body), check=True, capture_output=True, text=True, timeout=_limit_s(load)
        )
    return _outcome(done.stdout)


async def send_beside(port: int, load: Load) -> Outcome:
    """As `send`, while the event loop goes on; cancelled, the generator is killed.

    Raises: `RuntimeError` where the generator fails.
    """
    with _body_file(load) as body:
        generator = await asyncio.create_subprocess_exec(
            *_command(port, load, body), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        try:
            async with asyncio.timeout(_limit_s(load)):
                said, _ = await generator.communicate()
        finally:
            if generator.returncode is None:
                generator.kill()
                await generator.wait()
    if generator.returncode != 0:
        raise RuntimeError(f"the load generator ended with code {generator.returncode}")
    return _outcome(said)


@contextlib.contextmanager
def _body_file(load: Load) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(prefix="load-", suffix=".json") as body:
        body.write(chat_body(load))
        body.flush()
        yield body.name


def _limit_s(load: Load) -> float:
    return load.seconds + load.last_answers_s + 10


def _outcome(printed: str | bytes) -> Outcome:
    said = json.loads(printed)
    names = ("ok", "non200", "errors", "unfinished", "truncated_streams", "events", "elapsed_s")
    return Outcome(
        **{name: said[name] for name in names},
        first_error=said.get("first_error"),
        latency_us=said.get("latency_us") or {},
        ttft_us=said.get("ttft_us") or {},
    )


def _command(port: int, load: Load, body: str) -> list[str]:
    command = [
        str(program("loadgen")),
        "-p",
        str(port),
        "-c",
        str(load.connections),
        "-d",
        str(load.seconds),
        "-b",
        body,
    ]
    command += ["-T", str(load.last_answers_s), "-g", str(load.stagger_us)]
    if load.is_stream:
        command.append("-s")
    if load.requests_max is not None:
        command += ["-n", str(load.requests_max)]
    for header in load.headers:
        command += ["-h", header]
    return command
