"""How a model is divided among the processes of a training, and put together again.

    tensor > 1   neighbouring processes share each layer (`compress.models.architecture.split`), by `parallelize_module` of
                 torch.distributed.tensor.parallel: weights become DTensors of the mesh dimension `tensor`
    fsdp2        `fully_shard` then shards every weight, or every share of one, over the mesh dimension `data`
    ddp          nothing more in one group of processes. Between several, `fully_shard` on a mesh [data, 1] replicates: it sums gradients
                 over data and knows DTensors.

Processes that share each layer have the same rows, and draw the same dropout where activations are whole. Within a share, between column
and row layers, each draws its own: otherwise heads of different processes would lose the same entries. The random state is put aside there
and continued afterwards, as Megatron's random tracker does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.core.target import Parallel
from compress.machine.device import computing_device
from compress.machine.parallel import Team, full, shard, sharded_like, skeleton, unshard
from compress.models.architecture.blocks import blocks_of
from compress.models.architecture.shapes import set_counts
from compress.models.architecture.split import Split, split_of


@dataclass(frozen=True)
class Division:
    """A model that was divided."""

    model: nn.Module
    plain: nn.Module | None
    """The `skeleton` of the model before; None if it is whole."""
    orders: Mapping[str, Tensor]
    """Order of the rows of weights in which shares are contiguous, by name of the weight."""

    def whole(self, name: str, value: Tensor) -> Tensor:
        """Returns the whole of a weight, or of something of its shape, in the order of the model; all processes must call it.

        Args:
            name: Name of the weight in the model.
            value: It as this process has it.
        """
        gathered = full(value)
        order = self.orders.get(name)
        return gathered if order is None or not gathered.ndim else gathered[order.to(gathered.device).argsort()]

    def part(self, name: str, like: Tensor, whole: Tensor) -> Tensor:
        """Returns what a process has of `whole`: the inverse of the method `whole`.

        Args:
            name: Name of the weight in the model.
            like: The weight, divided.
            whole: It, or something of its shape; other shapes stay as they are.
        """
        order = self.orders.get(name)
        return sharded_like(like, whole if order is None or not whole.ndim else whole[order.to(whole.device)])

    def collected(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns entries of a checkpoint whole, by name; all processes must call it."""
        return tensors if self.plain is None else {name: self.whole(in_model(name), value).cpu() for name, value in tensors.items()}

    def holds(self, entry: str) -> bool:
        """Whether this process has a part of an entry of a checkpoint."""
        return True

    def undo(self) -> None:
        """Makes the model whole again in every process, with its current weights; the object stays the same."""
        if self.plain is not None:
            unshard(self.model, self.plain, self.whole)


def divided(model: nn.Module, team: Team, parallel: Parallel, key: str, share: bool = True) -> Division:
    """Divides a model among the processes of a team that shards, in place; on the device afterwards.

    Args:
        model: The same weights in all processes; on the CPU where it would not fit on a device.
        team: The processes.
        parallel: The section of the recipe.
        key: Key path in the recipe, for messages.
        share: Whether processes may share its layers; without, it is whole in each group of them, or sharded over data.

    Raises:
        InputError: The layers cannot be shared; see `compress.models.architecture.split.split_of`.
    """
    if not team.whole.shards:
        return Division(model, None, {})
    plain, orders = skeleton(model), dict[str, Tensor]()
    blocks = list(blocks_of(model, key).values())
    if team.tensor > 1 and share:
        split = split_of(model, team.tensor, key)
        orders = _reorder(model, split)
        _parallelize(model, split, team)
    if team.strategy == "fsdp2" or (team.data_size > 1 and share):
        mesh = None if team.tensor == 1 else team.mesh()["data"] if team.strategy == "fsdp2" else team.mesh()["data", "one"]
        shard(model, blocks, parallel.offload, mesh)
    else:
        model.to(computing_device())
    return Division(model, plain, orders)


@torch.no_grad()
def _reorder(model: nn.Module, split: Split) -> dict[str, Tensor]:
    """Brings the outputs of layers into an order in which shares are contiguous; returns it by name of the weight."""
    orders: dict[str, Tensor] = {}
    for layer, order in split.orders().items():
        for name, parameter in model.get_submodule(layer).named_parameters(recurse=False):
            parameter.copy_(parameter[order.to(parameter.device)])
            orders[f"{layer}.{name}"] = order
    return orders


def _parallelize(model: nn.Module, split: Split, team: Team) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in split.columns}
    plan |= {name: RowwiseParallel() for name in split.rows}
    parallelize_module(model, team.mesh()["tensor"], plan, src_data_rank=None)  # all processes have the same weights
    for name, counts in split.counts.items():
        set_counts(model.get_submodule(name), counts)
    for first, last in split.regions:
        region = _OwnDropout(team.tensor_rank)
        model.get_submodule(first).register_forward_pre_hook(region.begin)
        model.get_submodule(last).register_forward_pre_hook(region.end)


class _OwnDropout:
    """Gives each process random numbers of its own between a column and a row layer.

    The seed follows from the common state, so that a block that activation checkpointing computes again, or a training that goes on, draws
    the same. That second run may stop before the end of the region, with the state restored by torch; so `begin` does not rely on `end`.

    Args:
        rank: Index of the process among those that share the layer.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.aside: Tensor | None = None

    def begin(self, module: nn.Module, args: Any) -> None:
        """Puts the random state aside and goes on from a seed of this process."""
        if module.training:
            device = args[0].device
            torch.rand((), device=device)  # a step on, or a region without draws before it would begin as the last one did
            self.aside = generator_state(device)
            common = hashlib.blake2b(self.aside.numpy().tobytes(), digest_size=7).digest()  # no number is read back from a GPU
            (torch.cuda if device.type == "cuda" else torch).manual_seed(int.from_bytes(common) + self.rank)

    def end(self, module: nn.Module, args: Any) -> None:
        """Continues with the random state that was put aside."""
        if self.aside is not None:
            set_generator_state(args[0].device, self.aside)
            self.aside = None


def in_model(entry: str) -> str:
    """Returns the name in the model of an entry of a checkpoint, such as `optimizer.exp_avg.0.head.weight`; "" for none of the model."""
    kind, _, name = entry.partition(".")
    name = name.partition(".")[2] if kind == "optimizer" else name
    return name.removeprefix("0.") if name.startswith("0.") else ""  # the second entry of what is trained is the objective


def generator_state(device: torch.device) -> Tensor:
    """Returns the state, on the CPU, of the random generator of dropout."""
    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Sets the state of the random generator of dropout."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
