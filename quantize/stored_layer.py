"""One decoder layer of a language model: observed, shifted, rounded and written, without ever being loaded.

    observe      its inputs, in float: largest |x| (`smoothquant`), histograms (`calibration`), H and mean |x| (`moments`)
    shift        norm -> q k v, norm -> gate up, up -> down, v -> o, where `folding` finds that exact
    round        by the functions that quantize in memory, for a few outputs at a time
    write        grid weights into model.safetensors shards, scales into quantization.safetensors
    move on      hidden states of all rows go through it, for the next layer

What is written lies in mapped files (`compress.artifacts.shards`). Memory holds what a batch takes on its way through the layer, about ten
tensors of `ROUND_BYTES`, and where weights are rounded by the error of outputs three float32 matrices H of the widest input: the sums, and
their float64 factor or copy. AWQ takes the layer in float32 besides.

Which hidden states a layer passes on is the standard of each method: those of the float layer, as in memory, for ranges, SmoothQuant and
AWQ; those of the layer with rounded weights for gptq and adaround, so that a layer makes up for what the layers before lost (Frantar et
al. 2022, section 4). Inside of a layer all inputs are those of float weights.

Weights keep the type in which they are stored where the code comes back from it: bfloat16 moves a weight by 127 * 2^-8 < 1/2 of a step at
most, so always; float16 where its range suffices (`grid_dtype`), else they become float32. What folding changed is written as float32.

Tensor names carry their shapes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from compress.artifacts.shards import ShardWriter
from compress.machine.process import trim_memory
from compress.models.stored_linear import ROUND_BYTES, AnyScales, StoredLinear, rows_of
from compress.models.streaming import HIDDEN, Batch, StreamedModel
from compress.schemes.fp8 import Fp8Scales
from compress.schemes.int8 import quantize
from compress.schemes.table import SCHEMES, Scheme, facts_of
from quantize.adaround import adaround
from quantize.awq import awq
from quantize.calibration import Histogram, Method, Observed, collect
from quantize.folding import Fold, find_folds, groups
from quantize.gptq import eliminate, elimination
from quantize.moments import Moments, in_groups, output_errors
from quantize.rounding import IntegerScales, better_rows, grid_of
from quantize.rounding import Method as Rounding
from quantize.schemes import choose_scales, decibels, input_figures, powers, weight_scales
from quantize.smoothquant import Channels, smooth

TRACED = (slice(0, 2), slice(0, 8))  # rows and positions
GPTQ_BYTES = 4 * ROUND_BYTES  # a step in Python for each input, so that few parts are better
SMALLEST_F16_STEP = 2.0**-16
LARGEST_F16 = 65504.0


@dataclass(frozen=True)
class Settings:
    """How to quantize; see the recipe's `quantize`."""

    scheme: Scheme
    bits: int
    """Of an int8 weight."""
    group_size: int
    """Of int4 weights."""
    rounding: Rounding
    awq: bool
    calibrator: Method | None
    """None for a scheme without ranges."""
    percentile: float
    alpha: float | Literal["auto"] | None
    """Of smoothing; None for none."""
    prescale: bool
    """Whether smoothing may multiply inputs in the engine."""

    @property
    def ranges(self) -> bool:
        """Whether inputs have a scale from calibration."""
        return SCHEMES[self.scheme].largest_activation is not None

    @property
    def learns(self) -> bool:
        """Whether weights are rounded, or their scales chosen, by the error of outputs."""
        return self.awq or self.rounding != "nearest"

    @property
    def observes(self) -> bool:
        """Whether rows are needed."""
        return self.ranges or self.learns or self.alpha is not None


@dataclass
class Written:
    """What has been written, and the figures that come of it."""

    weights: ShardWriter
    scales: ShardWriter
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    smoothed: list[dict[str, Any]] = field(default_factory=list)
    awq: list[dict[str, Any]] = field(default_factory=list)
    rounding: list[dict[str, Any]] = field(default_factory=list)


def grid_dtype(stored: torch.dtype, scales: AnyScales) -> torch.dtype:
    """Returns the type to write the grid weights of a layer in: that in which the weights were stored, where codes come back from it.

    Args:
        stored: Type of the float weights.
        scales: Of the layer.
    """
    if stored != torch.float16:
        return torch.bfloat16 if stored == torch.bfloat16 else torch.float32
    smooth_I = getattr(scales, "input_smooth", None)
    factors = torch.ones(1) if smooth_I is None else smooth_I
    step, largest = facts_of(scales).smallest_step, facts_of(scales).largest_weight
    fits = float(scales.weight_scale.min() / factors.max()) * step >= SMALLEST_F16_STEP
    return torch.float16 if fits and float(scales.weight_scale.max() / factors.min()) * largest <= LARGEST_F16 else torch.float32


class _Runs:
    """Passes of all rows through one decoder layer."""

    def __init__(self, model: StreamedModel, index: int, layer: nn.Module, batches: Sequence[Batch]) -> None:
        self._model, self._index, self._layer, self._batches = model, index, layer, batches
        self.moved = not batches or index == len(model) - 1  # behind the last one nobody reads them

    def feed(self, count: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Yields what goes into the layer, batch by batch."""
        return (batch.inputs for batch in self._batches[:count])

    def forward(self, _: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns what comes out of it."""
        return self._model.run(self._index, self._layer, inputs)

    def move(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Puts what comes out in the place of what went in, for the next layer; on the way of a pass over all batches."""
        hidden = self.forward(model, inputs)
        if self._index < len(self._model) - 1:
            inputs[HIDDEN].copy_(hidden)
            self.moved = True
        return hidden

    def folds(self) -> list[Fold]:
        """Returns what can be folded inside the layer."""
        batch = self._batches[0]
        rows = {name: value.expand(max(2, len(value)), *value.shape[1:])[TRACED] for name, value in batch.inputs.items()}
        with torch.inference_mode():
            args, kwargs = self._model.arguments(self._index, {name: value for name, value in rows.items() if name != HIDDEN})
        return find_folds(self._model.shape, rows, lambda _, inputs: self._layer(inputs[HIDDEN], *args, **kwargs))


def quantize_layer(
    model: StreamedModel,
    index: int,
    layer: nn.Module,
    names: Sequence[str],
    batches: Sequence[Batch],
    settings: Settings,
    written: Written,
) -> None:
    """Quantizes one decoder layer, writes it, and sends the hidden states through it."""
    layers: dict[str, nn.Linear] = {name: _stored(model, name) for name in names}
    runs = _Runs(model, index, layer, batches)
    on_the_way = runs.forward if settings.rounding != "nearest" else runs.move
    vectors: dict[str, Tensor] = {}
    observed: Observed[Histogram] = Observed({}, {})
    if layers and settings.alpha is not None:
        vectors = _smooth(model, layers, runs, runs.forward if settings.ranges else on_the_way, settings, written)
    if layers and settings.ranges:
        observed = collect(model.shape, layers, runs.feed(), on_the_way, Histogram, vectors)
    elif layers and settings.learns:  # of interest is only which layers read one tensor
        observed = collect(model.shape, layers, runs.feed(1), runs.forward, Histogram, vectors)
    if settings.ranges or settings.learns:
        written.unreached += [name for name in layers if name not in observed.group or not observed.of(name).total]
        layers = {name: linear for name, linear in layers.items() if name not in written.unreached}
    chosen = _awq(model, layer, layers, runs, observed, settings, written) if settings.awq else {}
    for name in layers:
        scale = chosen[name] if settings.awq else _weight_scale(name, _stored(model, name), vectors, settings)
        chosen[name] = scale
    scales = cast(
        "dict[str, AnyScales]",
        choose_scales(
            settings.scheme,
            chosen,
            vectors,
            observed,
            settings.bits,
            settings.group_size,
            settings.percentile,
            settings.calibrator or "minmax",
        ),
    )
    if settings.rounding == "nearest":
        for name in layers:
            _write_nearest(model, name, scales[name], observed if settings.ranges else None, written)
    elif layers:
        _write_learned(model, layers, scales, runs, vectors, observed, settings, written)
    for name, found in scales.items():
        written.entries[name] = found.entry()
        for key, tensor in found.tensors().items():
            written.scales.copy(f"{name}.{key}", tensor)
    _write_rest(model, index, layer, layers, written)
    if not runs.moved:
        with torch.inference_mode():
            for inputs in runs.feed():
                runs.move(layer, inputs)


def _smooth(
    model: StreamedModel,
    layers: Mapping[str, nn.Linear],
    runs: _Runs,
    forward: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
    settings: Settings,
    written: Written,
) -> dict[str, Tensor]:
    """Shifts what is hard to quantize from activations to weights; returns what inputs have to be divided by."""
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
    runs: _Runs,
    observed: Observed[Histogram],
    settings: Settings,
    written: Written,
) -> dict[str, Tensor]:
    """Returns the scales of the weights, after AWQ has folded its factors into the layer."""
    found = groups(layers, runs.folds(), observed)
    for module in layer.modules():
        if isinstance(module, StoredLinear):
            module.load()
    scales, figures = awq(model.shape, layers, found, runs.feed, runs.forward, settings.group_size)
    written.awq += figures
    return {name: scales[name].weight_scale for name in layers}


def _weight_scale(name: str, stored: StoredLinear, vectors: Mapping[str, Tensor], settings: Settings) -> Tensor:
    found = [
        weight_scales(settings.scheme, {name: stored.part(start, stop)}, settings.bits, settings.group_size, vectors)[name]
        for start, stop in stored.parts(ROUND_BYTES)
    ]
    return torch.cat(found)


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
    runs: _Runs,
    vectors: Mapping[str, Tensor],
    observed: Observed[Histogram],
    settings: Settings,
    written: Written,
) -> None:
    """Rounds weights by the error of their outputs, for inputs that float weights give; then the layer has its grid weights."""
    units = [group.layers for group in groups(layers, [], observed)]
    widest = max(linear.in_features for linear in layers.values())
    grids: dict[str, Tensor] = {}
    for names in in_groups(units, layers, 4 * widest**2):
        seen = collect(model.shape, {name: layers[name] for name in names}, runs.feed(), runs.forward, Moments, vectors)
        moments, group_of = dict(seen.statistics), seen.group
        del seen  # every H goes as soon as its layers are done
        for unit in (unit for unit in units if unit[0] in names):
            found = moments.pop(group_of[unit[0]])
            with torch.inference_mode():
                hessian_II = found.product_II.div_(max(1, found.total))
            del found
            codes = _codes(model, unit, scales, hessian_II, settings.rounding)
            hessian_II = hessian_II.double()
            for name in unit:
                grids[name], power, error = _write_better(model, name, scales[name], codes.pop(name), hessian_II, written)
                written.layers.append(_layer_figures(name, scales[name], observed if settings.ranges else None, power, error))
    for name, grid_OI in grids.items():
        _stored(model, name).store(grid_OI, scales[name])


def _codes(
    model: StreamedModel, unit: Sequence[str], scales: Mapping[str, AnyScales], hessian_II: Tensor, method: Rounding
) -> dict[str, Tensor]:
    """Returns the codes of layers that read one tensor, int8 [O, I] each."""
    given = elimination(hessian_II) if method == "gptq" else None
    codes = {}
    for name in unit:
        trim_memory()
        stored = _stored(model, name)
        codes_OI = codes[name] = torch.empty(stored.weight.shape, dtype=torch.int8)
        for start, stop in stored.parts(GPTQ_BYTES):
            rows_OI, part = stored.rows(start, stop), _integer(rows_of(scales[name], start, stop))
            smooth_I, scale_OI, low, high = grid_of(rows_OI, part)
            if given is not None:
                codes_OI[start:stop] = eliminate(rows_OI * smooth_I, given, scale_OI, low, high)
            else:
                codes_OI[start:stop] = adaround(rows_OI * smooth_I, hessian_II, scale_OI, low, high)
    return codes


def _write_better(
    model: StreamedModel, name: str, scales: AnyScales, codes_OI: Tensor, hessian_II: Tensor, written: Written
) -> tuple[Tensor, float, float]:
    """Writes for each output whichever is better, its codes or the nearest; returns what was written, and the powers of weights and error.

    Args:
        model: The model.
        name: Of the layer.
        scales: Of the layer.
        codes_OI: int8.
        hessian_II: Of its inputs, float64.
        written: Takes weights and figures.
    """
    stored, grid_OI = _stored(model, name), _new_grid(model, name, scales, written)
    squares = (0.0, 0.0)
    before = after = outputs = 0.0
    for start, stop in stored.parts(ROUND_BYTES):
        rows_OI, part = stored.rows(start, stop), _integer(rows_of(scales, start, stop))
        smooth_I, scale_OI, low, high = grid_of(rows_OI, part)
        smoothed_OI = rows_OI * smooth_I
        nearest_OI = quantize(smoothed_OI, scale_OI, low, high)
        better_OI, error_nearest, error = better_rows(smoothed_OI, nearest_OI, codes_OI[start:stop], scale_OI, hessian_II)
        before, after = before + error_nearest, after + error
        outputs += float(output_errors(smoothed_OI, torch.zeros_like(smoothed_OI), hessian_II).sum())
        rounded_OI = better_OI.float() * scale_OI / smooth_I
        grid_OI[start:stop] = rounded_OI
        squares = _added(squares, powers(rows_OI, rounded_OI, part))
    relative = {"error_nearest": before / outputs if outputs else 0.0, "error": after / outputs if outputs else 0.0}
    written.rounding.append({"name": name, **relative})
    return grid_OI, *squares


def _write_rest(model: StreamedModel, index: int, layer: nn.Module, quantized: Collection[str], written: Written) -> None:
    """Writes what else belongs to a decoder layer: as it is stored, or as float32 where folding changed it."""
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
    """Returns the tensor to write grid weights to, [O, I], whichever way round it is stored."""
    path = f"{name}.weight"
    shape, dtype = model.weights.shape(path), grid_dtype(model.weights.dtype(path), scales)
    grid = written.weights.new(path, shape, dtype)
    return grid.T if name in model.transposed else grid


def _layer_figures(name: str, scales: AnyScales, observed: Observed[Histogram] | None, power: float, error: float) -> dict[str, Any]:
    histogram = None if observed is None else observed.of(name)
    figures = {"name": name, "max_abs": histogram.largest if histogram else None, "weight_sqnr_db": decibels(power, error)}
    return {**figures, **(input_figures(scales, histogram) if histogram else {})}


def _stored(model: StreamedModel, name: str) -> StoredLinear:
    stored = model.shape.get_submodule(name)
    assert isinstance(stored, StoredLinear), name
    return stored


def _integer(scales: AnyScales) -> IntegerScales:
    assert not isinstance(scales, Fp8Scales), "fp8 is rounded to the nearest alone"
    return scales


def _added(left: tuple[float, float], right: tuple[float, float]) -> tuple[float, float]:
    return left[0] + right[0], left[1] + right[1]
