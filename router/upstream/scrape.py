"""Reads an engine's Prometheus page: only the few series that the router acts on.

Rules: what is missing, NaN, infinite, negative or unreadable is None, and None never stops traffic. No more than
`PAGE_MAX_BYTES` of a page and `SAMPLES_MAX` samples of a series are read. The series are looked up by name instead of
parsing the page, which has thousands of lines: one of 3 MB costs a few milliseconds.

Source: vLLM 0.33 `v1/metrics/loggers.py`, `v1/engine/core_client.py` (sum of blocks).
"""

import math
import re
from dataclasses import dataclass

PAGE_MAX_BYTES = 4 << 20
SAMPLES_MAX = 1024

_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*+)"\s*,?\s*')
_LINE_MAX_BYTES = 64 << 10

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What an engine says of itself, all ranks together; None for what it does not say.

    `running` and `waiting` are requests. `kv_usage_ratio` is 0 to 1, that of the fullest rank. `preemptions` counts
    since the engine's start. `capacity_tokens` is what the KV cache holds over all `dp_ranks`. `prefill_s_per_token` is
    the mean over all requests so far, the engine's queue included where it does not tell the two apart.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None
    preemptions: int | None = None
    capacity_tokens: int | None = None
    block_size_tokens: int | None = None
    enable_prefix_caching: bool | None = None
    dp_ranks: int | None = None
    is_asleep: bool | None = None
    #: Since the engine's start; that it grows is a sign of real work.
    generated_tokens: int | None = None
    prefill_s_per_token: float | None = None


def parse_metrics(page: bytes) -> EngineMetrics:
    """The state of an engine from its /metrics page. Never raises."""
    page = b"\n" + page[:PAGE_MAX_BYTES]
    running = _samples(page, b"vllm:num_requests_running")
    cache = _cache_configs(page)
    ranks = len(cache) or len({labels.get("engine") for labels, _ in running}) or None
    first = next(iter(cache.values()), {})
    # `gpu_cache_usage_perc` is the name before 0.12.
    usage = _values(page, b"vllm:kv_cache_usage_perc") or _values(page, b"vllm:gpu_cache_usage_perc")
    preemptions = _values(page, b"vllm:num_preemptions_total") or _values(page, b"vllm:num_preemptions")
    return EngineMetrics(
        running=_sum([value for _, value in running]),
        waiting=_sum(_values(page, b"vllm:num_requests_waiting")),
        kv_usage_ratio=min(1.0, max(usage)) if usage else None,
        preemptions=_sum(preemptions),
        capacity_tokens=_capacity_tokens(cache),
        block_size_tokens=_count(first.get("block_size")),
        enable_prefix_caching={"True": True, "False": False}.get(first.get("enable_prefix_caching", "")),
        dp_ranks=ranks,
        is_asleep=_is_asleep(page),
        prefill_s_per_token=_prefill_s_per_token(page),
        generated_tokens=_sum(_values(page, b"vllm:generation_tokens_total")),
    )


def _prefill_s_per_token(page: bytes) -> float | None:
    """Seconds of prefill over tokens of prompts."""
    seconds = _values(page, b"vllm:request_prefill_time_seconds_sum") or _values(
        page, b"vllm:time_to_first_token_seconds_sum"
    )
    tokens = sum(_values(page, b"vllm:prompt_tokens_total"))
    return sum(seconds) / tokens if seconds and tokens > 0 else None


def _capacity_tokens(cache: dict[str, Labels]) -> int | None:
    """Tokens in the KV cache of all ranks.

    `kv_cache_size_tokens` is that of one rank, true for hybrid models too. Without it: `num_gpu_blocks` is the sum over
    all ranks, repeated on the label of each, and one block of each rank is the null block.
    """
    sizes = [_count(labels.get("kv_cache_size_tokens")) for labels in cache.values()]
    stated = [size for size in sizes if size]
    if stated and len(stated) == len(sizes):
        return sum(stated)
    blocks = max((_count(labels.get("num_gpu_blocks")) or 0 for labels in cache.values()), default=0)
    block_size = max((_count(labels.get("block_size")) or 0 for labels in cache.values()), default=0)
    capacity = (blocks - len(cache)) * block_size
    return capacity if capacity > 0 else None


def _cache_configs(page: bytes) -> dict[str, Labels]:
    """Labels of `vllm:cache_config_info`, by rank."""
    return {labels.get("engine", "0"): labels for labels, _ in _samples(page, b"vllm:cache_config_info")}


def _is_asleep(page: bytes) -> bool | None:
    states = [labels.get("sleep_state") for labels, value in _samples(page, b"vllm:engine_sleep_state") if value >= 1]
    return any(state != "awake" for state in states) if states else None


def _values(page: bytes, name: bytes) -> list[float]:
    return [value for _, value in _samples(page, name)]


def _samples(page: bytes, name: bytes) -> list[tuple[Labels, float]]:
    """Every readable sample of the series `name`: its labels and a finite value >= 0."""
    samples: list[tuple[Labels, float]] = []
    needle = b"\n" + name
    at = page.find(needle)
    while at >= 0 and len(samples) < SAMPLES_MAX:
        start = at + len(needle)
        end = page.find(b"\n", start)
        sample = _sample(page[start : min(end if end >= 0 else len(page), start + _LINE_MAX_BYTES)])
        if sample is not None:
            samples.append(sample)
        at = page.find(needle, start)
    return samples


def _sample(rest: bytes) -> tuple[Labels, float] | None:
    """What follows a series name on its line: labels perhaps, then the value. None for another, longer name."""
    labels: Labels = {}
    if rest[:1] == b"{":
        at = 1
        while (match := _LABEL.match(rest, at)) is not None:
            labels[match[1].decode()] = match[2].decode("utf-8", "replace")
            at = match.end()
        if rest[at : at + 1] != b"}":
            return None
        rest = rest[at + 1 :]
    elif rest[:1] not in (b" ", b"\t"):
        return None
    words = rest.split(None, 1)
    try:
        value = float(words[0]) if words else math.nan
    except ValueError:
        return None
    return (labels, value) if math.isfinite(value) and value >= 0 else None


def _sum(values: list[float]) -> int | None:
    return int(sum(values)) if values else None


def _count(text: str | None) -> int | None:
    """A whole number >= 0 out of a label, or None (`None` is a label value too)."""
    if text is None or not text.isdecimal() or len(text) > 18:
        return None
    return int(text)
