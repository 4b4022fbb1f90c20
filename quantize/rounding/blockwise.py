"""Rounding by AutoRound, block by block: in a model in memory, and the conversion of grids and scales that both drivers share.

A block is an entry of an outermost `nn.ModuleList` (`rounding.blocks`); where such an entry is never called itself, each of its layers is a
block. The model runs twice for each block: with all float weights for the target, and with the rounded weights of the blocks before for the
inputs. Memory holds both for all calibration rows. Layers are rounded from file to file in `quantize.streamed.stored_layer`.

Tensor names carry their shapes: I inputs, O outputs, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foundation.measure.closeness import replaced
from foundation.models.forward import without_cache
from foundation.schemes.int4 import HIGH, LOW, Int4Scales
from foundation.schemes.int8 import levels
from foundation.schemes.int8_weights import LARGEST, WeightScales
from foundation.schemes.scales import Grid
from quantize.rounding.autoround import Options, Sample, Start, autoround
from quantize.rounding.rounding import IntegerScales, RoundingFigures, units_by_block, with_weight

Forward = Callable[[nn.Module, Mapping[str, Tensor]], object]


@dataclass(frozen=True)
class _Call:
    """A call of a block."""

    features: Mapping[str, Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor


def start_of(weight_OI: Tensor, scales: IntegerScales) -> Start:
    """Returns the weight, float32 [O, I], and the grid that its learning starts with."""
    if isinstance(scales, Int4Scales):
        return Start(weight_OI, scales.grid, scales.group_size, LOW, HIGH)
    grid, inputs = Grid(scales.weight_scale[:, None]), weight_OI.shape[1]
    if isinstance(scales, WeightScales):
        return Start(weight_OI, grid, inputs, -LARGEST, LARGEST)
    largest, smooth_I = levels(scales.weight_bits), scales.input_smooth
    return Start(weight_OI if smooth_I is None else weight_OI * smooth_I, grid, inputs, -largest, largest, smooth_I)


def with_grid(scales: IntegerScales, grid: Grid) -> IntegerScales:
    """Returns scales with a learned grid, [O, G], of their weights."""
    if isinstance(scales, Int4Scales):
        return type(scales).of_grid(grid, scales.group_size)
    return dataclasses.replace(scales, weight_scale=grid.scale[:, 0])


def figures_of(name: str, nearest: float, error: float, samples: Sequence[Sample]) -> RoundingFigures:
    """Returns the errors of a block's output relative to its squares, for the report."""
    power = sum(float(sample.power()) for sample in samples)
    return {"name": name, "error_nearest": nearest / power if power else 0.0, "error": error / power if power else 0.0}


def round_blocks(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    scales: Mapping[str, IntegerScales],
    options: Options,
    units: Sequence[Sequence[str]],
    batches: Callable[[], Iterable[Mapping[str, Tensor]]],
    forward: Forward,
    each: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> tuple[dict[str, nn.Linear], dict[str, IntegerScales], list[RoundingFigures]]:
    """Returns float layers with the weights of `layers` rounded, their learned scales, and the output errors of blocks for the report.

    Args:
        model: The float model; holds rounded layers in between.
        layers: The layers to quantize; not changed.
        scales: Their scales at the start.
        options: Steps, rows of a step, seed.
        units: Groups of layers that read the same tensor, in execution order.
        batches: Starts a pass over the calibration rows, with the rows of a step in a batch.
        forward: Runs the model on a batch.
        each: Iterates over the blocks, showing progress.

    Returns:
        By name, a layer that shares the bias object of the float layer, and its scales; and `name` of the block, `error_nearest` and
        `error`, relative to the squares of its outputs.
    """
    rounded: dict[str, nn.Linear] = {}
    found: dict[str, IntegerScales] = {}
    figures: list[RoundingFigures] = []

    def learn(path: str, names: Sequence[str]) -> None:
        targets, inputs = (_calls(model, path, forms, batches(), forward) for forms in ({}, rounded))
        if not targets and path not in layers:
            for name in names:
                learn(name, [name])
            return
        samples = [
            Sample(partial(_run, model, path, call.args, call.kwargs), target.output, call.features)
            for call, target in zip(inputs, targets, strict=True)
        ]
        starts = {name: start_of(layers[name].weight.detach(), scales[name]) for name in names}
        learned, nearest, error = autoround(model, {name: layers[name] for name in names}, starts, samples, options)
        for name, one in learned.items():
            rounded[name] = with_weight(layers[name], one.weight(starts[name]))
            found[name] = with_grid(scales[name], one.grid)
        figures.append(figures_of(path, nearest, error, samples))

    inside = units_by_block(model, [[name] for unit in units for name in unit])
    for path in each(list(inside)):
        learn(path, [name for (name,) in inside[path]])
    return {name: rounded[name] for name in layers}, {name: found[name] for name in layers}, figures


def _calls(
    model: nn.Module, path: str, forms: Mapping[str, nn.Module], batches: Iterable[Mapping[str, Tensor]], forward: Forward
) -> list[_Call]:
    """Returns the calls of a block while the model, with some layers replaced, runs on batches; a shared block may have several a batch."""
    found: list[_Call] = []
    features: Mapping[str, Tensor] = {}

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found.append(_Call(features, args, kwargs, _hidden(output)))

    with replaced(model, forms), without_cache(model), torch.no_grad():
        handle = model.get_submodule(path).register_forward_hook(record, with_kwargs=True)
        try:
            for features in batches:
                forward(model, features)
        finally:
            handle.remove()
    return found


def _run(model: nn.Module, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return _hidden(model.get_submodule(path)(*args, **kwargs))


def _hidden(output: Any) -> Tensor:
    """Returns the hidden states among the outputs of a block: the first of several."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden
