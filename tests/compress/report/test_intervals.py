import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from compress.report import intervals
from foundation.core import resampling
from foundation.labels.classes import ClassIds
from foundation.labels.next_token import IGNORED, NO_CHOICE, Tokens, perplexity
from foundation.labels.value import Numbers
from foundation.measure.metrics import METRICS, Metric, metric_of

pytestmark = pytest.mark.usefixtures("all_draws")


def logits_of(answers: np.ndarray, num_classes: int = 2) -> np.ndarray:
    return np.eye(num_classes, dtype=np.float32)[answers]


def levels(rows: int) -> list[float]:
    """Returns the percentiles that make a bootstrap of a mean of `rows` rows as wide as the interval of Student's t."""
    level = stats.norm.cdf(-stats.t.ppf(0.975, rows - 1) * np.sqrt(rows / (rows - 1)))
    return [100 * level, 100 * (1 - level)]


def two_models(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, n)
    before = np.where(draw.random(n) < 0.9, labels, 1 - labels)
    after = np.where(draw.random(n) < 0.05, 1 - before, before)
    return logits_of(before), logits_of(after), labels


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_values(successes: int, n: int, low: float, high: float) -> None:
    # Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I
    assert intervals.wilson(successes, n) == pytest.approx((low, high), abs=6e-5)


@given(st.integers(1, 5000), st.data())
def test_wilson_agrees_with_scipy_and_holds_the_share(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = intervals.wilson(successes, n)
    expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= low <= successes / n <= high <= 1


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_what_is_no_share(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{successes} of {n}"):
        intervals.wilson(successes, n)


def test_bootstrap_is_the_naive_one() -> None:
    draw = np.random.default_rng(3)
    x, y = draw.normal(size=50), draw.normal(size=50)
    source, figures = np.random.default_rng(7), []
    for _ in range(200):
        rows = source.integers(0, 50, 50)
        figures.append(float(np.mean([x[row] * y[row] for row in rows])))
    figures.sort()
    low, high = intervals.bootstrap(lambda p, t: float(np.mean(p * t)), x, y, resamples=200, seed=7)
    assert (low, high) == pytest.approx(tuple(np.percentile(figures, levels(50))), abs=1e-12)


def test_bootstrap_of_a_correlation_is_near_fishers_interval() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=1500)
    y = x + draw.normal(size=1500)
    found = intervals.single(METRICS["pearson"], x[:, None], Numbers(y))
    expected = stats.pearsonr(x, y).confidence_interval()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01)
    assert found.value == pytest.approx(stats.pearsonr(x, y).statistic)
    assert found.n == 1500


def test_single_accuracy_is_the_wilson_interval() -> None:
    labels = np.array([0, 1, 1, 0])
    found = intervals.single(METRICS["accuracy"], logits_of(np.array([0, 1, 0, 0])), ClassIds(labels))
    low, high = intervals.wilson(3, 4)
    assert found.written() == {"value": 0.75, "low": low, "high": high, "groups": 4, "n": 4}


def test_paired_counts_every_kind_of_change() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2])
    before = logits_of(np.array([0, 0, 0, 1, 0, 2]), 3)
    after = logits_of(np.array([1, 0, 1, 1, 1, 0]), 3)
    found = intervals.paired(METRICS["accuracy"], before, after, ClassIds(labels))
    assert (found.right_to_wrong, found.wrong_to_right, found.changed, found.n) == (2, 1, 4, 6)
    assert found.difference == pytest.approx(1 / 6)


def test_many_changes_have_the_interval_of_resampling_rows() -> None:
    before, after, labels = two_models(800)
    quick = intervals.paired(METRICS["accuracy"], before, after, ClassIds(labels))
    slow = intervals.paired(Metric(lambda p, t: float(np.mean(p.argmax(axis=1) == t))), before, after, ClassIds(labels))
    assert slow.difference == pytest.approx(quick.difference)
    assert (slow.low, slow.high) == pytest.approx((quick.low, quick.high), abs=0.003)
    assert quick.low <= quick.difference <= quick.high


def test_paired_interval_has_the_width_of_the_normal_approximation() -> None:
    n, lost, gained = 1000, 40, 20
    low, high = intervals.paired_counts(lost, gained, n)
    spread = np.sqrt(lost + gained - (lost - gained) ** 2 / n) / n
    assert (low, high) == pytest.approx((0.02 - 1.96 * spread, 0.02 + 1.96 * spread), abs=0.0015)


def test_paired_regression_has_no_counts_and_a_signed_difference() -> None:
    draw = np.random.default_rng(1)
    labels = draw.normal(size=400).astype(np.float32)
    before = (labels + 0.1 * draw.normal(size=400))[:, None]
    after = (labels + 0.8 * draw.normal(size=400))[:, None]
    found = intervals.paired(METRICS["pearson"], before, after, Numbers(labels))
    assert found.right_to_wrong is found.wrong_to_right is found.changed is None
    assert 0 < found.low < found.difference < found.high


def likeliest_gain(d: float, lost: int, gained: int, n: int) -> float:
    """The share of gained rows that makes the counts likeliest where the difference is d, by trying all."""

    def unlikely(q: float) -> float:
        return -float(special.xlogy(lost, q + d) + special.xlogy(gained, q) + special.xlogy(n - lost - gained, 1 - 2 * q - d))

    low, high = max(0.0, -d), (1 - d) / 2
    found = optimize.minimize_scalar(unlikely, bounds=(low, high), method="bounded", options={"xatol": 1e-12})
    return float(min((low, high, found.x), key=unlikely))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("lost", "gained", "n"),
    [(0, 0, 1), (0, 0, 360), (1, 0, 360), (0, 5, 50), (40, 20, 1000), (12, 2, 14), (14, 0, 14), (0, 14, 14), (7, 7, 14)],
)
def test_the_interval_of_counts_holds_the_differences_whose_score_is_small(lost: int, gained: int, n: int) -> None:
    found = intervals.paired_counts(lost, gained, n)
    assert -1 <= found.low <= (lost - gained) / n <= found.high <= 1
    for d in np.linspace(-0.999, 0.999, 400):
        variance = n * (2 * likeliest_gain(float(d), lost, gained, n) + d * (1 - d))
        outside = (lost - gained - n * d) ** 2 > stats.norm.ppf(0.975) ** 2 * variance
        if min(abs(d - found.low), abs(d - found.high)) > 1e-4:
            assert outside == (not found.low <= d <= found.high), d
    other = intervals.paired_counts(gained, lost, n)
    assert (other.low, other.high) == pytest.approx((-found.high, -found.low), abs=1e-9)


@pytest.mark.parametrize(("loses", "gains"), [(0.0, 0.0), (0.004, 0.0), (0.01, 0.005), (0.06, 0.06), (0.5, 0.1)])
@pytest.mark.parametrize("n", [30, 120])
def test_the_interval_of_counts_holds_the_truth_in_95_of_100_samples(loses: float, gains: float, n: int) -> None:
    """By enumeration: every pair of counts with its probability."""
    held = 0.0
    for lost in range(int(stats.binom.ppf(1 - 1e-5, n, loses)) + 1):
        for gained in range(min(n - lost, int(stats.binom.ppf(1 - 1e-5, n, gains))) + 1):
            low, high = intervals.paired_counts(lost, gained, n)
            held += (low <= loses - gains <= high) * stats.multinomial.pmf(
                [lost, gained, n - lost - gained], n, [loses, gains, 1 - loses - gains]
            )
    assert held >= 0.925


def test_predictions_that_do_not_differ_may_differ_on_other_rows() -> None:
    before, _, labels = two_models(100)
    found = intervals.paired(METRICS["accuracy"], before, before, ClassIds(labels))
    assert (found.difference, found.changed) == (0, 0)
    assert (found.low, found.high) == pytest.approx((-(1.96**2) / (100 + 1.96**2), 1.96**2 / (100 + 1.96**2)), abs=1e-5)


def test_equal_seeds_give_equal_intervals() -> None:
    before, after, labels = two_models(300)
    metric = Metric(lambda p, t: float(np.mean(p.argmax(axis=1) == t)))
    found = [intervals.paired_bootstrap(metric, before, after, labels, resamples=100, seed=seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_that_do_not_match_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match="same number of rows"):
        intervals.paired(METRICS["accuracy"], np.zeros((rows, 2)), np.zeros((rows, 2)), ClassIds(np.zeros(2 * rows, np.int64)))


def test_the_metric_is_called_once_for_each_resample_and_never_for_accuracy() -> None:
    before, after, labels = two_models(10_000)
    calls = 0

    def counted(logits: np.ndarray, truth: np.ndarray) -> float:
        nonlocal calls
        calls += 1
        return float(np.mean(logits[:, 0] * truth))

    intervals.bootstrap(counted, before, labels, resamples=50)
    assert calls == 50
    assert intervals.paired(METRICS["accuracy"], before, after, ClassIds(labels)).n == 10_000


def blocks_of(losses: list[list[float]], chosen: list[list[int]], width: int = 3) -> np.ndarray:
    """Returns answers [n, width, 2] of blocks of different lengths."""
    answers = np.zeros((len(losses), width, 2), np.float32)
    answers[..., 1] = NO_CHOICE
    for row, nll, ids in zip(answers, losses, chosen, strict=True):
        row[: len(nll), 0], row[: len(ids), 1] = nll, ids
    return answers


def two_language_models(blocks: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 4, blocks)
    losses = [draw.exponential(2.0, length).tolist() for length in lengths]
    targets = [draw.integers(0, 5, length).tolist() for length in lengths]
    ids = [[[int(draw.integers(0, 5)) for _ in nll] for nll in losses] for _ in range(2)]
    worse = [[value + float(draw.normal(0.02, 0.1)) for value in nll] for nll in losses]
    labels = np.full((blocks, 3), IGNORED, np.int32)
    for row, target in zip(labels, targets, strict=True):
        row[: len(target)] = target
    return blocks_of(losses, ids[0]), blocks_of(worse, ids[1]), labels


def test_perplexity_is_bootstrapped_over_blocks() -> None:
    before, _, labels = two_language_models(40, 1)
    found = intervals.single(METRICS["perplexity"], before, Tokens(labels), seed=5)
    source, figures = np.random.default_rng(5), []
    for _ in range(intervals.RESAMPLES):
        rows = source.integers(0, 40, 40)
        figures.append(perplexity(before[rows], labels[rows]))
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(figures, levels(40))), rel=1e-5)
    assert found.value == perplexity(before, labels)
    assert found.n == (labels != IGNORED).sum()


@pytest.mark.whole
@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_a_drop_of_perplexity_is_relative_and_paired(seed: int) -> None:
    before, after, labels = two_language_models(30, seed)
    found = intervals.paired(METRICS["perplexity"], before, after, Tokens(labels), seed=2)
    source, figures = np.random.default_rng(2), []
    for _ in range(intervals.RESAMPLES):
        rows = source.integers(0, 30, 30)
        figures.append(perplexity(after[rows], labels[rows]) / perplexity(before[rows], labels[rows]) - 1)
    assert found.difference == pytest.approx(perplexity(after, labels) / perplexity(before, labels) - 1)
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(figures, levels(30))), rel=1e-6, abs=1e-6)
    right = [before[..., 1] == labels, after[..., 1] == labels]
    assert found.right_to_wrong == (right[0] & ~right[1]).sum()
    assert found.wrong_to_right == (~right[0] & right[1]).sum()
    assert found.changed == (before[..., 1] != after[..., 1]).sum()
    assert found.n == (labels != IGNORED).sum()


def test_another_metric_of_tokens_is_bootstrapped_over_blocks() -> None:
    before, after, labels = two_language_models(30, 4)
    metric = metric_of("text-generation", "accuracy")
    found = intervals.paired(metric, before, after, Tokens(labels))
    figures = [metric.of(answers, labels) for answers in (before, after)]
    assert found.difference == pytest.approx(figures[0] - figures[1])
    assert found.low < found.difference < found.high
    alone = intervals.single(metric, before, Tokens(labels))
    assert alone.low < alone.value == figures[0] < alone.high
    assert alone.n == found.n == (labels != IGNORED).sum()


def test_what_got_worse_is_lost_whichever_way_a_metric_points() -> None:
    draw = np.random.default_rng(1)
    labels = draw.normal(size=400).astype(np.float32)
    before, after = ((labels + noise * draw.normal(size=400))[:, None] for noise in (0.1, 0.8))
    error = Metric(lambda values, truth: float(np.mean(np.abs(values[:, 0] - truth))), higher_is_better=False)
    found = intervals.paired(error, before, after, Numbers(labels))
    assert 0 < found.low < found.difference < found.high
    assert Metric(error.of, higher_is_better=False, relative=True).drop(2.0, 3.0) == 0.5
    assert Metric(error.of, relative=True).drop(2.0, 1.5) == 0.25


def test_fewer_than_five_groups_have_no_interval_but_a_reason() -> None:
    values = np.arange(40) % 3
    for count in (1, 2, 4, 5):
        groups = resampling.Groups(np.arange(40) % count)
        found = resampling.interval(lambda rows: float(values[rows].mean()), groups)
        assert (found == resampling.NONE) == (count < 5)
        assert f"40 rows in {count} group(s)" in resampling.no_interval(groups)
        assert "at least 5" in resampling.no_interval(groups)
