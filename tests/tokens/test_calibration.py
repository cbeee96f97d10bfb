"""Bytes per token, learned."""

import random

from router.policy.demand import RequestClass
from router.tokens.calibration import COLD_BYTES_PER_TOKEN, FOLD_EVERY, WARM_UPDATES, BytesPerToken

CHAT = RequestClass.CHAT


def _fed(ratios: list[float], request_class: RequestClass | None = CHAT) -> BytesPerToken:
    learned = BytesPerToken()
    for ratio in ratios:
        learned.learn(round(1000 * ratio), 1000, request_class)
    return learned


def test_before_anything_is_known_two_bytes_are_one_token() -> None:
    learned = BytesPerToken()

    assert learned.estimate_tokens(1000, CHAT) == 1000 / COLD_BYTES_PER_TOKEN
    assert not learned.is_warm


def test_steady_traffic_is_estimated_close_to_its_ratio() -> None:
    learned = _fed([4.0] * 500)

    assert learned.estimate_tokens(4000, CHAT) == 1000


def test_the_estimate_covers_about_99_of_100_prompts_of_a_skewed_mix() -> None:
    rng = random.Random(3)
    learned = BytesPerToken()
    misses = 0

    for _ in range(20_000):
        size_bytes = round(10_000 * rng.choice([4.2, 4.2, 4.2, 2.6]) * rng.uniform(0.8, 1.2))
        misses += learned.estimate_tokens(size_bytes, CHAT) < 10_000
        learned.learn(size_bytes, 10_000, CHAT)

    assert 0.003 < misses / 20_000 < 0.02


def test_misses_widen_the_margin_and_hits_narrow_it_again() -> None:
    learned = _fed([4.0] * 100)
    calm = learned.estimate_tokens(4000, CHAT)

    learned.learn(2000, 1000, CHAT)
    alarmed = learned.estimate_tokens(4000, CHAT)
    for _ in range(300):
        learned.learn(4000, 1000, CHAT)

    assert alarmed > calm
    assert alarmed > learned.estimate_tokens(4000, CHAT) > calm


def test_hits_are_taken_in_together_and_a_miss_at_once() -> None:
    learned = _fed([4.0] * WARM_UPDATES)
    warm = learned.estimate_tokens(4000, CHAT)

    seen: list[int] = []
    for ratio in [8.0] * FOLD_EVERY + [2.0]:
        learned.learn(round(1000 * ratio), 1000, CHAT)
        seen.append(learned.estimate_tokens(4000, CHAT))

    assert seen[: FOLD_EVERY - 1] == [warm] * (FOLD_EVERY - 1)
    assert seen[FOLD_EVERY - 1] != warm
    assert seen[FOLD_EVERY] > seen[FOLD_EVERY - 1]


def test_a_class_seldom_seen_borrows_from_all_classes() -> None:
    learned = _fed([4.0] * WARM_UPDATES, request_class=None)

    assert learned.is_warm
    assert learned.estimate_tokens(4000, RequestClass.BATCH) == 1000


def test_classes_are_learned_apart() -> None:
    learned = _fed([4.0] * 100)

    for _ in range(100):
        learned.learn(2000, 1000, RequestClass.BATCH)

    assert learned.estimate_tokens(4000, CHAT) == 1000
    assert learned.estimate_tokens(4000, RequestClass.BATCH) == 2000


def test_absurd_observations_are_held_in_range_and_empty_ones_ignored() -> None:
    learned = BytesPerToken()

    assert not learned.learn(0, 5, CHAT)
    assert not learned.learn(5, 0, CHAT)
    for _ in range(100):
        learned.learn(10**12, 1, CHAT)

    assert learned.estimate_tokens(16_000, CHAT) >= 1000
    assert learned.estimate_tokens(0, CHAT) == 0
    assert learned.estimate_tokens(1, CHAT) == 1
