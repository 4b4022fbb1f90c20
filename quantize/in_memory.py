"""Quantizes a model in memory: calls the steps of `steps` in order."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn

from foundation.schemes.int4 import Int4Scales
from foundation.schemes.scales import Layer, Scales
from foundation.schemes.sites import Sites
from foundation.schemes.table import SCHEMES
from foundation.stage.context import Context
from quantize.batch_norm import return_biases
from quantize.ptq import UNREACHED, divide
from quantize.rotation.learned import Memory
from quantize.schemes import choose_scales, layer_figures, round_weights, scale_classes
from quantize.settings import QuantizeSettings
from quantize.steps import Steps


@dataclass(frozen=True)
class Quantized:
    """A quantized model in memory."""

    model: nn.Module
    """Float modules with weights on the grids of `scales`."""
    scales: Mapping[str, Scales]
    float_layers: Mapping[str, str]
    """The layers that stay float, each with the reason."""
    figures: Mapping[str, object]
    warnings: list[str]
    sites: Sites = field(default_factory=Sites)
    """Attention products and residuals in int8."""


def quantize_in_memory(settings: QuantizeSettings, source: Path, context: Context, memory: Memory | None = None) -> Quantized:
    """Quantizes a float checkpoint in memory, with mode ptq or qat.

    Args:
        settings: The settings; the mode is not `auto`.
        source: The float checkpoint.
        context: Data, target, teacher, progress.
        memory: What attempts at this model share; None: there is no other.

    Raises:
        InputError: A pattern of `exclude` matches nothing, no layer is left to quantize, an input holds NaN or infinity, or training
            failed.
    """
    steps = Steps.prepare(settings, source, context, memory)
    layers, kept = steps.choose_layers()
    norms = steps.fold_batch_norms(layers)
    smoothed, smoothing = steps.equalize_and_smooth(layers)
    observed = steps.observe(layers, smoothed)
    layers, unreached = divide(layers, observed, f"stages.{settings.title}.exclude")
    kept |= dict.fromkeys(unreached, UNREACHED)

    weights, scaled = steps.weights(layers, smoothed, observed)
    choose = partial(
        choose_scales,
        scale_classes(settings.scheme, layers),
        weights,
        smoothed,
        observed,
        steps.bits,
        settings.group_size,
        settings.calibration.percentile,
    )
    calibrator, tried = steps.calibrator(choose, layers)
    scales = choose(calibrator)

    rounded, scales, rounding = steps.rounded(layers, scales, observed)
    figures = [layer_figures(layer, layers[layer], rounded[layer], scales[layer], observed) for layer in layers]
    # Corrected biases suit the quantized model; as a teacher the float model keeps its own.
    uncorrected = copy.deepcopy(steps.model) if settings.mode == "qat" and settings.bias_correction else None
    corrected = steps.correct(layers, rounded, scales, observed)
    scan = steps.scan(layers, rounded, scales)
    layers, floating, mixed = steps.choose_float_layers(layers, rounded, scales, scan)
    kept |= floating
    scales = {layer: scales[layer] for layer in layers}
    warnings = [*steps.range_warnings(unreached), *steps.compare_ranges(figures, layers, smoothed), *steps.release_experts()]
    numbers = f"{len(layers)} layers in {SCHEMES[settings.scheme].numbers}, weights of {steps.bits} bits"
    context.progress.log(f"  {numbers}, {len(kept)} in float, {len(steps.rows)} rows")

    bits, trained = _bits_per_weight(layers, scales), dict[str, object]()
    if settings.mode == "qat":
        del layers, rounded  # a training shards the weights, and these would keep whole ones
        scales, trained = steps.train(scales, observed.group, uncorrected)
    else:
        round_weights(layers, rounded, scales)
    return_biases(steps.model, norms)
    sites, added = steps.sites(scales, calibrator, scan)
    chosen = {"calibrator": calibrator, "rows": len(steps.rows), **steps.routing.figures}
    folded = {**bits, **({"batch_norms": norms} if norms else {})}
    found = {**steps.rotation, **folded, **tried, **smoothing, **scaled, **rounding, **corrected, **scan, **mixed, **trained, **added}
    return Quantized(steps.model, scales, kept, {**chosen, **found, "layers": figures}, warnings, sites)


def _bits_per_weight(layers: Mapping[str, Layer], scales: Mapping[str, Scales]) -> dict[str, object]:
    """Returns the figure of weights in groups; none for other schemes."""
    grouped = {name: found for name, found in scales.items() if isinstance(found, Int4Scales)}
    count = sum(layers[name].weight.numel() for name in grouped)
    return {"bits_per_weight": sum(found.stored_bits() for found in grouped.values()) / count} if grouped else {}
