"""Experts that Transformers keeps as modules `expert_0`, `expert_1`, ... : Switch Transformers (one expert a token) and NLLB-MoE (two).

    y_n = sum over e of g_ne E_e(x_n),     g_ne = the router's weight of expert e for token n, 0 for all but its one or two experts

Transformers 5.23 computes this for Switch Transformers. For NLLB-MoE it takes the mask of chosen experts, 0 or 1, for numbers of experts.
So experts 0 and 1 answer for all of them (findings/transformers_nllb_moe_experts.sh). `mend` replaces that by the formula.
`with_listed_experts` gives such models experts that can be calibrated, and that a graph of fixed shapes can hold (`export.graph.experts`).

Switch Transformers: Fedus et al. 2021, https://arxiv.org/abs/2101.03961. NLLB-MoE: Costa-jussa et al. 2022, https://arxiv.org/abs/2207.04672.
Tensor names carry their shapes: N tokens, E experts, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from foundation.models.layers.expert_names import expert_name
from foundation.models.layers.routed import Experts

NLLB, SWITCH = "NllbMoeExperts", "SwitchTransformersExperts"
SHARE, UNLIMITED = "moe_eval_capacity_token_fraction", 2**31 - 1
"""The attribute of a router with the share of the tokens of a batch that an expert has room for, and room for any number."""


class ListedExperts(Experts):
    """The experts of one layer, under the names that Transformers gives them.

    Args:
        stock: The module of Transformers; its experts are taken over.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.num_experts = int(stock.num_experts)
        self.token_dropout = float(getattr(stock, "moe_token_dropout", 0.0))
        """Probability that the answer of an expert to a token is dropped in training; answers are scaled down otherwise."""
        for number in range(self.num_experts):
            self.add_module(expert_name(number), stock[expert_name(number)])

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum over the chosen experts, float `[N, D]`.

        Args:
            hidden_states: float `[N, D]`.
            chosen: What the router chose, in its own form.
            weights: Its weights, in its own form.
        """
        gates_NE = self.gates(chosen, weights)
        if not self.all_tokens:
            return _of_chosen(self, hidden_states, gates_NE, self.token_dropout, self.everywhere)
        said_ND = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            said_ND = said_ND + gates_NE[:, number, None] * self.expert(number, hidden_states)
        return said_ND * (1 - self.token_dropout)

    def expert(self, number: int, states_ND: Tensor) -> Tensor:
        """Returns the output of one expert, float `[N, D]`."""
        said_ND: Tensor = self.get_submodule(expert_name(number))(states_ND)
        return said_ND

    def routed(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns which experts read each token, bool `[N, E]`; the arguments are as for `forward`."""
        return self.gates(chosen, weights) != 0

    def gates(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the weight of every expert for every token, float `[N, E]`; 0 for experts that were not chosen."""
        raise NotImplementedError


class NllbExperts(ListedExperts):
    """Experts of NLLB-MoE, whose router gives the weights of all experts."""

    def gates(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the weights `[N, E]`; the mask is not read."""
        return _gates_of_nllb(chosen, weights)


class SwitchExperts(ListedExperts):
    """Experts of Switch Transformers, whose router gives a mask `[N, 1, E]` and one weight a token, `[N, 1]`."""

    def gates(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns their product; 0 for a token that its expert has no room for."""
        return _gates_of_switch(chosen, weights)


CLASSES: dict[str, type[ListedExperts]] = {NLLB: NllbExperts, SWITCH: SwitchExperts}


def _gates_of_nllb(chosen: Tensor, weights: Tensor) -> Tensor:
    return weights


def _gates_of_switch(chosen: Tensor, weights: Tensor) -> Tensor:
    return chosen[:, 0] * weights


_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {NLLB: _gates_of_nllb, SWITCH: _gates_of_switch}


def is_listed(module: nn.Module) -> bool:
    """Whether a module holds experts as modules, in the form of Transformers or in ours."""
    return isinstance(module, ListedExperts) or type(module).__name__ in CLASSES


def gates_of(module: nn.Module, chosen: Tensor, weights: Tensor) -> Tensor:
    """Returns the weight of every expert for every token, float `[N, E]`, from the arguments of such a module."""
    return module.gates(chosen, weights) if isinstance(module, ListedExperts) else gates_of_kind(type(module).__name__, chosen, weights)


def gates_of_kind(kind: str, chosen: Tensor, weights: Tensor) -> Tensor:
    """Returns the weight of every expert for every token, float `[N, E]`, from the arguments of a class of Transformers."""
    return _GATES[kind](chosen, weights)


def scaled(module: nn.Module, chosen: Tensor, weights: Tensor, factor_NE: Tensor) -> Tensor:
    """Returns the router's weights in their own form, each expert's times a factor, float `[N, E]` or `[E]`."""
    by_token = gates_of(module, chosen, weights) * factor_NE
    return by_token if weights.shape[1] == by_token.shape[1] else weights * (chosen[:, 0] * factor_NE).sum(dim=1, keepdim=True)


def alone_squares(module: nn.Module, states_ND: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of squares of what each expert adds to its tokens, float64 `[E]`; the arguments are those of such a module."""
    gates_NE = gates_of(module, chosen, weights)
    squares_E = torch.zeros(gates_NE.shape[1], dtype=torch.float64)
    for number in range(len(squares_E)):
        token = torch.where(gates_NE[:, number] != 0)[0]
        if len(token):
            said_ND = module.get_submodule(expert_name(number))(states_ND[token]) * gates_NE[token, number, None]
            squares_E[number] = said_ND.double().square().sum().cpu()
    return squares_E


def keep_first(module: nn.Module, count: int) -> None:
    """Lets go of all experts of such a module but the first ones, in place."""
    stock: Any = module
    for number in range(count, int(stock.num_experts)):
        delattr(stock, expert_name(number))
    stock.num_experts = count


def with_listed_experts(model: nn.Module) -> None:
    """Replaces the experts of such models, in place; their weights keep their names. Other models are not changed."""
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind in CLASSES:
            model.set_submodule(name, CLASSES[kind](module).train(module.training))


def fix_routers(model: nn.Module) -> None:
    """Lets the routers of such models stay as they are, in place: a forward pass moves them to a number format, which tracing refuses.

    In evaluation NLLB-MoE has room for a share of the tokens of a batch. A graph would keep the number of the tokens that it was traced
    with; of all tokens, the default, none is left out, whatever their number.
    """
    for module in model.modules():
        router: Any = getattr(module, "classifier", None)
        if getattr(module, SHARE, 0.0) >= 1:
            setattr(module, SHARE, 0.0)
            module.expert_capacity = UNLIMITED  # type: ignore[assignment]
        if type(module).__name__.startswith(("NllbMoeTop", "SwitchTransformersTop")) and router is not None:
            router.to(module.dtype)
            router.to = MethodType(_stays, router)


def mend(model_type: str) -> None:
    """Lets NLLB-MoE run the experts that its router chooses, in all models that are made later; does nothing for other types."""
    if model_type == "nllb-moe":
        from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts

        NllbMoeExperts.forward = _forward_of_nllb


def _forward_of_nllb(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """Returns the output of the chosen experts, float `[N, D]`, from states `[N, D]`, a mask that is not read, and weights `[N, E]`."""
    return _of_chosen(self, hidden_states, router_probs, self.moe_token_dropout, ())


def _of_chosen(experts: nn.Module, states_ND: Tensor, gates_NE: Tensor, dropout: float, everywhere: Collection[int]) -> Tensor:
    """Returns the sum over the experts whose weight is not 0, float `[N, D]`; some of them read all tokens meanwhile."""
    said_ND = torch.zeros_like(states_ND)
    for number in range(gates_NE.shape[1]):
        expert, token = experts.get_submodule(expert_name(number)), torch.where(gates_NE[:, number] != 0)[0]
        answer = expert(states_ND)[token] if number in everywhere else expert(states_ND[token])
        answer = answer * gates_NE[token, number, None]
        answer = nn.functional.dropout(answer, dropout) if experts.training else answer * (1 - dropout)
        said_ND.index_add_(0, token, answer.to(said_ND.dtype))
    return said_ND


def _stays(self: nn.Module, *args: object, **kwargs: object) -> nn.Module:
    return self
