"""The front and successive halving against written-out references."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from compress.search.front import dominates, front_of, layers_of, ranked, recommended
from compress.search.halving import survivors
from foundation.core.goals import Goals, LatencyGoal

SMALL = st.integers(0, 4).map(float)  # few values, so that ties and domination are frequent
POINTS = (
    st.integers(1, 3)
    .flatmap(lambda axes: st.lists(st.tuples(*[SMALL] * axes), min_size=1, max_size=14))
    .map(lambda rows: dict(enumerate(rows)))
)


def naive_front(points: dict[int, tuple[float, ...]]) -> set[int]:
    found = set()
    for number, own in points.items():
        beaten = False
        for other in points.values():
            no_worse, better = True, False
            for a, b in zip(other, own, strict=True):
                no_worse, better = no_worse and a <= b, better or a < b
            beaten = beaten or (no_worse and better)
        if not beaten:
            found.add(number)
    return found


@given(POINTS)
def test_the_front_is_what_nothing_dominates(points: dict[int, tuple[float, ...]]) -> None:
    assert set(front_of(points)) == naive_front(points)
    assert front_of(points)


@given(POINTS)
def test_layers_hold_every_point_once_and_each_is_the_front_of_the_rest(points: dict[int, tuple[float, ...]]) -> None:
    layers, rest = layers_of(points), dict(points)
    assert sorted(number for layer in layers for number in layer) == sorted(points)
    for layer in layers:
        assert set(layer) == naive_front(rest)
        rest = {number: own for number, own in rest.items() if number not in layer}


@given(POINTS, st.floats(0.01, 1.0))
def test_halving_keeps_its_share_and_never_drops_what_beats_a_survivor(points: dict[int, tuple[float, ...]], keep: float) -> None:
    kept = survivors(points, keep)
    dropped = [number for number in points if number not in kept]
    assert len(kept) == len(set(kept))
    assert max(1, keep * len(points) - 1e-6) <= len(kept) < keep * len(points) + 1
    assert not any(dominates(points[one], points[other]) for one in dropped for other in kept)
    assert set(kept[:1]) <= naive_front(points)


@given(POINTS)
def test_rank_depends_on_the_points_and_not_on_their_order(points: dict[int, tuple[float, ...]]) -> None:
    assert ranked(points) == ranked(dict(reversed(points.items())))
    assert sorted(ranked(points)) == sorted(points)


def test_the_ends_of_a_layer_outrank_its_middle() -> None:
    line = {number: (float(number), float(9 - number)) for number in range(10)}
    assert set(survivors(line, 0.2)) == {0, 9}
    assert survivors({0: (1.0, 2.0), 1: (0.0, 0.0)}, 0.5) == [1]


def test_halving_again_and_again_leaves_one() -> None:
    points = {number: (float(number % 5), float(number // 5)) for number in range(20)}
    sizes = [len(points)]
    while len(points) > 1:
        points = {number: points[number] for number in survivors(points, 0.5)}
        sizes.append(len(points))
    assert sizes == [20, 10, 5, 3, 2, 1]
    assert all(after < before for before, after in pairwise(sizes))


def test_what_is_recommended_follows_the_goals() -> None:
    front = {0: (-0.90, 4.0), 1: (-0.89, 2.0), 2: (-0.80, 1.0)}  # accuracy as a loss, and ms
    names = ("metric", "latency")
    assert recommended(front, names, Goals(max_drop=0.1)) == 2
    assert recommended(front, names, Goals(max_latency_ms=(LatencyGoal(value=5.0),))) == 0
    assert recommended(front, names, Goals(min_speedup=2.0)) == 0
    assert recommended(front, names, Goals(max_drop=0.1, min_speedup=2.0)) == 2
    assert recommended(front, names, Goals()) == 1
    assert recommended(front, ("latency", "metric"), Goals(max_drop=0.1)) == 0  # the columns are those of the names
    assert recommended({}, names, Goals()) is None
