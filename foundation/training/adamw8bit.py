"""AdamW with moments of 8 bits.

The update is AdamW's (https://arxiv.org/abs/1711.05101). Between two steps the moments of a weight are in blocks of 256 entries, each with
a float32 scale and a code of 8 bits for every entry:

    m = s_m * signed[c_m],   v = s_v * unsigned[c_v]        s: the largest |entry| of the block, c: the nearest level
    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2       in float32; the step uses these, and then they are rounded
    w <- w - lr * decay * w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

The levels follow dynamic tree quantization: seven decades below 1, each with twice as many levels as the one below, so that a small
entry next to a large one keeps a small relative error.

Source: Dettmers et al. 2022, https://arxiv.org/abs/2110.02861, sections 2 and 3; blocks of 256 and float moments of weights with fewer than
4096 entries as in the authors' library bitsandbytes. Differences:

    signed levels     are symmetric and end at 1, where the authors have 1 but not -1. A block that is rounded twice has the same codes
                      and scale: a checkpoint holds float32 moments as for AdamW, which any number of processes can divide anew, and a
                      resumed training with the same ones has the same bits.
    unsigned levels   have no 0. A v that is rounded to 0 next to an m that is not would make steps of 1 / sqrt(1 - b2) = 32 times their
                      length; rounded to the least level it makes shorter ones (Li et al. 2023, https://arxiv.org/abs/2309.01507,
                      section 4.1).

torchao has this optimizer too. It compiles a kernel for each shape of a weight when the first step is taken, which on a CPU needs a C++
compiler and minutes, and its moments are a tensor type that can be divided only at the ends of blocks.

Left out: embeddings that keep float moments, and their norm, which the authors advise for pretraining.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from foundation.machine.sharding import is_sharded
from foundation.training.each_weight import EachWeight, Group
from foundation.training.processes.layer_share import local
from foundation.training.state import Entry

BETAS = 0.9, 0.999
EPS = 1e-8
BLOCK = 256
"""Entries that share a scale."""
FEWEST = 4096
"""Entries of the smallest weight whose moments are rounded."""
CHUNK = 2**20
"""Entries that are updated at once: what is float32 meanwhile takes some MB, however large the weight."""
DECADES = 7
CPU = torch.device("cpu")
MOMENTS = "exp_avg", "exp_avg_sq"
"""Names of m and v, in checkpoints too."""


@functools.cache
def levels(signed: bool, device: torch.device = CPU) -> Tensor:
    """Returns the levels from 0 to 1 that have a code, float32, ascending: 128 for magnitudes of m, 255 above 0 for v."""
    found = [torch.zeros(1)] if signed else []
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        found.append((10.0 ** (decade - DECADES + 1) * (edges[:-1] + edges[1:]) / 2).float())
    if signed:
        found[-1][-1] = 1.0
    else:
        found.append(torch.ones(1))
    return torch.cat(found).to(device)


def rounded(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of a moment.

    Args:
        values: float32 `[n]`.
        signed: Whether it is m; v has no sign.

    Returns:
        Codes `[n]`, int8 from -127 to 127 if signed, else uint8, and scales float32 `[ceil(n / 256)]`.
    """
    known, blocks = levels(signed, values.device), -(-len(values) // BLOCK)
    padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - len(values))).view(blocks, BLOCK)
    scales = padded.abs().amax(dim=1)
    relative = padded.abs() / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(relative, (known[1:] + known[:-1]) / 2).view(-1)[: len(values)]
    return (codes * values.sign()).to(torch.int8) if signed else codes.to(torch.uint8), scales


def restored(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the moment of codes and scales, float32 `[n]`; the inverse of `rounded` up to rounding."""
    signed = codes.dtype == torch.int8
    values = levels(signed, codes.device)[codes.int().abs()]
    values = values * codes.sign() if signed else values
    return values * scales.repeat_interleave(BLOCK)[: len(codes)]


class AdamW8bit(EachWeight):
    """AdamW with moments of 8 bits, see the top of this file.

    Weights may be divided: each process has the moments of its part.

    Args:
        groups: Parameter groups with `weight_decay`.
        lr: Learning rate.
    """

    def __init__(self, groups: Iterable[Group], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": 0.0})

    def _change(self, weight: Tensor, gradient: Tensor, group: Group) -> None:
        state, (b1, b2) = self.state[weight], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            self._keep(weight, {name: torch.zeros_like(local(weight)) for name in MOMENTS})
        state["step"] += 1
        t, w, g = float(state["step"]), local(weight).view(-1), local(gradient).reshape(-1)
        for place, blocks in _chunks(len(w)):
            m, v = (self._moment(weight, name, place, blocks) for name in MOMENTS)
            m.lerp_(g[place], 1 - b1)
            v.mul_(b2).addcmul_(g[place], g[place], value=1 - b2)
            self._set(weight, "exp_avg", m, place, blocks)
            self._set(weight, "exp_avg_sq", v, place, blocks)
            root = (v / (1 - b2**t)).sqrt_().add_(group["eps"])
            w[place].mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(m, root, value=-group["lr"] / (1 - b1**t))

    def _moment(self, weight: Tensor, name: str, place: slice, blocks: slice) -> Tensor:
        """Returns a copy of some entries of a moment, float32 `[n]`."""
        state = self.state[weight]
        if f"{name}_scale" not in state:
            kept: Tensor = state[name][place]
            return kept.clone()
        return restored(state[name][place], state[f"{name}_scale"][blocks])

    def _set(self, weight: Tensor, name: str, values: Tensor, place: slice, blocks: slice) -> None:
        state = self.state[weight]
        if f"{name}_scale" in state:
            state[name][place], state[f"{name}_scale"][blocks] = rounded(values, state[name].dtype == torch.int8)
        else:
            state[name][place] = values

    def _keep(self, weight: Tensor, moments: dict[str, Tensor]) -> None:
        """Keeps moments, float32 of the shape of what this process has of a weight."""
        state = self.state[weight]
        for name, values in moments.items():
            flat = values.reshape(-1)
            if weight.numel() < FEWEST:
                state[name] = flat.clone()
            else:
                state[name], state[f"{name}_scale"] = rounded(flat, signed=name == "exp_avg")

    def moments(self, weight: Tensor) -> dict[str, Entry]:
        """Returns the state for a checkpoint: `step`, and the moments as float32 of the shape of the weight, divided as it is."""
        if weight not in self.state:
            return {}
        found = {name: Entry(torch.float32, weight.shape, functools.partial(self._whole, weight, name)) for name in MOMENTS}
        return {"step": Entry.of(self.state[weight]["step"]), **found}

    def _whole(self, weight: Tensor, name: str) -> Tensor:
        everything = slice(None)
        return _divided_like(weight, self._moment(weight, name, everything, everything).view(local(weight).shape))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `moments` returned for each weight."""
        super().load_state_dict(state_dict)
        for weight, state in self.state.items():
            self._keep(weight, {name: local(state.pop(name)) for name in MOMENTS})


def _chunks(size: int) -> Iterator[tuple[slice, slice]]:
    """Yields pieces of `size` entries, and the blocks that they are made of."""
    for start in range(0, size, CHUNK):
        yield slice(start, min(size, start + CHUNK)), slice(start // BLOCK, (start + CHUNK) // BLOCK)


def _divided_like(weight: Tensor, values: Tensor) -> Tensor:
    """Returns values of one process as a tensor that is divided like a weight."""
    if not is_sharded(weight):
        return values
    from torch.distributed.tensor import DTensor

    like: Any = weight
    found: Tensor = DTensor.from_local(values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    return found.to(weight.device)  # with offload the mesh has another device


def bytes_of(number: int) -> int:
    """Returns the bytes of both moments of a weight with `number` entries."""
    return 8 * number if number < FEWEST else 2 * number + 8 * -(-number // BLOCK)
