"""Writes the model repository for NVIDIA GPUs, without the TensorRT plans: they are built on the machine that serves.

    out/
      README.md                        the commands, and what has never been run
      build_plans.py  tensorrt_plan.py  tensorrt_layers.py  cuda_driver.py  tolerance.py  measure_plans.py  plan_files.py
      model.onnx                       the graph
      model_fused.onnx                 where its float part is in 16 bits: the graph with attention as nodes, which is tried first
      rival.onnx                       the float model in 16 bits, which the plan is timed next to
      golden.npz  rows.json            64 rows, preprocessed with their logits in torch fp32, and as they are
      gpu.json                         settings of build_plans.py
      preprocess.pbtxt  plan.pbtxt  postprocess.pbtxt     configurations, without what is known where the plans are built
      models/                          the repository that Triton serves
        NAME/                          ensemble: preprocess -> plan -> postprocess
        NAME_preprocess/1/             model.py preprocess.py long_text.py preprocess.json tokenizer.json response.py
        NAME_postprocess/1/            the same
        NAME_plan/warmup/              a golden row of each bucket

A plan works with one version of TensorRT and one compute capability only, so none is shipped: `build_plans.py` builds it in the serving
image, checks it on the golden rows, times it, and only then writes the configurations without which Triton does not load the models.
`compress deploy` adds `wheels/`, the packages of the Python models.

Not supported: a plan across several GPUs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from tritonclient.grpc import model_config_pb2 as pb

from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.standalone import cuda_driver, long_text, preprocess, response, tensorrt_layers, tensorrt_plan, tolerance
from foundation.standalone.preprocess import Preprocessor, Row
from triton_repo.config import to_text
from triton_repo.gpu import measure_plans, plan_files
from triton_repo.gpu.configs import Names, Serving, configurations, warm_up_file
from triton_repo.gpu.measure_plans import features_of
from triton_repo.gpu.plan_files import GOLDEN, MODELS, ROWS, SCHEMA, SPEC, Group, Spec, graph_digest, rows_text
from triton_repo.gpu.settings import Gpu
from triton_repo.layout import beside

ONNX, FUSED, RIVAL = "model.onnx", "model_fused.onnx", "rival.onnx"
README = "readme.md"
PADDED = 4
"""Golden rows of a bucket that no row falls into."""
_TYPES = {TensorProto.INT64: pb.TYPE_INT64, TensorProto.FLOAT: pb.TYPE_FP32}
_NUMPY = {pb.TYPE_INT64: "int64", pb.TYPE_FP32: "float32"}
_COPIED = (cuda_driver, tensorrt_plan, tensorrt_layers, tolerance, measure_plans, plan_files)


@dataclass(frozen=True)
class Rival:
    """The float model that the plan is timed against."""

    onnx: Path | None = None
    """Its half graph; None: there is none."""
    precision: str | None = None
    """Its precision: fp16 or bf16."""
    reason: str | None = None
    """Why there is none."""


@dataclass(frozen=True)
class Golden:
    """Rows with known answers."""

    rows: Sequence[Row]
    logits: NDArray[np.float32]
    """Their logits in torch, the float part in fp32, float32 [n, C]."""
    unit: float = 1.0
    """Unit of differences from them (`foundation.measure.agreement.unit`)."""


@dataclass(frozen=True)
class Plans:
    """The plans to build, and their settings."""

    onnx: Path
    """The float, Q/DQ or half graph. Next to a half graph may be `<name>_fused.onnx`, the same with attention as nodes."""
    rival: Rival = Rival(reason="no float model in halves was exported")
    gpu: Gpu = field(default_factory=Gpu)
    gemms: dict[str, int] = field(default_factory=dict)
    """MACs of each weight GEMM by node, for the share of int8; empty: not known."""


@dataclass(frozen=True)
class Written:
    """A repository that was written."""

    models: tuple[str, ...]
    """Names of its models, sorted."""
    layout: str = "ensemble"
    reason: str = "the plans are built on the machine that serves"
    """Why it was not measured."""


def write_gpu_repository(out: Path, plans: Plans, preprocessor: Preprocessor, golden: Golden, *, name: str, serving: Serving) -> Written:
    """Writes the repository.

    Args:
        out: Folder to write into; created.
        plans: The graphs.
        preprocessor: Preprocessor of the same checkpoint; defines inputs, buckets and labels.
        golden: Golden rows.
        name: Name of the ensemble, which clients call.
        serving: How the models are served.

    Returns:
        What was written.

    Raises:
        ValueError: The inputs of graph and preprocessor differ.
        InputError: Images have no fixed size.
    """
    names = Names(name)
    inputs = check_inputs(Graph(plans.onnx), preprocessor)
    models = out / MODELS
    models.mkdir(parents=True)
    configs = configurations(names, preprocessor, inputs, serving, takes_pairs(golden.rows))
    _write_model(models / name, configs.pop("ensemble"))
    for part, config in configs.items():
        (out / f"{part}.pbtxt").write_text(to_text(config), encoding="utf-8")
    for part in ("preprocess", "postprocess"):
        _write_python(models / names.parts[part] / "1", f"{part}_model.py", preprocessor)
    graphs = {ONNX: plans.onnx, FUSED: plans.onnx.with_name(f"{plans.onnx.stem}_fused.onnx"), RIVAL: plans.rival.onnx}
    for file, source in graphs.items():
        if source is not None and source.exists():
            _copy_graph(source, out / file)
    arrays = golden_arrays(preprocessor, golden.rows, golden.logits)
    untyped: dict[str, Any] = dict(arrays)
    np.savez(out / GOLDEN, **untyped)
    (out / ROWS).write_text(rows_text(golden.rows), encoding="utf-8")
    spec = _spec(out, names, plans, preprocessor, inputs, serving, golden.unit)
    (out / SPEC).write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
    _write_warm_up(models / names.parts["plan"] / "warmup", arrays, spec)
    for module in _COPIED:
        shutil.copyfile(str(module.__file__), out / Path(str(module.__file__)).name)
    shutil.copyfile(Path(__file__).with_name("build_plans.py"), out / "build_plans.py")
    (out / "README.md").write_text(readme(names.ensemble), encoding="utf-8")
    return Written(tuple(sorted([name, *names.parts.values()])))


def check_inputs(onnx_file: Graph, preprocessor: Preprocessor) -> dict[str, tuple[int, list[int]]]:
    """Returns the type (of `ModelConfig`) and the shape without batch (-1: dynamic) of each graph input.

    Raises:
        ValueError: They differ from the outputs of the preprocessor.
        InputError: Images have no fixed size.
    """
    graph = onnx_file.structure
    found = {}
    for value in graph.input:
        tensor = value.type.tensor_type
        axes = [axis.dim_value if axis.HasField("dim_value") else -1 for axis in tensor.shape.dim]
        found[value.name] = (_TYPES.get(tensor.elem_type, pb.TYPE_INVALID), axes[1:])
    steps = preprocessor.steps
    shape = [-1] if steps is None else list(steps.shape or ())
    if not shape:
        raise InputError(
            "model",
            "preprocessor_config.json does not resize images to a fixed size, which a plan needs",
            remedy="give it size {height, width} or a centre crop",
        )
    expected = dict.fromkeys(preprocessor.input_names, (pb.TYPE_INT64 if steps is None else pb.TYPE_FP32, shape))
    if found != expected:
        raise ValueError(f"{onnx_file.path.name}: its inputs are {found}, the preprocessor returns {expected} (type, shape of a row)")
    return found


def takes_pairs(rows: Sequence[Row]) -> bool:
    """Whether rows are pairs of texts."""
    return isinstance(rows[0], tuple)


def golden_arrays(preprocessor: Preprocessor, rows: Sequence[Row], logits: NDArray[np.float32]) -> dict[str, Array]:
    """Returns the preprocessed `<bucket>.<input>` and the `<bucket>.logits` of each bucket (0 for images).

    A bucket that no row falls into gets `PADDED` rows of smaller ones, so that its profile is checked too; where all rows are longer it is
    empty.
    """
    groups, arrays = preprocessor.groups(rows), {}
    for bucket in preprocessor.buckets or (0,):
        smaller = [member for other in sorted(groups) if other < bucket for member in groups[other]]
        members = groups.get(bucket, smaller[-PADDED:])
        features = preprocessor.encode([rows[index] for index in members], bucket) if members else {}
        for name in preprocessor.input_names:
            arrays[f"{bucket}.{name}"] = features.get(name, np.zeros((0, bucket), np.int64))
        arrays[f"{bucket}.logits"] = np.asarray(logits[members], np.float32)
    return arrays


def quantized_nodes(onnx_file: Graph) -> list[str]:
    """Returns the names of the GEMM nodes with DequantizeLinear on both inputs, cast or not."""
    graph = onnx_file.structure
    made: set[str] = set()
    for node in graph.node:
        if node.op_type == "DequantizeLinear" or (node.op_type == "Cast" and node.input[0] in made):
            made |= set(node.output)
    gemms = [node for node in graph.node if node.op_type in ("MatMul", "Gemm", "Conv")]
    return [node.name for node in gemms if node.input[0] in made and node.input[1] in made]


def float_precision(onnx_file: Graph) -> str:
    """Returns the type of a graph's float part, fp32, fp16 or bf16: the narrowest float type that it stores or casts to."""
    graph = onnx_file.structure
    casts = {attribute.i for node in graph.node if node.op_type == "Cast" for attribute in node.attribute if attribute.name == "to"}
    types = casts | {item.data_type for item in graph.initializer}
    return "fp16" if TensorProto.FLOAT16 in types else "bf16" if TensorProto.BFLOAT16 in types else "fp32"


def attentions(onnx_file: Graph) -> list[str]:
    """Returns the names of the last products of attention, one for each."""
    graph = onnx_file.structure
    return [node.name for node in graph.node if node.op_type == "MatMul" and node.name.rpartition("/")[2].split(".")[0] == "pv"]


def readme(name: str) -> str:
    """Returns the README of the repository."""
    return files("triton_repo.gpu").joinpath(README).read_text(encoding="utf-8").replace("@NAME@", name)


def _write_model(folder: Path, config: pb.ModelConfig) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(to_text(config), encoding="utf-8")
    (folder / "1" / ".keep").touch()  # Triton needs the version folder of an ensemble, and copying tools drop empty folders


def _write_warm_up(folder: Path, arrays: Mapping[str, Array], spec: Spec) -> None:
    """Writes a row of each bucket as raw bytes, as Triton reads them."""
    folder.mkdir(parents=True)
    for bucket in spec["buckets"] or [0]:
        for name, array in features_of(arrays, spec["inputs"], bucket, 1, spec["dims"]).items():
            (folder / warm_up_file(bucket, name)).write_bytes(np.ascontiguousarray(array).tobytes())


def _write_python(version: Path, template: str, preprocessor: Preprocessor) -> None:
    version.mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name(template), version / "model.py")
    for file in (preprocess.__file__, long_text.__file__, response.__file__, *beside(preprocessor)):
        shutil.copyfile(file, version / Path(file).name)
    preprocessor.save(version)


def _copy_graph(onnx_file: Path, out: Path) -> None:
    shutil.copyfile(onnx_file, out)
    data = onnx_file.with_name(f"{onnx_file.name}.data")  # external data for weights above 2 GB; the graph refers to this name
    if data.exists():
        shutil.copyfile(data, out.with_name(data.name))


def _spec(
    out: Path,
    names: Names,
    plans: Plans,
    preprocessor: Preprocessor,
    inputs: dict[str, tuple[int, list[int]]],
    serving: Serving,
    unit: float,
) -> Spec:
    fused, rival = (file if (out / file).exists() else None for file in (FUSED, RIVAL))
    gpu = plans.gpu
    return {
        "schema": SCHEMA,
        "ensemble": names.ensemble,
        "models": names.parts,
        "task": preprocessor.task,
        "onnx": ONNX,
        "fused": fused,
        "rival": rival,
        "onnx_sha256": graph_digest(out / ONNX),
        "fused_sha256": None if fused is None else graph_digest(out / fused),
        "rival_sha256": None if rival is None else graph_digest(out / rival),
        "rival_precision": plans.rival.precision,
        "rival_reason": plans.rival.reason,
        "inputs": list(inputs),
        "dims": {name: (_NUMPY[kind], shape) for name, (kind, shape) in inputs.items()},
        "buckets": list(preprocessor.buckets),
        "max_batch_size": serving.max_batch_size,
        "batch_sizes": serving.measured_sizes,
        "graph_sizes": serving.graph_sizes,
        "int8_gemms": quantized_nodes(Graph(out / ONNX)),
        "gemms": plans.gemms,
        "attentions": attentions(Graph(out / ONNX)),
        "float_precision": float_precision(Graph(out / ONNX)),
        "instances": serving.instances,
        "groups": None if serving.groups is None else [Group(gpus=list(one.gpus), instances=one.instances) for one in serving.groups],
        "settings": {
            "workspace_bytes": None if gpu.workspace_mb is None else gpu.workspace_mb * 10**6,
            "optimization_level": gpu.optimization_level,
            "hardware_compatibility": gpu.hardware_compatibility,
            "timing_cache": gpu.timing_cache,
            "refit": gpu.refit,
        },
        "processes": {"preprocess": gpu.preprocess_processes, "postprocess": gpu.postprocess_processes},
        "unit": unit,
    }
