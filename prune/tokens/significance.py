"""Predicts from the inputs of a block how much each token matters to the model's answer; fitted on rows without labels.

A token counts by how far the outputs z move, to first order, if it becomes the mean token of its row (as the Taylor scores of heads: Michel
et al. 2019, https://arxiv.org/abs/1905.10650, section 4; here for the states x_j that come into a block),

    t_j = sqrt( mean over signs v of (d(v z) / dx_j . (x_j - mean_i x_i))^2 )       v = +1 or -1 for each output, PROBES times
    w   = ridge regression of log(t_j / mean_i t_i + FLOOR) on x_j                  over all tokens but the first ones

For classes, z are logits minus their mean, so that a common shift does not count. Random signs sample all outputs: the mean of the squares
estimates the mean over the rows of the Jacobian (Hutchinson 1990, https://doi.org/10.1080/03610919008812866).

The regression is needed because t depends on the answer, while tokens are dropped before the block runs.

Legend: B rows, L tokens, M of them besides the first, N of all rows, D channels, C outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.labels.tasks import TASKS, Task
from foundation.models.architecture.blocks import Arguments, Keywords, between_blocks, blocks_of
from foundation.models.forward import forward
from foundation.models.inputs.padding import mask_of
from foundation.training.train import Batch

PROBES: Final = 4
"""Draws of the signs v."""
RIDGE: Final = 0.003
"""Strength of the regression, in mean variances of the states."""
FLOOR: Final = 0.05
"""Added to relative changes before their logarithm, so that much smaller changes do not count."""
HIGHEST: Final = 8.0
"""Relative changes are clipped to it, so that one dominant token does not determine the fit."""


def significance(model: nn.Module, batches: Iterable[Batch], task: Task, key: str, seed: int = 0) -> list[Tensor]:
    """Returns for each block the weights w that map an incoming state to its significance, float32 `[D]` on the CPU.

    Args:
        model: The model, which sees all tokens, in evaluation mode.
        batches: Calibration rows on its device; labels are not read.
        task: Task of the model.
        key: Key path of the stage, for messages.
        seed: Draws the signs.

    Raises:
        InputError: No row has a token besides the first one.
    """
    blocks, generator = list(blocks_of(model, key).values()), torch.Generator().manual_seed(seed)
    fits = [_Fit() for _ in blocks]
    for batch in batches:
        with torch.enable_grad(), _leaf_before(blocks[0]), between_blocks(blocks) as states:
            outputs_BC = forward(model, batch.features)
            if TASKS[task].problem_type == "single_label_classification":
                outputs_BC = outputs_BC - outputs_BC.mean(-1, keepdim=True)
            incoming = states[:-1]
            mask_BL = mask_of(batch.features, incoming[0].shape[1])
            valid_BL = torch.ones(incoming[0].shape[:2], dtype=torch.bool) if mask_BL is None else mask_BL.bool().cpu()
            squares = [torch.zeros(valid_BL.shape) for _ in blocks]
            for probe in range(PROBES):
                signs_BC = torch.randint(0, 2, outputs_BC.shape, generator=generator).mul(2).sub(1).to(outputs_BC)
                found = torch.autograd.grad((outputs_BC * signs_BC).sum(), incoming, retain_graph=probe < PROBES - 1)
                for square_BL, state_BLD, gradient_BLD in zip(squares, incoming, found, strict=True):
                    square_BL += _moved(state_BLD.detach(), gradient_BLD, valid_BL.to(state_BLD.device)).square().cpu() / PROBES
        for fit, square_BL, state_BLD in zip(fits, squares, incoming, strict=True):
            fit.add(state_BLD.detach().cpu(), square_BL.sqrt(), valid_BL)
    if not fits[0].count:
        raise InputError(f"{key}.tokens", "given, but no calibration row has a token beside the first one", remedy="leave it out")
    return [fit.weights() for fit in fits]


def _moved(states_BLD: Tensor, gradients_BLD: Tensor, valid_BL: Tensor) -> Tensor:
    """Returns how far an output moves, to first order, with each token in turn as the mean token of its row, `[B, L]`."""
    valid_BL1 = valid_BL[:, :, None].to(states_BLD.dtype)
    mean_B1D = (states_BLD * valid_BL1).sum(1, keepdim=True) / valid_BL1.sum(1, keepdim=True)
    return (gradients_BLD.float() * (states_BLD - mean_B1D).float()).sum(-1)


class _Fit:
    """Ridge regression of the logarithms of relative changes on states, by sums over the tokens."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def add(self, states_BLD: Tensor, moved_BL: Tensor, valid_BL: Tensor) -> None:
        """Adds the tokens of some rows, the first one of each left out."""
        others_BM = valid_BL[:, 1:]
        moved_BM = moved_BL[:, 1:].double()
        mean_B1 = (moved_BM * others_BM).sum(1, keepdim=True) / others_BM.sum(1, keepdim=True).clamp(min=1)
        relative_BM = (moved_BM / mean_B1.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=HIGHEST)
        x_ND, y_N = states_BLD[:, 1:][others_BM].double(), (relative_BM[others_BM] + FLOOR).log()
        new = (x_ND.sum(0), x_ND.T @ x_ND, y_N.sum(), x_ND.T @ y_N)
        self.count += len(y_N)
        self.sums = new if self.sums is None else tuple(old + more for old, more in zip(self.sums, new, strict=True))  # type: ignore[assignment]

    def weights(self) -> Tensor:
        """Returns w, float32 `[D]`."""
        assert self.sums is not None, "checked by `significance`"
        x_D, xx_DD, y, xy_D = (total / self.count for total in self.sums)
        covariance_DD = xx_DD - torch.outer(x_D, x_D)
        strength = RIDGE * covariance_DD.diagonal().mean()
        found: Tensor = torch.linalg.solve(covariance_DD + strength * torch.eye(len(x_D), dtype=torch.float64), xy_D - x_D * y)
        return found.float()


@contextmanager
def _leaf_before(block: nn.Module) -> Iterator[None]:
    """Makes the input of the first block a leaf that requires gradients, even if all parameters are frozen."""

    def detached(block: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        if args:
            return (args[0].detach().requires_grad_(), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].detach().requires_grad_()}

    handle = block.register_forward_pre_hook(detached, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
