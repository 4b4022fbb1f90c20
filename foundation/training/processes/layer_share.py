"""One process's share of a layer, and the sums between processes.

    columns   the outputs are shared: W_p [O / P, I]. Every process reads the whole input, and has its outputs.
    rows      the inputs are shared: W_p [O, I / P]. Every process reads its inputs; outputs are summed, and the bias is added once.

A plain `nn.Linear` is left to torch (`ColwiseParallel`, `RowwiseParallel`). Column layers that read one tensor, such as queries, keys and
values, read it once (`ReadOnce`): their gradients are added in each process, and then summed over processes by one message.

The two matrices of an adapter are left to torch too:

    y = x @ W.T + (alpha / r) * (x @ A.T) @ B.T        columns: W, B by outputs, A whole;   rows: W, A by inputs, B whole

A layer with arithmetic of its own (`SharesItself`) cuts its tensors itself and calls two sums. With a loss L that all processes compute:

    read(v)    v itself; its gradient is the sum over processes of what each adds to dL/dv. For everything that is whole while the layer
               uses it with a part of its weight: Megatron's f (https://arxiv.org/abs/1909.08053, section 3).
    total(v)   the sum over processes, of integers exactly; without a gradient, because layers that call it write their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from foundation.machine.sharding import is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

LINEAR = {"weight": 0, "bias": 0}, {"weight": 1}
ADAPTED = {"base_layer.weight": 0, "base_layer.bias": 0, "lora_B.default.weight": 0}, {"base_layer.weight": 1, "lora_A.default.weight": 1}
"""Tensors of `nn.Linear`, and of such a layer with an adapter of peft: those with an axis of outputs, and those with an axis of inputs."""


@dataclass(frozen=True)
class LayerShare:
    """The share of one process in a layer."""

    mesh: DeviceMesh
    """The processes that share it, of one dimension."""
    columns: bool
    """Whether outputs are shared; else inputs."""

    @property
    def processes(self) -> int:
        """Number of processes that share the layer."""
        return int(self.mesh.size())

    def read(self, whole: Tensor) -> Tensor:
        """Returns a tensor that is equal in all processes; in the backward pass its gradients are summed over them."""
        found: Tensor = _Read.apply(whole, self.mesh.get_group())  # type: ignore[no-untyped-call]
        return found

    def total(self, part: Tensor) -> Tensor:
        """Returns the sum over processes, without a gradient; `part` stays as it is, because activation checkpointing may keep it."""
        import torch.distributed as dist

        whole = part.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=self.mesh.get_group())
        return whole

    def cut(self, layer: nn.Module, axes: Mapping[str, int]) -> None:
        """Replaces tensors of a layer by sharded ones, in place.

        Args:
            layer: The layer; the same in all processes.
            axes: The axis that is shared, by name of the parameter or buffer.
        """
        from torch.distributed.tensor import Shard, distribute_tensor

        for name, axis in axes.items():
            owner, child = owner_of(layer, name)
            value = getattr(owner, child)
            if value is None:
                continue
            part = distribute_tensor(value.detach(), self.mesh, [Shard(axis)], src_data_rank=None)  # all processes have the same
            if isinstance(value, nn.Parameter):
                owner.register_parameter(child, nn.Parameter(part, requires_grad=value.requires_grad))
            else:
                owner.register_buffer(child, part)


class _Read(torch.autograd.Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup | None) -> Tensor:
        """Returns a view of the tensor."""
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of the gradients, and None for the group."""
        import torch.distributed as dist

        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class ReadOnce:
    """Lets plain column layers that read the same tensor turn it into a DTensor together, whose gradient is summed over processes once.

    Args:
        mesh: The processes that share the layers, of one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._seen: tuple[Tensor, Tensor] | None = None

    def attach(self, columns: Sequence[nn.Module], row: nn.Module) -> None:
        """Registers it with column layers, before what torch's style does to their inputs, and with the row layer behind them."""
        for column in columns:
            column.register_forward_pre_hook(self._read, prepend=True)
        row.register_forward_pre_hook(self._forget)

    def _read(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        from torch.distributed.tensor import DTensor, Replicate

        whole, *rest = inputs
        if self._seen is None or self._seen[0] is not whole:
            self._seen = whole, DTensor.from_local(whole, self._mesh, [Replicate()], run_check=False)
        return self._seen[1], *rest

    def _forget(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen = None


@runtime_checkable
class SharesItself(Protocol):
    """A layer with arithmetic of its own that several processes can share."""

    def axes(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Returns the axis of outputs, and the axis of inputs, of the tensors that have one, by name."""

    def share(self, share: LayerShare) -> None:
        """Cuts the tensors of the layer to the shard of one process, in place."""


def shared_axes(layer: nn.Module) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Returns the axis of outputs, and the axis of inputs, of the tensors of a layer that have one, by name."""
    if isinstance(layer, SharesItself):
        return layer.axes()
    return ADAPTED if is_adapted(layer) else LINEAR


def styles_of(layer: nn.Module, columns: bool) -> dict[str, ParallelStyle]:
    """Returns torch's sharding style for each part of a plain or adapted layer, by the name of the part; "" for the layer itself."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    style = ColwiseParallel if columns else RowwiseParallel
    if not is_adapted(layer):
        return {"": style()}
    return {".base_layer": style(), ".lora_B.default" if columns else ".lora_A.default": style()}


def is_adapted(layer: nn.Module) -> bool:
    """Whether a layer has an adapter of peft."""
    return hasattr(layer, "base_layer")


def plain(layer: nn.Module) -> nn.Module:
    """Returns an `nn.Linear` without values (meta device) of the sizes of a linear layer of any kind; other modules stay as they are."""
    inside = getattr(layer, "base_layer", layer)
    if not isinstance(inside, nn.Linear) or type(layer) is nn.Linear:
        return layer
    return nn.Linear(inside.in_features, inside.out_features, bias=inside.bias is not None, device="meta")


def local(tensor: Tensor) -> Tensor:
    """Returns this process's shard of a tensor: the tensor itself if it is not divided."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    part: Tensor = sharded.to_local()
    return part


def owner_of(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module inside a layer that has a parameter or buffer of this name, and its name there."""
    owner, _, child = name.rpartition(".")
    return layer.get_submodule(owner), child
