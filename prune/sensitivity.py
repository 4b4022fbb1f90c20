"""Sensitivity: how far the outputs move when one component of one block loses a share of its units.

D is the distance between the outputs of two models (`foundation.measure.closeness`: KL divergence, or squared error for regression):

    D_i(s)   distance with the share s of the units of component i masked out, lowest scores first, all others kept       s in `SHARES`

A_i(s) is the primary metric of the same model, if the rows have labels, for the report. D is interpolated linearly between the shares, from
D_i(0) = 0. The allocation uses these curves (`prune.allocation`): a component with a steep curve keeps nearly all of its units.
One-at-a-time scans: Li et al. 2017, https://arxiv.org/abs/1608.08710, section 3.2. Limitations: interactions between components are
ignored, and tokens of a masked expert are not routed to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from foundation.models.architecture.structure import Structure
from foundation.models.layers.listed_experts import is_listed, scaled
from prune.allocation import Part, top
from prune.cost import GATED, count_of, width_of
from prune.hook_points import HookPoints
from prune.surgery import KeptUnits

SHARES = (0.25, 0.5, 0.75, 1.0)
"""1 means as many units as may be removed."""
SCAN_ROWS = 128


@dataclass(frozen=True)
class Sensitivity:
    """The cost of pruning one component, in the unit of the distance (nats, or squared label units)."""

    part: Part
    name: str
    """Module path of the layer that reads the component."""
    distances: Mapping[float, float]
    """Distance by share of units removed."""
    metrics: Mapping[float, float] = field(default_factory=dict)
    """Primary metric by share of units removed; empty for rows without labels."""

    def at(self, count: int) -> float:
        """Returns the distance with `count` units kept."""
        shares = [0.0, *self.distances]
        return float(np.interp(1 - count / self.part.size, shares, [0.0, *self.distances.values()]))

    def as_row(self) -> dict[str, object]:
        """Returns the curves as JSON types."""
        curves = {"distances": self.distances, "metrics": self.metrics}
        points = {name: [[share, value] for share, value in curve.items()] for name, curve in curves.items() if curve}
        return {"name": self.name, "what": self.part.component, **points}


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
        model: The model, in evaluation mode; it is not changed.
        structure: Its structure.
        parts: The components; each may lose at least one unit.
        scores: Scores of the units of each, float `[n]`.
        look: Returns the distance of the current model from the original one, and its primary metric or None.
        advance: Called after every measurement.

    Returns:
        One curve per component, in order; distances are made non-decreasing, against measurement noise.
    """
    hooks, found = HookPoints.of(model, structure), []
    for part in parts:
        measured: dict[float, float] = {}
        metrics: dict[float, float] = {}
        highest = 0.0
        for share in SHARES:
            kept = max(part.counts()[-1], round((1 - share) * part.size))
            if kept < part.size and 1 - kept / part.size not in measured:  # with few units, several shares round to the same count
                with silenced(model, structure, hooks, part, top(scores[part], kept)):
                    apart, metric = look()
                measured[1 - kept / part.size] = highest = max(highest, apart)
                metrics |= {} if metric is None else {1 - kept / part.size: metric}
            advance(1)
        found.append(Sensitivity(part, str(hooks.at(part.block, part.component)), measured, metrics))
    return found


@contextmanager
def silenced(model: nn.Module, structure: Structure, hooks: HookPoints, part: Part, kept: Sequence[int]) -> Iterator[None]:
    """Masks out all units of a component but those in `kept`, inside the `with` block."""
    mask_S = torch.zeros(part.size)
    mask_S[list(kept)] = 1
    mask_I = mask_S.repeat_interleave(width_of(structure, part.block, part.component))

    def inputs(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * mask_I.to(args[0].device), *args[1:])

    def weights(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states, chosen_Nk, weights_Nk, *rest = args
        if is_listed(module):
            return (states, chosen_Nk, scaled(module, chosen_Nk, weights_Nk, mask_S.to(states.device)), *rest)
        return (states, chosen_Nk, weights_Nk * mask_S.to(states.device)[chosen_Nk], *rest)

    name = hooks.at(part.block, part.component)
    handle = model.get_submodule(str(name)).register_forward_pre_hook(weights if part.component == "experts" else inputs)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def silenced_all(model: nn.Module, structure: Structure, hooks: HookPoints, kept: KeptUnits) -> Iterator[None]:
    """Masks out all heads and FFN neurons that are not kept, inside the `with` block."""
    with ExitStack() as stack:
        for block in range(structure.depth):
            for what in GATED:
                number = count_of(structure.sizes, block, what)
                left = kept.units(block, what)
                if len(left) < number:
                    stack.enter_context(silenced(model, structure, hooks, Part(block, what, number, 1.0, number), left))
        yield
