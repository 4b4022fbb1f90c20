"""Mixed precision: finds the fewest float layers with which a quantized model meets an accuracy budget.

    minimize |F|   subject to   loss(A without F) <= max_drop,  |F| <= most        A: all layers, F: layers that stay float

Layers return to float in order of sensitivity (`quantize.sensitivity`), most sensitive first, so F is a prefix of the ranking and bisection
finds its length. Then each layer of F, least sensitive first, is tried in int8 again, which corrects single errors in the ranking. The loss
is that of `quantize.budget`. If `most` float layers do not meet the budget, these stay float and the result says that it was not met.

Not supported: weighting layers by their latency. Each float layer costs a float GEMM and two conversions; the aim is the fewest layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """The layers that stay float, and the loss."""

    floating: tuple[str, ...]
    """The layers that stay float, in the order of the ranking."""
    loss: float
    """The loss with these layers in float."""
    before: float
    """The loss with every layer in int8."""
    met: bool
    """Whether the budget was met."""
    passes: int
    """How many times the loss was measured."""


def choose(ranking: Sequence[str], loss: Callable[[Collection[str]], float], max_drop: float, most: int) -> Choice:
    """Returns the layers to keep in float.

    Args:
        ranking: All layers that could be int8, most sensitive first.
        loss: Returns the loss with the given layers in int8 and the others in float.
        max_drop: The budget, in the unit of the loss.
        most: Largest number of layers that may stay float.
    """
    measured: dict[tuple[str, ...], float] = {}

    def with_float(floating: Collection[str]) -> float:
        names = tuple(name for name in ranking if name not in floating)
        if names not in measured:
            measured[names] = loss(names)
        return measured[names]

    before = with_float(())
    low, high = 0, min(most, len(ranking))
    if before <= max_drop:
        high = 0
    elif with_float(ranking[:high]) > max_drop:
        low = high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if with_float(ranking[:middle]) <= max_drop else (middle + 1, high)
    floating = list(ranking[:high])
    for name in reversed(ranking[: max(0, high - 1)]):
        kept = [other for other in floating if other != name]
        floating = kept if with_float(kept) <= max_drop else floating
    value = with_float(floating)
    return Choice(tuple(floating), value, before, value <= max_drop, len(measured))
