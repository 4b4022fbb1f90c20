"""The files of a GPU model repository that both its writer and `build_plans.py` read: names, hashes, golden rows, configuration text.

It needs only the standard library and is copied next to `build_plans.py`, where there is no protobuf: what a machine adds to a
configuration is appended as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:  # where this file is copied to, types are not read
    from triton_repo.gpu.measure_plans import Timed

SPEC, GOLDEN, ROWS, RECORD, MODELS, CONFIG = "gpu.json", "golden.npz", "rows.json", "plans.json", "models", "config.pbtxt"
TIMING_CACHE = "timing-cache-"
SCHEMA = 2
_CHUNK = 1 << 24
Row = str | tuple[str, str] | bytes
"""A text, a pair of texts, or an encoded image."""


class BuilderSettings(TypedDict):
    """Settings of the builder; their meaning is that of `triton_repo.gpu.settings.Gpu`."""

    workspace_bytes: int | None
    optimization_level: int | None
    hardware_compatibility: str
    timing_cache: bool
    refit: bool


class Group(TypedDict):
    """GPUs that serve."""

    gpus: list[int]
    instances: int
    """Instances of the plan on each."""


class Processes(TypedDict):
    """Processes of the two Python models; None: as many as the plans need."""

    preprocess: int | None
    postprocess: int | None


class Spec(TypedDict):
    """The contents of `gpu.json`."""

    schema: int
    ensemble: str
    models: dict[str, str]
    """Names of the models `preprocess`, `plan` and `postprocess`."""
    task: str
    onnx: str
    fused: str | None
    """The graph with attention as nodes."""
    rival: str | None
    """The graph that the plan is timed against."""
    onnx_sha256: str
    fused_sha256: str | None
    rival_sha256: str | None
    rival_precision: str | None
    rival_reason: str | None
    """Why there is no rival."""
    inputs: list[str]
    dims: dict[str, tuple[str, list[int]]]
    """Type and shape of a row, by input; -1 is the sequence."""
    buckets: list[int]
    """Empty for images."""
    max_batch_size: int
    batch_sizes: list[int]
    """Batch sizes that are timed."""
    graph_sizes: list[int]
    """Batch sizes that are recorded as CUDA graphs."""
    int8_gemms: list[str]
    """GEMM nodes with Q/DQ on both inputs."""
    gemms: dict[str, int]
    """MACs of each weight GEMM by node; empty: not known."""
    attentions: list[str]
    """The last product of each attention."""
    float_precision: str
    instances: int
    groups: list[Group] | None
    settings: BuilderSettings
    processes: Processes
    unit: float
    """Unit of differences of logits."""


Figures = dict[str, int | float | bool]
"""How two sets of logits differ, as `tolerance.judge` says."""
Part = Literal["preprocess", "postprocess"]


class Parity(TypedDict):
    """How the logits of a plan differ from the golden logits."""

    batches: Figures
    single: Figures
    """The same of rows one by one."""
    passed: bool


class Attentions(TypedDict):
    """How many attentions of a plan are fused."""

    fused: int
    of: int
    reason: str | None
    """Why they need not be; None where all of them have to."""


class Graphs(TypedDict):
    """Whether a plan runs as CUDA graphs."""

    used: bool
    reason: str | None


class Rival(TypedDict):
    """What a plan was timed against."""

    precision: str | None
    sha256: str | None
    onnx_sha256: str | None
    graphs: bool
    reason: str | None


class Record(TypedDict):
    """A plan that passed."""

    file: str
    sha256: str
    onnx_sha256: str
    tensorrt: str
    settings: BuilderSettings
    seconds: float
    size_bytes: int
    float_precision: str
    """What its float part runs in."""
    parity: Parity
    attention: Attentions
    int8_gemms: int
    """Quantized GEMMs that run in int8."""
    precisions: dict[str, str]
    """Precision of each GEMM."""
    int8_share: float | None
    graphs: Graphs
    latency: list[Timed]
    rows_per_s: float
    rival: Rival


class Process(TypedDict):
    """Processes of a Python model."""

    processes: int
    rows_per_s: float | None
    """Rows per second of one; None where the number is given."""


class ServingGpu(TypedDict):
    """A GPU that serves."""

    gpu: int
    capability: str
    instances: int


class Served(TypedDict):
    """What serves."""

    gpus: list[ServingGpu]
    rows_per_s: float
    """Of all plans."""
    cores: int
    preprocess: Process
    postprocess: Process


class Published(TypedDict):
    """The contents of `plans.json`."""

    plans: dict[str, Record]


def graph_digest(onnx: Path) -> str:
    """Returns the sha256 (hex) of a graph and of the file with its external weights, `<name>.data`, where there is one."""
    digest = hashlib.sha256()
    for file in (onnx, onnx.with_name(f"{onnx.name}.data")):
        if file is onnx or file.exists():
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()


def rows_text(rows: Sequence[object]) -> str:
    """Returns the contents of `rows.json`: texts, pairs of texts, or images (bytes) in base64."""
    kind = "image" if isinstance(rows[0], bytes) else "pair" if isinstance(rows[0], tuple) else "text"
    given = [base64.b64encode(row).decode("ascii") if isinstance(row, bytes) else row for row in rows]
    return json.dumps({"kind": kind, "rows": given}) + "\n"


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of `rows.json`."""
    document = json.loads(file.read_text(encoding="utf-8"))
    if document["kind"] == "image":
        return [base64.b64decode(row) for row in document["rows"]]
    return [tuple(row) if document["kind"] == "pair" else row for row in document["rows"]]


def file_names(files: Mapping[str, str]) -> str:
    """Returns `cc_model_filenames` in protobuf text format, ready to append to a configuration.

    Args:
        files: File by capability, such as {"80": "sm80.plan"}; Triton's key is then "8.0".

    Raises:
        ValueError: A capability or a file name is none of ours.
    """
    lines = []
    for capability, file in sorted(files.items(), key=lambda item: int(item[0])):
        if not re.fullmatch(r"[0-9]{2,3}", capability) or not re.fullmatch(r"(sm[0-9]{2,3}|ampere_plus)\.plan", file):
            raise ValueError(f"capability {capability!r}, file {file!r}: two or three digits and sm<digits>.plan are allowed")
        lines.append(f'cc_model_filenames {{ key: "{capability[:-1]}.{capability[-1]}" value: "{file}" }}\n')
    return "".join(lines)


def cuda_graphs(batch_sizes: Sequence[int]) -> str:
    """Returns `optimization` with a CUDA graph for each batch size, ready to append to a configuration; "" without batch sizes.

    A graph of Triton's TensorRT backend without shapes of its own has those that a profile is tuned for, in every profile: the bucket. It
    runs requests of exactly its batch size and bucket; all others run kernel by kernel, so that no row of a batch is left uninitialized.
    """
    specs = " ".join(f"graph_spec {{ batch_size: {size} }}" for size in batch_sizes)
    return f"optimization {{ cuda {{ graphs: true {specs} }} }}\n" if batch_sizes else ""


def cpu_instances(count: int) -> str:
    """Returns the `instance_group` of a Python model, ready to append to a configuration."""
    return f"instance_group {{ count: {count} kind: KIND_CPU }}\n"


def built_files(root: Path) -> dict[str, str]:
    """Returns the sha256 of each file that `build_plans.py` has published, by its path below the repository; empty before.

    Raises:
        ValueError: The record was written by an earlier version.
    """
    path = root / RECORD
    if not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    if "files" not in record:
        raise ValueError(f"{RECORD} was written by an earlier version: deploy the run again, and build the plans")
    return dict(record["files"])


def unhashed_files(root: Path) -> Iterator[str]:
    """Yields the names of what `build_plans.py` writes besides: its record, and the times of kernels."""
    yield from (path.name for path in root.glob(f"{TIMING_CACHE}*"))
    if (root / RECORD).exists():
        yield RECORD
