"""Optimizers of our own, which change one weight after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
"""Parameters, as `params`, with the settings of their optimizer, as torch has them."""


class EachWeight(torch.optim.Optimizer):
    """An optimizer whose step is the same for each weight."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Changes all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._change(weight, weight.grad, group)

    @abstractmethod
    def _change(self, weight: Tensor, gradient: Tensor, group: Group) -> None:
        """Changes a weight, in place, and what is kept of it in `state`."""
