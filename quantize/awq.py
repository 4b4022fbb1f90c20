"""AWQ: gives weights of salient input channels (large activations) finer int4 steps.

Lin et al. 2023, https://arxiv.org/abs/2306.00978. For the linear layers that read a tensor X [N, I], with m_i = mean |X_i| and a factor s
per channel:

    s_i = m_i^a / sqrt(max m^a * min m^a)           X_i / s_i,   W_i * s_i
    a   = argmin over 0, 0.05, ... 1 of  sum over W  || X W^T - (X / s) Q(W s)^T ||^2

The product stays the same, and the rounding error of a weight shrinks by 1 / s. The division is folded into the producer of X where
`folding` finds that exact: a norm, the value layer before the attention output, the layer multiplied by a gate. Elsewhere s = 1. Then the
scales of W s are clipped (`group_scales`, by output error). A group whose error ends up larger than with s = 1 keeps s = 1.

Errors are taken over all calibration rows (`moments`). The paper clips all layers except query and key; here an output is clipped only if
that lowers its error.

Not supported: an extra multiplication in the engine where nothing can absorb the division.

Tensor names carry their shapes: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from foundation.schemes.int4 import Int4Scales
from foundation.schemes.scales import Grid
from quantize.folding import Group, rescale
from quantize.group_scales import Groups
from quantize.moments import Moments, observe, output_errors

ALPHAS = tuple(step / 20 for step in range(21))
SMALLEST = 1e-4  # smallest factor


def awq(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    groups: Sequence[Group],
    batches: Callable[[], Iterable[Mapping[str, Tensor]]],
    forward: Callable[[nn.Module, Mapping[str, Tensor]], object],
    grids: Groups,
) -> tuple[dict[str, Int4Scales], list[dict[str, object]]]:
    """Folds factors into a float model, in place, and chooses the scales of its weights.

    Args:
        model: The float model; it computes the same afterwards, up to float rounding.
        layers: The layers to quantize.
        groups: These layers, grouped by the tensor they read.
        batches: Starts a pass over the calibration rows.
        forward: Runs the model on a batch.
        grids: How the groups of weights get their grids; ranges are chosen by the outputs.

    Returns:
        The scales by layer, and figures for the report per group: `layers`, `into` (the module that absorbed the division, or None),
        `reason` (why none could, or None), `alpha` (None: s = 1), `error_before` (rounding to nearest) and `error` of the outputs, relative
        to their squares.
    """
    scales: dict[str, Int4Scales] = {}
    figures: list[dict[str, object]] = []
    of = {name: group for group in groups for name in group.layers}
    for names, observed in observe(model, layers, [group.layers for group in groups], batches, forward):
        for group in dict.fromkeys(of[name] for name in names):
            moments = observed.of(group.layers[0])
            weights = [layers[name].weight.detach() for name in group.layers]
            alpha, factor_I, chosen, errors = choose(weights, moments, grids, ALPHAS if group.fold else (0.0,))
            if group.fold and alpha:
                rescale(model, group.fold, factor_I)
                if group.fold.producer in scales:  # dividing its outputs divides its weight scales too
                    producer = group.fold.producer
                    divided = grids.divided(layers[producer].weight.detach(), scales[producer].grid, factor_I)
                    scales[producer] = Int4Scales.of_grid(divided, grids.size)
            scales |= {name: Int4Scales.of_grid(grid, grids.size) for name, grid in zip(group.layers, chosen, strict=True)}
            figures.append(
                {
                    "layers": list(group.layers),
                    "into": group.fold.producer if group.fold and alpha else None,
                    "reason": group.reason,
                    "alpha": alpha or None,
                    **errors,
                }
            )
    return scales, figures


def choose(
    weights: Sequence[Tensor], moments: Moments, grids: Groups, alphas: Sequence[float] = ALPHAS
) -> tuple[float, Tensor, list[Grid], dict[str, float]]:
    """Chooses factor and scales for the weights that read a tensor.

    Args:
        weights: float32 [O, I] each.
        moments: Moments of the tensor.
        grids: How the groups of weights get their grids.
        alphas: Exponents to try, 0 (no factor) among them.

    Returns:
        The exponent; the factor, float32 [I]; the grid of each weight times the factor, [O, G]; and `error_before` (rounding to
        nearest without a factor) and `error`, relative to the squares of the float outputs.
    """
    hessian_II = moments.hessian_II
    factors = {alpha: activation_factor(moments.mean_I, alpha) for alpha in alphas}

    def search_error(alpha: float) -> float:
        factor_I = factors[alpha]
        full = [grids.full(weight_OI * factor_I) for weight_OI in weights]
        return sum(_error(w_OI, hessian_II, factor_I, grid, grids.size) for w_OI, grid in zip(weights, full, strict=True))

    def with_clipping(alpha: float) -> tuple[float, float, list[Grid]]:
        factor_I = factors[alpha]
        divided_II = moments.divided(factor_I).hessian_II
        found = [grids.best(weight_OI * factor_I, divided_II) for weight_OI in weights]
        error = sum(_error(w_OI, hessian_II, factor_I, grid, grids.size) for w_OI, grid in zip(weights, found, strict=True))
        return error, alpha, found

    best = min(alphas, key=search_error)
    error, alpha, chosen = min((with_clipping(alpha) for alpha in dict.fromkeys((0.0, best))), key=lambda attempt: attempt[0])
    plain = (grids.searched(w_OI, None) for w_OI in weights)
    nearest = sum(_error(w_OI, hessian_II, factors[0.0], grid, grids.size) for w_OI, grid in zip(weights, plain, strict=True))
    power = sum(float(output_errors(weight_OI, torch.zeros_like(weight_OI), hessian_II).sum()) for weight_OI in weights)
    relative = {"error_before": nearest / power if power else 0.0, "error": error / power if power else 0.0}
    return alpha, factors[alpha], chosen, relative


def activation_factor(mean_I: Tensor, alpha: float) -> Tensor:
    """Returns s, float32 [I]; all 1 if the exponent is 0.

    Args:
        mean_I: Mean |x| of each channel, float32 [I].
        alpha: The exponent, 0 to 1.
    """
    if alpha == 0:
        return torch.ones_like(mean_I)
    power_I = mean_I.pow(alpha).clamp(min=SMALLEST)
    return power_I / (power_I.max() * power_I.min()).sqrt()


def describe(figures: Sequence[Mapping[str, object]]) -> str:
    """Returns a one-line summary of the figures of `awq`."""
    folded = [figure for figure in figures if figure["into"] is not None]
    reasons = [figure["reason"] for figure in figures if figure["into"] is None and figure["reason"]]
    blocked = f", {len(reasons)} of them cannot be folded ({reasons[0]})" if reasons else ""
    return f"{len(folded)} groups folded, {len(figures) - len(folded)} with clipped scales only{blocked}"


def _error(weight_OI: Tensor, hessian_II: Tensor, factor_I: Tensor, grid: Grid, group_size: int) -> float:
    """Returns the output error of weights that are multiplied by the factor, rounded, and divided by it again."""
    rounded_OI = Int4Scales.of_grid(grid, group_size).on_grid(weight_OI * factor_I) / factor_I
    return float(output_errors(weight_OI, rounded_OI, hessian_II).sum())
