"""Bias correction: what rounding shifts the outputs of a layer by, on average, is put into its bias (Nagel et al. 2019,
https://arxiv.org/abs/1906.04721, section 4.2, from data as in its appendix D).

    b <- b + E[ W x - Q(W) Q(x) ]

over the real positions of the calibration rows. x is the input that the layer has when all layers before it are quantized and corrected:
the layers are corrected in order of execution, those that read one tensor together, with one pass over the rows up to there for each. Only
sums of [O] values are kept.

Left out: layers without a bias, which a stock checkpoint gives no place for one.
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


class _Reached(Exception):
    """Ends a pass once the layers of interest have run."""


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
    """Corrects the biases of float layers in place, for the time when their weights and inputs are quantized.

    Args:
        model: The float model.
        layers: The layers that will be quantized.
        scales: Their scales.
        group: By layer, in order of execution: equal for layers that read one tensor.
        batches: Starts a new pass over the calibration rows.
        forward: Sends a batch through the model.
        each: Goes through the groups of layers, showing progress.
        rounded: The layers with their weights rounded, where that is not to the nearest; their biases are those of `layers`.

    Returns:
        By layer that has a bias, the root mean square of its correction relative to that of its outputs.
    """
    together: dict[str, list[str]] = {}
    for name in (name for name in group if name in layers):
        together.setdefault(group[name], []).append(name)
    moved: dict[str, float] = {}
    try:
        for names in each(list(together.values())):
            integer = {name: scales[name].module(name, (rounded or layers)[name]) for name in names}
            shifts = _shifts(model, {name: layers[name] for name in names}, integer, batches, forward)
            for name in names:
                layer = layers[name]
                if layer.bias is not None:
                    shift_O, power_O = shifts[name]
                    layer.bias.data = layer.bias.data + shift_O.float()
                    moved[name] = float((shift_O.square().mean() / power_O.mean().clamp(min=1e-30)).sqrt())
                place(model, name, scales[name].module(name, (rounded or layers)[name]))
    finally:
        for name, layer in layers.items():
            place(model, name, layer)
    return moved


def _shifts(
    model: nn.Module, layers: Mapping[str, nn.Linear], integer: Mapping[str, nn.Module], batches: Batches, forward: Forward
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns for each layer the means of (float - quantized output) and of (float output)^2, float64 [O], over all real positions."""
    watch = _Watch(layers, integer)
    handles = [layer.register_forward_hook(watch.hook(name)) for name, layer in layers.items()]
    try:
        with torch.inference_mode():
            for features in batches():
                watch.start_batch(features)
                try:
                    forward(model, features)
                except _Reached:
                    continue
                watch.runs = watch.ran  # of a whole pass: from the next batch on it may end with the last run
    finally:
        for handle in handles:
            handle.remove()
    return watch.means()


class _Watch:
    """Compares the outputs of float layers with those of their quantized forms."""

    def __init__(self, layers: Mapping[str, nn.Linear], integer: Mapping[str, nn.Module]) -> None:
        self.integer = integer
        self.shift = {name: torch.zeros(layer.out_features, dtype=torch.float64) for name, layer in layers.items()}
        self.power = {name: torch.zeros(layer.out_features, dtype=torch.float64) for name, layer in layers.items()}
        self.count: Counter[str] = Counter()
        self.runs: Counter[str] | None = None
        self.ran: Counter[str] = Counter()
        self._features: Mapping[str, Tensor] = {}

    def start_batch(self, features: Mapping[str, Tensor]) -> None:
        self._features, self.ran = features, Counter()

    def hook(self, name: str) -> Callable[[nn.Module, Sequence[Tensor], Tensor], None]:
        def compare(module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> None:
            y_NO, shift_NO = (real_rows(y, self._features).double() for y in (output, output - self.integer[name](inputs[0])))
            self.shift[name] += shift_NO.sum(dim=0)
            self.power[name] += y_NO.square().sum(dim=0)
            self.count[name] += len(y_NO)
            self.ran[name] += 1
            if self.runs is not None and self.ran == self.runs:
                raise _Reached

        return compare

    def means(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (self.shift[name] / self.count[name], self.power[name] / self.count[name]) for name in self.integer}
