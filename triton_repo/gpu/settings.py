"""The key `gpu` of the stage `triton_repo`: how TensorRT plans are built, and what runs on which GPU."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from foundation.core.config import Config

Ordinal = Annotated[int, Field(ge=0, le=63)]


class GpuGroup(Config):
    """Some GPUs of the machine that serves, and how many instances of the plan run on each of them."""

    gpus: Annotated[tuple[Ordinal, ...], Field(min_length=1)]
    """Numbers of the GPUs, as the container sees them."""
    instances: Annotated[int, Field(ge=1, le=64)] = 1
    """Instances of the plan on each: more than one overlaps the copies of one batch with the kernels of another."""


class Gpu(Config):
    """Settings of the model repository for TensorRT."""

    groups: Annotated[tuple[GpuGroup, ...], Field(min_length=1)] | None = None
    """GPUs that serve, and the number of instances on each. Default: every GPU that the container sees, with `instances` of the stage."""
    workspace_mb: Annotated[int, Field(ge=1)] | None = None
    """Most GPU memory in 10^6 bytes that a kernel may use while it runs. Default: all of it."""
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = None
    """How long TensorRT searches for kernels: 0 is fastest to build, 5 searches longest. Default: TensorRT's own."""
    hardware_compatibility: Literal["none", "same_compute_capability", "ampere_plus"] = "none"
    """GPUs that load a plan besides the one that built it. none: fastest. ampere_plus: one plan for every GPU from compute capability 8.0
    on."""
    timing_cache: bool = True
    """Keep the measured times of kernels, so that the next build on the same GPU takes seconds."""
    refit: bool = False
    """Build plans whose weights can be replaced, which may cost speed."""
    cuda_graphs: bool = True
    """Launch a batch as one CUDA graph, recorded for each bucket and for the batch sizes 1, 2, 4 and so on and `target.batch_sizes`; other
    shapes run kernel by kernel. Used if every plan can be recorded and then gives the golden answers, which is checked on the GPU."""
    response_cache: bool = False
    """Answer a request that was answered before from Triton's cache; the server needs --cache-config."""
    preprocess_processes: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes that tokenize or decode images. Default: measured where the plans are built, so that they keep up with the GPUs."""
    postprocess_processes: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes that turn logits into labels. Default: measured as well."""

    @model_validator(mode="after")
    def _one_group_each(self) -> Self:
        listed = [gpu for group in self.groups or () for gpu in group.gpus]
        twice = sorted({gpu for gpu in listed if listed.count(gpu) > 1})
        if twice:
            raise ValueError(f"groups: GPU {twice[0]} is listed more than once; list each GPU in one group")
        return self
