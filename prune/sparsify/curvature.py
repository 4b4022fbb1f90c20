"""Curvature: how strongly the answers of a model depend on the weights of its linear layers, by input and by output of a layer.

    L(W + D) - L(W)  ~  1/2 sum_oi F_oi D_oi^2                            F: diagonal of the Fisher information
    F_oi = 1/B sum over positions t of E[(dL/dy_to)^2] x_ti^2  ~  g_o^2 a_i^2
    g_o^2 = 1/B sum over t of E[(dL/dy_to)^2]             a_i^2 = mean over t of x_ti^2          B: calibration rows

for y = x W^T. The factors are the diagonals of the factors of K-FAC (Martens and Grosse 2015, https://arxiv.org/abs/1503.05671, section 3).
To prune by this change of the loss is LeCun et al. 1989; for Transformers Kurtic et al. 2022, https://arxiv.org/abs/2203.07259. The answers
are drawn from the model itself, so that the gradient does not vanish where the model fits its labels:

    dL/dz = softmax(z / T) - onehot(c),  c ~ softmax(z / T)    classes, and each predicted token of a language model
    dL/dz ~ N(0, 1)                                            values

With the temperature T of distillation this is the curvature of the distillation loss where student and teacher agree. Positions without
a gradient, such as padding, do not count. Left out: products of different positions and of different weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foundation.labels.tasks import Task
from foundation.models.forward import device_of, forward, modes_kept
from foundation.training.distillation.distilled import TEMPERATURE
from foundation.training.losses.table import losses_of
from foundation.training.train import Batch


class Curvature(NamedTuple):
    """The square roots of the factors of a layer's curvature, both 0 where no row reaches the layer."""

    outputs_O: Tensor
    """g, float32."""
    inputs_I: Tensor
    """a, float32."""


def curvatures(model: nn.Module, layers: Mapping[str, nn.Linear], batches: Iterable[Batch], task: Task, seed: int) -> dict[str, Curvature]:
    """Returns the curvature of each layer by name; leaves the model as it was.

    Args:
        model: The model; it is run in evaluation mode and float32.
        layers: Linear layers of the model by module name.
        batches: Calibration rows on the model's device; at least one.
        task: Task of the model.
        seed: Seed of the answers that are drawn.
    """
    device = device_of(model)
    calls: list[tuple[str, Tensor, Tensor]] = []
    inputs, outputs = ({name: _zeros(layer.weight, side) for name, layer in layers.items()} for side in (1, 0))
    positions, rows = dict.fromkeys(layers, 0), 0

    def keeping(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, args, output: calls.append((name, args[0].detach(), output))

    generator, losses = torch.Generator(device).manual_seed(seed), losses_of(task)
    handles = [layer.register_forward_hook(keeping(name)) for name, layer in layers.items()]
    with modes_kept(model):
        model.eval()
        try:
            for batch in batches:
                calls.clear()
                with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                    logits = forward(model, batch.features)
                drawn = losses.drawn_gradient(logits.detach(), batch.labels, TEMPERATURE, generator)
                made = tuple(calls)  # backward may run blocks again (`foundation.training.recompute`), which calls the hooks again
                gradients = torch.autograd.grad(logits, [output for *_, output in made], drawn, allow_unused=True)
                for (name, x, output), gradient in zip(made, gradients, strict=True):
                    dy_NO = (torch.zeros_like(output) if gradient is None else gradient).flatten(0, -2)
                    counts_N = (dy_NO != 0).any(dim=1)
                    outputs[name] += dy_NO.double().square().sum(dim=0)
                    inputs[name] += x.flatten(0, -2)[counts_N].double().square().sum(dim=0)
                    positions[name] += int(counts_N.sum())
                rows += len(batch.indices)
        finally:
            calls.clear()
            for handle in handles:
                handle.remove()
    return {
        name: Curvature((outputs[name] / rows).sqrt().float(), (inputs[name] / max(1, positions[name])).sqrt().float()) for name in layers
    }


def _zeros(weight_OI: Tensor, side: int) -> Tensor:
    return torch.zeros(weight_OI.shape[side], dtype=torch.float64, device=weight_OI.device)


def metrics(weights: Mapping[str, Tensor], curvatures: Mapping[str, Curvature]) -> dict[str, Curvature]:
    """Returns the factors scaled so that the weights of all layers together keep their norm when multiplied by them.

    Args:
        weights: Weights by layer, float32 `[O, I]`.
        curvatures: Their curvature.
    """
    plain = sum(float(weight_OI.double().square().sum()) for weight_OI in weights.values())
    seen = sum(float(in_metric(weight_OI, curvatures[name]).double().square().sum()) for name, weight_OI in weights.items())
    scale = (plain / seen) ** 0.25 if seen else 1.0
    return {name: Curvature(one.outputs_O * scale, one.inputs_I * scale) for name, one in curvatures.items()}


def in_metric(weight_OI: Tensor, curvature: Curvature) -> Tensor:
    """Returns `g_o W_oi a_i`, float32 `[O, I]`: with unscaled factors, half the square of an entry is what zeroing its weight costs."""
    return curvature.outputs_O[:, None] * weight_OI * curvature.inputs_I
