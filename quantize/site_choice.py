"""Chooses under `auto` which attention products and residuals ("sites") are int8, at negligible total cost.

With D(S) the distance to the float model on selection rows (`quantize.trial`) when the chosen linear layers and the sites S are int8, and F
the sites that are always on:

    added(s) = D({s}) - D({})                                                   each site alone, in addition to the int8 layers
    S = F; then in ascending order of added(s):   S = S + {s}  if  upper(D(S + {s}) - D(F)) <= bound
    bound = max(D({}) / 4, floor)                                               see `foundation.measure.closeness`

upper is the upper end of the 95 % interval of the difference, row by row; rows that belong together count as one group. A site stays float,
the default, where the rows are too few to decide. So all chosen sites together cost at most a quarter of what the int8 linear layers cost,
or an amount too small to measure.

Not supported: pairs of sites that are cheap only together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from foundation.core.arrays import Array
from foundation.core.resampling import Groups
from foundation.measure.closeness import bound_of, interval
from foundation.schemes.scales import Layer, Scales
from foundation.schemes.sites import Sites, placed
from quantize.sensitivity import Sensitivity
from quantize.trial import Trial, in_int8

Distances = Callable[[Collection[str]], Array]
"""Returns the distance of each row to the float model, float64 [n], with the given sites in int8."""


@dataclass(frozen=True)
class Choice:
    """The chosen sites and their cost, in the unit of the distance."""

    on: tuple[str, ...]
    """The chosen sites, in model order."""
    added: Mapping[str, float]
    """The distance that each site adds by itself; may be negative, from noise or errors that cancel."""
    layers: float
    """The distance with only the int8 layers."""
    before: float
    """The distance with the sites that are always on."""
    after: float
    """The distance with all chosen sites."""
    bound: float
    """The largest distance that the chosen sites may add."""
    interval: tuple[float, float]
    """95 % interval of after - before."""


def switch_on(sites: Sequence[str], always: Collection[str], distances: Distances, floor: float, groups: Groups | None = None) -> Choice:
    """Chooses which sites are int8; takes at most 2 n + 2 measurements for n sites.

    Args:
        sites: All sites, in model order.
        always: Sites that are on whatever they cost.
        distances: Returns the distance of each row with some sites in int8.
        floor: Lower limit of the bound.
        groups: Which rows belong together; None: each row is its own group.

    Returns:
        The choice; `added` is measured for all sites.
    """
    layers_n = distances([])
    added = {site: float(np.mean(distances([site]) - layers_n)) for site in sites}
    before_n = distances(always) if always else layers_n
    layers, before = float(np.mean(layers_n)), float(np.mean(before_n))
    bound = bound_of(layers, floor)
    chosen, after_n = set(always), before_n
    for site in sorted((site for site in sites if site not in chosen), key=added.__getitem__):
        together_n = distances([*chosen, site])
        if interval(together_n - before_n, groups)[1] <= bound:
            chosen.add(site)
            after_n = together_n
    on, after = tuple(site for site in sites if site in chosen), float(np.mean(after_n))
    return Choice(on, added, layers, before, after, bound, interval(after_n - before_n, groups))


def passes(sites: Sequence[str], always: Collection[str]) -> int:
    """Returns the number of passes over the trial rows of `switch_on`."""
    return 2 + 2 * len(sites) - len(always) if always else 1 + 2 * len(sites)


def distances_with(
    trial: Trial, layers: Mapping[str, Layer], scales: Mapping[str, Scales], sites: Sites, advance: Callable[[int], None]
) -> Distances:
    """Returns the function for `switch_on`: the distance to float with these layers, and some sites, in int8.

    Args:
        trial: The float logits on the trial rows.
        layers: The float layers that are int8 in the measurement; empty for a float model.
        scales: Scales of these layers.
        sites: All sites.
        advance: Called after every measurement.
    """

    def distances(names: Collection[str]) -> Array:
        with in_int8(trial.model, layers, scales) if layers else nullcontext(), placed(trial.model, *sites.only(names).forms()):
            values = trial.distances_now()
        advance(1)
        return values

    return distances


def sensitivities(choice: Choice, alone: Distances) -> list[Sensitivity]:
    """Returns the chosen sites as rows of a sensitivity scan; sites have no weights, so only their inputs cost something.

    Args:
        choice: The choice.
        alone: Returns the distance of each row with one site in int8 and everything else in float.
    """
    cost = {site: float(np.mean(alone([site]))) for site in choice.on}
    return [Sensitivity(site, alone=cost[site], weights=0.0, inputs=cost[site], gain=choice.added[site]) for site in choice.on]
