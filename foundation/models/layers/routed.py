"""What calibration, reports and graphs ask of the experts of a layer, in whatever form Transformers keeps them.

    y_n = sum over e of g_ne E_e(x_n),     g_ne = the router's weight of expert e for token n; 0 for experts that were not chosen

Mixtures have their experts as one tensor (`foundation.models.layers.experts`) or as modules (`foundation.models.layers.listed_experts`).
Both are replaced by a subclass of `Experts`.

Tensor names carry their shapes: N tokens, E experts, D channels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Experts(nn.Module):
    """The experts of one layer, each with linear layers of its own."""

    num_experts: int
    everywhere: Collection[int] = ()
    """Experts that run on all tokens, for calibration; their answers to tokens of others are dropped."""
    all_tokens = False
    """Whether every expert runs on all tokens and the router's weights choose: the form that a graph can hold."""

    def expert(self, number: int, states_ND: Tensor) -> Tensor:
        """Returns the output of one expert, float `[N, D]`."""
        raise NotImplementedError

    def routed(self, *inputs: Any, **named: Any) -> Tensor:
        """Returns which experts read each token, bool `[N, E]`, from the arguments of `forward`."""
        raise NotImplementedError


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """Returns the experts of each layer by the path of their module."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


@contextmanager
def on_all_tokens(model: nn.Module, chosen: Mapping[str, Collection[int]] | None = None) -> Iterator[None]:
    """Lets experts run on all tokens meanwhile, so that all of them run whatever the router says; the answers of the model stay the same.

    Args:
        model: The model.
        chosen: Experts by path of their module; None: all.
    """
    found = experts_of(model)
    before = {name: module.everywhere for name, module in found.items()}
    try:
        for name, module in found.items():
            module.everywhere = range(module.num_experts) if chosen is None else chosen.get(name, ())
        yield
    finally:
        for name, module in found.items():
            module.everywhere = before[name]
