import numpy as np
import pytest

from export.cascade.losses import disagreements, drops, form_of, right
from export.cascade.scores import FEWEST, Judged, auroc, choose, crossed, fit, plain
from foundation.core.arrays import Array
from foundation.labels.classes import ClassIds
from foundation.labels.label_sets import LabelSets
from foundation.standalone.confidence import CALIBRATED, confidence
from tests.problems import raises_problem

KEY = "stages.cascade.score"


def judged(n: int = 600, seed: int = 0) -> Judged:
    """A tier of three classes whose answers of class 2 are wrong far more often at the same margin."""
    rng = np.random.default_rng(seed)
    classes, margins = rng.integers(0, 3, n), rng.exponential(2.0, n)
    wrong = rng.random(n) < np.where(classes == 2, 0.6, 0.05) * np.exp(-0.4 * margins)
    logits = np.where(np.arange(3) == classes[:, np.newaxis], margins[:, np.newaxis], 0.0) + rng.normal(size=(n, 1))
    original = np.eye(3)[np.where(wrong, (classes + 1) % 3, classes)] * 2
    return Judged(logits.astype(np.float32), original.astype(np.float32), ~wrong, "class")


@pytest.mark.parametrize("ties", [False, True])
def test_the_auroc_is_the_share_of_pairs_in_order(ties: bool) -> None:
    rng = np.random.default_rng(0)
    scores, agrees = rng.normal(size=60), rng.random(60) < 0.7
    scores = scores.round(0) if ties else scores
    pairs = [(good, bad) for good in scores[agrees] for bad in scores[~agrees]]
    naive = sum((good > bad) + (good == bad) / 2 for good, bad in pairs) / len(pairs)
    assert auroc(scores, agrees) == pytest.approx(naive)
    assert auroc(scores, np.ones(60, bool)) == 0.5


def test_a_calibrated_score_learns_the_class_that_is_less_sure_than_it_looks() -> None:
    known = judged(3000)
    found = fit(known)
    assert found["bias"][2] < min(found["bias"][:2])
    assert crossed(known) > auroc(confidence(known.logits, plain("margin", "class")), known.agrees) + 0.05
    p = 1 / (1 + np.exp(-confidence(known.logits, found)))
    for low, high in ((0.5, 0.8), (0.8, 0.95), (0.95, 1.0)):
        some = (p >= low) & (p < high)
        assert known.agrees[some].mean() == pytest.approx(p[some].mean(), abs=0.06)


def test_a_calibrated_score_is_judged_on_rows_that_it_was_not_fitted_on() -> None:
    """Where nothing can be learned, the rows of the fit look as if something could."""
    own, other = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=(80, 10)).astype(np.float32)
        noise = Judged(logits, logits, rng.random(80) < 0.7, "class")
        own.append(auroc(confidence(logits, fit(noise)), noise.agrees))
        other.append(crossed(noise))
    assert np.mean(own) > 0.65
    assert 0.4 < np.mean(other) < 0.58


def test_newton_finds_the_minimum_of_the_penalized_loss() -> None:
    from export.cascade.scores import RIDGE, _logistic

    rng = np.random.default_rng(1)
    design = np.concatenate([np.ones((80, 1)), rng.normal(size=(80, 3))], axis=1)
    target = (rng.random(80) < 0.7).astype(float)
    ridge = np.array([0.0, RIDGE, RIDGE, RIDGE])

    def loss(weights: Array) -> float:
        z = design @ weights
        return float((np.logaddexp(0, z) - target * z).sum() + (ridge * weights**2).sum() / 2)

    found = _logistic(design, target, ridge)
    for direction in (*np.eye(4), *rng.normal(size=(20, 4))):
        for step in (1e-3, -1e-3):
            assert loss(found) <= loss(found + step * direction)


def test_auto_takes_margin_unless_another_one_is_better() -> None:
    score, areas = choose(judged(3000), "auto", KEY)
    assert score["name"] == CALIBRATED
    assert areas[CALIBRATED] == max(areas.values())
    rng = np.random.default_rng(2)
    margins = rng.exponential(2.0, 2000).astype(np.float32)
    wrong = rng.random(2000) < 0.4 * np.exp(-margins)
    logits = np.stack([margins, np.zeros_like(margins)], axis=1)
    original = np.where(wrong[:, np.newaxis], logits[:, ::-1], logits)
    score, areas = choose(Judged(logits, original, ~wrong, "class"), "auto", KEY)
    assert score == plain("margin", "class")
    assert set(areas) == {"margin", "entropy", "energy", CALIBRATED}


def test_without_other_answers_there_is_nothing_to_calibrate() -> None:
    known = judged()
    agreed = Judged(known.logits, known.logits, np.ones(len(known.agrees), bool), "class")
    assert choose(agreed, "auto", KEY)[0] == plain("margin", "class")
    with raises_problem(KEY, "calibrated", "0 of 600", str(FEWEST), "margin"):
        choose(agreed, CALIBRATED, KEY)


def test_losses_of_classes_and_sets() -> None:
    original = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    answers = np.array([[2, 0], [0, 2], [0, 3], [3, 0]], np.float32)
    assert disagreements("text-classification", original, answers).tolist() == [False, True, False, True]
    labels = ClassIds(np.array([0, 1, 0, 1]))
    assert right(original, labels).tolist() == [True, False, False, True]
    assert drops(original, answers, labels).tolist() == [0, -1, 0, 1]
    sets = np.array([[1, -1], [1, 1], [-1, -1]], np.float32)
    other = np.array([[1, 1], [2, 3], [-1, -2]], np.float32)
    assert disagreements("multi-label-classification", sets, other).tolist() == [True, False, False]
    assert right(sets, LabelSets(np.array([[True, False], [True, False], [False, False]]))).tolist() == [True, False, True]


def far(n: int, form: str, seed: int = 0) -> Judged:
    """A tier that is far from the original where its answer is in the middle, or points along the first axis."""
    rng = np.random.default_rng(seed)
    if form == "value":
        answers = rng.uniform(0, 5, (n, 1))
        size = np.exp(-((answers[:, 0] - 2.5) ** 2))
        original = answers + (size * rng.normal(size=n))[:, np.newaxis]
        apart = np.abs(answers - original)[:, 0]
    else:
        answers = rng.normal(size=(n, 6)) * rng.uniform(0.5, 2, (n, 1))
        size = 0.1 * np.exp(1.5 * answers[:, 0] / np.linalg.norm(answers, axis=1))
        moved = rng.normal(size=(n, 6)) * size[:, np.newaxis] * np.linalg.norm(answers, axis=1, keepdims=True)
        original = answers + moved
        apart = np.linalg.norm(moved, axis=1) / np.linalg.norm(original, axis=1)
    return Judged(answers.astype(np.float32), original.astype(np.float32), apart <= np.quantile(apart, 0.8), form, apart)


@pytest.mark.parametrize("form", ["value", "vector"])
def test_the_score_of_numbers_and_vectors_knows_where_the_tier_is_far_from_the_original(form: str) -> None:
    known, other = far(1500, form), far(1500, form, seed=1)
    score, areas = choose(known, "auto", KEY)
    assert (score["name"], score["form"], list(areas)) == (CALIBRATED, form, [CALIBRATED])
    area = auroc(confidence(other.logits, score), other.agrees)
    assert area > 0.75
    assert areas[CALIBRATED] == pytest.approx(area, abs=0.05)
    shuffled = np.random.default_rng(5).permutation(1500)
    nothing = Judged(known.logits, known.original, known.agrees[shuffled], form, np.asarray(known.apart)[shuffled])
    assert crossed(nothing) == pytest.approx(0.5, abs=0.07), "judged on rows that it was not fitted on"


@pytest.mark.parametrize("form", ["value", "vector"])
def test_the_score_of_numbers_is_the_ridge_regression_of_the_negative_logarithm(form: str) -> None:
    """Against least squares on rows that are lengthened by the ridge."""
    known = far(300, form, seed=3)
    parts = known.logits.astype(np.float64)
    if form == "value":
        design = np.concatenate([parts, parts**2], axis=1)
    else:
        sizes = np.linalg.norm(parts, axis=1, keepdims=True)
        design = np.concatenate([parts / sizes, np.log(sizes)], axis=1)
    standard = (design - design.mean(axis=0)) / design.std(axis=0)
    apart = np.asarray(known.apart)
    target = -np.log(np.maximum(apart, sum(sorted(apart.tolist())[149:151]) / 200))  # a hundredth of the median
    count = design.shape[1]
    longer = np.concatenate([standard, np.sqrt(count) * np.eye(count)])
    weights = np.linalg.lstsq(longer, np.concatenate([target - target.mean(), np.zeros(count)]), rcond=None)[0]
    found = confidence(known.logits, fit(known))
    np.testing.assert_allclose(found, standard @ weights + target.mean(), rtol=1e-5, atol=1e-5)


def test_a_tier_that_is_never_far_has_a_constant_score() -> None:
    answers = np.ones((20, 3), np.float32)
    same = Judged(answers, answers, np.ones(20, bool), "vector", np.zeros(20))
    score, areas = choose(same, "auto", KEY)
    assert len(np.unique(confidence(answers, score))) == 1
    assert areas == {CALIBRATED: 0.5}


def test_numbers_and_vectors_are_other_answers_beyond_a_distance() -> None:
    numbers = np.array([[1.0], [2.0], [3.0]], np.float32), np.array([[1.25], [2.3], [2.7]], np.float32)
    assert disagreements("text-regression", *numbers, 0.25).tolist() == [False, True, True]
    original, answers = np.array([[3, 4], [3, 4]], np.float32), np.array([[3, 4.5], [3, 5.1]], np.float32)
    assert disagreements("sentence-embedding", original, answers, 0.1).tolist() == [False, True]


@pytest.mark.parametrize("task", ["text-generation", "question-answering", "reranking", "retrieval", "image-text", "speech-recognition"])
def test_answers_without_scores_are_refused(task: str) -> None:
    with raises_problem("stages.cascade", task, "text-classification"):
        form_of(task, "stages.cascade")
