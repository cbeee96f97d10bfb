"""What chat keeps for itself on an engine that it shares, and when a lane is free again."""

from router.policy.lanes import MARGIN_RATIO, ChatReserve, prefill_s


def test_before_anything_was_seen_the_reserve_is_the_floor() -> None:
    assert ChatReserve(0.25).tokens(1_000) == 250
    assert ChatReserve(0.0).tokens(1_000) == 0


def test_the_reserve_follows_what_chat_held_lately_with_a_margin() -> None:
    reserve = ChatReserve(0.1)
    for _ in range(64):
        reserve.note(400)

    assert reserve.tokens(1_000) == int(400 * MARGIN_RATIO)
    assert reserve.tokens(10_000) == 1_000


def test_the_reserve_is_never_more_than_there_is() -> None:
    reserve = ChatReserve(0.1)
    for _ in range(64):
        reserve.note(900)

    assert reserve.tokens(1_000) == 1_000


def test_a_prefill_is_expected_to_last_a_margin_longer_than_the_mean_of_all_prompts() -> None:
    assert prefill_s(30_000, 0.0001) == 3.75
    assert prefill_s(0, 0.1) == 0


def test_an_engine_that_has_seen_only_probes_or_says_nothing_is_taken_for_a_slow_one_not_for_a_dead_one() -> None:
    assert prefill_s(10_000, 0.3) == prefill_s(10_000, None) == 25.0
