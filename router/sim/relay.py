"""An outside provider: the same server with its own names and key, a provider's errors, none of an engine's routes."""

from collections.abc import Sequence

from router.sim.engine import EngineShape
from router.sim.faults import FaultKind, FaultRule, Faults
from router.sim.options import OutputLengths, SimServerOptions
from router.sim.presets import PRESETS, EnginePreset


def relay_options(
    *,
    model: str,
    api_key: str,
    aliases: tuple[str, ...] = (),
    max_model_len: int = 131_072,
    preset: EnginePreset = PRESETS["tiny-demo"],
    time_scale: float = 1.0,
    rate_limited_requests: int | None = 0,
    retry_after_s: float = 1.0,
    rejects_stream_options: bool = False,
    rejected_fields: Sequence[str] = (),
    faults: Faults | None = None,
    output_lengths: OutputLengths | None = None,
    port: int = 0,
    seed: int = 0,
) -> SimServerOptions:
    """A provider that serves `model` to whoever has `api_key` (401 otherwise).

    The first `rate_limited_requests` get 429 with `Retry-After: retry_after_s`; None is all of them. `rejected_fields`
    get a 400 that names them, `stream_options` among them with `rejects_stream_options`. A provider has room for
    many: its KV cache holds 64 requests of `max_model_len`.
    """
    unwanted = {*rejected_fields, *(("stream_options",) if rejects_stream_options else ())}
    limit = FaultRule(kind=FaultKind.REJECT_429, value=retry_after_s, requests=rate_limited_requests)
    others = () if faults is None else faults.rules
    return SimServerOptions(
        model=model,
        aliases=aliases,
        api_key=api_key,
        face="provider",
        preset=preset,
        shape=EngineShape(max_model_len=max_model_len, max_num_seqs=1024, kv_cache_tokens=64 * (max_model_len + 16)),
        time_scale=time_scale,
        rejected_fields=frozenset(unwanted),
        faults=Faults(others if rate_limited_requests == 0 else (limit, *others)),
        output_lengths=output_lengths or OutputLengths(),
        port=port,
        seed=seed,
    )
