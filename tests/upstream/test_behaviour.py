"""The behaviour table, by version."""

import pytest

from router.upstream.behaviour import behaviour_of, cannot_have_started, is_shutting_down, parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.33.0rc1+cpu", (0, 33, 0)),
        ("0.33.1.dev12+g0123abc.d20261130", (0, 33, 1)),
        ("v0.9", (0, 9, 0)),
        (" 1.0.0\n", (1, 0, 0)),
        ("", None),
        ("dev", None),
        ("0", None),
        ("0.320000", None),
        ("x" * 10_000, None),
        ("\ud800", None),
    ],
)
def test_a_version_is_read_or_unknown(text: str, version: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == version
    assert behaviour_of(text).version == version


def test_the_cut_overs_lie_where_the_engine_changed() -> None:
    assert (behaviour_of("0.31.0").clamps_output, behaviour_of("0.32.0").clamps_output) == (False, True)
    assert (behaviour_of("0.28.0").has_admission_503, behaviour_of("0.29.0").has_admission_503) == (False, True)
    assert (behaviour_of("0.13.9").honours_dp_rank_header, behaviour_of("0.14.0").honours_dp_rank_header) == (
        False,
        True,
    )
    assert not behaviour_of("0.25.0").has_kv_cache_size_tokens
    assert behaviour_of("0.26.0").has_kv_cache_size_tokens
    assert not behaviour_of("0.16.0").waits_as_drain


def test_of_an_unknown_engine_the_worst_is_expected_and_nothing_relied_on() -> None:
    unknown = behaviour_of("")

    assert unknown.clamps_output
    assert unknown.has_admission_503
    assert unknown.waits_as_drain
    assert not unknown.honours_priority_header
    assert not unknown.has_kv_cache_size_tokens


def test_only_a_refusal_or_a_shutdown_proves_that_nothing_began() -> None:
    text = "cannot schedule new futures after shutdown"

    assert cannot_have_started(503, "")
    assert cannot_have_started(500, text)
    assert is_shutting_down(500, text)
    assert not cannot_have_started(500, "EngineCore encountered an issue")
    assert not cannot_have_started(400, text)
    assert not is_shutting_down(503, text)
