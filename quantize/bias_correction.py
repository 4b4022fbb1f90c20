"""Bias correction: adds the mean output error of quantization to a layer's bias.

Nagel et al. 2019, https://arxiv.org/abs/1906.04721, section 4.2, data-based as in appendix D:

    b <- b + E[ W x - Q(W) Q(x) ]

The mean runs over the calibration rows, padding excluded. x is the layer's input when all layers before it are quantized and corrected, so
layers are corrected in execution order. Layers that read the same tensor are corrected together; each such group takes one pass over the
rows, up to the group. Memory: sums of [O] values only.

Not supported: layers without a bias, as a stock checkpoint has no place for one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from compress.measure.closeness import place
from compress.models.padding import real_rows
from compress.schemes.scales import Scales

Forward = Callable[[nn.Module, Mapping[str, Tensor]], object]
Batches = Callable[[], Iterable[Mapping[str, Tensor]]]


class _PassComplete(Exception):
    """Ends a pass once the observed layers have run."""


def correct_biases(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    scales: Mapping[str, Scales],
    group: Mapping[str, str],
    batches: Batches,
    forward: Forward,
    each: Callable[[Iterable[list[str]]], Iterable[list[str]]] = iter,
    rounded: Mapping[str, nn.Linear] | None = None,
) -> dict[str, float]:
    """Corrects the biases of float layers in place, as needed once their weights and inputs are quantized.

    Args:
        model: The float model.
        layers: The layers to quantize.
        scales: Their scales.
        group: For each layer, in execution order, the group of layers that read the same tensor.
        batches: Starts a new pass over the calibration rows.
        forward: Runs the model on a batch.
        each: Iterates over the groups of layers, showing progress.
        rounded: The layers with rounded weights, if not rounded to nearest; their biases are those of `layers`.

    Returns:
        For each layer with a bias, the RMS of its correction relative to the RMS of its outputs.
    """
    groups: dict[str, list[str]] = {}
    for name in (name for name in group if name in layers):
        groups.setdefault(group[name], []).append(name)
    corrections: dict[str, float] = {}
    try:
        for names in each(list(groups.values())):
            integer = {name: scales[name].module(name, (rounded or layers)[name]) for name in names}
            shifts = _shifts(model, {name: layers[name] for name in names}, integer, batches, forward)
            for name in names:
                layer = layers[name]
                if layer.bias is not None:
                    shift_O, power_O = shifts[name]
                    layer.bias.data = layer.bias.data + shift_O.float()
                    corrections[name] = float((shift_O.square().mean() / power_O.mean().clamp(min=1e-30)).sqrt())
                place(model, name, scales[name].module(name, (rounded or layers)[name]))
    finally:
        for name, layer in layers.items():
            place(model, name, layer)
    return corrections


def _shifts(
    model: nn.Module, layers: Mapping[str, nn.Linear], integer: Mapping[str, nn.Module], batches: Batches, forward: Forward
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns for each layer the means of (float - quantized output) and (float output)^2, float64 [O], padding excluded."""
    comparison = _OutputComparison(layers, integer)
    handles = [layer.register_forward_hook(comparison.hook(name)) for name, layer in layers.items()]
    try:
        with torch.inference_mode():
            for features in batches():
                comparison.start_batch(features)
                try:
                    forward(model, features)
                except _PassComplete:
                    continue
                comparison.expected_runs = comparison.runs  # after one full pass: later batches stop once all layers have run
    finally:
        for handle in handles:
            handle.remove()
    return comparison.means()


class _OutputComparison:
    """Compares the outputs of float layers with those of their quantized versions."""

    def __init__(self, layers: Mapping[str, nn.Linear], integer: Mapping[str, nn.Module]) -> None:
        self.integer = integer
        self.shift = {name: torch.zeros(layer.out_features, dtype=torch.float64) for name, layer in layers.items()}
        self.power = {name: torch.zeros(layer.out_features, dtype=torch.float64) for name, layer in layers.items()}
        self.count: Counter[str] = Counter()
        self.expected_runs: Counter[str] | None = None
        self.runs: Counter[str] = Counter()
        self._features: Mapping[str, Tensor] = {}

    def start_batch(self, features: Mapping[str, Tensor]) -> None:
        self._features, self.runs = features, Counter()

    def hook(self, name: str) -> Callable[[nn.Module, Sequence[Tensor], Tensor], None]:
        def compare(module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> None:
            y_NO, shift_NO = (real_rows(y, self._features).double() for y in (output, output - self.integer[name](inputs[0])))
            self.shift[name] += shift_NO.sum(dim=0)
            self.power[name] += y_NO.square().sum(dim=0)
            self.count[name] += len(y_NO)
            self.runs[name] += 1
            if self.expected_runs is not None and self.runs == self.expected_runs:
                raise _PassComplete

        return compare

    def means(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (self.shift[name] / self.count[name], self.power[name] / self.count[name]) for name in self.integer}
