"""Quantizes one decoder layer of a language model from file to file, without loading it.

    observe      its float inputs: largest |x| (`smoothquant`), histograms (`calibration`), H and mean |x| (`moments`)
    smooth       norm -> q k v, norm -> gate up, up -> down, v -> o, where `folding` finds that exact
    round        with the same functions as in memory, a few outputs at a time
    write        grid weights to model.safetensors shards, scales to quantization.safetensors
    advance      run the hidden states of all rows through the layer, as inputs of the next one

Output is written to memory-mapped files (`foundation.artifacts.shards`). Memory holds the tensors of one batch inside the layer, about ten
tensors of `ROUND_BYTES`, and, for rounding by output error, three float32 matrices H of the widest input: the sums, and their float64
factor or copy; at least `MOMENT_BYTES`. During a pass the float32 weights of a layer are there, if they take at most `HELD_BYTES`. AWQ
additionally loads the layer in float32; autoround holds about eight tensors of the size of the layer, float32.

Which hidden states a layer passes on depends on what reads them, as in memory. For ranges, SmoothQuant and AWQ: the outputs of the float
layer. For gptq, adaround and autoround: the outputs of the layer with rounded weights, so that a layer compensates the error of the layers
before (`rounding`). A stage with both keeps both, as does autoround, whose target is the float output. Within a layer gptq and adaround
compute all inputs with float weights, autoround with the weights as learned so far.

Weights keep their stored dtype if the codes can be recovered from it. bfloat16 always can: it moves a weight by at most 127 * 2^-8 < 1/2 of
a step. float16 can if its range suffices (`grid_dtype`); otherwise weights are written as float32. Tensors changed by folding are written
as float32.

Tensor names carry their shapes: I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from foundation.artifacts.shards import ShardWriter
from foundation.machine.process import trim_memory
from foundation.models.layers.stored_linear import ROUND_BYTES, AnyScales, StoredLinear, held, rows_of
from foundation.models.streaming import Batch, StreamedModel
from foundation.schemes.fp8 import Fp8Scales
from foundation.schemes.int4 import Int4Scales, nearest
from foundation.schemes.scales import Entry, Grid
from foundation.schemes.table import SCHEMES, Scheme, facts_of
from quantize.awq import awq
from quantize.calibration import Histogram, LayerFigures, Observed, collect
from quantize.choices import Method, MomentRounding, Rounding
from quantize.folding import groups
from quantize.group_scales import GroupMoments, Groups
from quantize.moments import Moments, in_groups, output_errors
from quantize.rounding.adaround import adaround
from quantize.rounding.autoround import Options, Sample, autoround
from quantize.rounding.blockwise import figures_of, start_of, with_grid
from quantize.rounding.gptq import eliminate, elimination
from quantize.rounding.rounding import IntegerScales, OutputErrors, RoundingFigures, better_rows, grid_of
from quantize.schemes import choose_scales, decibels, input_figures, powers, scale_classes, weight_grids
from quantize.smoothquant import Channels, smooth
from quantize.streamed.layer_runs import HELD_BYTES, LayerRuns

GPTQ_BYTES = 4 * ROUND_BYTES  # GPTQ takes one Python step per input and part, so fewer and larger parts are faster
MOMENT_BYTES = 64 * 2**20  # of the moments of a pass over the rows, where a single one is smaller: each pass runs the layer once
SMALLEST_F16_STEP = 2.0**-16
LARGEST_F16 = 65504.0
Forward = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Settings:
    """The settings for one decoder layer, derived from the stage's settings."""

    scheme: Scheme
    bits: int
    """Bits of an int8 weight."""
    groups: Groups
    """How the groups of int4 weights get their grids."""
    rounding: Rounding
    autoround: Options
    """How autoround learns."""
    awq: bool
    calibrator: Method | None
    """The calibration method; None for a scheme without calibrated ranges."""
    percentile: float
    alpha: float | Literal["auto"] | None
    """Migration strength of SmoothQuant; None for no smoothing."""
    prescale: bool
    """Whether smoothing may multiply inputs in the engine."""

    @property
    def ranges(self) -> bool:
        """Whether inputs have a calibrated scale."""
        return SCHEMES[self.scheme].largest_activation is not None

    @property
    def learns(self) -> bool:
        """Whether weights are rounded, or their scales chosen, by output error."""
        return self.awq or self.rounding != "nearest" or self.groups.range_by == "outputs"

    @property
    def keeps_float(self) -> bool:
        """Whether hidden states are computed twice: by the float model and by the rounded one."""
        reads_float = self.ranges or self.alpha is not None or self.groups.range_by == "outputs"
        return self.rounding == "autoround" or (self.rounding != "nearest" and reads_float)

    @property
    def observes(self) -> bool:
        """Whether calibration rows are needed."""
        return self.ranges or self.learns or self.alpha is not None


@dataclass
class Written:
    """The output files and the figures collected so far."""

    weights: ShardWriter
    scales: ShardWriter
    zero_points: dict[str, Tensor] = field(default_factory=dict)
    """A byte for each group, written to `scales` at the end: a file that mixed them with the scales would not be aligned."""
    entries: dict[str, Entry] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    layers: list[LayerFigures] = field(default_factory=list)
    smoothed: list[dict[str, object]] = field(default_factory=list)
    awq: list[dict[str, object]] = field(default_factory=list)
    rounding: list[RoundingFigures] = field(default_factory=list)
    bits: int = 0
    """Bits of the int4 weights with their scales, and below the number of these weights."""
    int4_weights: int = 0


def grid_dtype(stored: torch.dtype, scales: AnyScales) -> torch.dtype:
    """Returns the dtype for a layer's grid weights: the stored dtype if codes can be recovered from it, else float32.

    Args:
        stored: Dtype of the float weights.
        scales: Scales of the layer.
    """
    if stored != torch.float16:
        return torch.bfloat16 if stored == torch.bfloat16 else torch.float32
    smooth_I = getattr(scales, "input_smooth", None)
    factors = torch.ones(1) if smooth_I is None else smooth_I
    step, largest = facts_of(scales).smallest_step, scales.largest if isinstance(scales, Int4Scales) else facts_of(scales).largest_weight
    fits = float(scales.weight_scale.min() / factors.max()) * step >= SMALLEST_F16_STEP
    return torch.float16 if fits and float(scales.weight_scale.max() / factors.min()) * largest <= LARGEST_F16 else torch.float32


def quantize_layer(
    model: StreamedModel,
    index: int,
    layer: nn.Module,
    names: Sequence[str],
    batches: Sequence[Batch],
    rounded: Sequence[Batch],
    settings: Settings,
    written: Written,
) -> None:
    """Quantizes one decoder layer, writes it, and runs the hidden states through it.

    Args:
        model: The model.
        index: Index of the layer.
        layer: The layer.
        names: Its linear layers to quantize.
        batches: All rows with the hidden states of the float model.
        rounded: The same with hidden states of the rounded model; the object `batches` itself unless `Settings.keeps_float`.
        settings: The settings.
        written: Receives weights, scales and figures.
    """
    layers: dict[str, nn.Linear] = {name: _stored(model, name) for name in names}
    runs = LayerRuns(model, index, layer, batches)
    passing = runs if rounded is batches else LayerRuns(model, index, layer, rounded)
    # where float hidden states are passed on, the last observing pass can advance them at no extra cost
    passes_float = settings.rounding == "nearest" or passing is not runs
    last_forward = runs.advance if passes_float else runs.forward
    vectors: dict[str, Tensor] = {}
    observed: Observed[Histogram] = Observed({}, {})
    if layers and settings.alpha is not None:
        vectors = _smooth(model, layers, runs, runs.forward if settings.ranges else last_forward, settings, written)
    if layers and settings.ranges:
        observed = collect(model.shape, layers, runs.feed(), last_forward, Histogram, vectors)
    elif layers and settings.learns:
        observed = _readers(model, layers, passing, vectors)
    if settings.ranges or settings.learns:
        written.unreached += [name for name in layers if name not in observed.group or not observed.of(name).total]
        layers = {name: linear for name, linear in layers.items() if name not in written.unreached}
    chosen = _awq(model, layer, layers, runs, observed, settings, written) if settings.awq else None
    if layers and not settings.awq and settings.groups.range_by == "outputs":
        chosen = _grids_by_outputs(model, layers, runs, last_forward, settings.groups)
    scales = _scales(model, layers, chosen, vectors, observed, settings)
    if passes_float and settings.rounding != "nearest":
        runs.finish(layer)
    if settings.rounding == "nearest":
        for name in layers:
            _write_nearest(model, name, scales[name], observed if settings.ranges else None, written)
    elif layers and settings.rounding == "autoround":
        samples = passing.samples(runs.outputs(layer))
        scales |= _write_block(
            model, model.layer_name(index), layers, scales, samples, observed if settings.ranges else None, settings, written
        )
    elif layers:
        _write_learned(model, layers, scales, passing, vectors, observed, settings, written)
    _write_scales(model, scales, written)
    _write_rest(model, index, layer, layers, written)
    passing.finish(layer)


def _readers(model: StreamedModel, layers: Mapping[str, nn.Linear], runs: LayerRuns, vectors: Mapping[str, Tensor]) -> Observed[Histogram]:
    """Returns which layers read the same tensor: the first batch says so, or all if a layer has no row in it, as an expert may."""
    for batches in (itertools.islice(runs.feed(), 1), runs.feed()):
        observed = collect(model.shape, layers, batches, runs.forward, Histogram, vectors)
        if all(name in observed.group and observed.of(name).total for name in layers):
            break
    return observed


def _smooth(
    model: StreamedModel,
    layers: Mapping[str, nn.Linear],
    runs: LayerRuns,
    forward: Forward,
    settings: Settings,
    written: Written,
) -> dict[str, Tensor]:
    """Applies SmoothQuant to the layer; returns the factors that inputs must be divided by."""
    assert settings.alpha is not None
    folds = runs.folds()
    channels = collect(model.shape, layers, runs.feed(), forward, Channels)
    per_token = SCHEMES[settings.scheme].activations == "dynamic"
    vectors, figures = smooth(model.shape, layers, folds, channels, settings.bits, settings.alpha, settings.prescale, per_token)
    written.smoothed += figures
    return vectors


def _awq(
    model: StreamedModel,
    layer: nn.Module,
    layers: Mapping[str, nn.Linear],
    runs: LayerRuns,
    observed: Observed[Histogram],
    settings: Settings,
    written: Written,
) -> dict[str, Grid]:
    """Folds the factors of AWQ into the layer and returns scales and zero points of the weights."""
    found = groups(layers, runs.folds(), observed)
    for module in layer.modules():
        if isinstance(module, StoredLinear):
            module.load()
    scales, figures = awq(model.shape, layers, found, runs.feed, runs.forward, settings.groups)
    written.awq += figures
    return {name: scales[name].grid for name in layers}


def _scales(
    model: StreamedModel,
    layers: Mapping[str, nn.Linear],
    chosen: Mapping[str, Grid] | None,
    vectors: Mapping[str, Tensor],
    observed: Observed[Histogram],
    settings: Settings,
) -> dict[str, AnyScales]:
    """Returns the scales of every layer, with the weight scales of AWQ if `chosen` gives them."""
    weights = chosen or {name: _weight_grid(name, _stored(model, name), vectors, settings) for name in layers}
    shape = settings.bits, settings.groups.size, settings.percentile
    found = choose_scales(scale_classes(settings.scheme, layers), weights, vectors, observed, *shape, settings.calibrator or "minmax")
    return cast("dict[str, AnyScales]", found)


def _weight_grid(name: str, stored: StoredLinear, vectors: Mapping[str, Tensor], settings: Settings) -> Grid:
    found = [
        weight_grids(settings.scheme, {name: stored.part(start, stop)}, settings.bits, settings.groups, vectors)[name]
        for start, stop in stored.parts(ROUND_BYTES)
    ]
    return _stacked(found)


def _grids_by_outputs(
    model: StreamedModel, layers: Mapping[str, nn.Linear], runs: LayerRuns, forward: Forward, groups: Groups
) -> dict[str, Grid]:
    """Returns the grids with the least output errors over the inputs of the float layer."""
    with held(runs.layer, HELD_BYTES):
        seen = collect(model.shape, layers, runs.feed(), forward, partial(GroupMoments, groups.size))
    grids = {}
    for name in layers:
        stored, blocks_Ggg = _stored(model, name), seen.of(name).blocks_Ggg
        grids[name] = _stacked([groups.grid(stored.rows(*part), blocks_Ggg) for part in stored.parts(ROUND_BYTES)])
    return grids


def _stacked(grids: Sequence[Grid]) -> Grid:
    """Returns the grid of a layer whose outputs were divided into parts."""
    parts = zip(*grids, strict=True)
    return Grid(*(None if part[0] is None else torch.cat(part) for part in parts))  # type: ignore[arg-type]


def _write_nearest(model: StreamedModel, name: str, scales: AnyScales, observed: Observed[Histogram] | None, written: Written) -> None:
    stored, grid_OI = _stored(model, name), _new_grid(model, name, scales, written)
    squares = (0.0, 0.0)
    for start, stop in stored.parts(ROUND_BYTES):
        rows_OI, part = stored.rows(start, stop), rows_of(scales, start, stop)
        rounded_OI = part.on_grid(rows_OI)
        grid_OI[start:stop] = rounded_OI
        squares = _added(squares, powers(rows_OI, rounded_OI, part))
    written.layers.append(_layer_figures(name, scales, observed, *squares))


def _write_learned(
    model: StreamedModel,
    layers: Mapping[str, nn.Linear],
    scales: Mapping[str, AnyScales],
    runs: LayerRuns,
    vectors: Mapping[str, Tensor],
    observed: Observed[Histogram],
    settings: Settings,
    written: Written,
) -> None:
    """Rounds weights by output error, with inputs computed by the float weights of this layer, and stores the grid weights in it."""
    units = [group.layers for group in groups(layers, [], observed)]
    method, widest = settings.rounding, max(linear.in_features for linear in layers.values())
    assert method != "autoround", "learned by _write_block"
    grids: dict[str, Tensor] = {}
    for names in in_groups(units, layers, max(4 * widest**2, MOMENT_BYTES)):
        with held(runs.layer, HELD_BYTES):
            collected = collect(model.shape, {name: layers[name] for name in names}, runs.feed(), runs.forward, Moments, vectors)
        moments, group_of = dict(collected.statistics), collected.group
        del collected  # so that each H is freed as soon as its layers are done
        for unit in (unit for unit in units if unit[0] in names):
            found = moments.pop(group_of[unit[0]])
            with torch.no_grad():
                hessian_II = found.product_II.div_(max(1, found.total))
            del found
            codes = _codes(model, unit, scales, hessian_II, method)
            hessian_II = hessian_II.double()
            for name in unit:
                grids[name], power, error = _write_better(model, name, scales[name], codes.pop(name), hessian_II, written)
                written.layers.append(_layer_figures(name, scales[name], observed if settings.ranges else None, power, error))
    for name, grid_OI in grids.items():
        _stored(model, name).store(grid_OI, scales[name])


def _write_block(
    model: StreamedModel,
    path: str,
    layers: Mapping[str, nn.Linear],
    scales: Mapping[str, AnyScales],
    samples: Sequence[Sample],
    observed: Observed[Histogram] | None,
    settings: Settings,
    written: Written,
) -> dict[str, AnyScales]:
    """Rounds weights by the output of the whole layer, writes them, and stores them in it; returns the learned scales."""
    integer = {name: _integer(scales[name]) for name in layers}
    starts = {name: start_of(_stored(model, name).rows(0, linear.out_features), integer[name]) for name, linear in layers.items()}
    learned, nearest_error, error = autoround(model.shape, layers, starts, samples, settings.autoround)
    written.rounding.append(figures_of(path, nearest_error, error, samples))
    found: dict[str, AnyScales] = {}
    for name, one in learned.items():
        stored, found[name] = _stored(model, name), with_grid(integer[name], one.grid)
        rows_OI, rounded_OI = stored.rows(0, stored.out_features), one.weight(starts[name])
        written.layers.append(_layer_figures(name, found[name], observed, *powers(rows_OI, rounded_OI, found[name])))
        grid_OI = _new_grid(model, name, found[name], written)
        grid_OI.copy_(rounded_OI)
        stored.store(grid_OI, found[name])
    return found


def _codes(
    model: StreamedModel, unit: Sequence[str], scales: Mapping[str, AnyScales], hessian_II: Tensor, method: MomentRounding
) -> dict[str, Tensor]:
    """Returns the codes of layers that read the same tensor, int8 [O, I] each."""
    given = elimination(hessian_II) if method == "gptq" else None
    codes = {}
    for name in unit:
        stored = _stored(model, name)
        if 4 * stored.weight.numel() > HELD_BYTES:
            trim_memory()
        codes_OI = codes[name] = torch.empty(stored.weight.shape, dtype=torch.int8)
        for start, stop in stored.parts(GPTQ_BYTES):
            rows_OI, part = stored.rows(start, stop), _integer(rows_of(scales[name], start, stop))
            grid = grid_of(rows_OI, part)
            if given is not None:
                codes_OI[start:stop] = eliminate(grid.target(rows_OI), given, grid.scale_OI, grid.low, grid.high)
            else:
                codes_OI[start:stop] = adaround(grid.target(rows_OI), hessian_II, grid.scale_OI, grid.low, grid.high)
    return codes


def _write_better(
    model: StreamedModel, name: str, scales: AnyScales, codes_OI: Tensor, hessian_II: Tensor, written: Written
) -> tuple[Tensor, float, float]:
    """Writes for each output the given or the nearest codes, whichever have the smaller error.

    Args:
        model: The model.
        name: Name of the layer.
        scales: Scales of the layer.
        codes_OI: Codes of the rounding method, int8.
        hessian_II: Mean of x x^T over the layer's inputs, float64.
        written: Receives weights and figures.

    Returns:
        The written grid weights, and the sums of squares of the weights and of their error.
    """
    stored, grid_OI = _stored(model, name), _new_grid(model, name, scales, written)
    squares = (0.0, 0.0)
    before = after = outputs = 0.0
    for start, stop in stored.parts(ROUND_BYTES):
        rows_OI, part = stored.rows(start, stop), _integer(rows_of(scales, start, stop))
        grid = grid_of(rows_OI, part)
        target_OI, smoothed_OI = grid.target(rows_OI), rows_OI * grid.smooth_I
        nearest_OI = nearest(target_OI, grid.scale_OI, grid.low, grid.high)
        better_OI, error_nearest, error = better_rows(target_OI, nearest_OI, codes_OI[start:stop], grid.scale_OI, hessian_II)
        before, after = before + error_nearest, after + error
        outputs += float(output_errors(smoothed_OI, torch.zeros_like(smoothed_OI), hessian_II).sum())
        rounded_OI = grid.weight(better_OI)
        grid_OI[start:stop] = rounded_OI
        squares = _added(squares, powers(rows_OI, rounded_OI, part))
    relative: OutputErrors = {"error_nearest": before / outputs if outputs else 0.0, "error": after / outputs if outputs else 0.0}
    written.rounding.append({"name": name, **relative})
    return grid_OI, *squares


def _write_scales(model: StreamedModel, scales: Mapping[str, AnyScales], written: Written) -> None:
    for name, found in scales.items():
        if isinstance(found, Int4Scales):
            written.bits, written.int4_weights = (
                written.bits + found.stored_bits(),
                written.int4_weights + _stored(model, name).weight.numel(),
            )
        written.entries[name] = found.entry()
        for key, tensor in found.tensors().items():
            if tensor.dtype == torch.int8:
                written.zero_points[f"{name}.{key}"] = tensor
            else:
                written.scales.copy(f"{name}.{key}", tensor)


def _write_rest(model: StreamedModel, index: int, layer: nn.Module, quantized: Collection[str], written: Written) -> None:
    """Writes the other parameters of a decoder layer: as stored, or as float32 if folding changed them."""
    for path in model.parameters_of(index):
        owner, _, key = path.rpartition(".")
        if key == "weight" and owner in quantized:
            continue
        stored, module = model.weights[path], model.shape.get_submodule(owner)
        if key == "weight" and isinstance(module, StoredLinear):
            given = stored.T if owner in model.transposed else stored
            parts = module.parts(ROUND_BYTES)
            if all(torch.equal(module.rows(start, stop), given[start:stop].float()) for start, stop in parts):
                written.weights.copy(path, stored)
                continue
            changed = written.weights.new(path, stored.shape, torch.float32)
            for start, stop in parts:
                (changed.T if owner in model.transposed else changed)[start:stop] = module.rows(start, stop)
        else:
            value = getattr(module, key).detach()
            written.weights.copy(path, stored if torch.equal(value, stored.to(value.dtype)) else value)


def _new_grid(model: StreamedModel, name: str, scales: AnyScales, written: Written) -> Tensor:
    """Returns the tensor to write grid weights to, as [O, I] also if it is stored transposed."""
    path = f"{name}.weight"
    shape, dtype = model.weights.shape(path), grid_dtype(model.weights.dtype(path), scales)
    grid = written.weights.new(path, shape, dtype)
    return grid.T if name in model.transposed else grid


def _layer_figures(name: str, scales: AnyScales, observed: Observed[Histogram] | None, power: float, error: float) -> LayerFigures:
    histogram = None if observed is None else observed.of(name)
    figures: LayerFigures = {
        "name": name,
        "max_abs": histogram.largest if histogram else None,
        "weight_sqnr_db": decibels(power, error),
    }
    return {**figures, **input_figures(scales, histogram)} if histogram else figures


def _stored(model: StreamedModel, name: str) -> StoredLinear:
    stored = model.shape.get_submodule(name)
    assert isinstance(stored, StoredLinear), name
    return stored


def _integer(scales: AnyScales) -> IntegerScales:
    assert not isinstance(scales, Fp8Scales), "fp8 supports only rounding to nearest"
    return scales


def _added(left: tuple[float, float], right: tuple[float, float]) -> tuple[float, float]:
    return left[0] + right[0], left[1] + right[1]
