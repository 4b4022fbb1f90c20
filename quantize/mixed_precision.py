"""Mixed precision: the fewest layers in float with which a quantized model keeps within a budget.

    minimize |F|   subject to   loss(A without F) <= max_drop,  |F| <= most        A: all layers, F: those that stay float

Layers leave int8 in the order of their sensitivity (`quantize.sensitivity`), the costliest first, so that F is a prefix of the ranking
and its length is found by bisection; then every layer of F, the least costly first, is tried in int8 again, which mends a ranking that
was wrong about one. The loss is that of `quantize.budget`. Where `most` layers in float do not meet the budget, those stay float and the
choice says that it was not met.

Left out: weighing layers by their cost in time. Every layer in float costs a GEMM in float and a pair of conversions; fewest is the aim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """Which layers stay float, and what that costs."""

    floating: tuple[str, ...]
    """In the order of the ranking."""
    loss: float
    """With those in float."""
    before: float
    """With every layer in int8."""
    met: bool
    """Whether the budget was met."""
    passes: int
    """How many times the loss was measured."""


def choose(ranking: Sequence[str], loss: Callable[[Collection[str]], float], max_drop: float, most: int) -> Choice:
    """Returns the layers to keep in float.

    Args:
        ranking: All layers that could be int8, the costliest first.
        loss: What is lost with these layers in int8 and the others in float.
        max_drop: The budget, in the unit of the loss.
        most: Most layers that may stay float.
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
