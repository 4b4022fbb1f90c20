"""Training in several processes: the process group, and its collectives; models that they hold in shards: `foundation.machine.sharding`.

    torchrun --nproc_per_node=2 $(which compress) run recipe.yaml

A launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT starts the processes. torch.distributed connects them: gloo
between CPUs, NCCL between GPUs (one GPU per process). Every process runs the same pipeline. Process 0 decides, writes and prints. The
others take part in the stages that train in parallel and wait during all other stages, without a timeout and without spinning (gloo).
Whether all of them have come, and are still there, is `foundation.machine.lifeline`.

    rows      each batch is dealt out round-robin, rows that belong together as one; a process sums loss_b / B over its rows, where B is the
              number of rows of the whole batch. Losses that compare rows gather them (`foundation.training.processes.gathered`)
    gradient  the sum over processes, equal to the gradient of a single process up to the order of addition
    dropout   on CPUs, where rows are all that is shared, as in a single process (`foundation.training.processes.row_draws`);
              else independent in every process, seeded by (seed, rank)

    ddp    Every process holds the model and the optimizer; gradients are summed while backward runs (`DistributedDataParallel` around the
           whole step, see `foundation.training.processes.engine`).
    fsdp2  Every process holds a shard of each weight and of its optimizer state; a block is gathered only while it runs
           (`torch.distributed.fsdp.fully_shard`, https://arxiv.org/abs/2304.11277; blocks are wrapped first, then the whole model).
           Scalars, such as a learned scale, cannot be sharded and stay whole. With `offload` shards, their gradients and their optimizer
           state are in host memory (`CPUOffloadPolicy`).
    tensor Neighbouring processes share each layer (`foundation.training.processes.division`) and work on the same rows; the others
           are dealt out. Processes 0 1 | 2 3 with tensor 2: the mesh of torch is [data 2, tensor 2]. Between such groups the strategy
           holds. `ddp` is `fully_shard` on a mesh [data, 1] then: it replicates over data, and its all-reduce knows parameters that are
           divided already, which `DistributedDataParallel` does not.
    sequence  Those processes share the tokens of each row between the layers too (`foundation.models.architecture.sequence`).
    context  Neighbouring processes share the tokens of each row (`foundation.models.architecture.context`) and hold whole layers; each
             takes a part of the loss, so that `ddp` and `fsdp2` work over all processes as if every one had rows of its own.
    experts  Neighbouring processes spread the experts of a mixture (`foundation.models.layers.expert_parallel`) and have rows of their
             own. All else is as with `ddp` or `fsdp2`.
    pipeline  Neighbouring processes hold consecutive blocks (`foundation.training.processes.pipeline`) and work on the same rows; the
           others are distributed, only by `ddp`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

from foundation.machine.faults import FailedElsewhere, Fault, is_lost
from foundation.machine.lifeline import JOIN_S, WATCHED, Lifeline, end_here, join, wait_for_first

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Strategy = Literal["ddp", "fsdp2"]
FOREVER = timedelta(days=365)
"""Timeout of a collective: process 0 may export and serve for hours while the others wait."""
LINE_BYTES = 64
"""A cache line of the processor."""
T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The processes of this run, as seen by one of them. A run without a launcher is a team of one."""

    rank: int = 0
    """Index of this process, from 0."""
    size: int = 1
    """Number of processes."""
    strategy: Strategy = "ddp"
    """How training is parallelized."""
    tensor: int = 1
    """Neighbouring processes that share each layer; divides `size`."""
    pipeline: int = 1
    """Neighbouring processes that hold consecutive blocks; divides `size`. One of `tensor` and `pipeline` is 1."""
    sequence: bool = False
    """Whether processes that share each layer share the tokens between layers too."""
    context: int = 1
    """Neighbouring processes that share the tokens of each row; divides `size`. At most one of these three numbers is not 1."""
    experts: int = 1
    """Neighbouring processes that spread the experts of a mixture; divides `size`. If it is not 1, the three numbers are."""
    lifeline: Lifeline | None = field(default=None, compare=False, repr=False)
    """The lines to the other processes; None in a team of one."""

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which decides, writes and prints."""
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Whether each process holds only a part of the model."""
        return self.size > 1 and (self.strategy == "fsdp2" or self.tensor > 1 or self.pipeline > 1 or self.experts > 1)

    @property
    def runs_together(self) -> bool:
        """Whether a process alone cannot run the model, because it has a part of it or of its tokens."""
        return self.shards or (self.size > 1 and self.context > 1)

    @property
    def settings(self) -> str:
        """The settings of the section `parallel` that divide the model, as text."""
        if self.pipeline > 1:
            return f"pipeline: {self.pipeline}"
        if self.context > 1:
            return f"context: {self.context}"
        if self.experts > 1:
            return f"experts: {self.experts}"
        shared = f"tensor: {self.tensor}{', sequence: true' * self.sequence}"
        return shared if self.tensor > 1 else f"strategy: {self.strategy}"

    @property
    def plan(self) -> str:
        """How the processes work, in short."""
        if self.pipeline > 1:
            return f"{self.strategy}, pipeline {self.pipeline}"
        if self.context > 1:
            return f"{self.strategy}, context {self.context}"
        if self.experts > 1:
            return f"{self.strategy}, experts {self.experts}"
        shared = f"{self.strategy}, tensor {self.tensor}{' with sequence' * self.sequence}"
        return shared if self.tensor > 1 else str(self.strategy)

    @property
    def model_parallel_size(self) -> int:
        """Neighbouring processes that run one model together, and take the same rows."""
        return self.tensor * self.pipeline * self.context

    @property
    def data_rank(self) -> int:
        """Index of the rows that this process takes; those that hold one model together take the same ones."""
        return self.rank // self.model_parallel_size

    @property
    def data_size(self) -> int:
        """Number of shares that the rows of a batch are dealt out in."""
        return self.size // self.model_parallel_size

    @property
    def stream(self) -> int:
        """Index of the random numbers that this process draws; processes that share layers or tokens draw the same ones."""
        return self.rank // self.replicas

    @property
    def replicas(self) -> int:
        """Neighbouring processes that compute the same outside of blocks."""
        return self.tensor * self.context

    @property
    def without_pipeline(self) -> Team:
        """The processes of a pipeline, as they work on a model that each of them has whole, such as a teacher; else the same team."""
        return replace(self, pipeline=1)

    @property
    def tensor_rank(self) -> int:
        """Index of the part of each layer that this process holds."""
        return self.rank % self.tensor

    @property
    def context_rank(self) -> int:
        """Index of the tokens of each row that this process has."""
        return self.rank % self.context

    @property
    def expert_rank(self) -> int:
        """Index of the experts that this process has."""
        return self.rank % self.experts

    @property
    def pipeline_rank(self) -> int:
        """Index of the stage that this process holds."""
        return self.rank % self.pipeline

    def mesh(self) -> DeviceMesh:
        """Returns the mesh of a team whose processes run a model together; all processes must call it.

        Its dimensions are data, one and tensor where they share layers, data and stage where they are a pipeline, data and context where
        they share tokens, replica and expert where they spread experts.
        """
        import torch.distributed as dist

        if self.pipeline > 1:
            return _mesh(dist.group.WORLD, (self.data_size, self.pipeline), ("data", "stage"))
        if self.context > 1:
            return _mesh(dist.group.WORLD, (self.data_size, self.context), ("data", "context"))
        if self.experts > 1:
            return _mesh(dist.group.WORLD, (self.size // self.experts, self.experts), ("replica", "expert"))
        return _mesh(dist.group.WORLD, (self.data_size, 1, self.tensor), ("data", "one", "tensor"))

    def data_group(self) -> ProcessGroup | None:
        """Returns the process group of those that have the same part of the model, or of its tokens; None for all processes."""
        return self.mesh()["data"].get_group() if self.model_parallel_size > 1 else None

    def gradient_group(self) -> ProcessGroup | None:
        """Returns the process group over which gradients are summed; None for all processes."""
        return None if self.context > 1 else self.data_group()

    def broadcast(self, value: T) -> T:
        """Returns process 0's value (JSON types) in every process; all processes must call it."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0)
        data = data if self.is_first else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0)
        received: T = json.loads(data.numpy().tobytes())
        return received

    def broadcast_object(self, value: T) -> T:
        """Returns process 0's value in every process; all must call it. Unlike `broadcast` it takes all that can be pickled."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        box = [value if self.is_first else None]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return cast("T", box[0])

    def share(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns this process's rows of a batch: every `data_size`-th, so that each process gets long and short rows."""
        return indices[self.data_rank :: self.data_size]

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns the sum of each value over the shares of the rows; processes that hold one model together have the same values."""
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(self._once(sums))
        found: list[float] = sums.tolist()
        return found

    def add(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the shares of the rows, in place; returns it."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(self._once(tensor))
        return tensor

    def _once(self, tensor: Tensor) -> Tensor:
        """Sets a tensor to 0, in place, in all but one of the processes that have the same one; returns it."""
        return tensor.zero_() if self.rank % self.model_parallel_size else tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all processes, in order of rank; all must be on the CPU and have the same shape."""
        if self.size == 1:
            return [tensor]
        import torch
        import torch.distributed as dist

        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor)
        return found

    def spread(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of process 0 with their names, one at a time; the arguments of the other processes are ignored."""
        if self.size == 1:
            yield from tensors.items()
            return
        import torch

        shapes = self.broadcast([(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in tensors.items()])
        for name, dtype, shape in shapes:
            value = tensors[name].contiguous() if self.is_first else torch.empty(shape, dtype=getattr(torch, dtype))
            copy_from(value)
            yield name, value

    def align(self, module: nn.Module) -> None:
        """Copies the weights of process 0 to all processes, in place, into memory that is aligned alike (`own_lines`).

        Raises:
            RuntimeError: The model of some process has different tensors or shapes.
        """
        if self.size == 1:
            return
        own_lines(module)
        state = module.state_dict()
        shapes = [[name, list(value.shape)] for name, value in state.items()]
        if self.broadcast(shapes) != shapes:
            raise RuntimeError(f"process {self.rank}: its model has other tensors or shapes than the model of process 0")
        for value in state.values():
            whole = value.contiguous()
            copy_from(whole)
            value.copy_(whole)


ALONE = Team()


def own_lines(module: nn.Module) -> None:
    """Moves tensors that do not begin at a cache line to memory that does, as all memory from torch does.

    A matrix product on a CPU adds in an order that depends on the alignment of its inputs, and weights from a file have any alignment.
    Processes that each hold a copy of a weight would compute gradients that differ in the last bits, and the copies would drift apart.
    """
    moved: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        place = tensor.data_ptr(), tuple(tensor.shape)
        if place[0] % LINE_BYTES:
            if place not in moved:
                moved[place] = tensor.data.clone()
            tensor.data = moved[place]  # tied weights that are two objects stay tied


def is_launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def leave(status: int) -> NoReturn:
    """Ends one of several processes at once, without Python's usual shutdown.

    During shutdown the threads of torch.distributed may outlive the objects they use. The process then sometimes aborts after all of its
    work is done, and the launcher reports the run as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def joined(ends: Callable[[str | None], Any] = end_here) -> Iterator[Team]:
    """Connects this process, for the duration of the block, with the others that the launcher started.

    Args:
        ends: Ends this process at once, after it has reported a line, if there is one: where its main thread waits for a process that is
            gone.

    Raises:
        FailedElsewhere: Another process failed first, and this is reported.
        Fault: Not all processes have come, or others are gone.
    """
    if not is_launched():
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, size)
    lifeline = join(store, rank, size, os.environ["MASTER_ADDR"], ends)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=size, timeout=FOREVER
        )
        yield Team(rank, size, lifeline=lifeline)
    except BaseException as error:
        elsewhere = _is_reported_elsewhere(error, store, lifeline)
        lifeline.failed()
        if elsewhere:
            raise FailedElsewhere from error
        raise
    finally:
        lifeline.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(rank: int, size: int) -> Any:
    """Returns the store by which processes find each other: of process 0, or of the launcher.

    Raises:
        Fault: It cannot be reached.
    """
    import torch.distributed as dist

    distributed: Any = dist  # whose stubs leave the store out
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        wait_for_first(host, port)
    try:  # by itself it would wait for all processes, and name none; `join` counts them
        return distributed.TCPStore(host, port, size, serves, timedelta(seconds=JOIN_S), wait_for_workers=False)
    except distributed.DistNetworkError as error:
        what = f"cannot serve at {host}:{port}" if serves else f"cannot reach the store at {host}:{port}"
        raise Fault(f"process {rank} {what} ({str(error).splitlines()[0]}); give another MASTER_PORT, or start it again") from error


def _is_reported_elsewhere(error: BaseException, store: Any, lifeline: Lifeline) -> bool:
    """Whether somebody else says why the run ends: the process that failed first, or the one that watches a process that was ended.

    A lost connection is not reported to the store: it may be gone with process 0, and torch writes a trace of its own about that.

    Raises:
        Fault: Processes are gone, and this one reports it.
    """
    if is_lost(error) and WATCHED in os.environ:
        return True
    # other errors of a collective follow from a lost process too, if one is known by now
    end = lifeline.why() if is_lost(error) else lifeline.why(0.0) if isinstance(error, RuntimeError) else None
    if end is not None and end.line is not None:
        raise Fault(end.line) from error
    if end is not None:
        return True
    try:
        failed: int = store.add("failed", 1)
    except RuntimeError:  # the store is gone with process 0: it failed and said why, or it was ended
        end = lifeline.why()
        return end is not None and end.line is None
    return failed > 1


@functools.lru_cache(maxsize=4)
def _mesh(world: ProcessGroup | None, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Returns the mesh of a process group, for which it makes groups once."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    # a weight that is gathered over data and tensor takes two steps, which torch advises against each time
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, shape, mesh_dim_names=names)


def copy_from(tensor: Tensor, source: int = 0, group: ProcessGroup | None = None) -> None:
    """Overwrites a contiguous tensor with the tensor of one process, in all processes of a group, which all must call it.

    Args:
        tensor: A tensor of the same shape and dtype in each of them.
        source: Rank of the process among all.
        group: The process group; None: all processes.
    """
    import torch.distributed as dist

    if tensor.numel():
        dist.broadcast(as_bytes(tensor), source, group=group)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor as uint8 `[bytes]`, in the same memory: in this form every back end sends it."""
    import torch

    return tensor.view(-1).view(torch.uint8) if tensor.ndim else tensor.view(1).view(torch.uint8)
