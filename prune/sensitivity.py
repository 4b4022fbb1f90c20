"""Sensitivity: what becomes of the model when one component of one block loses a share of its units.

With D the distance between the answers of two models (`compress.measure.closeness`: KL of the logits, or squared error for regression)

    D_i(s)   the units of component i with the lowest scores silenced, a share s of them; everything else whole       s in `SHARES`

and A_i(s) the primary metric there, by labels, for the report. Between the shares D is taken as a straight line, from D_i(0) = 0 on. Shares
for every component come of it (`prune.allocation`): one whose line is steep is a key layer, and keeps nearly all. One-at-a-time scans: Li
et al. 2017, https://arxiv.org/abs/1608.08710, section 3.2. Left out: the effect of components on each other, which a scan of pairs would
take; tokens of a silenced expert are not sent to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.models.structure import Structure
from prune.allocation import Part, top
from prune.cost import Component, count_of
from prune.places import Places
from prune.surgery import Kept

SHARES = (0.25, 0.5, 0.75, 1.0)
"""1 stands for as much as may go."""
SCAN_ROWS = 128


@dataclass(frozen=True)
class Sensitivity:
    """What it costs to cut one component, in the unit of the distance (nats, or squared label units)."""

    part: Part
    name: str
    """Module path of the layer that reads it."""
    distances: Mapping[float, float]
    """By share of its units that is gone."""
    metrics: Mapping[float, float] = field(default_factory=dict)
    """The primary metric, by the same shares; empty for rows without labels."""

    def at(self, count: int) -> float:
        """Returns the distance with so many units kept."""
        shares = [0.0, *self.distances]
        return float(np.interp(1 - count / self.part.size, shares, [0.0, *self.distances.values()]))

    def as_row(self) -> dict[str, Any]:
        """Returns it as JSON types."""
        curves = {"distances": self.distances, "metrics": self.metrics}
        points = {name: [[share, value] for share, value in curve.items()] for name, curve in curves.items() if curve}
        return {"name": self.name, "what": self.part.what, **points}


def scan(
    model: nn.Module,
    structure: Structure,
    parts: Sequence[Part],
    scores: Mapping[Part, Tensor],
    look: Callable[[], tuple[float, float | None]],
    advance: Callable[[int], None] = lambda _: None,
) -> list[Sensitivity]:
    """Measures every component.

    Args:
        model: The model, in evaluation mode; left as it is.
        structure: Its structure.
        parts: The components; each can lose something.
        scores: Of the units of each, float `[n]`.
        look: How far the model as it is now is from what it was, and its primary metric, or None.
        advance: Is told of every pass.

    Returns:
        The components, in their order; distances never fall as more is gone, which noise may make them do.
    """
    places, found = Places.of(model, structure), []
    for part in parts:
        measured: dict[float, float] = {}
        metrics: dict[float, float] = {}
        highest = 0.0
        for share in SHARES:
            kept = max(part.counts()[-1], round((1 - share) * part.size))
            if kept < part.size and 1 - kept / part.size not in measured:  # of few units several shares are one number
                with silenced(model, structure, places, part, top(scores[part], kept)):
                    apart, metric = look()
                measured[1 - kept / part.size] = highest = max(highest, apart)
                metrics |= {} if metric is None else {1 - kept / part.size: metric}
            advance(1)
        name = {"heads": places.heads, "ffn": places.ffn, "experts": places.experts}[part.what][part.block]
        found.append(Sensitivity(part, str(name), measured, metrics))
    return found


@contextmanager
def silenced(model: nn.Module, structure: Structure, places: Places, part: Part, kept: Sequence[int]) -> Iterator[None]:
    """Silences the units of a component that are not kept for as long as the block lasts."""
    mask_S = torch.zeros(part.size)
    mask_S[list(kept)] = 1
    width = structure.attentions[part.block].group * structure.sizes.head_dim if part.what == "heads" else 1
    mask_I = mask_S.repeat_interleave(width)

    def inputs(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * mask_I.to(args[0].device), *args[1:])

    def weights(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        states, chosen_Nk, weights_Nk, *rest = args
        return (states, chosen_Nk, weights_Nk * mask_S.to(states.device)[chosen_Nk], *rest)

    name = {"heads": places.heads, "ffn": places.ffn, "experts": places.experts}[part.what][part.block]
    handle = model.get_submodule(str(name)).register_forward_pre_hook(weights if part.what == "experts" else inputs)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def silenced_all(model: nn.Module, structure: Structure, places: Places, kept: Kept) -> Iterator[None]:
    """Silences all heads and neurons that are not kept for as long as the block lasts."""
    whats: tuple[Component, ...] = ("heads", "ffn")
    with ExitStack() as stack:
        for block in range(structure.depth):
            for what in whats:
                number, left = count_of(structure.sizes, block, what), getattr(kept, what)[block]
                if len(left) < number:
                    stack.enter_context(silenced(model, structure, places, Part(block, what, number, 1.0, number), left))
        yield
