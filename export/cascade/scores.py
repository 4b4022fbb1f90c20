"""The score of a tier, chosen and fitted on selection rows: how well it ranks the rows that the original answers otherwise last.

    AUROC         P(score of an agreed row > score of another row) + P(equal) / 2 (Mann and Whitney 1947)
    auto          the score with the highest AUROC; margin, unless another one is better by more than `CLEARLY`. The calibrated score is
                  judged on rows that it was not fitted on (two halves, each judged by the fit of the other)
    calibrated    a logistic model of "the original answers the same" (Platt 1999) over the three scores and a bias for each class. The
                  logits are first divided by the temperature that makes the original's answers likeliest (Guo et al. 2017,
                  https://arxiv.org/abs/1706.04599). Standardized weights and the biases of classes have a ridge of 1

Where a tier answers no selection row otherwise, nothing can be ranked: `auto` takes margin.

Numbers and vectors say nothing of how sure they are. Their score is minus the logarithm of the distance d from the original's answer, as a
ridge regression on selection rows predicts it from the answer itself: of a number z, and z^2; of a vector its direction and its length.
Features are standardized, the ridge is their number, and d counts as at least a hundredth of its median.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.measure import selective
from foundation.standalone.confidence import CALIBRATED, NAMES, SURE, Score, confidence, features

CLEARLY = 0.005
FEWEST = 8
"""Rows answered otherwise, and as many answered the same, that a calibrated score needs."""
RIDGE = 1.0
LEAST_SHARE, LEAST = 0.01, 1e-9
"""The least distance that is told from 0, as a share of the median distance, and the least median."""
NEWTON_STEPS = 50
TEMPERATURES = (0.05, 20.0)


@dataclass(frozen=True)
class Judged:
    """A tier on selection rows."""

    logits: Array
    """float32 `[n, C]`, or `[n, L, C]`."""
    original: Array
    """Predictions of the original, of the same shape."""
    agrees: Array
    """Rows that both answer alike, bool `[n]`."""
    form: str
    """class, set, tags, value or vector."""
    apart: Array | None = None
    """Of a value or vector, how far it is from the original's, float64 `[n]`."""

    @property
    def can_be_fitted(self) -> bool:
        """Whether there are rows enough of both kinds."""
        return min(int(self.agrees.sum()), int((~self.agrees).sum())) >= FEWEST

    def part(self, rows: Array) -> Judged:
        """Returns some of the rows."""
        apart = None if self.apart is None else self.apart[rows]
        return Judged(self.logits[rows], self.original[rows], self.agrees[rows], self.form, apart)


def plain(name: str, form: str) -> Score:
    """Returns a score without parameters."""
    return Score(name=name, form=form, temperature=1.0, weights=[], bias=[])


def auroc(scores: Array, agrees: Array) -> float:
    """Returns the area under the ROC curve; 0.5 where all rows are of one kind."""
    area = selective.auroc(scores, ~agrees)
    return 0.5 if area is None else area


def choose(judged: Judged, name: str, key: str) -> tuple[Score, dict[str, float]]:
    """Returns the score of a tier, and the AUROC of each score that was compared.

    Args:
        judged: The tier on selection rows.
        name: One of `NAMES`, calibrated or auto.
        key: Key path of the setting, for the message.

    Raises:
        InputError: A calibrated score is asked for, and too few rows are answered otherwise.
    """
    if judged.apart is not None:
        return fit(judged), {CALIBRATED: crossed(judged)}
    if name in NAMES:
        found = plain(name, judged.form)
        return found, {name: auroc(confidence(judged.logits, found), judged.agrees)}
    if name == CALIBRATED:
        if not judged.can_be_fitted:
            few = min(int(judged.agrees.sum()), int((~judged.agrees).sum()))
            given = f"calibrated given, and {few} of {len(judged.agrees)} selection rows are of the rarer kind"
            raise InputError(
                key, given, f"{FEWEST} rows that the original answers otherwise, and {FEWEST} others, are needed", "give margin"
            )
        return fit(judged), {CALIBRATED: crossed(judged)}
    areas = {one: auroc(confidence(judged.logits, plain(one, judged.form)), judged.agrees) for one in NAMES}
    if judged.can_be_fitted:
        areas[CALIBRATED] = crossed(judged)
    best = max(areas, key=lambda one: areas[one])
    best = best if areas[best] > areas[NAMES[0]] + CLEARLY else NAMES[0]
    return fit(judged) if best == CALIBRATED else plain(best, judged.form), areas


def crossed(judged: Judged) -> float:
    """Returns the AUROC of the calibrated score on rows that it was not fitted on."""
    halves = np.arange(len(judged.agrees)) % 2 == 0
    found = np.zeros(len(halves))
    for half in (halves, ~halves):
        found[half] = confidence(judged.logits[half], fit(judged.part(~half)))
    return auroc(found, judged.agrees)


def fit(judged: Judged) -> Score:
    """Returns the calibrated score; see above."""
    if judged.apart is not None:
        return _fit_distance(judged.logits, judged.form, judged.apart)
    temperature = _temperature(judged)
    known = np.minimum(features(judged.logits, judged.form, temperature), SURE)
    classes = judged.logits.argmax(axis=1) if judged.form == "class" else np.zeros(len(known), np.int64)
    count = judged.logits.shape[1] if judged.form == "class" else 1
    usual = np.abs(known) < SURE
    centre = np.array([known[rows, place].mean() if rows.any() else 0.0 for place, rows in enumerate(usual.T)])
    scale = np.array([known[rows, place].std() if rows.any() else 0.0 for place, rows in enumerate(usual.T)])
    scale = np.where(scale > 0, scale, 1.0)
    standard = np.clip((known - centre) / scale, -10, 10)
    design = np.concatenate([np.ones((len(known), 1)), standard, np.eye(count)[classes]], axis=1)
    ridge = np.full(design.shape[1], RIDGE)
    ridge[0] = 0.0
    solution = _logistic(design, judged.agrees.astype(np.float64), ridge)
    weights = solution[1 : 1 + len(NAMES)] / scale
    bias = solution[0] - weights @ centre + solution[1 + len(NAMES) :]
    return Score(name=CALIBRATED, form=judged.form, temperature=temperature, weights=weights.tolist(), bias=bias.tolist())


def _fit_distance(answers: Array, form: str, apart: Array) -> Score:
    """Returns the score of values or vectors: a linear model of minus the logarithm of their distance from the original's.

    Args:
        answers: What the tier answered, float32 `[n, 1]` or `[n, D]`.
        form: value or vector.
        apart: Their distances, float64 `[n]`.
    """
    known = features(answers, form)
    centre, scale = known.mean(axis=0), known.std(axis=0)
    scale = np.where(scale > 1e-12, scale, 1.0)
    standard = (known - centre) / scale
    target = -np.log(np.maximum(apart, LEAST_SHARE * max(float(np.median(apart)), LEAST)))
    ridge = RIDGE * known.shape[1] * np.eye(known.shape[1])
    weights = np.linalg.solve(standard.T @ standard + ridge, standard.T @ (target - target.mean())) / scale
    return Score(name=CALIBRATED, form=form, temperature=1.0, weights=weights.tolist(), bias=[float(target.mean() - weights @ centre)])


def _logistic(design: Array, target: Array, ridge: Array) -> Array:
    """Returns the weights of a logistic model with a ridge, float64 `[k]`, by Newton's method."""
    weights = np.zeros(design.shape[1])
    weights[0] = np.log((target.sum() + 1) / (len(target) - target.sum() + 1))
    for _ in range(NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(design @ weights, -30, 30)))
        gradient = design.T @ (p - target) + ridge * weights
        curvature = (design.T * (p * (1 - p))) @ design + np.diag(ridge)
        curvature[0, 0] += 1e-9
        step = np.linalg.solve(curvature, gradient)
        weights = weights - step
        if float(np.abs(step).max()) < 1e-9:
            break
    return np.asarray(weights)


def _temperature(judged: Judged) -> float:
    """Returns the temperature with the least NLL of the original's classes; 1 for other answers."""
    if judged.form != "class":
        return 1.0
    from scipy.optimize import minimize_scalar

    logits, wanted = judged.logits.astype(np.float64), judged.original.argmax(axis=1)

    def nll(log_temperature: float) -> float:
        scaled = logits / np.exp(log_temperature)
        return float((np.logaddexp.reduce(scaled, axis=1) - scaled[np.arange(len(scaled)), wanted]).mean())

    found = minimize_scalar(nll, bounds=tuple(np.log(TEMPERATURES)), method="bounded")
    return float(np.exp(found.x))
