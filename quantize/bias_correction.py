"""Bias correction: takes the mean error of a quantized network's outputs off the biases, layer after layer.

Nagel et al. 2019, https://arxiv.org/abs/1906.04721, section 4.2, in the empirical form of the appendix:

    b <- b + E[y] - E[y^],   y = W x  in the float network,   y^ = Q(W) Q(x^)  in the quantized network

The means run over the calibration rows, padding excluded. x^ is what the layer reads when all layers before it are quantized and corrected,
so what these leave uncorrected is corrected too, and layers are corrected in execution order; the layers after it do not matter. The means
of the float network take one pass over the rows. Layers that read the same tensor are corrected together; each such group takes one more
pass, up to the group. A layer that runs several times gets one correction, for the mean over its runs. Memory: sums of [O] values only.

Not supported: layers without a bias, as a stock checkpoint has no place for one; the next layers make up for their error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from foundation.models.inputs.padding import real_rows
from foundation.schemes.int8_convolution import channel_axis
from foundation.schemes.scales import Layer, Scales

Forward = Callable[[nn.Module, Mapping[str, Tensor]], object]
Batches = Callable[[], Iterable[Mapping[str, Tensor]]]


class _PassComplete(Exception):
    """Ends a pass once the observed layers have run."""


def correct_biases(
    model: nn.Module,
    layers: Mapping[str, Layer],
    scales: Mapping[str, Scales],
    group: Mapping[str, str],
    batches: Batches,
    forward: Forward,
    each: Callable[[Iterable[list[str]]], Iterable[list[str]]] = iter,
    rounded: Mapping[str, Layer] | None = None,
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
        rounded: The layers with rounded weights, if not rounded to nearest; their biases are the biases of `layers`.

    Returns:
        For each layer with a bias, the RMS of its correction relative to the RMS of its outputs in the float network.
    """
    groups: dict[str, list[str]] = {}
    for name in (name for name in group if name in layers):
        groups.setdefault(group[name], []).append(name)

    def quantized(name: str) -> nn.Module:
        return scales[name].module(name, (rounded or layers)[name])

    reference = _means(layers, model, batches, forward)
    corrections: dict[str, float] = {}
    try:
        for names in each(list(groups.values())):
            integer = {name: quantized(name) for name in names}
            for name, module in integer.items():
                model.set_submodule(name, module)
            if not any(layers[name].bias is not None for name in names):
                continue
            found = _means(integer, model, batches, forward)
            for name in names:
                layer = layers[name]
                if layer.bias is not None and reference[name].count and found[name].count:
                    shift_O = reference[name].mean_O - found[name].mean_O
                    layer.bias.data = layer.bias.data + shift_O.float()
                    corrections[name] = float((shift_O.square().mean() / reference[name].power_O.mean().clamp(min=1e-30)).sqrt())
                    model.set_submodule(name, quantized(name))
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
    return corrections


def _means(modules: Mapping[str, nn.Module], model: nn.Module, batches: Batches, forward: Forward) -> dict[str, _Means]:
    """Returns the means over the outputs of some modules of a model, padding excluded; a pass ends once all of them have run."""
    observer = _Observer(modules)
    handles = [module.register_forward_hook(observer.hook(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            for features in batches():
                observer.start_batch(features)
                try:
                    forward(model, features)
                except _PassComplete:
                    continue
                if observer.runs.keys() == modules.keys():  # later batches stop once all modules have run
                    observer.expected_runs = observer.runs
    finally:
        for handle in handles:
            handle.remove()
    return observer.means


class _Means:
    """Running means of the outputs of a module and of their squares, float64 [O]."""

    def __init__(self) -> None:
        self.sum_O, self.squares_O = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        self.count = 0

    def add(self, y_NO: Tensor) -> None:
        """Adds outputs, float64 [N, O]."""
        self.sum_O, self.squares_O = self.sum_O + y_NO.sum(dim=0), self.squares_O + y_NO.square().sum(dim=0)
        self.count += len(y_NO)

    @property
    def mean_O(self) -> Tensor:
        """Mean output of each channel."""
        return self.sum_O / self.count

    @property
    def power_O(self) -> Tensor:
        """Mean square of each channel's outputs."""
        return self.squares_O / self.count


class _Observer:
    """Hooks that add the outputs of modules to their means."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.means = {name: _Means() for name in modules}
        self.expected_runs: Counter[str] | None = None
        self.runs: Counter[str] = Counter()
        self._features: Mapping[str, Tensor] = {}

    def start_batch(self, features: Mapping[str, Tensor]) -> None:
        self._features, self.runs = features, Counter()

    def hook(self, name: str) -> Callable[[nn.Module, Sequence[Tensor], Tensor], None]:
        def observe(module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> None:
            self.means[name].add(real_rows(output, self._features, channel_axis(module)).double())
            self.runs[name] += 1
            if self.expected_runs is not None and self.runs == self.expected_runs:
                raise _PassComplete

        return observe
