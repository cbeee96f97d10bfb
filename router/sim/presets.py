"""What one step of an engine costs, by hardware: the constants of the step time that `engine.py` adds up.

    T = max(weights, compute * (P + D)) + kv_read * C + attention * A + comm * (P + D) + overhead + per_sequence * S

in milliseconds, for P prefill and D decode tokens, C the summed context of the decodes, A the sum over prefill
chunks of n * (context + n / 2), and S sequences. Weights are read from memory once a step, so small steps cost
the same; compute overtakes them at the knee weights / compute.

Every preset but `tiny-demo` is Llama-3.3-70B. They are fits and estimates, not measurements of ours: each says where
its numbers come from. Known error: 10 % for pace and for saturation, 30 % for time to first token at middling load.
Work outside the step (HTTP, tokenizing, detokenizing) is absent: the fits were made without it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnginePreset:
    """The step time of one engine. Times are milliseconds.

    `kv_cache_tokens`: what the card holds beside the weights; a shape may say otherwise. `weights_ms`: reading the
    weights once. `compute_per_token_ms`: matrix work of a token. `comm_per_token_ms`: all-reduce of a token.
    `kv_read_per_token_ms`: reading one token of a decode's context. `attention_per_pair_ms`: one query against one key
    in a prefill. `overhead_ms`: launching and sampling, each step. `per_sequence_ms`: each sequence in a step.
    `source`: where the numbers come from.
    """

    name: str
    kv_cache_tokens: int
    weights_ms: float
    compute_per_token_ms: float
    comm_per_token_ms: float
    kv_read_per_token_ms: float
    attention_per_pair_ms: float
    overhead_ms: float
    per_sequence_ms: float
    source: str

    def step_s(
        self, prefill_tokens: int, decode_tokens: int, context_tokens: int, attention_pairs: float, sequences: int
    ) -> float:
        """Seconds of one step; the formula at the top of this module."""
        tokens = prefill_tokens + decode_tokens
        step_ms = (
            max(self.weights_ms, self.compute_per_token_ms * tokens)
            + self.kv_read_per_token_ms * context_tokens
            + self.attention_per_pair_ms * attention_pairs
            + self.comm_per_token_ms * tokens
            + self.overhead_ms
            + self.per_sequence_ms * sequences
        )
        return step_ms / 1000.0


_H100_FP8_TP2 = EnginePreset(
    name="h100-fp8-tp2",
    kv_cache_tokens=475_000,
    weights_ms=13.25,
    compute_per_token_ms=0.0650,
    comm_per_token_ms=0.0105,
    kv_read_per_token_ms=1.9e-5,
    attention_per_pair_ms=1.5e-6,
    overhead_ms=6.0,
    per_sequence_ms=0.0,
    source="2 x H100, FP8 weights and KV: fitted to NVIDIA's NIM 1.8.0 closed-loop table (5,000 in, 500 out)",
)

_H100_BF16_TP4 = EnginePreset(
    name="h100-bf16-tp4",
    kv_cache_tokens=487_000,
    weights_ms=13.15,
    compute_per_token_ms=0.0639,
    comm_per_token_ms=0.0157,
    kv_read_per_token_ms=4.1e-5,
    attention_per_pair_ms=1.9e-6,
    overhead_ms=3.6,
    per_sequence_ms=0.0,
    source="4 x H100, bf16: Splitwise step times, Vidur operator sums, vLLM's CI benchmark table",
)

_H100_FP8_TP4 = EnginePreset(
    name="h100-fp8-tp4",
    kv_cache_tokens=702_000,
    weights_ms=7.36,
    compute_per_token_ms=0.0390,
    comm_per_token_ms=0.0157,
    kv_read_per_token_ms=3.5e-5,
    attention_per_pair_ms=1.1e-6,
    overhead_ms=3.6,
    per_sequence_ms=0.0,
    source="4 x H100, FP8 weights: extrapolated from the two other H100 rows",
)

_A100_SXM_BF16_TP4 = EnginePreset(
    name="a100-sxm-bf16-tp4",
    kv_cache_tokens=487_000,
    weights_ms=25.4,
    compute_per_token_ms=0.214,
    comm_per_token_ms=0.026,
    kv_read_per_token_ms=6.7e-5,
    attention_per_pair_ms=6.0e-6,
    overhead_ms=4.0,
    per_sequence_ms=0.0,
    source="4 x A100-SXM, bf16: Splitwise step times and Vidur operator sums",
)

_A100_PCIE_BF16_TP4 = EnginePreset(
    name="a100-pcie-bf16-tp4",
    kv_cache_tokens=487_000,
    weights_ms=29.4,
    compute_per_token_ms=0.214,
    comm_per_token_ms=0.066,
    kv_read_per_token_ms=7.1e-5,
    attention_per_pair_ms=6.0e-6,
    overhead_ms=8.0,
    per_sequence_ms=0.0,
    source="4 x A100-PCIe, bf16: a ShareGPT run on an Azure NC96ads; too fast at 4 requests a second (51 ms for 74)",
)

_A6000_W4_TP4 = EnginePreset(
    name="a6000-w4-tp4",
    kv_cache_tokens=419_000,
    weights_ms=18.6,
    compute_per_token_ms=0.362,
    comm_per_token_ms=0.281,
    kv_read_per_token_ms=1.5e-4,
    attention_per_pair_ms=9.4e-6,
    overhead_ms=6.0,
    per_sequence_ms=0.0,
    source="4 x RTX A6000 over PCIe, 4-bit weights: an estimate from A40 operators at 14 GB/s; no public run was found",
)

_TINY_DEMO = EnginePreset(
    name="tiny-demo",
    kv_cache_tokens=131_072,
    weights_ms=10.0,
    compute_per_token_ms=0.04,
    comm_per_token_ms=0.0,
    kv_read_per_token_ms=2.0e-5,
    attention_per_pair_ms=5.0e-7,
    overhead_ms=2.0,
    per_sequence_ms=0.0,
    source="invented: no such card; quick enough for a demo on a laptop, slow enough to see queues",
)

#: Every preset by its name.
PRESETS: dict[str, EnginePreset] = {
    each.name: each
    for each in (
        _H100_FP8_TP2,
        _H100_BF16_TP4,
        _H100_FP8_TP4,
        _A100_SXM_BF16_TP4,
        _A100_PCIE_BF16_TP4,
        _A6000_W4_TP4,
        _TINY_DEMO,
    )
}


def preset(name: str) -> EnginePreset:
    """The preset of that name.

    Raises: `ValueError` where there is none; the message lists those that exist.
    """
    found = PRESETS.get(name)
    if found is None:
        raise ValueError(f"no engine preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return found
