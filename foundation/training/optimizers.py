"""The optimizers of a training.

    adamw      decoupled weight decay (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), torch's fused step: two moments a weight
    adamw8bit  the same with moments of 8 bits, `foundation.training.adamw8bit`
    adafactor  Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235, torch's: only second moments of rows and columns of a matrix, no
               first moment. Its learning rate is relative to the size of a weight, as in the paper.
    lamb       You et al. 2020, https://arxiv.org/abs/1904.00962, algorithm 2: AdamW whose step of each weight matrix is as long as lr times
               the matrix, so that large batches learn:

        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        u = r + decay * w,        w <- w - lr * (|w| / |u|) * u                       the factor is 1 where |w| or |u| is 0

    lars       You, Gitman & Ginsburg 2017, https://arxiv.org/abs/1708.03888: momentum SGD whose gradient is made as long as the
               weight matrix

        u = (|w| / (|g| + decay |w|)) * (g + decay * w)                               the factor is 1 where |w| or |g| is 0
        v <- 0.9 v + lr * u,   w <- w - v

The rule of that paper for `lars`: with a batch k times as large take k times the learning rate, and a longer warm-up. Its trust coefficient
(0.001 for lr of 0.1 and more) is part of lr here, so that lr is the length of a step relative to the weight, as it is for `lamb`.

The rule of the other paper for `lamb`: with a batch k times as large, take the learning rate times sqrt(k), and k times the share of steps
for `warmup`. Biases and norms are neither decayed nor scaled by either, as in the authors' code: a bias starts at 0, and a step in
proportion to it would leave it there. The clipping of |w| that the paper allows is left out, as the authors do.

A share of a weight does not know its rows and columns: adafactor is refused where weights are divided. Norms of lamb and lars are norms of
whole weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.machine.parallel import Team
from foundation.machine.sharding import full
from foundation.training.adamw8bit import AdamW8bit, bytes_of
from foundation.training.choices import Optimizer, OptimizerName
from foundation.training.each_weight import EachWeight, Group
from foundation.training.state import Entry

BETAS = 0.9, 0.999
EPS = 1e-6
MOMENTUM = 0.9


class Lamb(EachWeight):
    """LAMB, see the top of this file.

    Args:
        groups: Parameter groups with `weight_decay`; those without decay are not scaled either.
        lr: Learning rate.
    """

    def __init__(self, groups: Iterable[Group], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": 0.0, "scaled": True})

    def _change(self, weight: Tensor, gradient: Tensor, group: Group) -> None:
        state, (b1, b2) = self.state[weight], group["betas"]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        state["step"] += 1
        t, m, v = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(gradient, 1 - b1)
        v.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        update = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"]) + group["weight_decay"] * weight
        rate = group["lr"]
        if group["scaled"]:
            whole, step = norms(weight, update)
            rate *= whole / step if whole > 0 and step > 0 else 1.0
        weight.sub_(update, alpha=rate)


class Lars(EachWeight):
    """LARS, see the top of this file.

    Args:
        groups: Parameter groups with `weight_decay`; those without decay are not scaled either.
        lr: Learning rate, times the trust coefficient of the paper.
    """

    def __init__(self, groups: Iterable[Group], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": MOMENTUM, "weight_decay": 0.0, "scaled": True})

    def _change(self, weight: Tensor, gradient: Tensor, group: Group) -> None:
        state, decay = self.state[weight], group["weight_decay"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        rate = group["lr"]
        if group["scaled"]:
            whole, slope = norms(weight, gradient)
            rate *= whole / (slope + decay * whole) if whole > 0 and slope > 0 else 1.0
        update = gradient + decay * weight
        weight.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(update, alpha=rate))


def norms(*tensors: Tensor) -> tuple[float, ...]:
    """Returns the Euclidean norms of whole tensors, of which a process may hold a share."""
    return tuple(float(full(torch.linalg.vector_norm(each))) for each in tensors)


SCALED: Mapping[OptimizerName, type[Lamb | Lars]] = {"lamb": Lamb, "lars": Lars}
"""The optimizers whose steps are in proportion to the weights."""


def parameter_groups(module: nn.Module, weight_decay: float) -> list[Group]:
    """Returns the parameter groups: matrices with weight decay; biases, those of stacked experts too, norms and scalars without.

    Sharded parameters are in separate groups, one for each mesh of processes, because a fused optimizer step cannot mix them.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((_is_free(name, parameter), getattr(parameter, "device_mesh", None)), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda entry: entry[0][0])
    return [{"params": members, "weight_decay": 0.0 if free else weight_decay} for (free, _), members in ordered]


def _is_free(name: str, parameter: Tensor) -> bool:
    """Whether a weight is neither decayed nor scaled: a bias, a norm or a scalar. A bias of each expert is a matrix."""
    return parameter.ndim <= 1 or name.endswith("_bias")


def optimizer_of(settings: Optimizer, trained: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """Returns the optimizer of all trainable parameters of a module."""
    groups = parameter_groups(trained, weight_decay)
    if settings.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=learning_rate)
    if settings.name == "adamw8bit":
        return AdamW8bit(groups, learning_rate)
    if settings.name in SCALED:
        free = {id(weight) for name, weight in trained.named_parameters() if _is_free(name, weight)}
        return SCALED[settings.name](
            [{**group, "scaled": not any(id(weight) in free for weight in group["params"])} for group in groups], learning_rate
        )
    # the fused step is there on CPUs, CUDA and all else that we train on
    return torch.optim.AdamW(groups, lr=learning_rate, fused=True)


def moments_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Entry]:
    """Returns an optimizer's state of a weight for a checkpoint, by name; `load_state_dict` takes the same."""
    if isinstance(optimizer, AdamW8bit):
        return optimizer.moments(weight)
    return {name: Entry.of(value) for name, value in optimizer.state.get(weight, {}).items()}


def check_optimizer(settings: Optimizer, team: Team, key: str) -> None:
    """Raises an `InputError` if an optimizer does not run on some processes."""
    if settings.name == "adafactor" and team.without_pipeline.shards:  # stages have whole weights
        shared = next((f" without {name}" for name in ("tensor", "experts") if getattr(team, name) > 1), "")
        raise InputError(
            f"{key}.optimizer",
            f"adafactor given with parallel: {{{team.settings}}}, which divides the rows that it takes means over",
            remedy=f"give adamw, adamw8bit, lamb or lars, or parallel: {{strategy: ddp}}{shared}",
        )


def moment_bytes(name: OptimizerName, parameters: Iterable[Tensor]) -> int:
    """Returns the bytes of an optimizer's state; of the steps that it counts nothing.

    Args:
        name: The optimizer.
        parameters: What it trains.
    """
    if name == "adamw8bit":
        return sum(bytes_of(parameter.numel()) for parameter in parameters)
    if name != "adafactor":
        return (4 if name == "lars" else 8) * sum(parameter.numel() for parameter in parameters)
    sizes = ((parameter.shape, parameter.numel()) for parameter in parameters)
    return 4 * sum(number // shape[-1] + number // shape[-2] if len(shape) > 1 else number for shape, number in sizes)
