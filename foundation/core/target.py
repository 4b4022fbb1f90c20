"""The `target` section of a recipe (device, engines and shapes to serve) and the `parallel` section (training in several processes)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from foundation.core.config import Config
from foundation.core.engines import DEFAULT_ENGINES, EngineName
from foundation.core.errors import InputError
from foundation.machine.environment import physical_cores
from foundation.machine.parallel import Strategy, Team

Checkpointing = Literal["none", "full", "selective", "int8"]
Gradients = Literal["float32", "fp16", "powersgd"]
Schedule = Literal["1f1b", "interleaved"]


MICROBATCHES_EACH = 4
"""Micro-batches of a pipeline for each of its stages, by default."""


class Target(Config):
    """Where the model will be served, and for which shapes."""

    LATER: ClassVar[tuple[str, ...]] = ("buckets", "bucket_memory_mb")

    device: Literal["cpu", "cuda"] = "cpu"
    """Device that the engines run on; training, evaluation and quantization always use a GPU if there is one."""
    engines: Annotated[tuple[EngineName, ...], Field(min_length=1)] = DEFAULT_ENGINES
    """Engines to build, in order of preference: the order of the report, and the choice of what is served if `serve` is first."""
    serve: Literal["fastest", "first"] = "fastest"
    """How the served model, which the goals judge, is chosen. fastest: the last variant and its float model compete, in every engine, mode
    and float precision; the configuration that misses the fewest goals wins, then the fastest. first: the last variant in the first engine.
    For language models that answer, fastest takes for each build the engine with clearly more tokens per second. On GPUs the first engine
    is always served."""
    batch_sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(min_length=1)] = (1, 8)
    """Batch sizes to measure latency at."""
    sequence_lengths: tuple[Annotated[int, Field(ge=2, le=33_554_432)], ...] = (32, 128)
    """Sequence lengths (tokens) to measure at and to pad rows to; data.max_length is always added. For models that read waveforms: lengths
    in samples, by default only data.max_seconds. Ignored for images and spectrograms."""
    buckets: tuple[Annotated[int, Field(ge=2, le=65536)], ...] | Literal["auto"] | None = None
    """Lengths (tokens) that the engines and the server pad rows to; data.max_length is always added. null: sequence_lengths. auto: the
    buckets with the least time for the lengths of the evaluation rows, from latencies measured before the export. For texts with classes
    or values."""
    bucket_memory_mb: Annotated[float, Field(gt=0)] = 2048.0
    """Most memory in MB for the compiled networks of all buckets; with `buckets: auto` it bounds their number."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads per engine; by default the number of physical cores that this process may use."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that rows are padded to, besides data.max_length; with `auto`, the lengths that were chosen."""
        return self.buckets if isinstance(self.buckets, tuple) else self.sequence_lengths

    @property
    def num_threads(self) -> int:
        """CPU threads per engine, with the default filled in for this machine."""
        return self.threads or physical_cores()


class Parallel(Config):
    """How trainings use devices and their memory. Processes are started by a launcher such as torchrun."""

    LATER: ClassVar[tuple[str, ...]] = ("mesh", "experts", "expert_capacity")

    strategy: Strategy = "ddp"
    """ddp: every process holds the whole model. fsdp2: weights are sharded over the processes, for models too large for one GPU. Has no
    effect without a launcher."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing: activations of blocks are recomputed in the backward pass instead of stored. full: only the inputs of
    blocks are stored, for about a third more work; selective: results of matrix products too, for little more work. The loss does not
    change. int8: nothing is recomputed. Inputs of linear layers, norms and activation functions are stored in 8 bits, half of bfloat16;
    attention stays exact. Gradients change a little."""
    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Neighbouring processes that share each layer: each has some heads and FFN neurons (Megatron's split). For models too large for one
    GPU, on GPUs with a link like NVLink. Heads and neurons must divide by it, as they do after `prune: {divisible_by: N}`, and it must
    divide the number of processes: groups of that many share the rows by `strategy`. Has no effect without a launcher."""
    sequence: bool = False
    """With tensor: sequence parallelism. Processes that share each layer also share the tokens in norms, dropout and residual sums, so
    stored activations are divided by `tensor`; the traffic stays the same. For models with one stack of blocks. Has no effect without a
    launcher."""
    mesh: tuple[Annotated[int, Field(ge=2, le=1024)], Annotated[int, Field(ge=2, le=1024)]] | None = None
    """[R, C]: tensor parallelism in two dimensions, on R x C processes. C of them share each layer, as with `tensor: C` and `sequence`.
    Each share is divided by R again, and so are the rows: neither a weight nor an activation between layers is whole anywhere. It sets
    `tensor`, `sequence` and `strategy`. For blocks that are too large for the processes that a fast link joins. Has no effect without a
    launcher."""
    context: Annotated[int, Field(ge=1, le=1024)] = 1
    """Context parallelism: neighbouring processes share the tokens of each row. Each runs the blocks on its own tokens, and attention
    gathers keys and values. For rows too long for one device. It must divide the number of processes: groups of that many share the rows,
    and gradients are summed over all processes by `strategy`. For models that use the attention functions of Transformers. Has no effect
    without a launcher."""
    experts: Annotated[int, Field(ge=1, le=1024)] = 1
    """Expert parallelism: neighbouring processes spread the experts of a mixture. Each has some of them, whole, and rows of its own; tokens
    are sent to their experts and back. It must divide the number of processes and the number of experts of every layer: groups of that many
    have the same experts. The rest of the model is divided by `strategy`. Has no effect without a launcher."""
    expert_capacity: Annotated[float, Field(gt=0)] | None = None
    """With experts: capacity factor in training. An expert takes at most this many times its even share of a step's tokens; the choices
    with the smallest router weights are dropped and counted. 1.25 is common. null: nothing is dropped. Has no effect without a launcher."""
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    """Neighbouring processes that hold consecutive blocks of the model, one stage each: hidden states go from stage to stage, gradients
    back. For models too large for one GPU where the link is slow, as between machines. It must divide the number of processes; groups of
    that many share the rows (`ddp`). Has no effect without a launcher."""
    schedule: Schedule = "1f1b"
    """With pipeline: the order of micro-batches. 1f1b: a stage alternates between forward and backward, so that it keeps activations of
    few micro-batches. interleaved: each process has two shorter stages, which cuts the pipeline bubble by half for twice the messages; the
    model needs two blocks for each process."""
    microbatches: Annotated[int, Field(ge=1, le=4096)] | None = None
    """With pipeline: number of micro-batches of a step, a multiple of `pipeline`. More micro-batches shrink the pipeline bubble, which is
    (pipeline - 1) / (microbatches + pipeline - 1) of the time. Default: 4 for each stage, fewer if there are fewer rows."""
    offload: bool = False
    """With fsdp2: weights, gradients and moments of the optimizer are in host memory, blocks are copied to the device while they
    run, and the host updates the weights. Slow; for models that do not fit otherwise. Has no effect without a launcher."""
    gradients: Gradients = "float32"
    """With ddp: how gradients are compressed for slow links. fp16: half of the bytes. powersgd: each matrix is sent as two narrow ones
    whose product approximates it; the error is added to the next step. Both change the result. Has no effect without a launcher."""
    powersgd_rank: Annotated[int, Field(ge=1, le=64)] = 4
    """Rank of the matrices that powersgd sends: a higher rank approximates the gradient better and sends more."""

    @model_validator(mode="before")
    @classmethod
    def _of_mesh(cls, values: Any) -> Any:
        """Sets what `mesh` stands for."""
        mesh = values.get("mesh") if isinstance(values, Mapping) else None
        if not isinstance(mesh, list | tuple) or len(mesh) != 2 or not all(isinstance(side, int) and side > 1 for side in mesh):
            return values  # which the field refuses
        implied = {"tensor": mesh[1], "sequence": True, "strategy": "fsdp2"}
        for name, value in implied.items():
            if name in values and values[name] != value:
                raise ValueError(f"{name}: {values[name]} given with mesh: {list(mesh)}, which sets it: leave it out")
        return {**values, **implied}

    @model_validator(mode="after")
    def _compresses_sums(self) -> Self:
        if self.gradients != "float32" and self.strategy != "ddp":
            raise ValueError(f"gradients: {self.gradients} given with strategy: {self.strategy}, which sends shards: give strategy: ddp")
        if self.gradients != "float32" and self.tensor > 1:
            raise ValueError(
                f"gradients: {self.gradients} given with tensor: {self.tensor}; layers that are shared send them whole: give tensor: 1"
            )
        return self

    @model_validator(mode="after")
    def _shares_tokens_alone(self) -> Self:
        others = {f"tensor: {self.tensor}": self.tensor > 1, f"pipeline: {self.pipeline}": self.pipeline > 1}
        for given in (name for name, holds in others.items() if holds and self.context > 1):
            raise ValueError(f"{given} given with context: {self.context}, whose processes have whole layers: leave one of them out")
        return self

    @model_validator(mode="after")
    def _spreads_experts_alone(self) -> Self:
        if self.experts == 1 and self.expert_capacity is not None:
            raise ValueError(f"expert_capacity: {self.expert_capacity} given without experts: give experts: 2 or more, or leave it out")
        others = {f"{name}: {getattr(self, name)}": getattr(self, name) > 1 for name in ("tensor", "context", "pipeline")}
        others |= {"offload: true": self.offload, f"gradients: {self.gradients}": self.gradients != "float32"}
        for given in (name for name, holds in others.items() if holds and self.experts > 1):
            raise ValueError(f"{given} given with experts: {self.experts}, which goes with strategy alone: leave one of them out")
        return self

    @model_validator(mode="after")
    def _shares_tokens_of_shared_layers(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence: true given without tensor, whose processes share the tokens: give tensor: 2 or more, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _stages_hold_whole_weights(self) -> Self:
        if self.pipeline == 1:
            fields = type(self).model_fields
            alone = [
                f"{name}: {getattr(self, name)}" for name in ("schedule", "microbatches") if getattr(self, name) != fields[name].default
            ]
            if alone:
                raise ValueError(f"{alone[0]} given without pipeline: give pipeline: 2 or more, or leave it out")
            return self
        others = {"strategy: fsdp2": self.strategy == "fsdp2", f"tensor: {self.tensor}": self.tensor > 1}
        others[f"gradients: {self.gradients}"] = self.gradients != "float32"
        for given in (name for name, holds in others.items() if holds):
            raise ValueError(f"{given} given with pipeline: {self.pipeline}, whose stages have whole weights and gradients: leave it out")
        if self.microbatches is not None and self.microbatches % self.pipeline:
            low = self.microbatches - self.microbatches % self.pipeline
            fits = " or ".join(str(number) for number in (low, low + self.pipeline) if number)
            raise ValueError(f"microbatches: {self.microbatches} given, no multiple of pipeline: {self.pipeline}; give {fits}")
        return self

    @model_validator(mode="after")
    def _offloads_shards(self) -> Self:
        if self.offload and self.strategy != "fsdp2":
            raise ValueError(f"offload: true given with strategy: {self.strategy}; it moves what fsdp2 divides: give strategy: fsdp2")
        return self

    def of(self, team: Team) -> Team:
        """Returns the processes of a run with this section's settings.

        Raises:
            InputError: `tensor`, `pipeline`, `context` or `experts` does not divide the number of processes, or a mesh has not as many.
        """
        if team.size == 1:
            return team
        if self.mesh is not None and math.prod(self.mesh) != team.size:
            rows, columns = self.mesh
            raise InputError("parallel.mesh", f"[{rows}, {columns}] given for {team.size} processes", remedy=_meshes(team.size))
        for name in ("tensor", "pipeline", "context", "experts"):
            if team.size % getattr(self, name):
                fits = [number for number in range(1, team.size + 1) if team.size % number == 0]
                given = f"{getattr(self, name)} given for {team.size} processes"
                raise InputError(f"parallel.{name}", given, remedy=f"give {' or '.join(map(str, fits))}")
        names = ("strategy", "tensor", "pipeline", "sequence", "context", "experts")
        return replace(team, **{name: getattr(self, name) for name in names})

    @property
    def stages_each(self) -> int:
        """Number of pipeline stages of each process."""
        return 2 if self.schedule == "interleaved" else 1

    def parts(self, rows: int) -> int:
        """Returns the number of micro-batches of a step: `microbatches`, or its default.

        Args:
            rows: Rows of a step in one pipeline.
        """
        return self.microbatches or self.pipeline * max(1, min(MICROBATCHES_EACH, rows // self.pipeline))


def _meshes(size: int) -> str:
    """Returns which meshes so many processes can be put in, as a remedy."""
    fits = [f"[{rows}, {size // rows}]" for rows in range(2, size // 2 + 1) if size % rows == 0]
    return f"give {' or '.join(fits)}" if fits else "give tensor, or a number of processes that is a product"
