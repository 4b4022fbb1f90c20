"""Experts that Transformers keeps as modules `expert_0`, `expert_1`, ... : Switch Transformers (one expert a token) and NLLB-MoE (two).

    y_n = sum over e of g_ne E_e(x_n),     g_ne = the router's weight of expert e for token n, 0 for all but its one or two experts

Transformers 5.23 computes this for Switch Transformers. For NLLB-MoE it takes the mask of chosen experts, 0 or 1, for numbers of experts.
So experts 0 and 1 answer for all of them (findings/transformers_nllb_moe_experts.sh). `mend` replaces that by the formula. `in_graph` lets
every expert see every token: the form that a graph of fixed shapes can hold (`export.graph.experts`).

Switch Transformers: Fedus et al. 2021, https://arxiv.org/abs/2101.03961. NLLB-MoE: Costa-jussa et al. 2022, https://arxiv.org/abs/2207.04672.
Tensor names carry their shapes: N tokens, E experts, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

NLLB, SWITCH = "NllbMoeExperts", "SwitchTransformersExperts"


def mend(model_type: str) -> None:
    """Lets NLLB-MoE run the experts that its router chooses, in all models that are made later; does nothing for other types."""
    if model_type == "nllb-moe":
        from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts

        NllbMoeExperts.forward = _chosen_of_nllb


def in_graph(model: nn.Module) -> None:
    """Lets every expert of such models see every token, in place; the answers stay the same. Other models are not changed."""
    forwards: dict[str, Callable[..., Tensor]] = {NLLB: _all_of_nllb, SWITCH: _all_of_switch}
    for module in model.modules():
        name = type(module).__name__
        if name in forwards:
            module.forward = MethodType(forwards[name], module)
        router: Any = getattr(module, "classifier", None)
        if name.startswith(("NllbMoeTop", "SwitchTransformersTop")) and router is not None:
            router.to(module.dtype)
            router.to = MethodType(_stays, router)  # forward moves the router to its dtype, which tracing refuses


def _chosen_of_nllb(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """Returns the output of the chosen experts, float `[N, D]`, from states `[N, D]`, a mask that is not read, and weights `[N, E]`."""
    said_ND = torch.zeros_like(hidden_states)
    for number in range(self.num_experts):
        token = torch.where(router_probs[:, number] != 0)[0]
        answer = self[f"expert_{number}"](hidden_states[token]) * router_probs[token, number, None]
        answer = self.token_dropout(answer) if self.training else answer * (1 - self.moe_token_dropout)
        said_ND.index_add_(0, token, answer.to(said_ND.dtype))
    return said_ND


def _all_of_nllb(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """Returns what `_chosen_of_nllb` returns in evaluation mode."""
    return _weighted(self, hidden_states, router_probs * (1 - self.moe_token_dropout))


def _all_of_switch(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    """Returns what the experts of Switch Transformers return: states `[N, D]`, a mask `[N, 1, E]` and weights `[N, 1]` in, `[N, D]` out."""
    return _weighted(self, hidden_states, selected_experts[:, 0] * routing_weights)


def _weighted(experts: Any, states_ND: Tensor, gates_NE: Tensor) -> Tensor:
    said_ND = torch.zeros_like(states_ND)
    for number in range(experts.num_experts):
        said_ND = said_ND + gates_NE[:, number, None] * experts[f"expert_{number}"](states_ND)
    return said_ND


def _stays(self: nn.Module, *args: object, **kwargs: object) -> nn.Module:
    return self
