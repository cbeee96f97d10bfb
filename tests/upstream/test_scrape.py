"""An engine's metrics page, whole, odd and hostile."""

import random

import pytest

from router.upstream.scrape import EngineMetrics, parse_metrics

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 178.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",kv_cache_size_tokens="2000",\
num_gpu_blocks="126",sliding_window="None"} 1.0
"""


def cache(**labels: object) -> bytes:
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:cache_config_info{{{text}}} 1.0\n".encode()


def test_a_whole_page_is_read() -> None:
    assert parse_metrics(PAGE) == EngineMetrics(3, 2, 0.25, 4, 2000, 16, True, 1, False, 178)


def test_ranks_are_added_up_and_the_fullest_one_tells_the_usage() -> None:
    page = PAGE + PAGE.replace(b'engine="0"', b'engine="1"').replace(b"0.25", b"0.5")

    metrics = parse_metrics(page)

    assert (metrics.running, metrics.waiting, metrics.preemptions) == (6, 4, 8)
    assert (metrics.dp_ranks, metrics.capacity_tokens, metrics.kv_usage_ratio) == (2, 4000, 0.5)


def test_without_a_stated_size_blocks_count_less_one_null_block_a_rank() -> None:
    one = cache(block_size=16, engine=0, num_gpu_blocks=101)
    # The engine repeats the sum over its ranks on the label of each.
    two = b"".join(
        cache(block_size=16, engine=rank, num_gpu_blocks=202, kv_cache_size_tokens="None") for rank in (0, 1)
    )

    assert parse_metrics(one).capacity_tokens == 1600
    assert parse_metrics(two).capacity_tokens == 3200


@pytest.mark.parametrize("blocks", ["None", "0", "-5", "1", "9" * 30, "1e5", "", "²"])
def test_a_capacity_that_makes_no_sense_is_unknown(blocks: str) -> None:
    assert parse_metrics(cache(block_size=16, engine=0, num_gpu_blocks=blocks)).capacity_tokens is None


def test_the_old_name_of_the_usage_is_known() -> None:
    assert parse_metrics(b'vllm:gpu_cache_usage_perc{model_name="m"} 0.75\n').kv_usage_ratio == 0.75


def test_a_series_with_help_and_no_sample_is_unknown() -> None:
    page = b"# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n"

    assert parse_metrics(page) == EngineMetrics()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "x", "", "0x10"])
def test_a_value_that_is_no_count_is_unknown(value: str) -> None:
    page = f'vllm:num_requests_running{{engine="0"}} {value}\nvllm:kv_cache_usage_perc{{engine="0"}} {value}\n'

    assert (parse_metrics(page.encode()).running, parse_metrics(page.encode()).kv_usage_ratio) == (None, None)


def test_a_sleeping_engine_is_seen() -> None:
    page = b'vllm:engine_sleep_state{sleep_state="awake"} 0.0\nvllm:engine_sleep_state{sleep_state="discard_all"} 1.0\n'

    assert parse_metrics(page).is_asleep is True


def test_labels_may_hold_quotes_braces_and_stamps_may_follow() -> None:
    page = b'vllm:num_requests_running{model_name="a}\\"b, {",engine="0",} 5 1700000000\nvllm:num_requests_waiting 7\n'

    assert (parse_metrics(page).running, parse_metrics(page).waiting) == (5, 7)


def test_a_page_of_any_size_is_read_to_a_bound() -> None:
    noise = b'vllm:num_requests_running_bucket{a="b"} 1\n' * 200_000

    assert parse_metrics(noise[: 3 << 20] + b"\n" + PAGE).running == 3
    assert parse_metrics(noise + PAGE).running is None
    assert parse_metrics(b'vllm:num_requests_running{engine="0"} 1\n' * 5000).running == 1024


def test_a_page_cut_or_broken_anywhere_raises_nothing() -> None:
    rng = random.Random(5)
    for cut in range(0, len(PAGE), 7):
        parse_metrics(PAGE[:cut])
        broken = bytearray(PAGE)
        for _ in range(20):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        parse_metrics(bytes(broken))
    parse_metrics(b'vllm:cache_config_info{a="' + b"\\" * 3_000_000)


def test_the_mean_prefill_is_the_engines_prefill_time_over_its_prompt_tokens() -> None:
    page = (
        b'vllm:request_prefill_time_seconds_sum{engine="0"} 3.0\n'
        b'vllm:time_to_first_token_seconds_sum{engine="0"} 90.0\n'
        b'vllm:prompt_tokens_total{engine="0"} 6000\n'
    )

    assert parse_metrics(page).prefill_s_per_token == 0.0005


def test_without_a_prefill_time_the_time_to_first_token_stands_in_and_without_both_nothing_is_known() -> None:
    first_token = b"vllm:time_to_first_token_seconds_sum 6.0\nvllm:prompt_tokens_total 6000\n"

    assert parse_metrics(first_token).prefill_s_per_token == 0.001
    assert parse_metrics(b"vllm:time_to_first_token_seconds_sum 6.0\n").prefill_s_per_token is None
    assert (
        parse_metrics(b"vllm:prompt_tokens_total 0\nvllm:request_prefill_time_seconds_sum 0\n").prefill_s_per_token
        is None
    )
