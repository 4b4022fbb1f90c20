"""Low-rank changes of quantized weights: quantization-aware training of few parameters.

The adapter (`foundation.training.few_parameters.lora`) is added to the weight before it is rounded, so that the trained model is an
int8 model without adapters:

    y = Int8(x, W + (alpha / r) * B @ A)        A [r, I] random, B [O, r] zero; W frozen, A, B and the scales are learned

An adapter next to a quantized layer, as in QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), cannot be merged into the
integers afterwards: it costs two more products in every engine. With A and B inside the rounding the optimizer still holds few moments,
while the gradient of W is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from foundation.training.few_parameters.lora import Lora, matching_layers
from foundation.training.processes.layer_share import LayerShare, local
from foundation.training.state import seeded
from quantize.training.linear import QatLinear
from quantize.training.straight_through import Scale


class LowRank(nn.Module):
    """Adds (alpha / r) * B @ A to a weight.

    Args:
        weight_OI: The weight, float32 `[O, I]`.
        lora: Rank and alpha.
    """

    def __init__(self, weight_OI: Tensor, lora: Lora) -> None:
        super().__init__()
        outputs, inputs = weight_OI.shape
        self.factor = lora.alpha / lora.rank
        self.shared: LayerShare | None = None
        self.a_rI = nn.Parameter(torch.empty(lora.rank, inputs, device=weight_OI.device))
        self.b_Or = nn.Parameter(torch.zeros(outputs, lora.rank, device=weight_OI.device))
        nn.init.kaiming_uniform_(self.a_rI, a=math.sqrt(5))

    def forward(self, weight_OI: Tensor) -> Tensor:
        """Returns the changed weight, float32 `[O, I]`; what this process has of it if it is shared."""
        weight_OI, a_rI, b_Or = local(weight_OI), local(self.a_rI), local(self.b_Or)
        if self.shared is not None:  # one matrix is shared with the weight, the other one is whole
            a_rI, b_Or = (self.shared.read(a_rI), b_Or) if self.shared.columns else (a_rI, self.shared.read(b_Or))
        with torch.autocast(weight_OI.device.type, enabled=False):  # codes depend on the last bits of a weight
            return weight_OI + self.factor * (b_Or @ a_rI)


@contextmanager
def changed_by_low_rank(model: nn.Module, lora: Lora | None, seed: int, key: str) -> Iterator[None]:
    """Within the block only low-rank changes of the weights of `QatLinear`, and scales, are trainable; afterwards they are in the weights.

    Args:
        model: A model after `quantize.training.qat.insert`.
        lora: The changes; None trains all weights.
        seed: Seed of the random matrices A.
        key: Key path of the settings that hold `lora`, for messages.

    Raises:
        InputError: No layer matches a pattern.
    """
    if lora is None:
        yield
        return
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = add_low_rank(model, lora, seed, key)
    yield
    for name in layers:  # by name: `train` may have replaced the modules of a sharded model
        parametrize.remove_parametrizations(model.get_submodule(name), "weight")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)


def add_low_rank(model: nn.Module, lora: Lora, seed: int, key: str) -> list[str]:
    """Adds changes to the weights of `QatLinear`, in place; only they, and scales, are trainable then. Returns the names of the layers.

    See `changed_by_low_rank` for the arguments and errors.
    """
    layers = _chosen(model, lora, key)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    scales = {parameter for module in model.modules() if isinstance(module, Scale) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable and parameter in scales)
    with seeded(seed):
        for layer in layers.values():
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, lora))
    return list(layers)


def _chosen(model: nn.Module, lora: Lora, key: str) -> dict[str, QatLinear]:
    """Returns the layers whose weights are changed, by module name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QatLinear)}
    return {name: layers[name] for name in matching_layers(list(layers), lora, key, "quantized linear layer")}
