"""The certificate of a whole path: what it promises, by exact enumeration and by simulation."""

import math
from fractions import Fraction

import numpy as np
import pytest

from export.cascade.certificate import betting_p, binomial_p, upper_limit
from export.cascade.path import Seen, Thresholds, path
from export.cascade.tested import Answers, Bounds, Walk, certify_path, escalations
from foundation.core.arrays import Array
from foundation.labels.classes import ClassIds
from foundation.standalone.confidence import KEEP_ALL, Score

TASK = "text-classification"
MARGIN: Score = {"name": "margin", "form": "class", "temperature": 1.0, "weights": [], "bias": []}


def keys(n: int) -> Array:
    return np.random.default_rng(9).integers(0, 256, (n, 16)).astype(np.uint8)


def logits(margins: Array, classes: Array) -> Array:
    """Logits of two classes with given margins."""
    return np.where(np.arange(2) == classes[:, np.newaxis], margins[:, np.newaxis], 0.0).astype(np.float32)


def population(n: int, seed: int = 0, last_wrong: float = 0.0) -> tuple[Answers, Array]:
    """Rows with an original, a small tier that is wrong where it is unsure, and a last tier."""
    rng = np.random.default_rng(seed)
    classes, margins = rng.integers(0, 2, n), rng.exponential(2.0, n)
    small = np.where(rng.random(n) < 0.5 * np.exp(-1.2 * margins), 1 - classes, classes)
    last = np.where(rng.random(n) < last_wrong, 1 - classes, classes)
    original = logits(np.ones(n), classes)
    labels = np.where(rng.random(n) < 0.1, 1 - classes, classes)
    return Answers(TASK, original, [logits(margins, small), logits(np.ones(n), last)], ClassIds(labels)), margins


def certified(answers: Answers, seen: Seen, points: list[Thresholds], bounds: Bounds) -> Walk:
    """Tests a path whose later points are faster."""
    return certify_path(answers, seen, points, [-float(number) for number in range(len(points))], bounds, keys(len(answers.original)))


def part(answers: Answers, rows: Array) -> Answers:
    labels = None if answers.labels is None else answers.labels[rows]
    return Answers(answers.task, answers.original[rows], [one[rows] for one in answers.tiers], labels)


def test_every_point_has_its_counts_and_p_values() -> None:
    answers, margins = population(300)
    seen = answers.seen([MARGIN], [1.0, 5.0])
    np.testing.assert_allclose(seen.scores[0], margins.astype(np.float32))
    points = path(seen)
    tested = certified(answers, seen, points, Bounds(0.05, 0.05))
    assert [point.thresholds for point in tested.points] == points
    small_wrong = answers.tiers[0].argmax(1) != answers.original.argmax(1)
    passed = True
    for point in tested.points:
        threshold = math.inf if point.thresholds[0] is None else float(point.thresholds[0])
        kept = seen.scores[0] >= threshold
        assert point.disagreements == int((kept & small_wrong).sum())
        assert point.escalated == (int((~kept).sum()),)
        assert point.p_value == binomial_p(point.disagreements, 300, 0.05)
        passed = passed and point.p_value <= 0.05
        assert point.passed == passed
    assert tested.chosen == sum(point.passed for point in tested.points) - 1
    assert tested.drop is None


def test_of_the_points_that_pass_the_fastest_is_chosen() -> None:
    answers, _ = population(600)
    seen = answers.seen([MARGIN], [1.0, 5.0])
    points = path(seen)
    last = certified(answers, seen, points, Bounds(0.05, 0.05)).chosen
    assert last is not None
    times = [5.0] * len(points)
    times[last - 2], times[last - 1], times[last + 1] = 3.0, 3.0, 1.0
    tested = certify_path(answers, seen, points, times, Bounds(0.05, 0.05), keys(600))
    assert tested.chosen == last - 1
    assert sum(point.passed for point in tested.points) == last + 1


def test_the_first_point_answers_as_the_last_tier_does() -> None:
    answers, _ = population(500, last_wrong=0.02)
    seen = answers.seen([MARGIN], [1.0, 5.0])
    first = certified(answers, seen, path(seen), Bounds(0.1, 0.05)).points[0]
    assert first.disagreements == int((answers.tiers[-1].argmax(1) != answers.original.argmax(1)).sum()) > 0
    assert first.escalated == (500,)


def test_where_the_original_in_its_engine_is_too_far_nothing_is_chosen() -> None:
    answers, _ = population(500, last_wrong=0.2)
    seen = answers.seen([MARGIN], [1.0, 5.0])
    assert certified(answers, seen, path(seen), Bounds(0.05, 0.05)).chosen is None


def test_both_bounds_have_to_pass() -> None:
    answers, _ = population(2000)
    assert answers.labels is not None
    seen = answers.seen([MARGIN], [1.0, 5.0])
    points = path(seen)
    alone = certified(answers, seen, points, Bounds(0.06, 0.05))
    both = certified(answers, seen, points, Bounds(0.06, 0.05, 0.012))
    order = np.lexsort(keys(2000).T[::-1])
    right = answers.original.argmax(1) == answers.labels.array
    for one, other in list(zip(alone.points, both.points, strict=True))[::40]:
        answering = seen.answering(one.thresholds)
        given = np.where(answering == 0, answers.tiers[0].argmax(1), answers.tiers[1].argmax(1))
        lost = right.astype(float) - (given == answers.labels.array)
        assert other.p_value == max(float(one.p_value), betting_p(lost[order], 0.012, -1.0, 1.0, 0.05))
    assert both.chosen is not None
    assert alone.chosen is not None
    assert 0 < both.chosen < alone.chosen
    assert both.drop is not None
    assert both.drop.p_value <= 0.05
    assert both.drop.limit == 0.012


def test_escalation_limits_hold_for_every_point_and_tier_at_once() -> None:
    answers, _ = population(400)
    seen = answers.seen([MARGIN], [1.0, 5.0])
    tested = certified(answers, seen, path(seen), Bounds(0.1, 0.05))
    (found,) = escalations(tested, 400, 0.05)
    assert tested.chosen is not None
    assert found.units == tested.points[tested.chosen].escalated[0]
    assert found.rate == found.units / 400
    assert found.upper == upper_limit(found.units, 400, 0.05 / len(tested.points))
    assert found.upper > upper_limit(found.units, 400, 0.05) > found.rate


@pytest.mark.parametrize(("bound", "alpha"), [(0.29, 0.1), (0.35, 0.3), (0.45, 0.2)])
def test_a_risk_above_the_bound_is_certified_seldom_enough_in_all_draws(bound: float, alpha: float) -> None:
    """All draws of 7 rows from 4 kinds with exact probabilities; the last tier is wrong for one kind, so that risks rise and fall."""
    shares = (Fraction(4, 10), Fraction(3, 10), Fraction(2, 10), Fraction(1, 10))
    margins = np.array([4.0, 3.0, 2.0, 1.0])
    classes = np.array([0, 0, 0, 0])
    small, last = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 0])
    kinds = Answers(TASK, logits(np.ones(4), classes), [logits(margins, small), logits(np.ones(4), last)])
    points = [(None,), (3.5,), (2.5,), (1.5,), (KEEP_ALL,)]
    of_kinds = kinds.seen([MARGIN], [1.0, 2.0])
    risks = [sum((share for share, loss in zip(shares, of_kinds.losses(point), strict=True) if loss), Fraction(0)) for point in points]
    assert max(risks) > Fraction(bound) > min(risks)
    n, wrong = 7, Fraction(0)
    for counts in ((a, b, c, n - a - b - c) for a in range(n + 1) for b in range(n + 1 - a) for c in range(n + 1 - a - b)):
        drawn = part(kinds, np.repeat(np.arange(4), counts))
        chosen = certified(drawn, drawn.seen([MARGIN], [1.0, 2.0]), points, Bounds(bound, alpha)).chosen
        if chosen is not None and risks[chosen] > Fraction(bound):
            ways = math.factorial(n) // math.prod(map(math.factorial, counts))
            wrong += ways * math.prod((share**count for share, count in zip(shares, counts, strict=True)), start=Fraction(1))
    assert wrong <= Fraction(alpha)


@pytest.mark.whole
@pytest.mark.parametrize("drop", [None, 0.02])
def test_draws_from_a_pool_are_above_the_bound_seldom_enough_and_use_most_of_it(drop: float | None) -> None:
    pool, _ = population(20_000, seed=1)
    assert pool.labels is not None
    selection, _ = population(500, seed=2)
    points = path(selection.seen([MARGIN], [1.0, 5.0]))[::16]
    rng, draws, n, bound, alpha = np.random.default_rng(3), 150 if drop is None else 50, 1200, 0.04, 0.1
    truth = pool.seen([MARGIN], [1.0, 5.0])
    right = pool.original.argmax(1) == pool.labels.array
    risks, drops = [], []
    for point in points:
        answering = truth.answering(point)
        given = np.where(answering == 0, pool.tiers[0].argmax(1), pool.tiers[1].argmax(1))
        risks.append(float(truth.losses(point).mean()))
        drops.append(float((right.astype(float) - (given == pool.labels.array)).mean()))
    above, met = 0, []
    for _ in range(draws):
        drawn = part(pool, rng.integers(0, 20_000, n))
        chosen = certified(drawn, drawn.seen([MARGIN], [1.0, 5.0]), points, Bounds(bound, alpha, drop)).chosen
        assert chosen is not None
        above += risks[chosen] > bound or (drop is not None and drops[chosen] > drop)
        met.append(risks[chosen])
    assert above <= draws * alpha + 3 * math.sqrt(draws * alpha * (1 - alpha))
    if drop is None:
        assert np.mean(met) >= 0.6 * bound


def test_a_path_of_three_tiers_is_tested_as_one() -> None:
    rng = np.random.default_rng(5)
    n = 1500
    classes = rng.integers(0, 2, n)
    tiers = []
    for sharp in (0.8, 1.5):
        margins = rng.exponential(2.0, n)
        tiers.append(logits(margins, np.where(rng.random(n) < 0.5 * np.exp(-sharp * margins), 1 - classes, classes)))
    answers = Answers(TASK, logits(np.ones(n), classes), [*tiers, logits(np.ones(n), classes)])
    seen = answers.seen([MARGIN, MARGIN], [1.0, 2.0, 8.0])
    tested = certified(answers, seen, path(seen), Bounds(0.05, 0.05))
    assert tested.chosen is not None
    point = tested.points[tested.chosen]
    assert n > point.escalated[0] > point.escalated[1] > 0
    first, second = escalations(tested, n, 0.05)
    assert first.upper == upper_limit(point.escalated[0], n, 0.05 / (2 * len(tested.points)))
    assert (second.tier, second.units) == (2, point.escalated[1])
    assert isinstance(seen, Seen)
