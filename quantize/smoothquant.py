"""SmoothQuant: scales down outlier channels of activations and scales up the weights that read them.

Xiao et al. 2022, https://arxiv.org/abs/2211.10438, section 4. For the linear layers that read a tensor X [N, I], with W_j column j of all
their weights:

    s_j = max |X_j|^a / max |W_j|^(1 - a)            X_j / s_j,   W_j * s_j,   1 where either maximum is 0

The product stays the same, and a per-tensor scale wastes fewer codes on a few outlier channels. The division is folded into the producer of
X where `folding` finds that exact: the norm before attention and FFN of a pre-norm encoder, the value layer before the attention output,
the layer before a ReLU. Elsewhere (the norm after BERT's residual sum, GELU) nothing can absorb it. Then the group is not smoothed and is
reported; or, with `prescale`, X is multiplied by 1 / s before it is quantized (`input_smooth` of `foundation.schemes.int8`), if that at
least halves the error: the multiplication costs time.

The paper uses one a for the whole model. Here a is chosen for each group among 0, 0.1, ... 1: the value with the least squared error of the
group's outputs, with quantized weights and activations, on a sample of the calibration rows. The same error decides whether to smooth at
all:

    a = argmin  sum over n  e_n / max(p_n, typical p)       e_n = sum over W  || x_n W^T - Q(x_n / s) Q(W s)^T ||^2
                                                            p_n = sum over W  || x_n W^T ||^2,   typical: the median of those above 0

No token counts for more than a typical one. Decoders have a few tokens, the first among them, whose states are thousands of times as large
(Sun et al. 2024, https://arxiv.org/abs/2402.17762): in a plain sum of squares these alone would decide, although the next norm takes their
size off again, and all other tokens would be rounded in steps that suit those few.

As in the paper, the search uses minmax ranges for both: per tensor, or per token for activations with a scale per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from foundation.models.layers.stored_linear import WeightParts
from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, levels, on_grid, quantize, token_scale, weight_scale
from quantize.calibration import Observed, input_scale
from quantize.folding import Fold, Group, groups, rescale

ALPHAS = tuple(step / 10 for step in range(11))
SAMPLE_ROWS = 512
SMALLEST, LARGEST = 1e-5, 1e5  # limits of a factor: keep weights well inside the range of float32
PRESCALE_GAIN = 2.0  # smallest ratio of the errors without and with smoothing that justifies a multiplication in the engine


@dataclass
class Channels:
    """The largest |x| of each channel and an evenly spaced sample of rows; memory does not depend on the number of rows."""

    largest_I: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 [I]; empty before the first row."""
    sample_NI: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """float32 [N, I], between `SAMPLE_ROWS / 2` and `SAMPLE_ROWS` rows once that many were added."""
    _stride: int = 1
    total: int = 0
    """Number of rows so far."""

    def add(self, x_NI: Tensor) -> None:
        """Adds rows, float [N, I]; raises ValueError if a value is NaN or infinite."""
        if not len(x_NI):
            return
        largest_I = x_NI.abs().amax(dim=0).float()
        if not bool(largest_I.isfinite().all()):
            raise ValueError("NaN or infinite value")
        rows_NI = x_NI[-self.total % self._stride :: self._stride].float()
        self.largest_I = torch.maximum(self.largest_I, largest_I) if self.total else largest_I
        self.sample_NI = torch.cat([self.sample_NI, rows_NI]) if self.total else rows_NI.clone()
        self.total += len(x_NI)
        while len(self.sample_NI) > SAMPLE_ROWS:
            self.sample_NI = self.sample_NI[::2].clone()
            self._stride *= 2


def smooth(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    folds: Sequence[Fold],
    observed: Observed[Channels],
    bits: int,
    alpha: float | Literal["auto"],
    prescale: bool,
    per_token: bool = False,
) -> tuple[dict[str, Tensor], list[dict[str, object]]]:
    """Smooths a float model: folds factors in place where possible, and returns those that cannot be folded.

    Args:
        model: The float model; it computes the same afterwards, up to float rounding.
        layers: The layers to quantize.
        folds: The result of `folding.find_folds`.
        observed: Statistics of the layers' inputs.
        bits: Bits of a weight.
        alpha: The exponent a, or auto for a search.
        prescale: Whether the engine may multiply the inputs of groups that cannot be folded.
        per_token: Whether activations have a scale per token.

    Returns:
        By layer, the factors by which its input must be divided (only with `prescale`), float32 [I]; and figures for the report per group:
        `layers`, `into` (what absorbed the division: the producer, "input", or None), `reason` (why no producer could, or None), `alpha`
        (None: not smoothed), `error_before` and `error` (`output_error`).
    """
    vectors: dict[str, Tensor] = {}
    figures: list[dict[str, object]] = []
    for group in groups(layers, folds, observed):
        allowed = group.fold is not None or prescale
        alphas = (() if not allowed else ALPHAS) if alpha == "auto" else (alpha,) * allowed
        before, tried = _attempts(group, layers, observed, bits, alphas, per_token)
        enough = before if group.fold else before / PRESCALE_GAIN
        best = min(tried, key=lambda attempt: attempt[0], default=None)
        chosen = best if best and (best[0] <= enough or alpha != "auto") else None
        into = None if chosen is None else group.fold.producer if group.fold else "input"
        if chosen and group.fold:
            rescale(model, group.fold, chosen[2])
        elif chosen:
            vectors |= dict.fromkeys(group.layers, chosen[2])
        figures.append(
            {
                "layers": list(group.layers),
                "into": into,
                "reason": group.reason,
                "alpha": chosen[1] if chosen else None,
                "error_before": before,
                "error": chosen[0] if chosen else before,
            }
        )
    return vectors, figures


def describe(figures: Sequence[Mapping[str, object]]) -> str:
    """Returns a one-line summary of the figures of `smooth`."""
    smoothed = [figure for figure in figures if figure["alpha"] is not None]
    folded = sum(figure["into"] != "input" for figure in smoothed)
    reasons = [figure["reason"] for figure in figures if figure["alpha"] is None and figure["reason"]]
    parts = [f"{folded} groups folded", f"{len(smoothed) - folded} multiplied at the input"]
    why = f" ({len(reasons)} cannot be folded: {reasons[0]})" if reasons else ""
    return ", ".join([*parts, f"{len(figures) - len(smoothed)} not smoothed{why}"])


def smoothing_factor(input_I: Tensor, weight_I: Tensor, alpha: float) -> Tensor:
    """Returns s, float32 [I].

    Args:
        input_I: Largest |x| of each channel, float32 [I].
        weight_I: Largest |w| of each column over all weights, float32 [I].
        alpha: Migration strength: how much of the difficulty moves from activations to weights, 0 to 1.
    """
    factor_I = (input_I.pow(alpha) / weight_I.pow(1 - alpha)).clamp(SMALLEST, LARGEST)
    return torch.where((input_I == 0) | (weight_I == 0), torch.ones_like(factor_I), factor_I)


def output_error(x_NI: Tensor, weights: Iterable[Tensor], factor_I: Tensor, bits: int, per_token: bool = False) -> float:
    """Returns the mean over rows of the squared output error with smoothed and quantized inputs and weights, relative to the squares of the
    row's float outputs, or of those of a typical row if they are smaller.

    Args:
        x_NI: float32 [N, I].
        weights: float32 [O, I] each, iterated once.
        factor_I: s, float32 [I].
        bits: Bits of a weight.
        per_token: Whether activations have a scale per token.
    """
    smoothed_NI = x_NI / factor_I
    scale = token_scale(smoothed_NI) if per_token else input_scale(float(smoothed_NI.abs().max()))
    rounded_NI = quantize(smoothed_NI, scale, ACTIVATION_LOW, ACTIVATION_HIGH).float() * scale
    error_N, power_N = x_NI.new_zeros(len(x_NI)), x_NI.new_zeros(len(x_NI))
    for weight_OI in weights:
        smoothed_OI = weight_OI * factor_I
        rounded_OI = on_grid(smoothed_OI, weight_scale(smoothed_OI, levels(bits)), levels(bits))
        expected_NO = x_NI @ weight_OI.T
        error_N += (rounded_NI @ rounded_OI.T - expected_NO).square().sum(dim=1)
        power_N += expected_NO.square().sum(dim=1)
    some_N = power_N[power_N > 0]
    return float((error_N / power_N.clamp(min=float(some_N.median()))).mean()) if len(some_N) else 0.0


def _attempts(
    group: Group, layers: Mapping[str, nn.Linear], observed: Observed[Channels], bits: int, alphas: Sequence[float], per_token: bool
) -> tuple[float, list[tuple[float, float, Tensor]]]:
    """Returns the error of a group without smoothing, and error, a and factor of each attempt."""
    inputs = [observed.statistics[name] for name in dict.fromkeys(observed.group[name] for name in group.layers)]
    weights = WeightParts([layers[name] for name in group.layers])
    input_I = torch.stack([channels.largest_I for channels in inputs]).amax(dim=0)
    weight_I = torch.stack([weight_OI.abs().amax(dim=0) for weight_OI in weights]).amax(dim=0)
    x_NI = torch.cat([channels.sample_NI for channels in inputs])
    factors = [(alpha, smoothing_factor(input_I, weight_I, alpha)) for alpha in alphas]
    before = output_error(x_NI, weights, torch.ones_like(input_I), bits, per_token)
    return before, [(output_error(x_NI, weights, factor_I, bits, per_token), alpha, factor_I) for alpha, factor_I in factors]
