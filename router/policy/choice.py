"""Which engine of several is tried first.

Two choices keep replicas that see the same loads from choosing the same engine; going on to the rest keeps a free
place from being overlooked. Source: Mitzenmacher, "The power of two choices in randomized load balancing" (1996).
"""


def two_of(count: int, sample: float) -> tuple[int, int]:
    """Two different places of `count` (>= 2), every ordered pair as likely. `sample`, random in [0, 1), is the draw."""
    pairs = count * (count - 1)
    first, step = divmod(min(pairs - 1, int(sample * pairs)), count - 1)
    return first, (first + 1 + step) % count
