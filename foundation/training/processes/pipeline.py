"""Pipeline parallel training: neighbouring processes hold consecutive blocks of the model, by torch.distributed.pipelining.

    process 0   stage 0: embeddings, first blocks      F0 F1 B0 F2 B1 F3 B2    B3        F, B: forward and backward of a micro-batch
    process 1   stage 1: last blocks, head                F0 B0 F1 B1 F2 B2 F3 B3        1F1B

    1f1b         one stage in each process. At most S - s micro-batches of stage s are between forward and backward (Narayanan et al. 2019,
                 https://arxiv.org/abs/1806.03377)
    interleaved  two stages in each process, s and s + N: half of the time at the start and the end in which processes wait, twice the
                 messages (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2)

The stages come from `foundation.models.architecture.stages`. A stage runs the code of the whole model, so each process keeps the whole
object: weights of other stages are zeros of stride 0, which take no memory, and are not trained.

    rows      a step is cut into micro-batches of equal size; rows that fill the last ones up do not count in the loss. The loss is computed
              in the last stage by the objective of the training, to which the model answers with the logits that came through the stages.
    loss      sum_b loss_b / B over the rows of the whole batch, as in one process, however many tokens of a row are labelled
    gradient  summed over groups of processes, and of a parameter that several stages read, such as tied embeddings, over these stages too.
              Both start from the same values and take the same steps.
    norm      over all stages, each parameter once
    answers   for evaluation the stages run one after another, and all processes get the logits of the last one

Hidden states travel in float32. Their shape is known beforehand, so torch need not run every shape once to find it out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.core.target import Parallel, Schedule
from foundation.machine.device import computing_device
from foundation.machine.parallel import Team, as_bytes, copy_from
from foundation.models.architecture.blocks import block_of
from foundation.models.architecture.stages import Stages, run_stage, stages_of
from foundation.models.forward import without_cache
from foundation.training.processes.division import in_model
from foundation.training.processes.engine import Objective
from foundation.training.rows import Rows
from foundation.training.state import Entry, Gathers, by_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FEW = 2
"""Rows that are run whole and in stages before the training."""


def pipelined(model: nn.Module, objective: Objective, rows: Rows, at_once: int, team: Team, parallel: Parallel, key: str) -> Pipeline:
    """Divides a model into stages, in place; on the device afterwards. Runs its shortest rows before, whole and in stages.

    Args:
        model: The same weights in all processes, on the CPU where it would not fit on a device.
        objective: Returns the loss terms of rows.
        rows: The training rows.
        at_once: How many of them a pipeline takes at once, at the most.
        team: The processes.
        parallel: The section of the recipe.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: The objective has parameters, or the model cannot be divided; see `foundation.models.architecture.stages.stages_of`.
    """
    if isinstance(objective, nn.Module) and any(parameter.requires_grad for parameter in objective.parameters()):
        raise InputError(key, "parallel.pipeline given with a loss that trains a projection", remedy="give losses that compare answers")
    device = next(model.parameters()).device
    few = {name: value.to(device) for name, value in rows.batch(np.argsort(rows.lengths, kind="stable")[:FEW]).items()}
    closing = ExitStack()
    closing.enter_context(without_cache(model))
    stages = stages_of(model, few, team.pipeline * parallel.stages_each, key)
    return Pipeline(model, stages, team, parallel.schedule, parallel.parts(at_once), closing)


@dataclass
class _Step:
    """Some rows on their way through the stages."""

    objective: Objective
    batch: Any
    """The rows, a `foundation.training.train.Batch`."""
    num_counted: int
    """Rows that count: the first ones."""
    num_rows: int
    """Rows of the whole batch, over all processes."""
    autocast: AbstractContextManager[object]
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Loss terms, summed over the rows that count; only in the last stage."""


class _Stage(nn.Module):
    """The module that torch runs as a stage; it has no parameters of its own, they stay in the model.

    Args:
        pipeline: Runs it.
        stage: Index of the stage.
    """

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self.pipeline, self.stage = pipeline, stage

    def forward(self, states: Tensor | None = None, **features: Tensor) -> Tensor:
        """Returns hidden states, or the logits of the last stage."""
        return self.pipeline.run(self.stage, states, features)


class Pipeline:
    """A model that was divided into stages; `model` answers as before, if all processes of the pipeline ask it together.

    Args:
        model: The model, whole.
        stages: Its stages.
        team: The processes.
        schedule: Order of forward and backward passes.
        parts: Micro-batches of a pass.
        closing: Is closed when the model is whole again.
    """

    def __init__(self, model: nn.Module, stages: Stages, team: Team, schedule: Schedule, parts: int, closing: ExitStack) -> None:
        self.model, self.stages, self.team, self.schedule, self.parts, self.closing = model, stages, team, schedule, parts, closing
        self.spread = None
        """A pipeline does not spread experts."""
        self.rank, self.count, self.device = team.pipeline_rank, team.pipeline, computing_device()
        self.group = team.mesh()["stage"].get_group()
        self.peers = [team.rank - team.pipeline_rank + rank for rank in range(team.pipeline)]
        self.data = team.data_group() if team.data_size > 1 else None
        self.blocks = [model.get_submodule(name) for name in stages.blocks]
        self.forward = model.forward
        self.known: tuple[Tensor, Mapping[str, Tensor]] | None = None  # logits that the model answers with, for these rows
        self.step: _Step | None = None
        self.scheduled: tuple[Any, Any] = (None, None)
        self.names = _names_of_each(model)
        self.trained = {names[0]: model.get_parameter(names[0]).requires_grad for names in self.names}
        self.shared = self._groups_of_shared()
        self._empty()
        own = (names[0] for names in self.names if self.trained[names[0]] and self.rank in self._processes(names[0]))
        self.own = {name: model.get_parameter(name) for name in own}
        model.forward = self._answer

    @property
    def plan(self) -> str:
        """How the processes work, in short."""
        return f"{self.team.plan}, {self.schedule} of {self.parts} micro-batches"

    def _processes(self, name: str) -> tuple[int, ...]:
        """Returns which processes of the pipeline hold a parameter or buffer, in order of their stages."""
        return tuple(dict.fromkeys(stage % self.count for stage in self.stages.stages_with(name)))

    def _groups_of_shared(self) -> dict[str, ProcessGroup | None]:
        """Returns the process group that sums the gradient of each parameter that several processes hold, by its name."""
        import torch.distributed as dist

        held = {names[0]: tuple(sorted(self._processes(names[0]))) for names in self.names if self.trained[names[0]]}
        several = sorted({ranks for ranks in held.values() if len(ranks) > 1})
        groups: dict[tuple[int, ...], ProcessGroup | None] = {}
        for ranks in several:
            for first in range(0, self.team.size, self.count):  # every process has to make all groups
                made = _group(dist.group.WORLD, tuple(first + rank for rank in ranks))
                groups[ranks] = made if first == self.peers[0] else groups.get(ranks)
        return {name: groups[ranks] for name, ranks in sorted(held.items()) if ranks in groups and self.rank in ranks}

    def _empty(self) -> None:
        """Moves what this process holds to the device; of other parameters only shapes stay."""
        for names in self.names:
            parameter = self.model.get_parameter(names[0])
            if self.rank not in self._processes(names[0]):
                nothing = torch.zeros((), dtype=parameter.dtype, device=self.device).expand(parameter.shape)
                _set(self.model, names, nn.Parameter(nothing, requires_grad=False))
        self.model.to(self.device)

    def run(self, stage: int, states: Tensor | None, features: Mapping[str, Tensor]) -> Tensor:
        """Runs a stage of this process; see `foundation.models.architecture.stages.run_stage`."""
        with self.step.autocast if self.step is not None else nullcontext():
            return run_stage(self.forward, self.blocks, self.stages.spans[stage], self.stages.form, states, features)

    def _answer(self, **features: Tensor) -> Any:
        """Replaces the forward pass of the model: returns logits that are known, or runs the stages one after another."""
        if self.known is not None:
            logits, rows = self.known
            assert features.keys() == rows.keys(), (features.keys(), rows.keys())
            assert all(torch.equal(value, rows[name]) for name, value in features.items()), "the objective asks about other rows"
            return SimpleNamespace(logits=logits)
        import torch.distributed as dist

        result, shape = torch.empty(0), self.stages.shape(features)
        for stage in range(len(self.stages)):
            if stage % self.count != self.rank:
                continue
            states = torch.empty(shape, device=self.device) if stage else None
            if states is not None:
                dist.recv(states, self.peers[(stage - 1) % self.count], group=self.group)
            result = self.run(stage, states, features).detach()
            if stage < len(self.stages) - 1:
                dist.send(result, self.peers[(stage + 1) % self.count], group=self.group)
        return SimpleNamespace(logits=self._from_last(result))

    def _from_last(self, logits: Tensor) -> Tensor:
        """Returns the logits of the last stage in all processes of the pipeline, float32."""
        last = self.peers[-1]
        sizes = torch.zeros(8, dtype=torch.int64)
        if self.rank == self.count - 1:
            sizes[0], sizes[1 : 1 + logits.ndim] = logits.ndim, torch.tensor(logits.shape)
        copy_from(sizes, last, self.group)
        shape = sizes[1 : 1 + int(sizes[0])].tolist()
        whole = logits.float().contiguous() if self.rank == self.count - 1 else torch.empty(shape, device=self.device)
        copy_from(whole, last, self.group)
        return whole

    def filled(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns rows with further ones after them, which do not count, so that all micro-batches have as many."""
        missing = -len(indices) % self.parts
        return np.concatenate([indices, np.repeat(indices[:1], missing)])

    def backward(
        self, objective: Objective, batch: Any, num_counted: int, num_rows: int, autocast: AbstractContextManager[object]
    ) -> dict[str, float]:
        """Accumulates the gradient of some rows; returns the sums of the loss terms, in all processes of the pipeline.

        Args:
            objective: Returns the loss terms of rows; runs in the last stage.
            batch: The rows, `filled`: a `foundation.training.train.Batch`.
            num_counted: How many of them count.
            num_rows: Rows of the whole batch, over all processes.
            autocast: Sets the number format; entered for every micro-batch.
        """
        import torch.distributed as dist

        self.step = _Step(objective, batch, num_counted, num_rows, autocast)
        self._scheduled(batch.features).step(target=torch.arange(len(batch.indices)), return_outputs=False, **batch.features)
        found = [{name: float(value) for name, value in self.step.sums.items()}]
        self.step = None
        dist.broadcast_object_list(found, self.peers[-1], group=self.group, device=torch.device("cpu"))
        return found[0]

    def _loss(self, logits: Tensor, places: Tensor) -> Tensor:
        """Returns the loss of a micro-batch, a scalar.

        Args:
            logits: What its rows came to in the last stage.
            places: Places of its rows in the batch, int64 `[b]`, on the CPU.
        """
        step = self.step
        assert step is not None, "within `backward`"
        at = places.to(step.batch.labels.device)
        features = {name: value[at] for name, value in step.batch.features.items()}
        part = replace(step.batch, features=features, labels=step.batch.labels[at], indices=step.batch.indices[places.numpy()])
        self.known = logits, features
        try:
            with step.autocast:
                terms = step.objective(self.model, part)
        finally:
            self.known = None
        assert all(term.shape == places.shape for term in terms.values()), {name: term.shape for name, term in terms.items()}
        counts = (at < step.num_counted).float()
        sums = {name: (term.float() * counts).sum() for name, term in terms.items()}
        for name, value in sums.items():
            step.sums[name] = step.sums.get(name, torch.zeros((), device=value.device)) + value.detach()
        return torch.stack(list(sums.values())).sum() / step.num_rows

    def _scheduled(self, features: Mapping[str, Tensor]) -> Any:
        """Returns the order of forward and backward passes for rows of some shape; the order of the last shape is cached."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        rows, *state = self.stages.shape(features)
        if self.scheduled[0] != (rows, *state):
            states = torch.empty(rows // self.parts, *state, device=self.device, requires_grad=True)
            last = len(self.stages) - 1
            made = [
                PipelineStage(_Stage(self, stage), stage, last + 1, self.device, () if not stage else states, states, group=self.group)
                for stage in range(self.rank, last + 1, self.count)
            ]
            schedule: Any = Schedule1F1B if len(made) == 1 else ScheduleInterleaved1F1B
            loss, given = self._loss, made[0] if len(made) == 1 else made
            self.scheduled = (rows, *state), schedule(given, self.parts, loss_fn=loss, scale_grads=False)
        return self.scheduled[1]

    def sum_gradients(self) -> None:
        """Sums the gradients of a step over groups of processes, and over the stages that read a parameter."""
        import torch.distributed as dist

        if self.data is not None:
            for work in [
                dist.all_reduce(weight.grad, group=self.data, async_op=True) for weight in self.own.values() if weight.grad is not None
            ]:
                work.wait()
        for name, group in self.shared.items():
            weight = self.own[name]
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad, group=group)

    def clip(self, max_norm: float) -> float:
        """Scales all gradients to a norm over all stages of at most `max_norm`, in place; returns the norm before."""
        import torch.distributed as dist

        square = torch.zeros((), dtype=torch.float64)
        gradients = {name: weight.grad for name, weight in self.own.items() if weight.grad is not None}
        for name, gradient in gradients.items():
            if self._processes(name)[0] == self.rank:
                square += float(torch.linalg.vector_norm(gradient)) ** 2
        dist.all_reduce(square, group=self.group)
        norm = math.sqrt(float(square))
        scale = max_norm / (norm + 1e-6)
        if scale < 1:
            for gradient in gradients.values():
                gradient.mul_(scale)
        return norm

    def part(self, name: str, like: Tensor, whole: Tensor) -> Tensor:
        """Returns a process's shard of a weight that it holds: all of it."""
        return whole

    def holds(self, entry: str) -> bool:
        """Whether this process has an entry of a checkpoint; what is not of the model is in the last one."""
        name = in_model(entry)
        return self.rank in self._processes(name) if name else self.rank == self.count - 1

    def collected(self, entries: Mapping[str, Entry]) -> Gathers:
        """Returns functions that gather entries of a checkpoint from all stages in process 0, by name; all must call them."""
        import torch.distributed as dist

        if self.team.data_rank:
            return {}
        saved = {name: entry for name, entry in entries.items() if self._saves(name)}
        listed: list[Any] = [None] * self.count
        dist.all_gather_object(listed, {name: (entry.dtype, entry.shape) for name, entry in saved.items()}, group=self.group)
        owners = {name: self.peers[stage] for stage, found in enumerate(listed) for name in found}
        everywhere = {name: _elsewhere(*known) for found in listed for name, known in found.items()} | saved
        return {name: functools.partial(self._collected, owners[name], entry) for name, entry in by_bytes(everywhere.items()).items()}

    def _collected(self, owner: int, entry: Entry) -> Tensor:
        """Returns a tensor of the process `owner` in process 0."""
        import torch.distributed as dist

        first, rank, value = self.peers[0], self.team.rank, entry.make().cpu().contiguous()
        if first != owner and rank in (first, owner) and value.numel():
            if rank == owner:
                dist.send(as_bytes(value), first, group=self.group)
            else:
                dist.recv(as_bytes(value), owner, group=self.group)
        return value

    def _saves(self, entry: str) -> bool:
        name = in_model(entry)
        return self._processes(name)[0] == self.rank if name else self.rank == self.count - 1

    def undo(self) -> None:
        """Makes the model whole again in every process, in the memory of the host; the object stays the same."""
        del self.model.forward
        self.closing.close()
        self.model.cpu()
        for names in self.names:
            source = self._processes(names[0])[0]
            old = self.model.get_parameter(names[0]).detach()
            value = old.clone() if self.rank == source else torch.empty(old.shape, dtype=old.dtype)
            copy_from(value, self.peers[source], self.group)
            _set(self.model, names, nn.Parameter(value, requires_grad=self.trained[names[0]]))
        for name, buffer in self.model.named_buffers():
            if block_of(name, self.stages.blocks) is not None:  # such as running means
                value = buffer.contiguous()
                copy_from(value, self.peers[self._processes(name)[0]], self.group)
                buffer.copy_(value)


def _elsewhere(dtype: torch.dtype, shape: torch.Size) -> Entry:
    """Returns the entry of a tensor of another stage."""
    return Entry(dtype, shape, functools.partial(torch.empty, shape, dtype=dtype))


def _names_of_each(model: nn.Module) -> list[list[str]]:
    """Returns all names of each parameter, the one of `named_parameters` first; tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _set(model: nn.Module, names: list[str], parameter: nn.Parameter) -> None:
    for name in names:
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, parameter)


@functools.lru_cache(maxsize=64)
def _group(world: ProcessGroup | None, ranks: tuple[int, ...]) -> ProcessGroup | None:
    """Returns the process group of some ranks, which is made once; all processes must make the call."""
    import torch.distributed as dist

    group: ProcessGroup | None = dist.new_group(list(ranks))
    return group
