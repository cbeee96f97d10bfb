"""What one request asks of an engine."""

from router.policy.demand import Demand


def test_a_demand_grows_with_prompts_and_with_n() -> None:
    one = Demand(prompt_tokens=100, longest_prompt_tokens=100, output_tokens=4_000)
    thirty_two = Demand(prompt_tokens=100, longest_prompt_tokens=100, output_tokens=4_000, n=32)
    hundred = Demand(prompt_tokens=1_000, longest_prompt_tokens=20, output_tokens=16, prompts=100)
    both = Demand(prompt_tokens=60, longest_prompt_tokens=40, output_tokens=10, prompts=2, n=3)

    assert (one.kv_tokens, one.sequences) == (4_100, 1)
    assert (thirty_two.kv_tokens, thirty_two.sequences) == (32 * 4_100, 32)
    assert (hundred.kv_tokens, hundred.sequences) == (1_000 + 100 * 16, 100)
    assert (both.kv_tokens, both.sequences) == (3 * 60 + 6 * 10, 6)


def test_what_must_fit_the_context_is_the_longest_single_sequence() -> None:
    demand = Demand(prompt_tokens=60, longest_prompt_tokens=40, output_tokens=10, prompts=2, n=3)

    assert demand.context_tokens == demand.floor_context_tokens == 50


def test_an_answer_without_a_cap_needs_room_for_one_token_at_least() -> None:
    demand = Demand(prompt_tokens=40, longest_prompt_tokens=40, output_tokens=500, output_is_capped=False)

    assert (demand.context_tokens, demand.floor_context_tokens) == (540, 41)
    assert demand.kv_tokens == 540
