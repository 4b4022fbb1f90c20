"""Sharded models (`fully_shard`): shards are made and gathered, and the gradient norm is computed.

A weight is sharded over the processes of a mesh as a DTensor. `shard` gathers a block only while it runs; `skeleton` and `unshard` make the
plain model again, in place, with the weights that training has changed.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    offload: bool = False,
    mesh: DeviceMesh | None = None,
    without: Collection[nn.Parameter] = (),
) -> nn.Module:
    """Shards the weights of a model over all processes, in place; returns the model.

    Args:
        model: The same weights in all processes, on any device.
        blocks: The modules to gather one at a time.
        offload: Whether shards, their gradients and their optimizer state are in host memory.
        mesh: The processes to shard over; of two dimensions the first replicates. Default: all of them.
        without: Weights that stay as they are, on the device.
    """
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
    for scalar in scalars:
        scalar.data = scalar.data.to(device)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, ignored_params={*scalars, *without}, offload_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # the sum over processes, not the mean
        module.set_force_sum_reduction_for_comms(True)  # the only reduction that gloo supports
    return model


def skeleton(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose parameters take no memory (meta device); `unshard` fills it."""
    import torch
    from torch import nn

    empty = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, dict(empty))


def unshard(model: nn.Module, plain: nn.Module, whole: Callable[[str, Tensor], Tensor] | None = None) -> None:
    """Turns a sharded model back into a plain one with the current weights, in place and in every process.

    Args:
        model: Result of `shard`. The object stays the same; its modules become the modules of `plain`.
        plain: The `skeleton` of the model, taken before sharding.
        whole: Returns the whole tensor of a name in the model; default: `full`.
    """
    from torch import nn

    weights, made = dict(model.named_parameters(remove_duplicate=False)), dict[int, nn.Parameter]()
    for name, parameter in list(plain.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:  # tied weights stay one
            value = weights[name].detach()
            made[id(parameter)] = nn.Parameter(whole(name, value) if whole else full(value), requires_grad=parameter.requires_grad)
        owner, _, child = name.rpartition(".")
        setattr(plain.get_submodule(owner), child, made[id(parameter)])
    for name, buffer in model.named_buffers():
        owner, _, child = name.rpartition(".")
        setattr(plain.get_submodule(owner), child, whole(name, buffer) if whole else full(buffer))
    plain.train(model.training)
    model.__class__ = type(plain)
    model.__dict__ = plain.__dict__


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a shard of a tensor."""
    distributed = sys.modules.get("torch.distributed.tensor")  # without it there are none, and importing it takes a second
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def full(tensor: Tensor) -> Tensor:
    """Returns the whole tensor; for a sharded tensor all processes must call it."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole


def sharded_like(reference: Tensor, whole: Tensor) -> Tensor:
    """Returns `whole` sharded like a sharded `reference` of the same shape, else `whole` itself."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(reference, DTensor) or reference.shape != whole.shape:
        return whole
    mesh = reference.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, reference.placements, src_data_rank=None).to(reference.device)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales all gradients, sharded or not, to a total norm of at most `max_norm`, in place; returns the norm before.

    Whole gradients are the same in all processes. Of the others each process adds what it holds, divided by the number of processes that
    hold the same: one sum over all processes, however the parameters are divided.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = torch.zeros(2, dtype=torch.float64)  # of whole and of divided gradients
    for gradient in gradients:
        divided = isinstance(gradient, DTensor)
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        squares[int(divided)] += float(torch.linalg.vector_norm(own)) ** 2 / (_copies(gradient) if divided else 1)
    dist.all_reduce(squares[1:])
    norm = math.sqrt(float(squares.sum()))
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        for gradient in gradients:
            gradient.mul_(scale)
    return norm


def _copies(tensor: Any) -> int:
    """Returns the number of processes that hold the same part of a sharded tensor."""
    import torch.distributed as dist

    mesh = tensor.device_mesh
    assert not any(placement.is_partial() for placement in tensor.placements), tensor.placements
    shards: list[int] = [mesh.size(i) for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return int(dist.get_world_size()) // math.prod(shards)
