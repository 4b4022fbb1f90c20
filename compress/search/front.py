"""The front of a search: of the candidates that meet the goals those that no other one beats, and which of them to take.

    a dominates b   <=>   a is at least as good in every objective and better in one

All vectors here are losses, so that smaller is better. The recommended point is chosen only by figures of selection rows:

    goals limit the metric                 the least loss in the first objective that is not the metric
    they limit time, size or throughput    the best metric
    they limit neither                     the point nearest to the ideal one, each objective scaled to 0..1 over the front

Left out: hypervolume. With few points and two objectives the picture says more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from foundation.core.goals import Goals

Losses = Sequence[float]


def dominates(one: Losses, other: Losses) -> bool:
    """Whether the first vector is at least as good everywhere and better somewhere."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(a < b for a, b in zip(one, other, strict=True))


def front_of(points: Mapping[int, Losses]) -> list[int]:
    """Returns the points that no other one dominates, in the order given; equal points all stay."""
    return [number for number, own in points.items() if not any(dominates(other, own) for other in points.values())]


def layers_of(points: Mapping[int, Losses]) -> list[list[int]]:
    """Returns the fronts of a set of points one after the other: the front, the front of the rest, and so on (Deb et al. 2002)."""
    rest, layers = dict(points), []
    while rest:
        layers.append(front_of(rest))
        rest = {number: own for number, own in rest.items() if number not in layers[-1]}
    return layers


def spread(points: Mapping[int, Losses], layer: Sequence[int]) -> dict[int, float]:
    """Returns the crowding distance of each point of a layer: how far its neighbours lie apart; infinite at the ends (Deb et al. 2002)."""
    found = dict.fromkeys(layer, 0.0)
    for axis in range(len(points[layer[0]])):
        order = sorted(layer, key=lambda number: (points[number][axis], number))
        width = points[order[-1]][axis] - points[order[0]][axis]
        found[order[0]] = found[order[-1]] = math.inf
        for before, number, after in zip(order, order[1:], order[2:], strict=False):
            found[number] += (points[after][axis] - points[before][axis]) / width if width > 0 else 0.0
    return found


def ranked(points: Mapping[int, Losses]) -> list[int]:
    """Returns the points from best to worst: by layer, within one the most isolated first, then by number."""
    order: list[int] = []
    for layer in layers_of(points):
        apart = spread(points, layer)
        order += sorted(layer, key=lambda number: (-apart[number], number))
    return order


def recommended(points: Mapping[int, Losses], objectives: Sequence[str], goals: Goals) -> int | None:
    """Returns the point of a front to take; None of an empty one.

    Args:
        points: The losses of the points, which all meet the goals.
        objectives: Names of the losses.
        goals: The goals of the recipe.
    """
    if not points:
        return None
    names, metric = list(objectives), "metric"
    costs = [index for index, name in enumerate(names) if name != metric]
    limits_metric = goals.max_drop is not None or goals.max_bleu_drop is not None
    limits_cost = bool(goals.max_latency_ms) or (goals.min_speedup, goals.max_size_mb, goals.min_throughput) != (None, None, None)
    if limits_metric and costs:
        return min(points, key=lambda number: (points[number][costs[0]], *points[number]))
    if limits_cost and metric in names:
        return min(points, key=lambda number: (points[number][names.index(metric)], *points[number]))
    scaled = _scaled(points)
    return min(points, key=lambda number: (math.hypot(*scaled[number]), number))


def _scaled(points: Mapping[int, Losses]) -> dict[int, list[float]]:
    columns = list(zip(*points.values(), strict=True))
    low, width = [min(column) for column in columns], [max(column) - min(column) for column in columns]
    return {
        number: [(value - least) / size if size > 0 else 0.0 for value, least, size in zip(own, low, width, strict=True)]
        for number, own in points.items()
    }
