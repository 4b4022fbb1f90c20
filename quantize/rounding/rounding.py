"""Rounding: turns weights into integers, given their scales.

    nearest     q = clamp(rint(w / s))
    gptq        later weights compensate the error of earlier ones (`gptq`)
    adaround    learns to round each weight up or down (`adaround`)
    autoround   learns offsets of weights and ranges of groups by the output of a block (`autoround`, driven by `blockwise`)

gptq and adaround minimize the error of the outputs instead of the weights. They need moments of the inputs (`moments`). The blocks of the
model are rounded in execution order, and the inputs of a block are computed with the rounded weights of the blocks before it, so that it
compensates their error too (Frantar et al. 2022, section 4). Within a block all inputs are computed with float weights, and activations
are float everywhere. This is the same as layer by layer from file to file (`stored_layer`). Each block takes a pass over the calibration
rows. The result is new float layers with weights on their grids; the float model does not change.

Codes of weights with zero points are counted from there: (code - zero point) * scale is the weight. With offsets, weight plus offset is
what is rounded to multiples of the scale.

Not supported: E4M3 (fp8), whose steps are not uniform.

Tensor names carry their shapes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from foundation.schemes.int4 import Bound, Int4Scales, nearest
from foundation.schemes.int8 import DynamicScales, LayerScales, levels
from foundation.schemes.int8_weights import LARGEST, WeightScales
from quantize.choices import MomentRounding, Rounding
from quantize.moments import observe, output_errors
from quantize.rounding.adaround import adaround
from quantize.rounding.gptq import gptq

IntegerScales = LayerScales | DynamicScales | WeightScales | Int4Scales


class OutputErrors(TypedDict):
    """The output errors of a layer, relative to the squares of its outputs."""

    error_nearest: float
    """With rounding to nearest."""
    error: float


class RoundingFigures(OutputErrors):
    """The output errors of a layer, with its name; of a block for autoround, which learns its layers together."""

    name: str


def mean_errors(figures: Sequence[RoundingFigures]) -> tuple[float, float]:
    """Returns the mean output error of a layer with rounding to nearest, and with the method."""
    return sum(one["error_nearest"] for one in figures) / len(figures), sum(one["error"] for one in figures) / len(figures)


def summarized(method: Rounding, figures: Sequence[RoundingFigures]) -> str:
    """Returns a one-line summary of the figures for the log."""
    before, after = mean_errors(figures)
    whole = "block" if method == "autoround" else "layer"
    return f"{method}: mean output error of a {whole} {after:.2e}, {before:.2e} with rounding to nearest"


def round_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    scales: Mapping[str, IntegerScales],
    method: MomentRounding,
    units: Sequence[Sequence[str]],
    batches: Callable[[], Iterable[Mapping[str, Tensor]]],
    forward: Callable[[nn.Module, Mapping[str, Tensor]], object],
    each: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> tuple[dict[str, nn.Linear], list[RoundingFigures]]:
    """Returns float layers with the weights of `layers` rounded to their grids, and their output errors for the report.

    Args:
        model: The float model; holds rounded layers in between.
        layers: The layers to quantize; not changed.
        scales: Their scales.
        method: The rounding method.
        units: Groups of layers that read the same tensor, in execution order.
        batches: Starts a pass over the calibration rows.
        forward: Runs the model on a batch.
        each: Iterates over the layers, showing progress.

    Returns:
        By name, a layer that shares the bias object of the float layer; and `name`, `error_nearest` and `error` of each, relative to the
        squares of its outputs.
    """
    rounded: dict[str, nn.Linear] = {}
    figures: list[RoundingFigures] = []
    smooth = {
        name: found.input_smooth
        for name, found in scales.items()
        if isinstance(found, LayerScales | DynamicScales) and found.input_smooth is not None
    }
    try:
        for block in blocks(model, units):
            inside = {name: layers[name] for unit in block for name in unit}
            for names, observed in observe(model, inside, block, batches, forward, smooth):
                for name in each(names):
                    hessian_II = observed.of(name).hessian_II
                    weight_OI, errors = round_weight(layers[name].weight.detach(), scales[name], hessian_II, method)
                    rounded[name] = with_weight(layers[name], weight_OI)
                    figures.append({"name": name, **errors})
            for name in inside:
                model.set_submodule(name, rounded[name])
    finally:
        for name in rounded:
            model.set_submodule(name, layers[name])
    return rounded, figures


def blocks(model: nn.Module, units: Sequence[Sequence[str]]) -> list[list[Sequence[str]]]:
    """Groups units by their block of the model, in order of the first unit of each; see `units_by_block`."""
    return list(units_by_block(model, units).values())


def units_by_block(model: nn.Module, units: Sequence[Sequence[str]]) -> dict[str, list[Sequence[str]]]:
    """Returns the units of each block by its path, in order of the first unit of each.

    A block is an entry of an outermost `nn.ModuleList`, such as an encoder layer; a unit outside of all lists is a block of its own.

    Args:
        model: The model.
        units: Groups of layers that read the same tensor, in execution order; a unit belongs to the block of its first layer.
    """
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found: dict[str, list[Sequence[str]]] = {}
    for unit in units:
        around = next((name for name in outermost if unit[0].startswith(f"{name}.")), None)
        entry = unit[0] if around is None else f"{around}.{unit[0].removeprefix(f'{around}.').partition('.')[0]}"
        found.setdefault(entry, []).append(unit)
    return found


def round_weight(weight_OI: Tensor, scales: IntegerScales, hessian_II: Tensor, method: MomentRounding) -> tuple[Tensor, OutputErrors]:
    """Rounds one weight.

    Args:
        weight_OI: float32.
        scales: Scales of the layer.
        hessian_II: Mean of x x^T over its inputs, after smoothing, float32.
        method: The rounding method.

    Returns:
        The weight on its grid, float32 [O, I], with smoothing undone; and the output errors.
    """
    grid = grid_of(weight_OI, scales)
    target_OI, smoothed_OI, scale_OI = grid.target(weight_OI), weight_OI * grid.smooth_I, grid.scale_OI
    nearest_OI = nearest(target_OI, scale_OI, grid.low, grid.high)
    match method:
        case "nearest":
            codes_OI = nearest_OI
        case "gptq":
            codes_OI = gptq(target_OI, hessian_II, scale_OI, grid.low, grid.high)
        case "adaround":
            codes_OI = adaround(target_OI, hessian_II, scale_OI, grid.low, grid.high)
    codes_OI, before, after = better_rows(target_OI, nearest_OI, codes_OI, scale_OI, hessian_II)
    power = float(output_errors(smoothed_OI, torch.zeros_like(smoothed_OI), hessian_II).sum())
    relative: OutputErrors = {"error_nearest": before / power if power else 0.0, "error": after / power if power else 0.0}
    return grid.weight(codes_OI), relative


class WeightGrid(NamedTuple):
    """The grid of every weight of a layer: with q from `low` to `high`, (scale q - offset) / smooth.

    Codes q minimize the error of `scale q` as an estimate of `target`: offsets and smoothing add no error of their own.
    """

    smooth_I: Tensor
    """Smoothing factors; 1 without."""
    scale_OI: Tensor
    low: Bound
    high: Bound
    offset_OI: Tensor | None = None

    def target(self, weight_OI: Tensor) -> Tensor:
        """Returns what multiples of the scales estimate, float32 [O, I]."""
        smoothed_OI = weight_OI * self.smooth_I
        return smoothed_OI if self.offset_OI is None else smoothed_OI + self.offset_OI

    def weight(self, codes_OI: Tensor) -> Tensor:
        """Returns the weight that codes stand for, float32 [O, I]."""
        target_OI = codes_OI.float() * self.scale_OI
        return (target_OI if self.offset_OI is None else target_OI - self.offset_OI) / self.smooth_I


def grid_of(weight_OI: Tensor, scales: IntegerScales) -> WeightGrid:
    """Returns the grid of every weight of a layer."""
    ones, inputs = torch.ones(()), weight_OI.shape[1]
    if isinstance(scales, Int4Scales):
        return WeightGrid(ones, scales.expanded(inputs), *scales.bounds(inputs), scales.offset(inputs))
    scale_OI = scales.weight_scale[:, None].expand(weight_OI.shape)
    if isinstance(scales, WeightScales):
        return WeightGrid(ones, scale_OI, -LARGEST, LARGEST)
    largest, smooth_I = levels(scales.weight_bits), scales.input_smooth
    return WeightGrid(ones if smooth_I is None else smooth_I, scale_OI, -largest, largest)


def better_rows(
    weight_OI: Tensor, nearest_OI: Tensor, codes_OI: Tensor, scale_OI: Tensor, hessian_II: Tensor
) -> tuple[Tensor, float, float]:
    """Returns for each output the codes with the smaller error, the total error of the nearest codes, and the total error of the returned
    codes."""
    nearest_O, error_O = (output_errors(weight_OI, codes.float() * scale_OI, hessian_II) for codes in (nearest_OI, codes_OI))
    better_O = error_O < nearest_O
    chosen_OI = torch.where(better_O[:, None], codes_OI, nearest_OI)
    return chosen_OI, float(nearest_O.sum()), float(torch.where(better_O, error_O, nearest_O).sum())


def with_weight(linear: nn.Linear, weight_OI: Tensor) -> nn.Linear:
    """Returns a copy of a layer with another weight; it shares the bias object."""
    layer = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    layer.weight, layer.bias = nn.Parameter(weight_OI, requires_grad=False), linear.bias
    return layer
