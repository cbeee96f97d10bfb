"""A real vLLM server on this machine's CPU, and what it says of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.process import Program, free_port, wait_until

#: The name that the engines serve the model under.
SERVED_MODEL_NAME = "tiny"
#: KV blocks of 128 tokens (vLLM's block on a CPU): 65,536 tokens, as many as 16 chats of 4,096 or 2 batches of 32,768.
KV_BLOCKS = 512
#: Alone it takes 30 to 45 s to load; four at once on two noisy cores take a few minutes.
START_MAX_S = 420.0
#: The engine's metrics follow its steps; a step of the longest prompt here takes seconds on a busy machine.
SETTLE_MAX_S = 60.0
#: What a router asks one token for, to see that an engine works.
HEALTH_CHECK_PROMPT = "1"

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # One GiB holds far more than KV_BLOCKS of this model; the override below is what counts.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # More threads than cores make every step slower, and there are several servers.
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine has counted since it started: requests finished, and tokens of the prompts it has computed.

    A request for a single output token is a router's health check and is left out; the tests ask for two or more.
    """

    requests: int
    prompt_tokens: int

    def plus(self, requests: int, prompt_tokens: int) -> "Counters":
        return Counters(self.requests + requests, self.prompt_tokens + prompt_tokens)


class Vllm:
    """One server; not yet serving when made."""

    def __init__(
        self, name: str, venv: Path, model: Path, logs: Path, *, max_model_len: int, max_num_seqs: int
    ) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        flags = {
            "--served-model-name": SERVED_MODEL_NAME,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--max-model-len": str(max_model_len),
            "--max-num-seqs": str(max_num_seqs),
            "--num-gpu-blocks-override": str(KV_BLOCKS),
            "--dtype": "float32",
            "--tool-call-parser": "hermes",
        }
        switches = ["--enforce-eager", "--enable-auto-tool-choice", "--enable-prompt-tokens-details"]
        argv = [str(venv / "bin/python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model), *switches]
        argv += [word for flag in flags.items() for word in flag]
        self.program = Program(name, argv, logs / f"{name}.log", _ENVIRONMENT)

    def wait_until_it_serves(self) -> None:
        self.program.wait_until_it_serves(f"{self.url}/health", within_s=START_MAX_S)

    def counters(self) -> Counters:
        samples = self._samples()
        checks = int(sum(value for name, labels, value in samples if _is_of_one_token(name, labels)))
        return Counters(
            requests=int(_total(samples, "vllm:request_prompt_tokens_count")) - checks,
            prompt_tokens=int(_total(samples, "vllm:prompt_tokens_total")) - checks * self._health_check_tokens,
        )

    def in_flight(self) -> tuple[int, int]:
        """Requests that run and requests that wait inside the engine, by its gauges."""
        samples = self._samples()
        running = _total(samples, "vllm:num_requests_running")
        return int(running), int(_total(samples, "vllm:num_requests_waiting"))

    def wait_until_in_flight(self, running: int, waiting: int = 0) -> None:
        """Return once the gauges say exactly this."""
        want = (running, waiting)
        what = f"running and waiting on {self.name}, {want} wanted"
        wait_until(self.in_flight, lambda seen: seen == want, within_s=SETTLE_MAX_S, what=what)

    def wait_until_counters(self, want: Counters) -> None:
        """Return once the engine has counted exactly this."""
        what = f"counters of {self.name}, {want} wanted"
        wait_until(self.counters, lambda seen: seen == want, within_s=SETTLE_MAX_S, what=what)

    def tokens_of(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """What the engine itself counts for a conversation."""
        return self._tokenize({"messages": list(messages)})

    @cached_property
    def _health_check_tokens(self) -> int:
        return self._tokenize({"prompt": HEALTH_CHECK_PROMPT})

    def _tokenize(self, what: Mapping[str, Any]) -> int:
        answer = httpx.post(
            f"{self.url}/tokenize", json={"model": SERVED_MODEL_NAME, **what}, timeout=60.0, trust_env=False
        )
        answer.raise_for_status()
        return int(answer.json()["count"])

    def _samples(self) -> list[tuple[str, Mapping[str, str], float]]:
        answer = httpx.get(f"{self.url}/metrics", timeout=30.0, trust_env=False)
        answer.raise_for_status()
        families = text_string_to_metric_families(answer.text)
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def _total(samples: Sequence[tuple[str, Mapping[str, str], float]], wanted: str) -> float:
    return sum(value for name, _, value in samples if name == wanted)


def _is_of_one_token(name: str, labels: Mapping[str, str]) -> bool:
    return name == "vllm:request_params_max_tokens_bucket" and float(labels["le"]) == 1.0
