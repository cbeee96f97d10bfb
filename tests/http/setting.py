"""The model of the tests, the engines and the relay that serve it, and the configuration that names them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.sim.engine import EngineShape
from router.sim.options import OutputLengths, SimServerOptions
from router.sim.relay import relay_options

MODEL = "llama"
ALIAS = "small"
#: Contexts of the two engines, an eighth of what one would really run.
CHAT_TOKENS = 1_024
LONG_TOKENS = 16_384
THRESHOLD_TOKENS = 1_024
RELAY_KEY = "relay-key-marker"


def chat_sim(**options: Any) -> SimServerOptions:
    """Engine C: a short context and many seats, as fast as the machine goes unless told otherwise."""
    shape = EngineShape(max_model_len=CHAT_TOKENS, max_num_seqs=16, kv_cache_tokens=16_384)
    return sim_options(**{"shape": shape, **options})


def long_sim(**options: Any) -> SimServerOptions:
    """Engine L: a long context and few seats."""
    shape = EngineShape(max_model_len=LONG_TOKENS, max_num_seqs=4, kv_cache_tokens=65_536)
    return sim_options(**{"shape": shape, **options})


def sim_options(**options: Any) -> SimServerOptions:
    return SimServerOptions(
        **{
            "model": MODEL,
            "time_scale": 0.0,
            "output_lengths": OutputLengths(median_tokens=5.0, sigma=0.1, max_tokens=8),
            "log_body_max_bytes": 1 << 21,
            **options,
        }
    )


def outside_sim(**options: Any) -> SimServerOptions:
    """Relay X: knows the model by another name and asks for the router's own key."""
    return relay_options(**{"model": "vendor/big-1", "api_key": RELAY_KEY, "time_scale": 0.0, **options})


def model_config(**settings: Any) -> dict[str, Any]:
    """The model of the tests; `chat` and `batch` are laid over the two pools."""
    chat, batch = settings.pop("chat", {}), settings.pop("batch", {})
    pools = {
        "chat": {"engines": ["c"], "max_model_len": CHAT_TOKENS, "max_num_seqs": 16, "default_output_tokens": 64},
        "batch": {"engines": ["l"], "max_model_len": LONG_TOKENS, "max_num_seqs": 4, "default_output_tokens": 64},
    }
    pools["chat"] |= chat
    pools["batch"] |= batch
    return {
        "name": MODEL,
        "aliases": [ALIAS],
        "served_model_name": MODEL,
        "threshold_tokens": THRESHOLD_TOKENS,
        "pools": pools,
        **settings,
    }


def relay_config(url: str, **settings: Any) -> dict[str, Any]:
    return {"name": "x", "url": url, "api_key": RELAY_KEY, "models": {MODEL: "vendor/big-1"}, **settings}


def write_config(folder: Path, engines: Mapping[str, str], **sections: Any) -> Path:
    """A `pools.yaml` of engines by name, the test's model, and whatever other sections are given. JSON is YAML."""
    config: dict[str, Any] = {
        "server": {"host": "127.0.0.1", "data_dir": str(folder / "data")},
        "redis": {"url": "embedded"},
        "engines": [{"name": name, "url": url} for name, url in engines.items()],
        "models": [model_config()],
    }
    for name, section in sections.items():
        config[name] = {**config[name], **section} if isinstance(section, dict) else section
    file = folder / "pools.yaml"
    file.write_text(json.dumps(config, ensure_ascii=False, indent=1))
    return file


def chat_body(text: str = "Hello.", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
