"""Which engine of several is tried first.

Two choices keep replicas that see the same loads from choosing the same engine; going on to the rest keeps a free
place from being overlooked. Source: Mitzenmacher, "The power of two choices in randomized load balancing" (1996).
"""

from collections.abc import Callable, Sequence


def two_choices_first(names: Sequence[str], sample: float, load_ratio: Callable[[str], float]) -> Sequence[str]:
    """All of `names`, in the order to try them: the less loaded of two drawn ones, the other, then the rest by load.
    `sample`, random in [0, 1), is the draw."""
    if len(names) < 2:
        return names
    pairs = len(names) * (len(names) - 1)
    draw = min(pairs - 1, int(sample * pairs))
    first, step = divmod(draw, len(names) - 1)
    second = (first + 1 + step) % len(names)
    drawn = sorted((names[first], names[second]), key=load_ratio)
    return drawn if len(names) == 2 else drawn + sorted((n for n in names if n not in drawn), key=load_ratio)
