"""Experts of a mixture in a form that a graph of fixed shapes can hold: every expert sees every token, and the router's weights choose.

    y_n = sum over e of  g_ne E_e(x_n),     g_ne = the router's weight of e for token n where e is among its k, else 0

The answer equals the sum over k experts for each token, up to the order of addition; the work is E / k times as large. What Transformers
runs instead gathers tokens by expert, or the weights of experts by token: neither is an operator of ONNX, or it moves more than it
multiplies. A few small experts are served well like that, dozens of large ones are not. Left out: kernels for mixtures (TensorRT-LLM,
vLLM).

Tensor names carry their shapes: N tokens, k experts of a token, E experts, D channels, F neurons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.models.layers.listed_experts import fix_routers, with_listed_experts
from foundation.models.layers.routed import experts_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAME = "compress_all_experts"


def all_experts(module: Any, states_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
    """Returns the output of a module of experts, float32 `[N, D]`; the signature follows Transformers' experts functions."""
    number = int(module.num_experts)
    is_chosen_NkE = chosen_Nk[:, :, None] == torch.arange(number, device=chosen_Nk.device)
    gates_NE = (is_chosen_NkE * weights_Nk[:, :, None]).sum(dim=1)
    first, last = ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"
    inner = _linear(module, first, states_ND.expand(number, -1, -1))  # OpenVINO does not broadcast the rows of a batched product
    inner_ENF = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    said_END = _linear(module, last, inner_ENF)
    if module.has_post_expert_norm:
        said_END = module.post_expert_norm(said_END)
    said_ND: Tensor = (said_END * gates_NE.T[:, :, None]).sum(dim=0)
    return said_ND


def make_exportable(model: nn.Module) -> None:
    """Lets all experts of a model see all tokens, in place; does nothing to a model without experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config: PreTrainedConfig = model.config
    with_listed_experts(model)
    fix_routers(model)
    for module in experts_of(model).values():
        module.all_tokens = True
    if any(hasattr(module, "_is_expert_parallel") for module in model.modules()):
        ALL_EXPERTS_FUNCTIONS.register(NAME, all_experts)
        config._experts_implementation = NAME


def _linear(module: Any, name: str, x: Tensor) -> Tensor:
    """Returns the products of all experts' weights, `[E, N, O]`, for an input `[E, N, I]`."""
    weight = getattr(module, name)
    y_ENO: Tensor = x @ (weight if module.is_transposed else weight.transpose(1, 2))
    return y_ENO + getattr(module, f"{name}_bias")[:, None] if module.has_bias else y_ENO
