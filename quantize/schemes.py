"""Schemes: the scales of every layer, by what weights and activations become (`foundation.schemes.checkpoint`).

    scheme         weights                                          activations
    w8a8           per output, least squared error (`ptq`)          one scale, threshold of a calibrator / 127
    w8a8-dynamic   per output, least squared error (`ptq`)          none: each token finds its own
    w8a16          per output, least squared error (`ptq`)          none: float
    w4a16          per group (`group_scales`), and a zero point     none: float
                   per group unless symmetric
    w4a8-block     as w4a16                                         none: each group of a token finds its own
    fp8            per output, largest |w| / 448                    one scale, threshold of a calibrator / 448

E4M3 has relative steps: clipping gains it nothing, so that its default calibrator is minmax, and those that count equal steps (mse,
entropy) are not for it.

Left out: two schemes in one checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from foundation.schemes.int8 import levels, weight_scale
from foundation.schemes.int8_convolution import CONVOLUTIONS
from foundation.schemes.scales import Grid, Layer, Scales
from foundation.schemes.table import SCHEMES, Scheme, facts_of
from quantize.calibration import Histogram, InputFigures, LayerFigures, Observed, clipped_share, input_scale, noise, signal, threshold
from quantize.choices import Method
from quantize.group_scales import Groups
from quantize.ptq import mse_weight_scale

SEARCHES: Mapping[str, Callable[[Tensor, int, Groups], Grid]] = {
    "int8": lambda weight_OI, bits, groups: Grid(mse_weight_scale(weight_OI, levels(bits))),
    "int4": lambda weight_OI, bits, groups: groups.grid(weight_OI),
}
"""By numbers of the weights: the grid of least squared error, from a weight float32 [O, I], its bits, and its groups. Other numbers get
max |w| / largest code."""


def weight_grids(scheme: Scheme, layers: Mapping[str, Layer], bits: int, groups: Groups, smooth: Mapping[str, Tensor]) -> dict[str, Grid]:
    """Returns the scales of the weights of every layer, float32 [O] or [O, G], with zero points unless symmetric.

    Args:
        scheme: The scheme.
        layers: The layers by name.
        bits: Bits of an int8 weight, 8 or 7.
        groups: How the groups of int4 weights get their grids.
        smooth: What the inputs of some layers are divided by, float32 [I].
    """
    weights = {name: layer.weight.detach().flatten(1) * smooth.get(name, 1) for name, layer in layers.items()}
    row = SCHEMES[scheme]
    if row.numbers not in SEARCHES:
        return {name: Grid(weight_scale(weight_OI, row.largest_weight)) for name, weight_OI in weights.items()}
    search = SEARCHES[row.numbers]
    return {name: search(weight_OI, bits, groups) for name, weight_OI in weights.items()}


def scale_classes(scheme: Scheme, layers: Mapping[str, Layer]) -> dict[str, type[Scales]]:
    """Returns the class of the scales of each layer, by name."""
    row = SCHEMES[scheme]

    def of(layer: Layer) -> type[Scales]:
        if not isinstance(layer, CONVOLUTIONS):
            return row.scales()
        assert row.convolutions is not None, scheme
        return row.convolutions()

    return {name: of(layer) for name, layer in layers.items()}


def choose_scales(
    classes: Mapping[str, type[Scales]],
    weights: Mapping[str, Grid],
    smooth: Mapping[str, Tensor],
    observed: Observed[Histogram],
    bits: int,
    group_size: int,
    percentile: float,
    method: Method | None,
) -> dict[str, Scales]:
    """Returns the scales of every layer: its weights' as given, its input's, where it has one, by the named calibrator."""

    def of_input(name: str) -> Tensor | None:
        highest = SCHEMES[classes[name].SCHEME].largest_activation
        if highest is None:
            return None
        assert method is not None, classes[name].SCHEME
        return input_scale(threshold(observed.of(name), method, percentile), highest)

    return {name: classes[name].chosen(grid, of_input(name), bits, group_size, smooth.get(name)) for name, grid in weights.items()}


def round_weights(layers: Mapping[str, Layer], rounded: Mapping[str, Layer], scales: Mapping[str, Scales]) -> None:
    """Puts weights on the grids of their scales, in place; `rounded` holds for each layer the weight to start from."""
    for name, layer in layers.items():
        layer.weight.data = scales[name].on_grid(rounded[name].weight.detach())


def layer_figures(name: str, layer: Layer, rounded: Layer, scales: Scales, observed: Observed[Histogram]) -> LayerFigures:
    """Returns the quantization figures of one layer, for the report; for a smoothed layer, of its smoothed inputs and weights.

    Args:
        name: Its module path.
        layer: The float layer.
        rounded: It with the weights that will be quantized.
        scales: Its scales.
        observed: Its inputs.
    """
    histogram, (power, error) = observed.of(name), powers(layer.weight.detach(), scales.on_grid(rounded.weight.detach()), scales)
    return {"name": name, "max_abs": histogram.largest, "weight_sqnr_db": decibels(power, error), **input_figures(scales, histogram)}


def powers(weight_OI: Tensor, grid_OI: Tensor, scales: Scales) -> tuple[float, float]:
    """Returns the sums of squares of weights and of what rounding changes them by, any smoothing put in.

    Args:
        weight_OI: float32 [O, I], or the weight of a convolution.
        grid_OI: The weights that a checkpoint keeps, float32.
        scales: Scales of the layer.
    """
    smooth_I: Tensor | None = getattr(scales, "input_smooth", None)
    error_OI = grid_OI - weight_OI
    if smooth_I is not None:
        weight_OI, error_OI = weight_OI * smooth_I, error_OI * smooth_I
    return float(weight_OI.double().square().sum()), float(error_OI.double().square().sum())


def input_figures(scales: Scales, histogram: Histogram) -> InputFigures:
    """Returns the quantization figures of a layer's inputs; none where it leaves them in float, or each token finds its scale."""
    row = facts_of(scales)
    if row.largest_activation is None:
        return {}
    scale = float(scales.tensors()["input_scale"])
    figures: InputFigures = {"input_scale": scale, "clipped": clipped_share(histogram, scale, row.largest_activation)}
    if row.equal_steps:
        # zeros are exact; a histogram spreads them over its first bin, where signal and noise would be equal
        figures["input_sqnr_db"] = decibels(signal(histogram), noise(histogram, scale)) if histogram.largest else None
    return figures


def decibels(power: float, error: float) -> float | None:
    """Returns a ratio of powers in dB; None where one of them is 0."""
    return None if power <= 0 or error <= 0 else round(10 * math.log10(power / error), 2)
