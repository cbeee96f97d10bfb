"""The scheduler's rules, one by one. A step of this preset takes 1 ms a token and nothing else."""

import random

import pytest

from router.sim.engine import EngineBusy, EngineShape, SimEngine, SimRequest, TokenEvent
from router.sim.presets import EnginePreset

MS_PER_TOKEN = EnginePreset("unit", 1_600, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, "for tests")


def engine_with(
    *,
    kv_cache_tokens: int = 1_616,
    max_model_len: int = 1_024,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 100,
    threshold: int = 0,
    is_priority: bool = False,
    reserves: bool = True,
    queued: int | None = None,
) -> SimEngine:
    shape = EngineShape(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_tokens=kv_cache_tokens,
        scheduling_policy="priority" if is_priority else "fcfs",
        long_prefill_token_threshold=threshold,
        scheduler_reserve_full_isl=reserves,
        max_num_queued_reqs=queued,
    )
    return SimEngine(MS_PER_TOKEN, shape)


def ask(engine: SimEngine, name: str, prompt: int, output: int = 1, *, priority: int = 0, at_s: float = 0.0) -> None:
    engine.submit(SimRequest(name, prompt, output, output, priority), at_s)


def run_dry(engine: SimEngine) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    now_s = 0.0
    while not engine.is_idle:
        result = engine.step(now_s)
        now_s += result.duration_s
        events += result.events
    return events


def finishing_order(engine: SimEngine) -> list[str]:
    return [event.id for event in run_dry(engine) if event.finish_reason is not None]


def ids(events: tuple[TokenEvent, ...]) -> list[str]:
    return [event.id for event in events]


def test_an_idle_engine_makes_no_step() -> None:
    result = engine_with().step(0.0)

    assert (result.duration_s, result.events) == (0.0, ())


def test_a_prompt_larger_than_the_budget_goes_in_chunks() -> None:
    engine = engine_with()
    ask(engine, "long", 250)

    steps = [engine.step(0.0) for _ in range(3)]

    assert [step.duration_s for step in steps] == pytest.approx([0.1, 0.1, 0.05])
    assert [ids(step.events) for step in steps] == [[], [], ["long"]]


def test_running_sequences_take_the_budget_before_waiting_ones() -> None:
    engine = engine_with()
    ask(engine, "long", 250)
    engine.step(0.0)
    ask(engine, "short", 10)

    second, third = engine.step(0.0), engine.step(0.0)

    assert ids(second.events) == []
    assert ids(third.events) == ["long", "short"]
    assert third.duration_s == pytest.approx(0.060)


def test_decodes_go_on_while_a_later_prompt_is_prefilled() -> None:
    engine = engine_with()
    ask(engine, "chat", 10, 5)
    engine.step(0.0)
    ask(engine, "long", 500)

    result = engine.step(0.0)

    assert ids(result.events) == ["chat"]
    assert result.duration_s == pytest.approx(0.100)


def test_the_long_prefill_threshold_leaves_budget_for_others() -> None:
    engine = engine_with(threshold=40)
    ask(engine, "long", 250)
    ask(engine, "short", 10)

    result = engine.step(0.0)

    assert ids(result.events) == ["short"]
    assert result.duration_s == pytest.approx(0.050)


def test_the_long_prefill_threshold_does_not_hold_for_a_sequence_that_is_alone() -> None:
    engine = engine_with(threshold=40)
    ask(engine, "long", 250)

    result = engine.step(0.0)

    assert result.duration_s == pytest.approx(0.100)


def test_no_more_than_max_num_seqs_run() -> None:
    engine = engine_with(max_num_seqs=2)
    for name in "abc":
        ask(engine, name, 10, 3)

    engine.step(0.0)

    assert (engine.snapshot().running, engine.snapshot().waiting) == (2, 1)


def test_a_head_whose_prompt_does_not_fit_blocks_all_behind_it() -> None:
    engine = engine_with()
    ask(engine, "first", 1_000, 3)
    for _ in range(10):
        engine.step(0.0)
    ask(engine, "head", 1_000)
    ask(engine, "small", 10)

    engine.step(0.0)

    assert (engine.snapshot().running, engine.snapshot().waiting) == (1, 2)


def test_without_full_prompt_reservation_a_long_prompt_starts_on_the_blocks_there_are() -> None:
    engine = engine_with(reserves=False)
    ask(engine, "first", 1_000, 3)
    for _ in range(10):
        engine.step(0.0)
    ask(engine, "head", 1_000)

    engine.step(0.0)

    assert engine.snapshot().running == 2


def test_one_block_is_the_null_block() -> None:
    engine = engine_with(kv_cache_tokens=1_616)

    assert engine.num_gpu_blocks == 101
    assert engine.snapshot().kv_blocks_usable == 100
    assert engine.kv_cache_size_tokens == 1_616


def test_a_cache_that_cannot_hold_one_full_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len 1024"):
        engine_with(kv_cache_tokens=1_024)


def test_blocks_follow_the_tokens_and_all_come_back() -> None:
    engine = engine_with()
    ask(engine, "one", 16, 2)

    engine.step(0.0)
    held = engine.snapshot().kv_blocks_used
    engine.step(0.0)

    assert (held, engine.snapshot().kv_blocks_used) == (1, 0)


def test_fcfs_preempts_the_last_admitted_and_all_finish_in_full() -> None:
    engine = engine_with(kv_cache_tokens=1_040, max_num_batched_tokens=1_000)
    ask(engine, "early", 480, 200)
    ask(engine, "late", 480, 200)

    events = run_dry(engine)

    assert engine.snapshot().preemptions_total == 1
    assert [event.id for event in events if event.finish_reason] == ["early", "late"]
    assert sum(event.id == "late" for event in events) == 200
    assert engine.snapshot().prompt_tokens_total == 960


def test_a_preempted_sequence_computes_its_output_again_too() -> None:
    engine = engine_with(kv_cache_tokens=1_040, max_num_batched_tokens=1_000)
    ask(engine, "early", 480, 60)
    ask(engine, "late", 480, 60)
    while engine.snapshot().preemptions_total == 0:
        engine.step(0.0)
    while engine.snapshot().waiting:
        resumed_s = engine.step(0.0).duration_s

    # The prompt, and the output there was when both sequences together had filled all 64 usable blocks.
    assert resumed_s == pytest.approx((480 + 33) / 1e3, abs=2e-3)


def test_priority_preempts_the_worst_even_when_it_was_admitted_first() -> None:
    engine = engine_with(kv_cache_tokens=1_040, max_num_batched_tokens=1_000, is_priority=True)
    ask(engine, "batch", 480, 200, priority=10)
    ask(engine, "chat", 480, 200, priority=0)

    order = finishing_order(engine)

    assert engine.snapshot().preemptions_total == 1
    assert order == ["chat", "batch"]


def test_priority_orders_the_waiting_and_ties_go_by_arrival() -> None:
    engine = engine_with(max_num_seqs=1, is_priority=True)
    ask(engine, "low", 10, priority=5, at_s=0.0)
    ask(engine, "second", 10, priority=1, at_s=2.0)
    ask(engine, "first", 10, priority=1, at_s=1.0)

    assert finishing_order(engine) == ["first", "second", "low"]


def test_fcfs_does_not_look_at_the_priority() -> None:
    engine = engine_with(max_num_seqs=1)
    ask(engine, "a", 10, priority=9)
    ask(engine, "b", 10, priority=0)

    assert finishing_order(engine) == ["a", "b"]


def test_the_queue_limit_counts_running_and_waiting() -> None:
    engine = engine_with(max_num_seqs=1, queued=2)
    ask(engine, "running", 10, 5)
    engine.step(0.0)
    ask(engine, "waiting", 10, 5)

    with pytest.raises(EngineBusy):
        ask(engine, "refused", 10, 5)

    assert engine.snapshot().rejected_total == 1


def test_a_sequence_that_has_said_its_piece_stops_before_its_cap() -> None:
    engine = engine_with()
    engine.submit(SimRequest("brief", 10, 50, 3), 0.0)

    events = run_dry(engine)

    assert [(event.output_tokens, event.finish_reason) for event in events] == [(1, None), (2, None), (3, "stop")]


def test_a_pooling_request_ends_with_its_prefill() -> None:
    engine = engine_with()
    engine.submit(SimRequest("vector", 150, 0, 0), 0.0)

    events = run_dry(engine)

    assert events == [TokenEvent("vector", 0, "stop")]
    assert engine.snapshot().prompt_tokens_total == 150


def test_an_abort_frees_blocks_wherever_the_sequence_is() -> None:
    engine = engine_with(max_num_seqs=1)
    ask(engine, "running", 100, 5)
    ask(engine, "waiting", 100, 5)
    engine.step(0.0)
    engine.plan_step(0.0)

    aborted = [engine.abort(name, 0.0) for name in ("waiting", "running", "running", "never")]
    events = engine.finish_step()

    assert aborted == [True, True, False, False]
    assert events == ()
    assert (engine.is_idle, engine.snapshot().kv_blocks_used) == (True, 0)


@pytest.mark.parametrize(
    "request_",
    [SimRequest("x", 0, 1, 1), SimRequest("x", 1_024, 1, 1), SimRequest("x", 5, 5, 0), SimRequest("x", 5, -1, 0)],
)
def test_lengths_that_vllm_would_not_let_through_are_refused(request_: SimRequest) -> None:
    with pytest.raises(ValueError, match=r"x|max_model_len"):
        engine_with().submit(request_, 0.0)


@pytest.mark.parametrize("is_priority", [False, True])
@pytest.mark.parametrize("reserves", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_every_sequence_ends_once_and_every_block_comes_back(
    is_priority: bool, reserves: bool, seed: int
) -> None:
    rng = random.Random(seed)
    engine = engine_with(kv_cache_tokens=1_120, is_priority=is_priority, reserves=reserves, threshold=seed * 10)
    ended: list[str] = []
    for number in range(120):
        ask(
            engine,
            str(number),
            rng.randint(1, 700),
            rng.randint(1, 300),
            priority=rng.randint(0, 3),
            at_s=float(number),
        )
        ended += [event.id for event in engine.step(float(number)).events if event.finish_reason]
        if rng.random() < 0.2:
            engine.abort(str(rng.randint(0, number)), float(number))
        held = engine.snapshot()
        assert 0 <= held.kv_blocks_used <= held.kv_blocks_usable
        assert held.running <= 8

    ended += finishing_order(engine)

    last = engine.snapshot()
    assert len(ended) == len(set(ended)) == 120 - last.aborted_total
    assert (last.kv_blocks_used, last.running, last.waiting) == (0, 0, 0)
