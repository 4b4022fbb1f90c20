"""Kept zeros: a sparse model keeps its zero weights through all later training.

`prune.sparsify.sparsify` writes `compress_keep_zeros: true` into the config of its checkpoint; later checkpoints inherit it, and a second
`sparsify` keeps the zeros too. A training that starts from such a model uses the zeros in the linear layers of the blocks as a mask on the
gradients:

    M = 1[W != 0] at the start,    g <- g * M

Masking gradients suffices: with zero gradients AdamW only applies weight decay, and 0 decays to 0. The mask is read from the weights, so a
stage that shrinks the model in between needs no special handling. Not covered: zeros outside the blocks (embeddings, pooler, head) and in
weights that are not linear layers, such as stacked experts. Experts that are linear layers are covered, also while processes spread them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from foundation.models.layers.expert_parallel import StackedExperts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTE = "compress_keep_zeros"


def keep_zeros(model: nn.Module) -> None:
    """Marks in the config of a model that its zeros must be kept."""
    config: PreTrainedConfig = model.config
    setattr(config, NOTE, True)


def keeps_zeros(model: nn.Module) -> bool:
    """Whether the config of a model says that its zeros must be kept."""
    return bool(getattr(getattr(model, "config", None), NOTE, False))


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers inside the repeated blocks, the entries of any `nn.ModuleList`, by module name."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.startswith(inside)}


class ZeroMasks:
    """Keeps the zeros that a model has now, if its config says so.

    Args:
        model: The model, sharded or not.
    """

    def __init__(self, model: nn.Module) -> None:
        weights: list[Tensor] = []
        if keeps_zeros(model):
            weights = [layer.weight for layer in block_linears(model).values()]
            stacked = [module for module in model.modules() if isinstance(module, StackedExperts)]
            weights += [weight for module in stacked for weight in module.parameters() if weight.ndim > 2]  # biases have [E, O]
        self.masks = [(weight_OI, weight_OI.detach() != 0) for weight_OI in weights if weight_OI.requires_grad]

    def apply(self) -> None:
        """Masks the gradients of a step, which are complete: summed over micro-batches and processes."""
        for weight_OI, mask_OI in self.masks:
            if weight_OI.grad is not None:
                weight_OI.grad.mul_(mask_OI)
