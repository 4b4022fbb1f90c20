"""Separates the experts of a mixture into linear layers of their own, and stacks them again for saving.

Transformers keeps the weights of all experts of a layer in one tensor [E, O, I]. Quantization works on `nn.Linear`, so a model is
converted: by `with_separate_experts` before it is quantized or its quantized layers are restored, and by `stacked_state` when it is saved.
The layers are called after the stacked tensors:

    model.layers.0.mlp.experts.gate_up_proj [E, O, I]    ->    model.layers.0.mlp.experts.gate_up_proj.3 of expert 3, weight [O, I]

The router stays as it is. Mixtures whose experts are modules already keep the names of their weights
(`foundation.models.layers.listed_experts`).

Tensor names carry their shapes: N tokens, k experts of a token, E experts, D channels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from foundation.models.layers.listed_experts import with_listed_experts
from foundation.models.layers.routed import Experts

Model = TypeVar("Model", bound=nn.Module)
LAST = "down_proj"


def is_stacked(module: Any) -> bool:
    """Whether a module holds the stacked weights of experts, as `use_experts_implementation` of Transformers marks them."""
    return hasattr(module, "_is_expert_parallel")


class SeparateExperts(Experts):
    """The experts of one layer, each a pair of linear layers; computes what the stacked module computes.

    Args:
        stacked: The module of Transformers; its weights are taken over.
    """

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.num_experts = int(stacked.num_experts)
        self.held: Collection[int] = range(self.num_experts)
        """Experts that are here; others say nothing."""
        self.first = "gate_up_proj" if stacked.has_gate else "up_proj"
        self.has_gate, self.transposed, self.has_bias = bool(stacked.has_gate), bool(stacked.is_transposed), bool(stacked.has_bias)
        for name in (self.first, LAST):
            setattr(self, name, nn.ModuleList(_layers(stacked, name)))
        self.post_expert_norm = stacked.post_expert_norm if stacked.has_post_expert_norm else nn.Identity()
        for name in (self.first, f"{self.first}_bias", LAST, f"{LAST}_bias"):
            if name in stacked._parameters:
                del stacked._parameters[name]
        self._stock = [stacked]  # in a list: it is not a child, and only its activation is used

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the output of the chosen experts, [N, D].

        Args:
            hidden_states: float [N, D].
            top_k_index: Chosen experts, int64 [N, k].
            top_k_weights: Their weights, float [N, k].
        """
        if self.all_tokens:
            return self._of_all(hidden_states, top_k_index, top_k_weights)
        said_ND = torch.zeros_like(hidden_states)
        for expert in self.held:
            token, place = torch.where(top_k_index == expert)
            is_everywhere = expert in self.everywhere
            answer = self.expert(expert, hidden_states if is_everywhere else hidden_states[token])
            answer = answer[token] if is_everywhere else answer
            said_ND.index_add_(0, token, (answer * top_k_weights[token, place, None]).to(said_ND.dtype))
        return said_ND

    def routed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns which experts read each token, bool `[N, E]`; the arguments are as for `forward`."""
        numbers_E = torch.arange(self.num_experts, device=top_k_index.device)
        return (top_k_index[:, :, None] == numbers_E).any(dim=1)

    def hold(self, held: Collection[int]) -> None:
        """Lets go of all experts but some, in place; those keep their numbers and names."""
        self.held = held
        for name in (self.first, LAST):
            layers: Any = getattr(self, name)
            for expert in set(range(self.num_experts)) - set(held):
                layers[expert] = None

    def expert(self, number: int, states_ND: Tensor) -> Tensor:
        """Returns the output of one expert, [N, D]."""
        (stock,) = self._stock
        inner = getattr(self, self.first)[number](states_ND)
        inner = stock._apply_gate(inner) if self.has_gate else stock.act_fn(inner)
        said_ND: Tensor = self.post_expert_norm(getattr(self, LAST)[number](inner))
        return said_ND

    def _of_all(self, states_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        said_ND = torch.zeros_like(states_ND)
        for expert in self.held:
            gate_N1 = ((chosen_Nk == expert) * weights_Nk).sum(dim=1, keepdim=True)
            said_ND = said_ND + gate_N1 * self.expert(expert, states_ND)
        return said_ND


def _layers(stacked: Any, name: str) -> Iterator[nn.Linear]:
    weight = getattr(stacked, name).detach()
    bias = getattr(stacked, f"{name}_bias").detach() if stacked.has_bias else None
    for expert in range(int(stacked.num_experts)):
        weight_OI = weight[expert].T if stacked.is_transposed else weight[expert]
        layer = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight_OI.contiguous().clone())
        if bias is not None:
            layer.bias = nn.Parameter(bias[expert].clone())
        yield layer


def with_separate_experts(model: Model) -> Model:
    """Replaces the experts of every layer by an `Experts`, in place; returns the model."""
    with_listed_experts(model)
    for name, module in list(model.named_modules()):
        if is_stacked(module):
            model.set_submodule(name, SeparateExperts(module).train(module.training))
    return model


def separate_experts(model: nn.Module) -> dict[str, SeparateExperts]:
    """Returns the experts that were stacked, by the path of their module."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SeparateExperts)}


def stacked_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state dict with the weights of separate experts stacked as Transformers keeps them.

    Args:
        model: The model.
        state: Its state dict, or the state dict of its stock class for everything but experts.
    """
    found = dict(state)
    for path, module in separate_experts(model).items():
        for name in (module.first, LAST):
            weights = [found.pop(f"{path}.{name}.{expert}.weight") for expert in range(module.num_experts)]
            found[f"{path}.{name}"] = torch.stack([weight.T if module.transposed else weight for weight in weights]).contiguous()
            if module.has_bias:
                found[f"{path}.{name}_bias"] = torch.stack([found.pop(f"{path}.{name}.{e}.bias") for e in range(module.num_experts)])
    return found
