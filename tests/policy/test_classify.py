"""Which pool a request goes to, and the reason that is given for it."""

import pytest

from router.policy.classify import Classified, Hint, Reason, Shapes, TooLong, classify
from router.policy.demand import Demand, RequestClass

CHAT, BATCH = RequestClass.CHAT, RequestClass.BATCH
BOTH = Shapes(chat_max_model_len=8_192, batch_max_model_len=131_072, threshold_tokens=4_000)


def demand(prompt: int, output: int, *, capped: bool = True, n: int = 1) -> Demand:
    return Demand(prompt, prompt, output, output_is_capped=capped, n=n)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (demand(3_000, 1_000), Classified(CHAT, Reason.BELOW_THRESHOLD)),
        (demand(3_000, 1_001), Classified(BATCH, Reason.ABOVE_THRESHOLD)),
        (demand(100, 400, n=8), Classified(CHAT, Reason.BELOW_THRESHOLD)),
        (demand(100, 401, n=8), Classified(BATCH, Reason.ABOVE_THRESHOLD)),
        (demand(6_000, 4_000), Classified(BATCH, Reason.ABOVE_CHAT_CONTEXT)),
        (demand(131_071, 1), Classified(BATCH, Reason.ABOVE_CHAT_CONTEXT)),
        (demand(131_071, 2), TooLong(131_072)),
        (demand(200_000, 10), TooLong(131_072)),
    ],
)
def test_the_whole_demand_decides_the_pool_and_one_sequence_the_fit(
    asked: Demand, expected: Classified | TooLong
) -> None:
    assert classify(asked, BOTH) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (demand(3_000, 1_000, capped=False), Classified(CHAT, Reason.BELOW_THRESHOLD)),
        (demand(7_500, 1_000, capped=False), Classified(BATCH, Reason.ABOVE_CHAT_CONTEXT)),
        (demand(131_071, 1_000, capped=False), Classified(BATCH, Reason.ABOVE_CHAT_CONTEXT)),
        (demand(131_072, 1_000, capped=False), TooLong(131_072)),
    ],
)
def test_without_a_cap_one_token_of_room_is_enough_to_fit_but_not_to_be_chat(
    asked: Demand, expected: Classified | TooLong
) -> None:
    assert classify(asked, BOTH) == expected


@pytest.mark.parametrize("source", [Reason.HINT_HEADER, Reason.HINT_KEY, Reason.HINT_SERVICE_TIER])
def test_a_hint_wins_wherever_the_request_fits(source: Reason) -> None:
    short, long = demand(10, 10), demand(5_000, 1_000)

    assert classify(short, BOTH, Hint(BATCH, source)) == Classified(BATCH, source)
    assert classify(long, BOTH, Hint(CHAT, source)) == Classified(CHAT, source)


def test_a_hint_for_a_pool_that_cannot_hold_the_request_is_said_to_have_failed() -> None:
    asked = demand(20_000, 100)

    assert classify(asked, BOTH, Hint(CHAT, Reason.HINT_HEADER)) == Classified(BATCH, Reason.HINT_DOES_NOT_FIT)


def test_a_hint_does_not_make_a_request_shorter() -> None:
    assert classify(demand(200_000, 1), BOTH, Hint(BATCH, Reason.HINT_HEADER)) == TooLong(131_072)


def test_a_model_with_one_pool_sends_everything_there_whatever_the_hint() -> None:
    only_chat = Shapes(chat_max_model_len=8_192, batch_max_model_len=None, threshold_tokens=4_000)
    only_batch = Shapes(chat_max_model_len=None, batch_max_model_len=131_072, threshold_tokens=4_000)

    for hint in (None, Hint(BATCH, Reason.HINT_HEADER)):
        assert classify(demand(7_000, 1_000), only_chat, hint) == Classified(CHAT, Reason.ONLY_POOL)
    for hint in (None, Hint(CHAT, Reason.HINT_HEADER)):
        assert classify(demand(10, 10), only_batch, hint) == Classified(BATCH, Reason.ONLY_POOL)


def test_the_limit_that_is_told_is_the_largest_there_is() -> None:
    only_chat = Shapes(chat_max_model_len=8_192, batch_max_model_len=None, threshold_tokens=4_000)

    assert classify(demand(9_000, 1), only_chat) == TooLong(8_192)
    assert BOTH.largest_max_model_len == 131_072


def test_a_chat_pool_with_the_larger_context_takes_what_batch_cannot_hold() -> None:
    shapes = Shapes(chat_max_model_len=8_192, batch_max_model_len=4_096, threshold_tokens=2_000)

    classified = classify(demand(7_000, 100), shapes)

    assert isinstance(classified, Classified)
    assert classified.request_class is CHAT
