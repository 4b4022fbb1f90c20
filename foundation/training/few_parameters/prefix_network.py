"""The network of prefix tuning, which makes the keys and values of all layers while they are learned.

    h = tanh(A e + a)       P_K of layer l = U_l h + u_l,   P_V = V_l h + v_l       rows U_0 V_0 U_1 V_1 ... of one layer behind h

Li and Liang 2021, https://arxiv.org/abs/2101.00190, section 4.3. Names and order are those of `PrefixEncoder` of peft, so that weights fit.

Tensor names: k vectors of the prefix, D channels of the model, E channels of the keys of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foundation.models.layers.prefix import Prefix

NETWORK = "prefix_network"
"""Name of the child of a model that is the network."""
STARTING_STD = 0.02
"""Standard deviation of learned keys and values at the start: small scores and values, so that training begins near the model."""


class PrefixNetwork(nn.Module):
    """Makes keys and values.

    Args:
        count: k.
        width: D.
        hidden: Width of the hidden layer.
        widths: E of each layer.
    """

    def __init__(self, count: int, width: int, hidden: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(count, width)
        self.transform = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 2 * sum(widths)))
        self.widths = tuple(widths)

    def forward(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer, float `[k, E]` each."""
        outer: Any = self.transform[2]
        start, width = 2 * sum(self.widths[:layer]), self.widths[layer]
        rows = slice(start, start + 2 * width)
        both: Tensor = functional.linear(self.transform[:2](self.embedding.weight), outer.weight[rows], outer.bias[rows])
        return both[:, :width], both[:, width:]


class MadePrefix(nn.Module):
    """The prefix of one attention while the network makes it; holds the network as no child, which the model has once.

    Args:
        network: The network.
        layer: Number of the block.
    """

    def __init__(self, network: PrefixNetwork, layer: int) -> None:
        super().__init__()
        self.made_by = (network, layer)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns keys and values, float `[k, E]` each."""
        network, layer = self.made_by
        found: tuple[Tensor, Tensor] = network(layer)
        return found


def start(prefixes: Iterable[Prefix]) -> None:
    """Gives small random values to keys and values that are learned themselves, in place."""
    with torch.no_grad():
        for prefix in prefixes:
            for learned in prefix.parameters():
                learned.normal_(std=STARTING_STD)
