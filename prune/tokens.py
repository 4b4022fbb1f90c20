"""Tokens that leave the model: behind a layer only the most significant ones stay (`compress.models.architecture.dropped_tokens`).

    tokens: [0.5, 0.25]      half of the tokens stay behind the first layer, a quarter behind the second one and all after it
    tokens: 0.25             a quarter reaches the last layer; in between they fall evenly:  share_l = 0.25^(l / (L - 1)),  l = 1 ... L - 1

No weight is removed, and `sparsity` does not count it: of a row, later layers compute fewer tokens. What is lost is learned again by the
fine-tuning of the stage, with the tokens gone (Goyal et al. 2020, PoWER-BERT, https://arxiv.org/abs/2001.08950, section 3.4). There shares
are learned too, against the cost; here they are given, or searched.

What is significant is fitted before that, on calibration rows, without labels (`significance`): by how far the outputs z move, to first
order, if a token becomes the mean token of its row (as the Taylor scores of heads: Michel et al. 2019, https://arxiv.org/abs/1905.10650,
section 4; here for the states x_j that come into a block),

    t_j = sqrt( mean over signs v of (d(v z) / dx_j . (x_j - mean_i x_i))^2 )       v = +1 or -1 for each output, PROBES times
    w   = ridge regression of log(t_j / mean_i t_i + FLOOR) on x_j                  over all tokens but the first ones

For classes z are logits less their mean, so that what moves all of them alike counts for nothing. Signs stand for all outputs: the mean of
the squares is that over the rows of the Jacobian (Hutchinson 1990).

Two things are proved on rows of the data before anything is trained: that the head reads the first token alone, and that the layers treat
tokens alike wherever they stand, so that what is left may stand in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from compress.core.errors import InputError
from compress.core.tasks import TASKS, Task
from compress.models.architecture.blocks import between_blocks, blocks_of, states_of
from compress.models.architecture.dropped_tokens import DENOMINATOR, SIGNIFICANCE
from compress.models.architecture.shapes import remade, with_sizes
from compress.models.architecture.structure import Structure
from compress.models.forward import forward
from compress.models.inputs.padding import mask_of
from compress.models.library import REFUSED, one_line
from compress.training.train import Batch

TOLERANCE: Final = 1e-3
PROBES: Final = 4
"""Draws of the signs v."""
RIDGE: Final = 0.003
"""Strength of the regression, in mean variances of the states."""
FLOOR: Final = 0.05
"""Added to relative changes before their logarithm; what is far below counts as nothing."""
HIGHEST: Final = 8.0
"""Largest relative change: one token that says all must not be all that is fitted."""
ALL: Final = 1 - 0.4 / DENOMINATOR
"""A share that keeps all tokens, in the order of their significance."""
HALF: Final = 0.5
Tokens = float | tuple[float, ...]


def shares_of(tokens: Tokens, depth: int, key: str) -> tuple[float, ...]:
    """Returns the share of the tokens that stay behind each layer.

    Args:
        tokens: Shares behind the first layers, or the share that reaches the last one.
        depth: Number of layers.
        key: Key path of the stage, for messages.

    Raises:
        InputError: There are more shares than layers with a layer behind them.
    """
    if depth < 2:
        raise InputError(f"{key}.tokens: given for a model of one layer, behind which no tokens are read but the first: leave it out")
    if not isinstance(tokens, tuple):
        return (*(tokens ** (layer / (depth - 1)) for layer in range(1, depth)), tokens)
    if len(tokens) > depth - 1:
        raise InputError(f"{key}.tokens: {len(tokens)} shares given for a model of {depth} layers; give at most {depth - 1}")
    return (*tokens, *[tokens[-1]] * (depth - len(tokens)))


def check_tokens(model: nn.Module, structure: Structure, task: Task, key: str) -> None:
    """Checks, without running it, whether tokens may leave a model.

    Raises:
        InputError: They may not.
    """
    config: Any = model.config
    about = f"{key}.tokens: given"
    if TASKS[task].per_token or TASKS[task].two_towers:
        raise InputError(f"{about}; {task} needs the states of all tokens: leave it out")
    if len(structure.stacks) > 1:
        raise InputError(f"{about}; the decoder of a {config.model_type} reads all tokens of its encoder: leave it out")
    if any(attention.transformed for attention in structure.attentions):
        why = "change queries or keys before they meet, as rotary positions do"
        raise InputError(f"{about}; the layers of a {config.model_type} {why}: leave it out")


def prove_tokens(model: nn.Module, features: Mapping[str, Tensor], key: str) -> None:
    """Checks on rows of the data that the head reads the first token alone, and that layers treat tokens alike wherever they stand.

    Args:
        model: The model that tokens shall leave, in evaluation mode.
        features: Its inputs; the first two rows are used.
        key: Key path of the stage, for messages.

    Raises:
        InputError: One of the two does not hold, or the model does not run without some tokens.
    """
    config: Any = model.config
    few = {name: value[:2] for name, value in features.items()}
    about = f"{key}.tokens: given, but"
    blocks = list(blocks_of(model, key).values())
    with torch.inference_mode():
        expected = forward(model, few)
        handle = blocks[-1].register_forward_hook(_only_first)
        try:
            alone = forward(model, few)
        finally:
            handle.remove()
        if _distance(alone, expected) > TOLERANCE:
            raise InputError(f"{about} the head of this {config.model_type} reads other tokens than the first one: leave it out")
        drawn = torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(0))
        try:
            reordered, fewer = (
                forward(with_tokens(model, [share] * len(blocks), [drawn] * len(blocks), key).to(expected.device), few)
                for share in (ALL, HALF)
            )
        except REFUSED as error:
            raise InputError(
                f"{about} this {config.model_type} does not run without some tokens ({one_line(error)}): leave it out"
            ) from error
        assert fewer.shape == expected.shape
        if _distance(reordered, expected) > TOLERANCE:
            raise InputError(f"{about} the layers of this {config.model_type} read where tokens stand: leave it out")


def significance(model: nn.Module, batches: Iterable[Batch], task: Task, key: str, seed: int = 0) -> list[Tensor]:
    """Returns for each block how significant a token is, as the weights of the states that come in, float32 `[D]` on the CPU.

    Args:
        model: The model, which sees all tokens, in evaluation mode.
        batches: Calibration rows on its device; labels are not read.
        task: Task of the model.
        key: Key path of the stage, for messages.
        seed: Draws the signs.
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
        rows = others_BM.any(1)
        moved_BM = moved_BL[:, 1:].double()
        mean_B1 = (moved_BM * others_BM).sum(1, keepdim=True) / others_BM.sum(1, keepdim=True).clamp(min=1)
        relative_BM = (moved_BM / mean_B1.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=HIGHEST)
        chosen_BM = others_BM & rows[:, None]
        x_ND, y_N = states_BLD[:, 1:][chosen_BM].double(), (relative_BM[chosen_BM] + FLOOR).log()
        new = (x_ND.sum(0), x_ND.T @ x_ND, y_N.sum(), x_ND.T @ y_N)
        self.count += len(y_N)
        self.sums = new if self.sums is None else tuple(old + more for old, more in zip(self.sums, new, strict=True))  # type: ignore[assignment]

    def weights(self) -> Tensor:
        """Returns w, float32 `[D]`; zeros if there were no tokens."""
        if self.sums is None or not self.count:
            raise ValueError("no tokens beside the first ones were seen")
        x_D, xx_DD, y, xy_D = (total / self.count for total in self.sums)
        covariance_DD = xx_DD - torch.outer(x_D, x_D)
        strength = RIDGE * covariance_DD.diagonal().mean()
        found: Tensor = torch.linalg.solve(covariance_DD + strength * torch.eye(len(x_D), dtype=torch.float64), xy_D - x_D * y)
        return found.float()


@contextmanager
def _leaf_before(block: nn.Module) -> Iterator[None]:
    """Lets gradients be taken of what comes into the first block, whatever parameters are frozen."""

    def detached(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (args[0].detach().requires_grad_(), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].detach().requires_grad_()}

    handle = block.register_forward_pre_hook(detached, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def with_tokens(model: nn.Module, shares: Sequence[float], weights: Sequence[Tensor], key: str) -> nn.Module:
    """Returns a copy of a model on the CPU, in evaluation mode, behind whose blocks only these shares of the tokens stay.

    Args:
        model: The model; what it knows of significant tokens is left out.
        shares: Share of the tokens that stay behind each block; none: all of them do.
        weights: What `significance` returned, for each block.
        key: Key path of the stage, for messages.
    """
    config: Any = model.config
    sizes = replace(Structure.of(model, key).sizes, tokens=tuple(shares))
    made = remade(model, with_sizes(config, sizes, key))
    own = {name: value.cpu() for name, value in model.state_dict().items() if name.rpartition(".")[2] != SIGNIFICANCE}
    blocks = blocks_of(made, key)
    fitted = {
        f"{name}.{SIGNIFICANCE}": weights[number]
        for number, name in enumerate(blocks)
        if SIGNIFICANCE in dict(blocks[name].named_buffers())
    }
    made.load_state_dict({**own, **fitted})
    return made.eval()


def _only_first(block: nn.Module, args: Any, output: Any) -> Any:
    """Sets the states of all tokens but the first to other numbers."""
    states_BLD = states_of(output)
    changed_BLD = torch.cat([states_BLD[:, :1], -states_BLD[:, 1:].flip(1)], dim=1)
    return (changed_BLD, *output[1:]) if isinstance(output, tuple) else changed_BLD


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))
