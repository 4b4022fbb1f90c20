"""The `config.pbtxt` of the four models of a GPU repository, through Triton's own protobuf.

    NAME (ensemble): TEXT -> NAME_preprocess -> NAME_plan -> NAME_postprocess -> LABEL, SCORE, LOGITS

The number of processes of the two Python models and the files of the plan are known where the plans are built: `build_plans.py` appends
them. Warm-up of the plan runs golden rows, at batch 1 and at the largest batch of every bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritonclient.grpc import model_config_pb2 as pb

from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import LOGITS, RESPONSES
from triton_repo.config import IMAGE, TEXT, TEXT_PAIR, TYPES
from triton_repo.gpu.settings import GpuGroup
from triton_repo.queueing import Queue, write_policy

OUTPUT = "logits"
"""Output name of the graph; clients see LOGITS, as in the CPU repository."""
Tensors = Mapping[str, tuple[int, Sequence[int]]]
"""Type of `ModelConfig` and shape without batch (-1: dynamic), by name."""


@dataclass(frozen=True)
class Names:
    """Names of the four models."""

    ensemble: str

    @property
    def parts(self) -> dict[str, str]:
        """Names of the three models behind the ensemble, in order."""
        return {part: f"{self.ensemble}_{part}" for part in ("preprocess", "plan", "postprocess")}


@dataclass(frozen=True)
class Serving:
    """How the models are served."""

    max_batch_size: int
    """Maximum batch size of all models and of the optimization profiles."""
    batch_sizes: tuple[int, ...]
    """Batch sizes that latency is measured at."""
    instances: int = 1
    """Instances of the plan on each GPU, unless `groups` gives them."""
    groups: tuple[GpuGroup, ...] | None = None
    """GPUs that serve; None: all of them."""
    max_queue_delay_us: int = 0
    """Maximum time in microseconds that a request waits for others to form a batch."""
    cuda_graphs: bool = True
    """Whether the plan runs as CUDA graphs where it can."""
    response_cache: bool = False
    """Whether requests that were answered before are answered from the cache."""

    @property
    def measured_sizes(self) -> list[int]:
        """Batch sizes that are timed: the target's within the maximum, 1, and the maximum."""
        return sorted({size for size in self.batch_sizes if size <= self.max_batch_size} | {1, self.max_batch_size})

    @property
    def graph_sizes(self) -> list[int]:
        """Batch sizes that are recorded: powers of two below the maximum, and the timed ones."""
        powers = {1 << power for power in range(self.max_batch_size.bit_length())}
        return sorted({*powers, *self.measured_sizes}) if self.cuda_graphs else []


def configurations(names: Names, preprocessor: Preprocessor, inputs: Tensors, serving: Serving, pairs: bool) -> dict[str, pb.ModelConfig]:
    """Returns the `ModelConfig` of `ensemble`, `preprocess`, `plan` and `postprocess`.

    Args:
        names: Names of the models.
        preprocessor: Defines modality, buckets and labels.
        inputs: Inputs of the graph.
        serving: How they are served.
        pairs: Whether rows are pairs of texts.
    """
    texts = (TEXT, TEXT_PAIR) if pairs else (TEXT,)
    rows: Tensors = {value: (pb.TYPE_STRING, [1]) for value in ((IMAGE,) if preprocessor.modality == "image" else texts)}
    logits: Tensors = {OUTPUT: (pb.TYPE_FP32, [len(preprocessor.labels)])}
    outputs = RESPONSES[preprocessor.response].outputs(len(preprocessor.labels))
    answers: Tensors = {output.name: (TYPES[output.kind], list(output.dims)) for output in outputs if output.name != LOGITS}
    most, parts = serving.max_batch_size, names.parts
    before = _model(parts["preprocess"], rows, inputs, most)
    after = _model(parts["postprocess"], logits, answers, most)
    before.backend = after.backend = "python"
    plan = _plan(parts["plan"], inputs, logits, preprocessor.buckets, serving)
    ensemble = _model(names.ensemble, rows, {**answers, LOGITS: logits[OUTPUT]}, most)
    ensemble.platform = "ensemble"
    if serving.response_cache:
        ensemble.response_cache.enable = True
    for part in (before, plan, after):
        step = ensemble.ensemble_scheduling.step.add(model_name=part.name, model_version=-1)
        for value in part.input:
            step.input_map[value.name] = LOGITS if value.name == OUTPUT else value.name
        for value in part.output:
            step.output_map[value.name] = LOGITS if value.name == OUTPUT else value.name
    return {"ensemble": ensemble, "preprocess": before, "plan": plan, "postprocess": after}


def warm_up_file(bucket: int, name: str) -> str:
    """Returns the name of the file in `warmup/` that holds a row of a bucket for an input."""
    return f"{bucket or 'image'}.{name}"


def _model(name: str, inputs: Tensors, outputs: Tensors, max_batch_size: int) -> pb.ModelConfig:
    config = pb.ModelConfig(name=name, max_batch_size=max_batch_size)
    for value, (kind, dims) in inputs.items():
        config.input.add(name=value, data_type=kind, dims=dims)
    for value, (kind, dims) in outputs.items():
        config.output.add(name=value, data_type=kind, dims=dims)
    return config


def _plan(name: str, inputs: Tensors, outputs: Tensors, buckets: Sequence[int], serving: Serving) -> pb.ModelConfig:
    """Instances on the GPUs that serve, with all profiles; no default file, so that a GPU without a plan is an error."""
    config = _model(name, inputs, outputs, serving.max_batch_size)
    config.platform = "tensorrt_plan"
    config.dynamic_batching.max_queue_delay_microseconds = serving.max_queue_delay_us
    write_policy(config, Queue())
    profiles = [str(index) for index in range(max(1, len(buckets)))]
    every: tuple[tuple[tuple[int, ...], int], ...] = (((), serving.instances),)
    for gpus, count in every if serving.groups is None else [(group.gpus, group.instances) for group in serving.groups]:
        config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU, count=count, gpus=gpus, profile=profiles)
    for bucket in buckets or (0,):
        for batch in sorted({1, serving.max_batch_size}):
            warm_up = config.model_warmup.add(name=f"{batch} x {bucket or 'image'}", batch_size=batch)
            for value, (kind, dims) in inputs.items():
                sample = warm_up.inputs[value]
                sample.data_type, sample.input_data_file = kind, warm_up_file(bucket, value)
                sample.dims.extend(bucket if size == -1 else size for size in dims)
    return config
