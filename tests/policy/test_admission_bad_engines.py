"""Engines that take requests and give nothing, or errors: chosen after all others, or as a last resort."""

from router.policy.decision import Admitted, RefusalCause, Refused, Waiting
from router.policy.places import QUIET_S, QUIET_WAITING
from tests.policy.house import BATCH, CHAT, House, house

# -- quiet engines ------------------------------------------------------------------------------------------------


def stuck(home: House, name: str, requests: int = QUIET_WAITING) -> None:
    """`name` is given requests that get no token for longer than engines may be quiet."""
    for number in range(requests):
        home.offer(f"{name}-{number}", CHAT, 1, only=name)
    home.now_s += QUIET_S + 1


def chosen(home: House, requests: int) -> set[str]:
    """The engines of so many small requests, each over before the next."""
    engines = set()
    for number in range(requests):
        decision = home.offer(f"r{number}", CHAT, 1, sample=number / requests)
        assert isinstance(decision, Admitted)
        engines.add(decision.engine)
        home.finish(f"r{number}")
    return engines


def test_an_engine_where_three_wait_and_none_got_a_token_for_ten_seconds_is_passed_over() -> None:
    home = house(chat=("c1", "c2", "c3"), batch=())
    stuck(home, "c1")

    assert (QUIET_WAITING, QUIET_S) == (3, 10.0)
    assert chosen(home, 12) == {"c2", "c3"}


def test_two_that_wait_long_prove_nothing() -> None:
    home = house(chat=("c1", "c2"), batch=(), capacity_tokens=1_000)
    stuck(home, "c1", QUIET_WAITING - 1)
    home.offer("load", CHAT, 100, only="c2")

    assert chosen(home, 4) == {"c1"}


def test_one_token_makes_a_quiet_engine_a_choice_again() -> None:
    home = house(chat=("c1", "c2"), batch=(), capacity_tokens=1_000)
    stuck(home, "c1")
    home.offer("load", CHAT, 100, only="c2")
    quiet = chosen(home, 4)

    home.admission.first_token("c1-0", home.now_s)

    assert quiet == {"c2"}
    assert chosen(home, 4) == {"c1"}


def test_a_whole_answer_counts_as_a_token_and_an_end_without_one_does_not() -> None:
    home = house(chat=("c1", "c2"), batch=(), capacity_tokens=1_000)
    stuck(home, "c1", QUIET_WAITING + 2)
    home.offer("load", CHAT, 100, only="c2")
    home.finish("c1-0")
    quiet = chosen(home, 4)

    home.admission.finish("c1-1", home.now_s, is_answered=True)

    assert quiet == {"c2"}
    assert chosen(home, 4) == {"c1"}


def test_a_guess_that_the_prefill_is_over_is_no_token() -> None:
    home = house(chat=("c1", "c2"), batch=())
    stuck(home, "c1")
    home.admission.prefill_over("c1-0", home.now_s)

    assert chosen(home, 4) == {"c2"}
    assert home.admission.snapshot().engines["c1"].held[CHAT].in_prefill == 2


def test_a_quiet_engine_is_still_asked_where_all_others_are_full_or_quiet_too() -> None:
    home = house(chat=("c1", "c2"), batch=())
    stuck(home, "c1")
    home.offer("load", CHAT, 100, only="c2")

    full = home.offer("a", CHAT, 10)
    home.finish("load", "a")
    stuck(home, "c2")

    assert full == Admitted("a", "c1", CHAT, borrowed=False)
    assert isinstance(home.offer("b", CHAT, 1), Admitted)


def test_those_that_left_without_a_token_do_not_keep_an_engine_quiet() -> None:
    home = house(chat=("c1",), batch=())
    stuck(home, "c1")
    home.finish("c1-0", "c1-1", "c1-2")

    assert chosen(home, 1) == {"c1"}
    assert not home.admission._places._engines["c1"].waiting


# -- engines that fail --------------------------------------------------------------------------------------------


def fail(home: House, *names: str) -> None:
    for name in names:
        home.note(home.admission.set_serving(name, False, home.now_s, is_failing=True))


def test_an_engine_that_fails_is_chats_last_resort() -> None:
    home = house(chat=("c1", "c2"), batch=())
    fail(home, "c1")
    while_one_serves = chosen(home, 4)
    fail(home, "c2")

    assert while_one_serves == {"c2"}
    assert chosen(home, 4) == {"c1", "c2"}


def test_a_borrowed_place_is_better_than_an_engine_that_fails() -> None:
    home = house()
    fail(home, "c1")

    assert home.offer("a", CHAT, 10) == Admitted("a", "b1", BATCH, borrowed=True)


def test_batch_waits_rather_than_go_to_an_engine_that_fails() -> None:
    home = house(chat=("one",), batch=("one",))
    fail(home, "one")

    assert home.offer("a", BATCH, 10) == Waiting("a")
    assert home.admission.room_tokens(home.now_s) == 0


def test_an_engine_that_fails_and_is_full_is_no_resort() -> None:
    home = house(batch=())
    fail(home, "c1")
    home.offer("a", CHAT, 100)

    refused = home.offer("b", CHAT, 10)

    assert isinstance(refused, Refused)
    assert refused.cause is RefusalCause.NO_ENGINE
    home.finish("a")
    assert home.committed_tokens == 0
