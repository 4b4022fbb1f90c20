"""GPT-2's `Conv1D` as what it is: a linear layer whose weight is stored the other way round, [I, O].

Quantization, surgery and export know linear layers, `nn.Linear` with a weight [O, I]. So a model is turned at the two places where it comes
from Transformers or goes back: `with_linears` right after a model was made or loaded, `stock_state` when it is written. In between nothing
has to know; modules may be replaced by others of either kind, since what is written is decided by the class of the model alone.

The other way, a subclass of `nn.Linear` that turns its weight in the hooks of the state dict, fails without a sign as soon as somebody puts
a plain linear layer in its place: a square weight would be written the wrong way round.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def is_conv1d(module: Any) -> bool:
    """Whether a module is one; imports Transformers no earlier than this."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def with_linears(model: Model) -> Model:
    """Replaces every `Conv1D` of a model by the `nn.Linear` that computes the same, in place; returns the model."""
    for name, module in list(model.named_modules()):
        if is_conv1d(module):
            conv1d: Any = module
            owner, _, child = name.rpartition(".")
            linear = nn.Linear(conv1d.nx, conv1d.nf, device="meta")
            linear.weight = nn.Parameter(conv1d.weight.detach().T.contiguous(), requires_grad=conv1d.weight.requires_grad)
            linear.bias = conv1d.bias
            setattr(model.get_submodule(owner), child, linear.train(module.training))
    return model


def stock_state(model: Any) -> dict[str, Tensor]:
    """Returns the state dict of a Transformers model with every weight as its class stores it.

    Args:
        model: A model without `Conv1D`; its float layers may have been replaced.
    """
    with torch.device("meta"):
        stock = type(model)(model.config)
    turned = {f"{name}.weight" for name, module in stock.named_modules() if is_conv1d(module)}
    return {name: value.T.contiguous() if name in turned else value for name, value in model.state_dict().items()}
