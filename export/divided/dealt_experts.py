"""Experts of a mixture that are dealt out: each rank holds some of them whole, and the ranks add up what they say.

    y = sum_r sum_{e of rank r} g_e expert_e(x)          g: weights of the router, which every rank has; 0 for experts that were not chosen

(GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668.) All ranks have all tokens, as attention is divided by heads, so that no
tokens are sent: one sum for each layer of experts is all that is exchanged, where experts that are divided by neurons exchange one for each
expert. The sums of an int8 expert equal the undivided model's; what experts return is added in float32, which is exact for two experts a
token, and for more differs by the order of additions.

Which rank holds which experts is decided when the model is divided (`export.divided.placement`).

Left out: a rank for rows of its own, which would send tokens to experts instead of adding up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from export.divided.ranks import Ranks
from foundation.models.layers.experts import SeparateExperts, separate_experts


class DealtExperts(nn.Module):
    """The experts of one layer that this rank holds.

    Args:
        experts: Those that it holds.
        ranks: The ranks that hold the rest.
    """

    def __init__(self, experts: SeparateExperts, ranks: Ranks) -> None:
        super().__init__()
        self.experts, self.ranks = experts, ranks

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the output of the chosen experts of all ranks; the arguments are as for `SeparateExperts`."""
        said_ND: Tensor = self.experts(hidden_states, top_k_index, top_k_weights)
        return self.ranks.sum(said_ND.float()).to(said_ND.dtype)


def hold(model: nn.Module, experts: Mapping[str, Collection[int]]) -> None:
    """Leaves a model with the experts of one rank, in place.

    Args:
        model: A model with separate experts.
        experts: The experts that it holds by path of their module.
    """
    for name, module in separate_experts(model).items():
        module.hold(experts[name])


def with_dealt_experts(model: nn.Module, ranks: Ranks) -> None:
    """Replaces the experts that a rank holds by modules that add up over the ranks, in place."""
    for name, experts in separate_experts(model).items():
        model.set_submodule(name, DealtExperts(experts, ranks))
