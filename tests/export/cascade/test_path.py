import itertools
import math

import numpy as np
import pytest

from export.cascade.path import Seen, Thresholds, fastest_path, fastest_within, levels, path
from foundation.standalone.confidence import KEEP_ALL


def seen(tiers: int, n: int = 400, seed: int = 0) -> Seen:
    """Rows whose scores say how likely a tier is wrong; the second tier is wrong more rarely than the first."""
    rng = np.random.default_rng(seed)
    scores = [np.abs(rng.normal(size=n)) * 3 for _ in range(tiers - 1)]
    wrong = [rng.random(n) < 0.5 / (place + 1) * np.exp(-one) for place, one in enumerate(scores)]
    return Seen(scores, [*wrong, np.zeros(n, bool)], [1.0, 3.0, 10.0][-tiers:])


def height(threshold: float | None) -> float:
    return math.inf if threshold is None else threshold


def naive(known: Seen, thresholds: Thresholds) -> tuple[float, float]:
    """Rows with other answers, and the mean time, row by row."""
    errors, total = 0.0, 0.0
    for row in range(len(known.scores[0])):
        for tier, scores in enumerate([*known.scores, None]):
            threshold = thresholds[tier] if scores is not None else KEEP_ALL
            if threshold is not None:
                total += known.cost_ms[tier]
            if scores is None or (threshold is not None and scores[row] >= threshold):
                errors += float(known.wrong[tier][row])
                break
    return errors, total / len(known.scores[0])


@pytest.mark.parametrize("tiers", [2, 3])
def test_losses_and_times_of_a_point_are_those_of_its_rows(tiers: int) -> None:
    known = seen(tiers, n=60)
    for thresholds in path(known)[::37]:
        errors, time_ms = naive(known, thresholds)
        assert known.losses(thresholds).sum() == errors
        assert known.time_ms(thresholds) == pytest.approx(time_ms)


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_path_goes_from_keeping_no_row_to_keeping_all_and_never_back(tiers: int, seed: int) -> None:
    points = path(seen(tiers, seed=seed))
    assert points[0] == (None,) * (tiers - 1)
    assert points[-1] == (KEEP_ALL,) * (tiers - 1)
    for one, other in itertools.pairwise(points):
        changed = [(height(a), height(b)) for a, b in zip(one, other, strict=True) if a != b]
        assert len(changed) == 1
        assert changed[0][1] < changed[0][0]


def test_fewer_rows_go_on_at_every_step() -> None:
    known = seen(3)
    beyond = [[int((known.answering(point) > tier).sum()) for tier in (0, 1)] for point in path(known)]
    assert (np.diff(np.array(beyond), axis=0) <= 0).all()


@pytest.mark.parametrize("scores", [[1.0, 2.0, 2.0, 5.0], [3.0], [3.0, 3.0], [1.0, math.nan, 2.0]])
def test_levels_lie_between_scores(scores: list[float]) -> None:
    found = levels(np.array(scores))
    assert found[0] is None
    assert found[-1] == KEEP_ALL
    inner = [level for level in found[1:-1] if level is not None]
    assert inner == sorted(set(inner), reverse=True)
    known = sorted({score for score in scores if math.isfinite(score)})
    for low, high in itertools.pairwise(known):
        assert any(low < level <= high for level in inner)


def test_levels_are_at_most_as_many_as_asked_for() -> None:
    assert len(levels(np.random.default_rng(0).normal(size=5000), most=64)) <= 2 * 64 + 2


def test_levels_reach_between_rare_scores() -> None:
    """Selection rows that a model learned are sure; the rows of the traffic that are not fall between a few of their scores."""
    inner = [level for level in levels(np.array([0.0, *np.linspace(9, 10, 2000)])) if level not in (None, KEEP_ALL)]
    assert sum(level < 9 for level in inner) > 100


def test_the_threshold_that_does_less_harm_goes_first() -> None:
    rng = np.random.default_rng(1)
    n = 300
    scores = [rng.random(n), rng.random(n)]
    harmful = Seen(scores, [np.ones(n, bool), np.zeros(n, bool), np.zeros(n, bool)], [1.0, 1.1, 10.0])
    first = next(point for point in path(harmful) if point[1] == KEEP_ALL)
    assert harmful.losses(first).mean() < 0.2
    harmless = Seen(scores, [np.zeros(n, bool), np.ones(n, bool), np.zeros(n, bool)], [1.0, 1.1, 10.0])
    first = next(point for point in path(harmless) if point[0] == KEEP_ALL)
    assert harmless.losses(first).mean() < 0.2


def test_a_first_tier_that_costs_as_much_as_the_second_is_passed() -> None:
    """As a student in float beside int8 of the whole model, which is as fast and hardly ever answers otherwise."""
    rng, n = np.random.default_rng(2), 500
    own, sure = rng.random(n), rng.random(n)
    wrong = [(rng.random(n) < 0.24) & (own < 0.5), (rng.random(n) < 0.2) & (sure < 0.1), np.zeros(n, bool)]
    known = Seen([own, sure], wrong, [2.1, 2.2, 4.8])
    found = fastest_path(known, 0.005)
    assert {first for first, _ in found} == {None}
    assert found[-1] == (None, KEEP_ALL)
    assert fastest_within(known, found, 0.005) < fastest_within(known, path(known), 0.005)


@pytest.mark.first(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("allowed", [0.0, 0.02, 1.0])
def test_the_fastest_path_is_one_of_those_that_leave_out_at_most_one_tier(seed: int, allowed: float) -> None:
    known = seen(3, seed=seed)
    ways = [
        path(known),
        *([tuple(level if one == tier else None for one in (0, 1)) for level in levels(known.scores[tier])] for tier in (0, 1)),
    ]
    times = []
    for points in ways:  # written out: the least time before the first point that is above what is allowed
        passing = list(itertools.takewhile(lambda point: known.losses(point).mean() <= allowed, points[1:]))
        times.append(min(known.time_ms(point) for point in [points[0], *passing]))
    assert fastest_path(known, allowed) == ways[times.index(min(times))]


def test_two_tiers_have_one_path() -> None:
    known = seen(2)
    assert fastest_path(known, 0.01) == path(known)
