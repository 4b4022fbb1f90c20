"""The law that the loss of a training follows in its rows, its epochs and the size of its model.

    f(n, e, p) = E + A / d(n, e)^alpha + B / p^beta                  Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556
    d(n, e)    = n (1 + R (1 - exp(-(e - 1) / R)))                   Muennighoff et al. 2023, https://arxiv.org/abs/2305.16264
    L          = f / sqrt(1 + (f / c)^2)                             Rosenfeld et al. 2020, https://arxiv.org/abs/1909.12673

n are rows, e epochs, p is the size of a model, and d the number of fresh rows that are worth as much as n rows read e times: R epochs of
repetition at most. Below one epoch d = n e. c is the loss of a model that has learned nothing, which the power law would exceed. E is what
no training removes. Without c, L = f; where all models have one size, B / p^beta is part of E.

The fit minimizes the Huber loss of the errors of log L, from several starts. Eight to twelve short trainings hardly determine six
parameters, so each but the level has a weak normal prior, on a scale where such a prior is natural:

    f = f_0 (w_E + w_A (d / d_0)^-alpha + w_B (p / p_0)^-beta),  w = softmax(0, a, b)            d_0, p_0: the largest of the trainings
    theta = (log f_0, a, log alpha, log R, b, log beta)

The uncertainty is drawn by randomize-then-optimize (Bardsley et al. 2014): the losses and the centres of the priors are moved at random by
as much as they are uncertain, and the law is fitted again. This is the parametric bootstrap, but for the centres: they stand for what the
trainings do not say, and a plain bootstrap would report no uncertainty of it. The scale of the noise is drawn too, from its scaled inverse
chi-squared posterior, as few residuals leave it uncertain.

Left out: an interaction of rows and size beyond the sum, and learning rates that are best at each size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CENTRE = np.array([0.0, np.log(0.5), np.log(5.0), 0.0, np.log(0.5)])
"""Centres of the priors of a, log alpha, log R, b, log beta: exponents of 0.5, and repetitions worth at most 5 epochs."""
SPREAD = np.array([1.5, 0.6, 1.2, 1.5, 0.6])
"""Their standard deviations: exponents of 0.2 to 1.3, and 0.7 to 35 epochs, in nine of ten cases."""
NOISE = 0.04
"""Expected share by which the losses of two seeds differ from their mean."""
NOISE_ROWS = 4.0
"""How many residuals that expectation counts as."""
HUBER = 1.345
"""Residuals, in standard deviations, from where on they count linearly: 95 % efficient for normal noise."""
STARTS, DRAWS = 8, 400
TOLERANCE = 1e-5
LARGEST = 30.0
"""Largest number that an exponential is taken of."""


@dataclass(frozen=True, eq=False)
class Trainings:
    """Settings of N trainings, and what was measured of them."""

    settings: Array
    """Rows, epochs and size of the model, float64 [N, 3]; all above 0."""
    loss: Array
    """Loss on selection rows, float64 [N], above 0."""
    variance: Array
    """Variance of the logarithm of the loss by the choice of the selection rows, apart from what all trainings share, float64 [N]."""
    chance: float | None = None
    """Loss of a model that has learned nothing; None: the law has no such bound."""

    @property
    def sized(self) -> bool:
        """Whether the models differ in size."""
        return bool(np.ptp(self.settings[:, 2]) > 0)

    @property
    def tau(self) -> Array:
        """Expected standard deviation of the logarithm of each loss, float64 [N]."""
        return np.sqrt(self.variance + NOISE**2)


@dataclass(frozen=True, eq=False)
class Law:
    """A fitted law."""

    theta: Array
    """Its parameters, see above, float64 [4], with sizes [6]."""
    largest: tuple[float, float]
    """d_0 and p_0."""
    chance: float | None

    def loss(self, settings: Array) -> Array:
        """Returns the loss of settings, float64 [M, 3], as [M]."""
        return np.exp(log_loss(self.theta, settings, self.largest, self.chance))

    @property
    def parameters(self) -> dict[str, float]:
        """E, A, alpha, R, and where models differ in size B and beta: the parameters as the formula has them."""
        level, shares = float(np.exp(self.theta[0])), _shares(self.theta)
        alpha, decay = np.exp(self.theta[2:4])
        found = {"E": level * shares[0], "A": level * shares[1] * self.largest[0] ** alpha, "alpha": alpha, "R": decay}
        if len(self.theta) > 4:
            beta = np.exp(self.theta[5])
            found |= {"B": level * shares[2] * self.largest[1] ** beta, "beta": beta}
        return {name: float(value) for name, value in found.items()}


@dataclass(frozen=True, eq=False)
class Fit:
    """A law with its uncertainty."""

    law: Law
    draws: tuple[Law, ...]
    """Laws that fit about as well."""
    scale: Array
    """Standard deviation of the noise in `Trainings.tau` for each draw, float64 [K]."""
    noise: float
    """Standard deviation of the logarithm of a loss at scale 1."""

    def drawn(self, settings: Array, seed: int = 0) -> Array:
        """Returns losses that a training with these settings, float64 [M, 3], may have on the selection rows, [K, M].

        They hold the uncertainty of the law and the noise of one training. Settings share the law of a draw, and have noise of their own.
        """
        random = np.random.default_rng([seed, 1])
        logs = np.stack([np.log(law.loss(settings)) for law in self.draws])
        return np.exp(logs + self.noise * self.scale[:, None] * random.standard_normal(logs.shape))


def effective_rows(rows: Array, epochs: Array, decay: float) -> Array:
    """Returns the number of fresh rows that are worth as much: d, see above.

    Args:
        rows: Rows, [M].
        epochs: Epochs, [M].
        decay: R, above 0.
    """
    again = np.maximum(epochs - 1, 0)
    return rows * (np.minimum(epochs, 1) - decay * np.expm1(-again / decay))


def log_loss(theta: Array, settings: Array, largest: tuple[float, float], chance: float | None) -> Array:
    """Returns the logarithm of the loss of settings, float64 [M, 3], as [M]; arguments as of `Law`."""
    return _slopes(theta, settings, largest, chance)[0]


def _slopes(theta: Array, settings: Array, largest: tuple[float, float], chance: float | None) -> tuple[Array, Array]:
    """Returns the logarithm of the loss, [M], and its derivatives by the parameters, [M, P]; arguments as of `Law`."""
    rows, epochs, size = settings.T
    shares_T, sized = _shares(theta), len(theta) > 4
    exponents = np.exp(np.clip(theta[[2, 5] if sized else [2]], -LARGEST, LARGEST))
    decay = float(np.exp(np.clip(theta[3], -LARGEST, LARGEST)))
    fresh = effective_rows(rows, epochs, decay)
    ratios = [np.log(fresh / largest[0]), np.log(size / largest[1])][: len(exponents)]
    terms_TM = np.stack([np.zeros(len(rows)), *(-power * ratio for power, ratio in zip(exponents, ratios, strict=True))])
    terms_TM += np.log(shares_T)[:, None]
    whole = np.logaddexp.reduce(terms_TM, axis=0)
    parts_TM = np.exp(terms_TM - whole)
    again = np.maximum(epochs - 1, 0) / decay
    by_decay = rows * decay * (-np.expm1(-again) - again * np.exp(-again)) / fresh
    data = -parts_TM[1] * exponents[0]
    slopes = [np.ones(len(rows)), parts_TM[1] - shares_T[1], data * ratios[0], data * by_decay]
    if sized:
        slopes += [parts_TM[2] - shares_T[2], -parts_TM[2] * exponents[1] * ratios[1]]
    logs, slopes_MP = theta[0] + whole, np.stack(slopes, axis=1)
    if chance is None:
        return logs, slopes_MP
    over = 2 * (logs - np.log(chance))
    bounded = 0.5 * np.logaddexp(0.0, over)
    return logs - bounded, slopes_MP * np.exp(-np.logaddexp(0.0, over))[:, None]


def _shares(theta: Array) -> Array:
    """Returns the shares of E, A and B at the largest setting, which add up to 1."""
    logits = np.array([0.0, *np.clip(theta[[1, 4] if len(theta) > 4 else [1]], -LARGEST, LARGEST)])
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


def fit(trainings: Trainings, draws: int = DRAWS, seed: int = 0) -> Fit:
    """Fits the law to trainings, and draws its uncertainty; equal seeds give equal draws.

    Args:
        trainings: At least four.
        draws: How many laws to draw.
        seed: Seed of the starts and of the draws.
    """
    random, count = np.random.default_rng([seed, 0]), len(trainings.loss)
    assert count >= 4, count
    free = len(CENTRE) if trainings.sized else 3
    largest = (float((trainings.settings[:, 0] * np.minimum(trainings.settings[:, 1], 1)).max()), float(trainings.settings[:, 2].max()))
    problem = _Problem(trainings, largest, free)
    logs, centre = np.log(trainings.loss), CENTRE[:free]
    begun = [centre, *(centre + SPREAD[:free] * random.standard_normal(free) for _ in range(STARTS - 1))]
    theta = min((problem.solve(logs, centre, np.array([logs.min(), *start])) for start in begun), key=lambda one: one[1])[0]
    freedom, squares = problem.freedom(theta), problem.squares(theta, logs)
    scale = np.sqrt((NOISE_ROWS + squares) / random.chisquare(NOISE_ROWS + freedom, draws))
    least = np.sqrt(trainings.variance) / trainings.tau
    found = []
    for one in scale:
        moved = logs + np.maximum(one, least) * trainings.tau * random.standard_normal(count)
        around = centre + SPREAD[:free] * random.standard_normal(free)
        found.append(Law(problem.solve(moved, around, theta)[0], largest, trainings.chance))
    noise = float(np.sqrt(np.mean(trainings.tau**2)))
    return Fit(Law(theta, largest, trainings.chance), tuple(found), np.maximum(scale, float(np.mean(least))), noise)


@dataclass(frozen=True, eq=False)
class _Problem:
    """The least squares problem of some trainings."""

    trainings: Trainings
    largest: tuple[float, float]
    free: int

    def solve(self, logs: Array, centre: Array, start: Array) -> tuple[Array, float]:
        """Returns the parameters that fit these logarithms of losses, and what was minimized."""
        from scipy.optimize import least_squares

        count = len(logs)

        def residuals(theta: Array) -> Array:
            return np.concatenate((self.errors(theta, logs), (theta[1:] - centre) / SPREAD[: self.free]))

        def jacobian(theta: Array) -> Array:
            return np.concatenate((self.slopes(theta), np.eye(self.free + 1)[1:] / SPREAD[: self.free, None]))

        found = least_squares(residuals, start, jacobian, loss=lambda squares: _huber(squares, count), xtol=TOLERANCE, ftol=TOLERANCE)
        return found.x, float(found.cost)

    def errors(self, theta: Array, logs: Array) -> Array:
        """Returns the errors of the law in their expected standard deviations, [N]."""
        return (log_loss(theta, self.trainings.settings, self.largest, self.trainings.chance) - logs) / self.trainings.tau

    def slopes(self, theta: Array) -> Array:
        """Returns the derivatives of the errors, [N, P]."""
        slopes_NP = _slopes(theta, self.trainings.settings, self.largest, self.trainings.chance)[1]
        return np.asarray(slopes_NP / self.trainings.tau[:, None])

    def squares(self, theta: Array, logs: Array) -> float:
        """Returns the sum of the squared errors."""
        return float(np.sum(self.errors(theta, logs) ** 2))

    def freedom(self, theta: Array) -> float:
        """Returns the residual degrees of freedom: N less the trace of the matrix that maps losses to fitted losses."""
        slopes_NP = self.slopes(theta)
        inner_PP = slopes_NP.T @ slopes_NP
        prior_PP = np.diag([0.0, *SPREAD[: self.free] ** -2.0])
        return float(len(slopes_NP) - np.trace(np.linalg.lstsq(inner_PP + prior_PP, inner_PP, rcond=None)[0]))


def _huber(squares: Array, count: int) -> Array:
    """Returns the Huber loss of the first `count` squared residuals and the squares of the others, with two derivatives, [3, M]."""
    found = np.stack((squares, np.ones_like(squares), np.zeros_like(squares)))
    far = np.flatnonzero(squares[:count] > HUBER**2)
    root = np.sqrt(squares[far])
    found[:, far] = 2 * HUBER * root - HUBER**2, HUBER / root, -0.5 * HUBER / root**3
    return found
