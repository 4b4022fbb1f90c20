"""Several processes train one model: who is there, what they tell each other, and how a model is divided between them.

    torchrun --nproc_per_node=2 $(which compress) run recipe.yaml

A launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT starts the processes, torch.distributed connects them: gloo
between processors, NCCL between GPUs, one for each process. Every process runs the same pipeline. The first one decides, writes and
prints; the others train along in the stages that train together and wait in all others, without a limit and without spinning (gloo).

    rows      those of a batch are dealt out in turns; each process adds up loss_b / B over its own, B: the rows of the whole batch
    gradient  the sum over processes, so that it is that of one process up to the order of addition
    dropout   of its own in every process, from (seed, rank)

    ddp    every process has the model, optimizer included, and gradients are summed after backward. This is an all-reduce in buckets rather
           than DistributedDataParallel: that one wants one forward of one module before each backward, divides by the number of processes,
           and hides the model behind a wrapper. Distillation calls a student twice, trains projections along, and leaves parts unused.
           What it costs is that communication does not overlap with backward.
    fsdp2  each process holds a share of every weight and of its optimizer state, and a block is put together while it is run:
           `torch.distributed.fsdp.fully_shard` (https://arxiv.org/abs/2304.11277), blocks first, then the rest.

Left out: tensor and pipeline parallelism.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

Strategy = Literal["ddp", "fsdp2"]
FOREVER = timedelta(days=365)
"""The first process may export and serve for hours while the others wait."""
BUCKET_BYTES = 2**25
T = TypeVar("T")


class FailedElsewhere(Exception):
    """Another process of the run failed first, and has said why: nothing is left to say."""


@dataclass(frozen=True)
class Team:
    """The processes of this run, seen from one of them; a run without a launcher is a team of one."""

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """Number of processes."""
    strategy: Strategy = "ddp"
    """How a model is divided."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that decides, writes and prints."""
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Whether a process holds only a share of a model."""
        return self.size > 1 and self.strategy == "fsdp2"

    def tell(self, value: T) -> T:
        """Returns the value (JSON types) that the first process gives; every process has to call it."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0)
        data = data if self.is_first else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0)
        told: T = json.loads(data.numpy().tobytes())
        return told

    def share(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows of a batch that are this process's: every `size`-th, so that each gets long and short ones."""
        return indices[self.rank :: self.size]

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over all processes of some values."""
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found

    def add(self, tensor: Tensor) -> Tensor:
        """Adds up a tensor over all processes, in place; returns it."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all processes, of one shape and on the CPU, by rank."""
        if self.size == 1:
            return [tensor]
        import torch
        import torch.distributed as dist

        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor)
        return found

    def spread(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of the first process by name, one after the other; what others give is not looked at."""
        if self.size == 1:
            yield from tensors.items()
            return
        import torch

        shapes = self.tell([(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in tensors.items()])
        for name, dtype, shape in shapes:
            value = tensors[name].contiguous() if self.is_first else torch.empty(shape, dtype=getattr(torch, dtype))
            _broadcast(value)
            yield name, value

    def align(self, module: nn.Module) -> None:
        """Gives all processes the weights of the first one, in place.

        Raises:
            RuntimeError: A process has a model of other shapes.
        """
        if self.size == 1:
            return
        state = module.state_dict()
        shapes = [[name, list(value.shape)] for name, value in state.items()]
        if self.tell(shapes) != shapes:
            raise RuntimeError(f"process {self.rank} trains a model of other shapes than process 0")
        for value in state.values():
            whole = value.contiguous()
            _broadcast(whole)
            value.copy_(whole)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds up the gradients over all processes, in place; those of shares are summed already.

        A parameter without a gradient in any process keeps none, so that the optimizer leaves it alone as it does in one process.
        """
        if self.size == 1:
            return
        import torch
        from torch.distributed.tensor import DTensor

        plain = [parameter for parameter in parameters if parameter.requires_grad and not isinstance(parameter, DTensor)]
        counts = self.total([float(parameter.grad is not None) for parameter in plain])
        bucket: list[Tensor] = []
        for parameter, count in zip(plain, counts, strict=True):
            if not count:
                continue
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            alike = not bucket or (bucket[0].dtype, bucket[0].device) == (parameter.grad.dtype, parameter.grad.device)
            if not alike or sum(grad.nbytes for grad in bucket) >= BUCKET_BYTES:
                self._sum_bucket(bucket)
                bucket = []
            bucket.append(parameter.grad)
        self._sum_bucket(bucket)

    def _sum_bucket(self, gradients: Sequence[Tensor]) -> None:
        import torch

        if not gradients:
            return
        whole = self.add(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        parts = torch.split_with_sizes(whole, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


ALONE = Team()


def is_launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def leave(status: int) -> NoReturn:
    """Ends one of several processes at once.

    The threads of torch.distributed may still run when Python takes down what they belong to: the process then aborts, now and then, after
    all of its work is done, and the launcher takes that for a failure of the run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def joined() -> Iterator[Team]:
    """Connects this process with the others that a launcher started with it, for as long as the block lasts.

    Raises:
        FailedElsewhere: Another process failed first, and has said why.
    """
    if not is_launched():
        yield ALONE
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=size, timeout=FOREVER
    )
    try:
        yield Team(rank, size)
    except BaseException as error:
        if store.add("failed", 1) > 1:  # the connection to a process that ended, most likely
            raise FailedElsewhere from error
        raise
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, blocks: Iterable[nn.Module]) -> nn.Module:
    """Divides the weights of a model between all processes, in place; returns it.

    Args:
        model: With equal weights in all processes, on any device.
        blocks: The modules that are put together one at a time.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in (*blocks, model):
        fully_shard(module)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # the sum over processes, not the mean
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return model


def without_gradients(model: nn.Module) -> AbstractContextManager[Any]:
    """Returns the block in which to ask a model: `inference_mode`, which a divided one, that keeps tensors in between, cannot bear."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    return torch.no_grad() if isinstance(model, FSDPModule) else torch.inference_mode()


def skeleton(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose parameters take no memory: what `put_together` makes whole again."""
    import torch
    from torch import nn

    empty = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, dict(empty))


def put_together(model: nn.Module, plain: nn.Module) -> None:
    """Turns a divided model into the plain one it was, with the weights it has now, in place and in every process.

    Args:
        model: Of `shard`; the object stays the same, its modules are those of `plain`.
        plain: Its `skeleton`, made before.
    """
    from torch import nn

    weights, made = dict(model.named_parameters(remove_duplicate=False)), dict[int, nn.Parameter]()
    for name, parameter in list(plain.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:  # tied weights stay one
            made[id(parameter)] = nn.Parameter(full(weights[name].detach()), requires_grad=parameter.requires_grad)
        owner, _, child = name.rpartition(".")
        setattr(plain.get_submodule(owner), child, made[id(parameter)])
    for name, buffer in model.named_buffers():
        owner, _, child = name.rpartition(".")
        setattr(plain.get_submodule(owner), child, buffer)
    plain.train(model.training)
    model.__class__ = type(plain)
    model.__dict__ = plain.__dict__


def full(tensor: Tensor) -> Tensor:
    """Returns a tensor as a whole; of a divided one every process has to ask."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole


def divided_like(reference: Tensor, whole: Tensor) -> Tensor:
    """Returns this process's share of a tensor where the reference of the same shape is divided, else the tensor on its device."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(reference, DTensor) or reference.shape != whole.shape:
        return whole
    mesh = reference.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, reference.placements, src_data_rank=None)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales all gradients down to a norm of at most `max_norm`, in place; returns the norm they had, over shares and whole ones."""
    import torch
    from torch.distributed.tensor import DTensor

    gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    divided = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    kinds: tuple[list[Any], ...] = (divided, [gradient for gradient in gradients if not isinstance(gradient, DTensor)])
    norms = [float(full(torch.nn.utils.get_total_norm(kind))) for kind in kinds if kind]
    norm = math.hypot(*norms)
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        for gradient in gradients:
            gradient.mul_(scale)
    return norm


def _broadcast(tensor: Tensor) -> None:
    """Overwrites a contiguous tensor with that of the first process; as bytes, which every back end can send."""
    import torch
    import torch.distributed as dist

    if tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8) if tensor.ndim else tensor.view(1).view(torch.uint8), 0)
