"""What is trained of an adapter, and its changes as products of two matrices.

    block layers    B A of LoRA, times alpha / r                  `foundation.training.few_parameters.lora`
    head layers     W - W_before = I D or D I, and b - b_before   D the difference; I of the smaller side, so that the rank is min(O, I)

Of a head only linear layers are trained; norms and the like stay, as they are no sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foundation.models.layers.adapter_stack import Adapter, Change
from foundation.training.few_parameters.lora import head_of


def heads_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers of the head of a model by name."""
    own = {id(parameter) for parameter in head_of(model)}
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and id(layer.weight) in own}


def only_trainable(model: nn.Module, heads: Mapping[str, nn.Linear]) -> int:
    """Makes the matrices of LoRA and the layers of the head trainable, and nothing else; returns the number of their parameters."""
    trained = {id(parameter) for layer in heads.values() for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) in trained or ".lora_" in name)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def changes_of(model: nn.Module) -> Adapter:
    """Returns the changes that the adapter of a model makes, by layer; the model has peft's layers of one adapter."""
    from peft.tuners.lora import LoraLayer

    found: dict[str, Change] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            down, up = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
            found[name] = Change(down.float().cpu().clone(), (up.float() * layer.scaling["default"]).cpu())
    return found


def changed_heads(heads: Mapping[str, nn.Linear], before: Mapping[str, Sequence[Tensor]]) -> Adapter:
    """Returns the changes of the layers of a head.

    Args:
        heads: The layers after training.
        before: Weight, and bias where there is one, of each before it.
    """
    found = {}
    for name, layer in heads.items():
        weight_OI, *bias_O = (after.detach() - one for after, one in zip(layer.parameters(), before[name], strict=True))
        outputs, inputs = weight_OI.shape
        eye = torch.eye(min(outputs, inputs), device=weight_OI.device)
        down, up = (weight_OI, eye) if outputs <= inputs else (eye, weight_OI)
        found[name] = Change(down.cpu(), up.cpu(), bias_O[0].cpu() if bias_O else None)
    return found
