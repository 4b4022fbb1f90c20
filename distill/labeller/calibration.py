"""Calibration of a labeller's probabilities: without labels for each prompt, and with labels of selection rows for their average.

    contextual   log p_c - log q_c,  q the mean of p over texts without content        Zhao et al. 2021, https://arxiv.org/abs/2102.09690
    batch        the same with q the mean of p over the training rows                 Zhou et al. 2023, https://arxiv.org/abs/2309.17249
    temperature  log p_c * a                                                          Guo et al. 2017, https://arxiv.org/abs/1706.04599
    platt        log p_c * a + b_c                                                    Platt 1999, for several classes as vector scaling

a > 0 and b minimize the negative log-likelihood of the labels, which is convex in (a, b); b has a mean of 0. Where the rows are separable,
a has no finite optimum: a is limited to `LARGEST` and b by a small ridge.

Tensor names: n rows, m texts without content, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax

from foundation.core.arrays import Array

CONTENT_FREE = ("N/A", "", "[MASK]")
"""Texts without content of Zhao et al. 2021, section 4."""
SMALLEST, LARGEST = 1e-3, 1e3
SMALLEST_SHARE = 1e-12
RIDGE = 1e-4


def bias_of(log_p_mC: Array) -> Array:
    """Returns the logarithm of the mean probabilities of some rows, float64 [C].

    Args:
        log_p_mC: Log-probabilities, float64 [m, C], m at least 1.
    """
    return np.asarray(np.log(np.maximum(np.exp(log_p_mC).mean(axis=0), SMALLEST_SHARE)))


def without_bias(log_p_nC: Array, bias_C: Array) -> Array:
    """Returns log-probabilities without a bias, normalized, float64 [n, C].

    Args:
        log_p_nC: Log-probabilities, float64 [n, C].
        bias_C: Logarithm of q, float64 [C].
    """
    return np.asarray(log_softmax(log_p_nC - bias_C, axis=1))


@dataclass(frozen=True)
class Scaling:
    """log p * scale + offset, normalized."""

    scale: float
    offset: tuple[float, ...]

    def __call__(self, log_p_nC: Array) -> Array:
        """Returns the fitted log-probabilities, float64 [n, C]."""
        return np.asarray(log_softmax(log_p_nC * self.scale + np.array(self.offset), axis=1))


def fitted(log_p_nC: Array, labels_n: Array, offsets: bool) -> Scaling:
    """Returns the scaling that minimizes the negative log-likelihood of labels.

    Args:
        log_p_nC: Log-probabilities, float64 [n, C], n at least 1.
        labels_n: Class ids, int64 [n].
        offsets: Whether to fit an offset for each class too (Platt); false: the temperature alone.
    """
    num_classes = log_p_nC.shape[1]
    true_nC = np.eye(num_classes)[labels_n]

    def loss(parameters: Array) -> tuple[float, Array]:
        scale, offset_C = parameters[0], parameters[1:] if offsets else np.zeros(num_classes)
        fit_nC = log_softmax(log_p_nC * scale + offset_C, axis=1)
        error_nC = (np.exp(fit_nC) - true_nC) / len(labels_n)
        value = -(fit_nC * true_nC).sum() / len(labels_n) + RIDGE * float(offset_C @ offset_C)
        gradient = [np.array([(error_nC * log_p_nC).sum()])]
        if offsets:
            gradient.append(error_nC.sum(axis=0) + 2 * RIDGE * offset_C)
        return float(value), np.concatenate(gradient)

    start = np.concatenate([np.ones(1), np.zeros(num_classes * offsets)])
    bounds = [(SMALLEST, LARGEST), *[(None, None)] * (num_classes * offsets)]
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    offset_C = found[1:] - found[1:].mean() if offsets else np.zeros(num_classes)
    return Scaling(float(found[0]), tuple(offset_C.tolist()))
