"""What one of several worker processes may hold of what an engine has.

The sum of the shares is exactly the whole, so that limits neither vanish nor multiply with the number of workers.
"""


def share_of(whole: int, *, slot: int, slots: int) -> int:
    """The part of `whole` that belongs to `slot` (0 <= slot < slots); the first ones take the remainder."""
    assert 0 <= slot < slots, "a slot is one of the slots"
    return whole // slots + (1 if slot < whole % slots else 0)
