"""Under `auto`: which products of attention and which residuals are int8, so that all of them together cost next to nothing.

With D(S) the distance to the float model on selection rows (`quantize.trial`) when the chosen linear layers and the sites S are int8, and F
the sites that are on in any case:

    added(s) = D({s}) - D({})                                                       every site by itself, beside the int8 layers
    S = F; then in the order of added(s), the cheapest first:   S = S + {s}  where  D(S + {s}) - D(F) <= bound
    bound = max(D({}) / 4, floor)                                                   as `compress.measure.closeness` has it

so that all of them together cost at most a quarter of what int8 linear layers cost, or what nobody could measure.

Left out: pairs of sites that are cheap only together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import nn

from compress.measure.closeness import bound_of
from compress.schemes.scales import Scales
from compress.schemes.sites import Sites, placed
from quantize.sensitivity import Sensitivity
from quantize.trial import Trial, in_int8

Distance = Callable[[Collection[str]], float]
"""Returns the distance to the float model with these sites in int8."""


@dataclass(frozen=True)
class Choice:
    """Which sites are on, and what that costs, in the unit of the distance."""

    on: tuple[str, ...]
    """In the order of the model."""
    added: Mapping[str, float]
    """What every site adds by itself; may be negative: noise, or errors that cancel."""
    layers: float
    """The distance with int8 layers alone."""
    before: float
    """With the sites that are on in any case."""
    after: float
    """With all that are on."""
    bound: float
    """What may be added."""


def switch_on(sites: Sequence[str], always: Collection[str], distance: Distance, floor: float) -> Choice:
    """Chooses the sites that are on; at most 2 n + 2 measurements for n sites.

    Args:
        sites: All sites, in the order of the model.
        always: Those that are on whatever they cost.
        distance: The distance with some of them in int8.
        floor: What may be added in any case.

    Returns:
        The choice; `added` is measured for all sites.
    """
    layers = distance([])
    added = {site: distance([site]) - layers for site in sites}
    before = distance(always) if always else layers
    bound = bound_of(layers, floor)
    chosen, after = set(always), before
    for site in sorted((site for site in sites if site not in chosen), key=added.__getitem__):
        together = distance([*chosen, site])
        if together - before <= bound:
            chosen.add(site)
            after = together
    return Choice(tuple(site for site in sites if site in chosen), added, layers, before, after, bound)


def passes(sites: Sequence[str], always: Collection[str]) -> int:
    """Returns how many passes over the trial rows `switch_on` takes."""
    return 2 + 2 * len(sites) - len(always) if always else 1 + 2 * len(sites)


def distance_with(
    trial: Trial, layers: Mapping[str, nn.Linear], scales: Mapping[str, Scales], sites: Sites, advance: Callable[[int], None]
) -> Distance:
    """Returns the measure of `switch_on`: how far a model with these layers in int8, and some sites, is from what it was.

    Args:
        trial: On the rows that decide.
        layers: The float layers that are int8 in the measurement; none for a model in float.
        scales: Theirs.
        sites: All sites.
        advance: Is told of every measurement.
    """

    def distance(names: Collection[str]) -> float:
        with in_int8(trial.model, layers, scales) if layers else nullcontext(), placed(trial.model, *sites.only(names).forms()):
            value = trial.distance_now()
        advance(1)
        return value

    return distance


def sensitivities(choice: Choice, alone: Distance) -> list[Sensitivity]:
    """Returns the sites that are on as rows of a sensitivity scan; they have no weights, so that all they cost is their inputs.

    Args:
        choice: The choice.
        alone: The distance with a site in int8 and everything else in float.
    """
    cost = {site: alone([site]) for site in choice.on}
    return [Sensitivity(site, alone=cost[site], weights=0.0, inputs=cost[site], gain=choice.added[site]) for site in choice.on]
