"""The `target` section of a recipe (device, engines and shapes to serve) and the `parallel` section (training in several processes)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from foundation.core.config import Config
from foundation.core.engines import DEFAULT_ENGINES, EngineName
from foundation.core.errors import InputError
from foundation.machine.environment import physical_cores
from foundation.machine.parallel import Strategy, Team

Checkpointing = Literal["none", "full", "selective"]
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
    """Engines to build, in order of preference, for the report, and for what is served where `serve` is first."""
    serve: Literal["fastest", "first"] = "fastest"
    """What is served and held against the goals. fastest: of the last variant and the float model that it was made of, in every engine,
    mode and float precision, the one that misses the fewest goals, and of these the fastest. first: the last variant in the first engine.
    For language models that answer, it is for each build the engine with clearly more tokens per second. On GPUs it is the first one in any
    case."""
    batch_sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(min_length=1)] = (1, 8)
    """Batch sizes to measure latency at."""
    sequence_lengths: tuple[Annotated[int, Field(ge=2, le=33_554_432)], ...] = (32, 128)
    """Sequence lengths (tokens) to measure at and to pad rows to; data.max_length is always added. For models that read waveforms lengths
    in samples, by default the one of data.max_seconds. Ignored for images and spectrograms."""
    buckets: tuple[Annotated[int, Field(ge=2, le=65536)], ...] | Literal["auto"] | None = None
    """Lengths (tokens) that the engines and the server pad rows to; data.max_length is always added. null: sequence_lengths. auto: those
    with the least time for the lengths of the evaluation rows, from latencies that are measured before the export. For texts with classes
    or values."""
    bucket_memory_mb: Annotated[float, Field(gt=0)] = 2048.0
    """Most memory in MB for the compiled networks of all buckets; with `buckets: auto` it bounds their number."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads per engine; by default the number of physical cores that this process may use."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that rows are padded to, besides data.max_length; the lengths of `auto` once they are chosen."""
        return self.buckets if isinstance(self.buckets, tuple) else self.sequence_lengths

    @property
    def num_threads(self) -> int:
        """CPU threads per engine, with the default filled in for this machine."""
        return self.threads or physical_cores()


class Parallel(Config):
    """How trainings use devices and their memory. Processes are started by a launcher such as torchrun."""

    strategy: Strategy = "ddp"
    """ddp: every process holds the whole model. fsdp2: weights are sharded over the processes, for models too large for one GPU. Has no
    effect without a launcher."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing: what blocks compute is not kept for backward but computed again. full: only the inputs of blocks are kept,
    for about a third more work; selective: results of matrix products too, for little more work. Changes no loss."""
    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Neighbouring processes that share each layer: each has some heads and FFN neurons (Megatron's split). For models too large for one
    GPU, on GPUs with a link like NVLink. Heads and neurons must divide by it, as they do after `prune: {divisible_by: N}`, and it must
    divide the number of processes: groups of that many share the rows by `strategy`. Has no effect without a launcher."""
    sequence: bool = False
    """With tensor: processes that share each layer also share the tokens between them, where norms, dropout and residual sums are: what
    blocks keep for backward is divided by `tensor`, and as much is sent. For models with one stack of blocks. Has no effect without a
    launcher."""
    context: Annotated[int, Field(ge=1, le=1024)] = 1
    """Neighbouring processes that share the tokens of each row: each runs the blocks on its own, and attention gathers keys and values. For
    rows so long that what one takes does not fit. It must divide the number of processes: groups of that many share the rows, and gradients
    are summed over all processes by `strategy`. For models that attend by the attention functions of Transformers. Has no effect without a
    launcher."""
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    """Neighbouring processes that hold consecutive blocks of the model, one stage each: hidden states go from stage to stage, gradients
    back. For models too large for one GPU where the link is slow, as between machines. It must divide the number of processes; groups of
    that many share the rows (`ddp`). Has no effect without a launcher."""
    schedule: Schedule = "1f1b"
    """With pipeline: the order of micro-batches. 1f1b: a stage alternates between forward and backward, so that it keeps activations of
    few micro-batches. interleaved: each process has two shorter stages, which halves the time that processes wait at the start and the end
    of a step, for twice the messages; the model needs two blocks for each process."""
    microbatches: Annotated[int, Field(ge=1, le=4096)] | None = None
    """With pipeline: parts that the rows of a step go through the stages in, a multiple of `pipeline`. More of them let processes wait
    less: (pipeline - 1) / (microbatches + pipeline - 1) of the time. Default: 4 for each stage, fewer if there are fewer rows."""
    offload: bool = False
    """With fsdp2: weights, gradients and moments of the optimizer lie in the memory of the host, blocks are copied to the device while they
    run, and the host updates the weights. Slow; for models that do not fit otherwise. Has no effect without a launcher."""
    gradients: Gradients = "float32"
    """With ddp: what processes send each other of their gradients, where the link is slow. fp16: half of the bytes. powersgd: of every
    matrix two narrow ones, whose product is near it; what is left out goes into the next step. Both change the result. Has no effect
    without a launcher."""
    powersgd_rank: Annotated[int, Field(ge=1, le=64)] = 4
    """Width of the matrices that powersgd sends: wider is nearer to the gradient, and more to send."""

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
        """Returns the processes of a run as they are to work.

        Raises:
            InputError: Those that share each layer or the tokens of each row, or the stages of a pipeline, do not divide them.
        """
        if team.size == 1:
            return team
        for name in ("tensor", "pipeline", "context"):
            if team.size % getattr(self, name):
                fits = [number for number in range(1, team.size + 1) if team.size % number == 0]
                given = f"{getattr(self, name)} given for {team.size} processes"
                raise InputError(f"parallel.{name}", given, remedy=f"give {' or '.join(map(str, fits))}")
        names = ("strategy", "tensor", "pipeline", "sequence", "context")
        return replace(team, **{name: getattr(self, name) for name in names})

    @property
    def stages_each(self) -> int:
        """Stages of a pipeline that each process has."""
        return 2 if self.schedule == "interleaved" else 1

    def parts(self, rows: int) -> int:
        """Returns the micro-batches that some rows go through a pipeline in: `microbatches`, or what it is by default.

        Args:
            rows: Rows that a pipeline takes at once.
        """
        return self.microbatches or self.pipeline * max(1, min(MICROBATCHES_EACH, rows // self.pipeline))
