"""The load is pure and seeded: same seed, same requests, same times, same texts."""

import itertools
import math
import statistics
from random import Random

import pytest

from router.policy.demand import RequestClass
from router.sim.workload import (
    FULL_SHAPES,
    TINY_SHAPES,
    LoadSpec,
    LogNormalTokens,
    LogUniformTokens,
    PlannedRequest,
    parse_mix,
    plan,
    prompt_text,
)

_MIX = parse_mix("chat:0.9,batch:0.1")


def _load(count: int, **changes: object) -> list[PlannedRequest]:
    settings = {"mix": _MIX, "rate_per_s": 10.0, "seed": 7, "requests_max": count, **changes}
    return list(plan(LoadSpec(**settings)))  # type: ignore[arg-type]  # settings of several types in one dict


def test_the_same_seed_gives_the_same_load_and_the_same_texts() -> None:
    first, second = _load(300), _load(300)

    texts = [[prompt_text(planned) for planned in load[:20]] for load in (first, second)]

    assert first == second
    assert texts[0] == texts[1]


def test_another_seed_gives_another_load() -> None:
    first, second = _load(50), _load(50, seed=8)

    assert [planned.intended_at_s for planned in first] != [planned.intended_at_s for planned in second]
    assert prompt_text(first[0]) != prompt_text(second[0])


def test_another_rate_gives_the_same_requests_at_other_times() -> None:
    slow, fast = _load(100), _load(100, rate_per_s=20.0)

    assert [(r.request_class, r.prompt_tokens, r.max_tokens) for r in slow] == [
        (r.request_class, r.prompt_tokens, r.max_tokens) for r in fast
    ]
    assert all(b.intended_at_s == pytest.approx(a.intended_at_s / 2) for a, b in zip(slow, fast, strict=True))


def test_classes_come_in_the_shares_of_the_mix() -> None:
    load = _load(5_000)

    share = sum(planned.request_class is RequestClass.BATCH for planned in load) / len(load)

    assert share == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_keep_the_stated_rate_and_burstiness(cv: float) -> None:
    load = _load(20_000, cv=cv)

    gaps = [b.intended_at_s - a.intended_at_s for a, b in itertools.pairwise(load)]

    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-9)


def test_arrivals_never_go_back_in_time_and_end_with_the_duration() -> None:
    load = _load(100_000, duration_s=20.0, cv=2.0)

    times = [planned.intended_at_s for planned in load]

    assert times == sorted(times)
    assert times[0] == 0.0
    assert 10.0 < times[-1] < 20.0


def test_an_infinite_rate_sends_everything_at_once() -> None:
    load = _load(30, rate_per_s=math.inf)

    assert {planned.intended_at_s for planned in load} == {0.0}


@pytest.mark.parametrize("shapes", [FULL_SHAPES, TINY_SHAPES])
def test_chat_is_short_and_batch_is_long(shapes: dict[RequestClass, object]) -> None:
    load = _load(3_000, shapes=shapes)

    chats = [planned.prompt_tokens for planned in load if planned.request_class is RequestClass.CHAT]
    batches = [planned.prompt_tokens for planned in load if planned.request_class is RequestClass.BATCH]

    assert 1 <= min(chats) <= max(chats) <= 3_000
    assert 6_000 <= min(batches) <= max(batches) <= 30_000
    assert all(planned.max_tokens >= 1 for planned in load)


def test_lengths_have_the_median_they_state_and_stay_between_their_ends() -> None:
    normal = LogNormalTokens(median_tokens=350, sigma=0.8, min_tokens=16, max_tokens=3_000)
    uniform = LogUniformTokens(min_tokens=6_000, max_tokens=30_000)
    rng = Random("lengths")

    drawn = {
        "normal": [normal.draw(rng) for _ in range(4_000)],
        "uniform": [uniform.draw(rng) for _ in range(4_000)],
    }

    assert statistics.median(drawn["normal"]) == pytest.approx(350, rel=0.08)
    assert statistics.median(drawn["uniform"]) == pytest.approx(math.sqrt(6_000 * 30_000), rel=0.08)
    assert min(drawn["normal"]) >= 16
    assert max(drawn["uniform"]) <= 30_000


def test_a_prompt_has_one_word_a_token_and_begins_unlike_the_others() -> None:
    load = _load(200)

    texts = [prompt_text(planned) for planned in load]

    assert [len(text.split(" ")) for text in texts] == [planned.prompt_tokens for planned in load]
    assert len({text[:40] for text in texts}) == len(texts)


def test_a_mix_of_one_class_and_a_mix_that_misses_one_by_rounding_are_taken() -> None:
    thirds = parse_mix("chat:0.333,batch:0.6667")

    assert parse_mix("chat:1") == {RequestClass.CHAT: 1.0}
    assert parse_mix("chat:1.0, batch:0") == {RequestClass.CHAT: 1.0}
    assert sum(thirds.values()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chat:0.9,batch:0.2", "add up to 1.1"),
        ("chat:0.5", "add up to 0.5"),
        ("chat:1.2,batch:-0.2", "between 0 and 1"),
        ("chat:-1,batch:2", "between 0 and 1"),
        ("chat:nan", "between 0 and 1"),
        ("chat:inf", "between 0 and 1"),
        ("long:1", "the classes are chat, batch"),
        ("chat:0.5,chat:0.5", "twice"),
        ("chat:half,batch:0.5", "not a number"),
        ("chat=1", "not CLASS:SHARE"),
        ("chat:", "not a number"),
        ("", "not CLASS:SHARE"),
    ],
)
def test_a_wrong_mix_is_refused_with_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_mix(text)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rate_per_s": 0.0}, "rate"),
        ({"rate_per_s": -1.0}, "rate"),
        ({"rate_per_s": math.nan}, "rate"),
        ({"cv": -0.1}, "cv"),
        ({"cv": math.nan}, "cv"),
        ({"duration_s": 0.0}, "duration"),
        ({"duration_s": math.nan}, "duration"),
        ({"requests_max": 0}, "prompts"),
        ({"requests_max": 10_000_000}, "prompts"),
        ({"rate_per_s": math.inf, "requests_max": 1_000_000}, "how many prompts"),
    ],
)
def test_a_load_without_sense_is_refused(changes: dict[str, float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        LoadSpec(**{"mix": _MIX, "rate_per_s": 1.0, "seed": 0, **changes})  # type: ignore[arg-type]  # as above
