"""What each of several processes may hold."""

import pytest

from router.policy.shares import share_of


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("whole", [0, 1, 6, 7, 100, 475_003])
def test_the_shares_are_the_whole_and_differ_by_one_at_most(whole: int, slots: int) -> None:
    shares = [share_of(whole, slot=slot, slots=slots) for slot in range(slots)]

    assert sum(shares) == whole
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_is_one_of_the_slots(slot: int) -> None:
    with pytest.raises(AssertionError, match="one of the slots"):
        share_of(10, slot=slot, slots=2)
