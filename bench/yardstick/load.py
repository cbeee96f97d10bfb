"""One run of the load generator: what is sent, and what came of it.

Closed loop: each connection sends its next request when the last one is answered. That finds what a proxy costs; it is
not how users behave, which is what `router bench` is for.
"""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.yardstick.build import program

__all__ = ["BODY_BYTES", "Load", "Outcome", "chat_body", "send"]

#: A short chat turn with its system prompt.
BODY_BYTES = 1024
_FILLER = "Explain how a load balancer chooses between several replicas of one model. "
#: Longest that running requests are waited for at the end.
_LAST_ANSWERS_S = 20


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
    with tempfile.NamedTemporaryFile(prefix="load-", suffix=".json") as body:
        body.write(chat_body(load))
        body.flush()
        done = subprocess.run(
            _command(program("loadgen"), port, load, body.name),
            check=True,
            capture_output=True,
            text=True,
            timeout=load.seconds + _LAST_ANSWERS_S + 10,
        )
    said = json.loads(done.stdout)
    names = ("ok", "non200", "errors", "unfinished", "truncated_streams", "events", "elapsed_s")
    return Outcome(
        **{name: said[name] for name in names},
        first_error=said.get("first_error"),
        latency_us=said.get("latency_us") or {},
        ttft_us=said.get("ttft_us") or {},
    )


def _command(loadgen: Path, port: int, load: Load, body: str) -> list[str]:
    command = [str(loadgen), "-p", str(port), "-c", str(load.connections), "-d", str(load.seconds), "-b", body]
    command += ["-T", str(_LAST_ANSWERS_S), "-g", str(load.stagger_us)]
    if load.is_stream:
        command.append("-s")
    if load.requests_max is not None:
        command += ["-n", str(load.requests_max)]
    for header in load.headers:
        command += ["-h", header]
    return command
