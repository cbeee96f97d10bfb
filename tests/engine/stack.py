"""Engines, a relay and routers put together: what the tests of this folder run against."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.fake_relay import FakeRelay
from tests.engine.process import Program, free_port
from tests.engine.vllm import SERVED_MODEL_NAME, Vllm

#: Prompt and output together up to which a request is chat; under the chat engine's context of 4,096.
THRESHOLD_TOKENS = 3_000
CHAT_CONTEXT_TOKENS = 4_096
CHAT_SEATS = 16
BATCH_CONTEXT_TOKENS = 32_768
BATCH_SEATS = 2
#: The model whose chat template takes content as text, and the one whose template takes it as parts.
MODEL = "tiny"
PARTS_MODEL = "tiny-parts"
#: Imports, the embedded Valkey, two tokenizers and the first look at every engine, on two busy cores.
ROUTER_START_MAX_S = 90.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines, all of them serving. `doomed` is there to be killed; nothing else is sent to it."""

    chat: Vllm
    batch: Vllm
    parts: Vllm
    doomed: Vllm

    @property
    def engines(self) -> tuple[Vllm, ...]:
        return self.chat, self.batch, self.parts, self.doomed


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the models that `make_model.py` made, by the form of content that their templates take."""

    string: Path
    openai: Path


def start_fleet(venv: Path, models: Models, logs: Path) -> Fleet:
    """Start all engines at once; the caller waits for them and stops them."""

    def engine(name: str, model: Path, max_model_len: int, max_num_seqs: int) -> Vllm:
        return Vllm(name, venv, model, logs, max_model_len=max_model_len, max_num_seqs=max_num_seqs)

    return Fleet(
        chat=engine("chat-0", models.string, CHAT_CONTEXT_TOKENS, CHAT_SEATS),
        batch=engine("batch-0", models.string, BATCH_CONTEXT_TOKENS, BATCH_SEATS),
        parts=engine("parts-0", models.openai, CHAT_CONTEXT_TOKENS, CHAT_SEATS),
        doomed=engine("doomed-0", models.string, CHAT_CONTEXT_TOKENS, CHAT_SEATS),
    )


def pool(engine: Vllm) -> dict[str, Any]:
    """A pool of one engine, in its engine's own shape."""
    return {"engines": [engine.name], "max_model_len": engine.max_model_len, "max_num_seqs": engine.max_num_seqs}


def model(name: str, folder: Path, *, exact: str, pools: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "served_model_name": SERVED_MODEL_NAME,
        "tokenizer": {"kind": "huggingface", "path": str(folder), "exact": exact},
        "threshold_tokens": THRESHOLD_TOKENS,
        "pools": dict(pools),
    }


class Router:
    """`router serve` in a process of its own, with a configuration written for it. Serving when made."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        engines: Sequence[Vllm],
        models: Sequence[Mapping[str, Any]],
        relay: FakeRelay | None = None,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config: dict[str, Any] = {
            "server": {"host": "127.0.0.1", "port": port, "data_dir": str(folder / f"{name}-data")},
            "engines": [{"name": engine.name, "url": engine.url} for engine in engines],
            "models": list(models),
        }
        if relay is not None:
            config["relays"] = [{"name": "outside", "url": relay.url, "api_key": "none", "models": {MODEL: "any"}}]
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config, sort_keys=False))

        self.program = Program(name, [sys.executable, "-m", "router", "serve", "-c", str(file)], folder / f"{name}.log")
        try:
            self.program.wait_until_it_serves(f"{self.url}/readyz", within_s=ROUTER_START_MAX_S)
        except BaseException:
            self.program.stop()
            raise

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30.0, trust_env=False)

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120.0, trust_env=False)

    def metric(self, name: str, **labels: str) -> float | None:
        """The sum of the samples of that name that carry these labels, or None where there is no such sample."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        values = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        return sum(values) if values else None
