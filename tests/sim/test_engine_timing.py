"""Step times and closed loops against published values, in virtual time."""

from dataclasses import dataclass

import pytest

from router.sim.engine import EngineShape, SimEngine, SimRequest
from router.sim.presets import PRESETS, preset


@dataclass(frozen=True)
class ClosedLoop:
    ttft_ms: float
    itl_ms: float
    tokens_per_s: float


def closed_loop(
    name: str, clients: int, rounds: int, *, prompt_tokens: int = 5_000, output_tokens: int = 500
) -> ClosedLoop:
    """`clients` send a next request as soon as one ends. The first two rounds are warm-up."""
    engine = SimEngine(preset(name), EngineShape(max_model_len=8_192))
    now_s, sent = 0.0, 0
    sent_at_s: dict[str, float] = {}
    first_at_s: dict[str, float] = {}
    ended: list[tuple[float, float, float]] = []

    def send() -> None:
        nonlocal sent
        sent += 1
        sent_at_s[str(sent)] = now_s
        engine.submit(SimRequest(str(sent), prompt_tokens, output_tokens, output_tokens), now_s)

    for _ in range(clients):
        send()
    while len(ended) < clients * rounds:
        result = engine.step(now_s)
        now_s += result.duration_s
        for event in result.events:
            if event.output_tokens == 1:
                first_at_s[event.id] = now_s
            if event.finish_reason is not None:
                first_s = first_at_s[event.id]
                ended.append((now_s, first_s - sent_at_s[event.id], (now_s - first_s) / (output_tokens - 1)))
                send()
    begun_s = ended[2 * clients - 1][0]
    counted = ended[2 * clients :]
    return ClosedLoop(
        ttft_ms=1e3 * sum(each[1] for each in counted) / len(counted),
        itl_ms=1e3 * sum(each[2] for each in counted) / len(counted),
        tokens_per_s=len(counted) * output_tokens / (counted[-1][0] - begun_s),
    )


@pytest.mark.parametrize(
    ("name", "alone_ms", "sixteen_ms"),
    [
        ("h100-fp8-tp2", 19.3, 20.0),
        ("h100-bf16-tp4", 16.8, 18.2),
        ("h100-fp8-tp4", 11.0, 12.3),
        ("a100-sxm-bf16-tp4", 29.6, 31.7),
        ("a100-pcie-bf16-tp4", 37.6, 40.7),
        ("a6000-w4-tp4", 25.0, 33.0),
    ],
)
def test_a_decode_step_takes_what_the_preset_table_says(name: str, alone_ms: float, sixteen_ms: float) -> None:
    context_tokens = 2_000  # of each sequence; the table was made at about this

    alone_s = preset(name).step_s(0, 1, context_tokens, 0.0, 1)
    sixteen_s = preset(name).step_s(0, 16, 16 * context_tokens, 0.0, 16)

    assert alone_s * 1e3 == pytest.approx(alone_ms, rel=0.02)
    assert sixteen_s * 1e3 == pytest.approx(sixteen_ms, rel=0.04)


@pytest.mark.parametrize(
    ("name", "prefill_s"),
    [
        ("h100-fp8-tp2", 3.1),
        ("h100-bf16-tp4", 3.4),
        ("h100-fp8-tp4", 2.3),
        ("a100-sxm-bf16-tp4", 10.3),
        ("a100-pcie-bf16-tp4", 11.5),
        ("a6000-w4-tp4", 24.0),
    ],
)
def test_a_prefill_of_30k_tokens_takes_what_the_preset_table_says(name: str, prefill_s: float) -> None:
    engine = SimEngine(preset(name), EngineShape(max_model_len=32_768, max_num_batched_tokens=2_048))
    engine.submit(SimRequest("long", 30_000, 1, 1), 0.0)

    elapsed_s = 0.0
    while not engine.is_idle:
        elapsed_s += engine.step(elapsed_s).duration_s

    assert elapsed_s == pytest.approx(prefill_s, rel=0.06)


def test_one_client_sees_nims_published_latency_and_pace() -> None:
    measured = closed_loop("h100-fp8-tp2", clients=1, rounds=4)

    assert measured.ttft_ms == pytest.approx(406.8, rel=0.02)
    assert measured.itl_ms == pytest.approx(18.58, rel=0.05)
    assert measured.tokens_per_s == pytest.approx(51.7, rel=0.05)


def test_a_hundred_clients_queue_for_kv_as_in_nims_published_run() -> None:
    measured = closed_loop("h100-fp8-tp2", clients=100, rounds=6)

    assert measured.ttft_ms == pytest.approx(7_996, rel=0.05)
    assert measured.itl_ms == pytest.approx(92.91, rel=0.12)
    assert measured.tokens_per_s == pytest.approx(917.3, rel=0.10)


def test_every_preset_says_where_its_numbers_come_from() -> None:
    assert all(name == each.name and each.source for name, each in PRESETS.items())
    assert "invented" in preset("tiny-demo").source


def test_an_unknown_preset_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="tiny-demo"):
        preset("h200")
