"""Mixed precision: finds the fewest float layers with which a quantized model meets an accuracy budget.

    minimize |F|   subject to   loss(A without F) <= max_drop,  |F| <= most        A: all layers, F: layers that stay float

Layers return to float in order of sensitivity (`quantize.sensitivity`), most sensitive first, so F is a prefix of the ranking.
`quantize.budget` defines the loss. On a few hundred rows it does not always fall with the length of F, so all prefixes are measured in
order, from the empty one, and the first that meets the budget is taken. If no prefix of at most `most` layers meets it, the prefix with the
least loss is taken, the shortest of equals. Then each layer of F, least sensitive first, is tried in int8 again, which corrects single
errors in the ranking. It returns to int8 if the budget is still met, or, where it is not met, if the loss does not grow. The result says
whether the budget was met.

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

    prefixes = [tuple(ranking[:length]) for length in range(min(most, len(ranking)) + 1)]
    met = next((prefix for prefix in prefixes if with_float(prefix) <= max_drop), None)
    floating = min(prefixes, key=with_float) if met is None else met
    for name in reversed(floating[:-1]):
        kept = tuple(other for other in floating if other != name)
        floating = kept if with_float(kept) <= max(max_drop, with_float(floating)) else floating
    value = with_float(floating)
    return Choice(floating, value, with_float(()), value <= max_drop, len(measured))
