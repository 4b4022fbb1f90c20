"""Converts GPT-2's `Conv1D`, a linear layer whose weight is stored transposed, [I, O], to `nn.Linear` and back; weight norm is folded too.

Quantization, surgery and export work on `nn.Linear` with a weight [O, I]. Models are converted at the boundary to Transformers:
`with_linears` right after a model was built or loaded, `stock_state` when it is saved. No other code needs to know about `Conv1D`. Modules
may be replaced in between, since the layout of a saved weight depends only on the class of the model.

The alternative, a subclass of `nn.Linear` that transposes its weight in state dict hooks, fails silently once a plain linear layer replaces
it: a square weight would be saved transposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from foundation.models.layers.experts import stacked_state
from foundation.models.layers.weight_norm import fold_weight_norm, unfolded
from foundation.models.library import uninitialized
from foundation.models.meta import on_meta_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound=nn.Module)


def is_conv1d(module: Any) -> bool:
    """Whether a module is a `Conv1D`; imports Transformers lazily."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def with_linears(model: Model) -> Model:
    """Replaces every `Conv1D` of a model with an equivalent `nn.Linear`, and folds weight norm, in place; returns the model."""
    fold_weight_norm(model)
    for name, module in list(model.named_modules()):
        if is_conv1d(module):
            conv1d: Any = module
            linear = nn.Linear(conv1d.nx, conv1d.nf, device="meta")
            linear.weight = nn.Parameter(conv1d.weight.detach().T.contiguous(), requires_grad=conv1d.weight.requires_grad)
            linear.bias = conv1d.bias
            model.set_submodule(name, linear.train(module.training))
    return model


def stock_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the state dict of a Transformers model in the layout of its stock class: weights of `Conv1D` transposed, experts stacked.

    Args:
        model: A model after `with_linears`; its layers may have been replaced since.
    """
    with on_meta_device(), uninitialized():
        stock = type(model)(model.config)
    transposed = {f"{name}.weight" for name, module in stock.named_modules() if is_conv1d(module)}
    state = {name: value.T.contiguous() if name in transposed else value for name, value in model.state_dict().items()}
    return unfolded(stock, stacked_state(model, state))
