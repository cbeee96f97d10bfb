"""Chat: at once, held, borrowed, refused."""

from router.policy.decision import Admitted, Held, RefusalCause, Refused
from tests.policy.house import BATCH, CHAT, HOLD_S, admitted, house


def test_chat_with_room_starts_at_once() -> None:
    home = house()

    decision = home.offer("a", CHAT, 100)

    assert decision == Admitted("a", "c1", CHAT, borrowed=False)


def test_chat_without_room_is_held_for_the_bounded_time() -> None:
    home = house()
    home.offer("a", CHAT, 100)

    decision = home.offer("b", CHAT, 10)

    assert decision == Held("b", home.now_s + HOLD_S)
    assert home.admission.next_expiry_s(home.now_s) == home.now_s + HOLD_S


def test_places_go_to_the_held_ones_in_the_order_in_which_they_came() -> None:
    home = house()
    home.offer("a", CHAT, 100)
    for name in ("b", "c", "d"):
        home.offer(name, CHAT, 40)

    decisions = home.finish("a")

    assert decisions == admitted(("b", "c1"), ("c", "c1"))
    assert home.finish("b") == admitted(("d", "c1"))


def test_a_newcomer_that_would_fit_does_not_overtake_a_held_one() -> None:
    home = house()
    home.offer("a", CHAT, 60)
    home.offer("big", CHAT, 80)

    newcomer = home.offer("small", CHAT, 10)

    assert isinstance(newcomer, Held)
    assert home.finish("a") == admitted(("big", "c1"), ("small", "c1"))


def test_past_the_bound_of_held_ones_chat_borrows_or_is_refused_at_once() -> None:
    home = house(hold_max_requests=1)
    home.offer("a", CHAT, 100)
    home.offer("held", CHAT, 40)

    assert home.offer("b", CHAT, 50) == Admitted("b", "b1", BATCH, borrowed=True)
    refused = home.offer("c", CHAT, 50)

    assert isinstance(refused, Refused)
    assert refused.cause is RefusalCause.SATURATED


def test_a_hold_that_is_over_borrows_and_the_next_is_refused_with_the_cause() -> None:
    home = house()
    home.offer("a", CHAT, 100)
    home.offer("b", CHAT, 50)
    home.offer("c", CHAT, 50)

    decisions = home.expire(HOLD_S)

    assert decisions[0] == Admitted("b", "b1", BATCH, borrowed=True)
    refused = decisions[1]
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.cause) == ("c", RefusalCause.SATURATED)
    assert 1 <= refused.retry_after_s <= 60
    assert home.held_tokens == 0


def test_a_hold_ends_when_it_is_over_and_not_before() -> None:
    home = house(borrow=False)
    home.offer("a", CHAT, 100)
    home.offer("b", CHAT, 50)
    home.now_s += 1.0
    home.offer("c", CHAT, 50)

    first = home.expire(1.0)
    second = home.expire(1.0)

    assert [decision.request_id for decision in first] == ["b"]
    assert [decision.request_id for decision in second] == ["c"]


def test_attempts_of_one_request_share_one_hold() -> None:
    home = house(borrow=False)
    home.offer("a", CHAT, 100)

    again = home.offer("b", CHAT, 10, hold_until_s=home.now_s + 0.5)
    late = home.offer("c", CHAT, 10, hold_until_s=home.now_s)

    assert again == Held("b", home.now_s + 0.5)
    assert isinstance(late, Refused)


def test_without_borrowing_the_batch_pool_stays_batchs_own() -> None:
    home = house(borrow=False, hold_s=0.0)
    home.offer("a", CHAT, 100)

    refused = home.offer("b", CHAT, 10)

    assert isinstance(refused, Refused)
    assert refused.cause is RefusalCause.SATURATED


def test_chat_does_not_borrow_behind_a_batch_prefill() -> None:
    home = house(hold_s=0.0)
    home.offer("a", CHAT, 100)
    home.offer("long", BATCH, 30)

    refused = home.offer("b", CHAT, 10)
    home.admission.first_token("long", home.now_s)
    borrowed = home.offer("c", CHAT, 10)

    assert isinstance(refused, Refused)
    assert borrowed == Admitted("c", "b1", BATCH, borrowed=True)


def test_a_held_one_that_leaves_makes_way_for_the_next() -> None:
    home = house()
    home.offer("a", CHAT, 60)
    home.offer("big", CHAT, 80)
    home.offer("small", CHAT, 10)

    decisions = home.finish("big")

    assert decisions == admitted(("small", "c1"))
    assert home.finish("big") == []
