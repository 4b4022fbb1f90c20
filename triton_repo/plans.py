"""Writes the model repository for NVIDIA GPUs, without the TensorRT plans: they are built on the machine that serves.

    out/
      README.md                        the commands, and what has never been run
      build_plans.py  tensorrt_plan.py  cuda_driver.py  tolerance.py
      model.onnx  golden.npz           the graph; 64 preprocessed rows and their logits in torch, fp32
      model_fused.onnx                 where its float part is in halves: the graph with attention as nodes, which is tried first
      gpu.json  plan.pbtxt             settings of build_plans.py; configuration of the plan without its file names
      models/                          the repository that Triton serves
        NAME/                          ensemble: preprocess -> plan -> postprocess
        NAME_preprocess/1/             model.py preprocess.py preprocess.json tokenizer.json
        NAME_postprocess/1/            the same
        NAME_plan/                     written by build_plans.py after it has checked the plans

A plan works with one version of TensorRT and one compute capability only, so none is shipped: `build_plans.py` builds it in the serving
image, checks it on the golden rows, and only then writes the configuration without which Triton does not load the model.

Not supported: more than one instance per GPU, and a plan across several GPUs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto
from tritonclient.grpc import model_config_pb2 as pb

from compress.core.errors import InputError
from compress.standalone import cuda_driver, preprocess, tensorrt_plan, tolerance
from compress.standalone.preprocess import Preprocessor, Row
from triton_repo.config import IMAGE, LABEL, LOGITS, SCORE, TEXT, TEXT_PAIR, from_text, to_text

ONNX, FUSED = "model.onnx", "model_fused.onnx"
GOLDEN, SPEC, BASE_CONFIG, MODELS = "golden.npz", "gpu.json", "plan.pbtxt", "models"
OUTPUT = "logits"
"""Output name of the graph; clients see LOGITS, as in the CPU repository."""
PREPROCESS_INSTANCES = 2
"""Preprocessing processes; a single one would be the bottleneck of a fast GPU."""
_TYPES = {TensorProto.INT64: pb.TYPE_INT64, TensorProto.FLOAT: pb.TYPE_FP32}


@dataclass(frozen=True)
class _Names:
    """Names of the four models."""

    ensemble: str

    @property
    def preprocess(self) -> str:
        return f"{self.ensemble}_preprocess"

    @property
    def plan(self) -> str:
        return f"{self.ensemble}_plan"

    @property
    def postprocess(self) -> str:
        return f"{self.ensemble}_postprocess"


def write_gpu_repository(
    out: Path,
    onnx_file: Path,
    preprocessor: Preprocessor,
    rows: Sequence[Row],
    logits: NDArray[np.float32],
    *,
    name: str,
    max_batch_size: int,
    unit: float = 1.0,
) -> dict[str, Any]:
    """Writes the repository.

    Args:
        out: Folder to write into; created.
        onnx_file: The float, Q/DQ or half graph. Beside a half graph may lie `<name>_fused.onnx`, the same with attention as nodes.
        preprocessor: Preprocessor of the same checkpoint; defines inputs, buckets and labels.
        rows: Golden rows.
        logits: Their logits in torch, the float part in fp32, float32 [n, C].
        name: Name of the ensemble, which clients call.
        max_batch_size: Maximum batch size of all models and of the optimization profiles.
        unit: Unit of differences from the golden logits (`compress.measure.agreement.unit`).

    Returns:
        Figures for the manifest: `layout`, `models`, `ready` (always false here) and its `reason`.

    Raises:
        ValueError: The inputs of graph and preprocessor differ.
        InputError: Images have no fixed size.
    """
    names = _Names(name)
    inputs = check_inputs(onnx_file, preprocessor)
    models = out / MODELS
    models.mkdir(parents=True)
    for config in configurations(names.ensemble, preprocessor, inputs, max_batch_size, takes_pairs(rows)):
        if config.name == names.plan:
            (out / BASE_CONFIG).write_text(to_text(config), encoding="utf-8")
        else:
            _write_model(models / config.name, config)
    for part in (names.preprocess, names.postprocess):
        _write_python(models / part / "1", f"gpu_{part.removeprefix(name + '_')}.py", preprocessor)
    _copy_graph(onnx_file, out / ONNX)
    fused = onnx_file.with_name(f"{onnx_file.stem}_fused.onnx")
    if fused.exists():
        _copy_graph(fused, out / FUSED)
    arrays: dict[str, Any] = dict(golden_arrays(preprocessor, rows, logits))
    np.savez(out / GOLDEN, **arrays)
    spec = _spec(out, names, preprocessor, inputs, max_batch_size) | {"unit": unit}
    (out / SPEC).write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
    for source in (cuda_driver.__file__, tensorrt_plan.__file__, tolerance.__file__, Path(__file__).with_name("build_plans.py")):
        shutil.copyfile(source, out / Path(source).name)
    (out / "README.md").write_text(readme(names.ensemble), encoding="utf-8")
    return {
        "layout": "ensemble",
        "models": [config.name for config in _listed(models)],
        "ready": False,
        "reason": "the plans are built on the machine that serves",
    }


def check_inputs(onnx_file: Path, preprocessor: Preprocessor) -> dict[str, tuple[int, list[int]]]:
    """Returns the type (of `ModelConfig`) and the shape without batch (-1: dynamic) of each graph input.

    Raises:
        ValueError: They differ from the outputs of the preprocessor.
        InputError: Images have no fixed size.
    """
    graph = onnx.load(str(onnx_file), load_external_data=False).graph
    found = {}
    for value in graph.input:
        tensor = value.type.tensor_type
        axes = [axis.dim_value if axis.HasField("dim_value") else -1 for axis in tensor.shape.dim]
        found[value.name] = (_TYPES.get(tensor.elem_type, pb.TYPE_INVALID), axes[1:])
    steps = preprocessor.steps
    shape = [-1] if steps is None else list(steps.shape or ())
    if not shape:
        raise InputError(
            "model: preprocessor_config.json does not resize images to a fixed size, which a plan needs; "
            "give it size {height, width} or a centre crop"
        )
    expected = dict.fromkeys(preprocessor.input_names, (pb.TYPE_INT64 if steps is None else pb.TYPE_FP32, shape))
    if found != expected:
        raise ValueError(f"{onnx_file.name}: its inputs are {found}, the preprocessor returns {expected} (type, shape of a row)")
    return found


def takes_pairs(rows: Sequence[Row]) -> bool:
    """Whether rows are pairs of texts."""
    return isinstance(rows[0], tuple)


def configurations(
    name: str, preprocessor: Preprocessor, inputs: dict[str, tuple[int, list[int]]], max_batch_size: int, pairs: bool
) -> list[Any]:
    """Returns the `ModelConfig` of ensemble, preprocess, plan and postprocess.

    Args:
        name: Name of the ensemble.
        preprocessor: Defines modality, buckets and labels.
        inputs: Result of `check_inputs`.
        max_batch_size: Maximum batch size of all four.
        pairs: Whether rows are pairs of texts.
    """
    names, classes = _Names(name), len(preprocessor.labels)
    texts = (TEXT, TEXT_PAIR) if pairs else (TEXT,)
    rows = {value: (pb.TYPE_STRING, [1]) for value in ((IMAGE,) if preprocessor.modality == "image" else texts)}
    logits, answers = {OUTPUT: (pb.TYPE_FP32, [classes])}, {LABEL: (pb.TYPE_STRING, [1]), SCORE: (pb.TYPE_FP32, [1])}
    before = _python(names.preprocess, rows, inputs, max_batch_size, PREPROCESS_INSTANCES)
    after = _python(names.postprocess, logits, answers, max_batch_size, 1)
    plan = _plan(names.plan, inputs, logits, preprocessor.buckets, max_batch_size)
    ensemble = _model(names.ensemble, rows, {**answers, LOGITS: logits[OUTPUT]}, max_batch_size)
    ensemble.platform = "ensemble"
    for part in (before, plan, after):
        step = ensemble.ensemble_scheduling.step.add(model_name=part.name, model_version=-1)
        for value in part.input:
            step.input_map[value.name] = LOGITS if value.name == OUTPUT else value.name
        for value in part.output:
            step.output_map[value.name] = LOGITS if value.name == OUTPUT else value.name
    return [ensemble, before, plan, after]


def golden_arrays(preprocessor: Preprocessor, rows: Sequence[Row], logits: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """Returns the preprocessed `<bucket>.<input>` and the `<bucket>.logits` of each bucket (0 for images); a bucket may be empty."""
    groups, arrays = preprocessor.groups(rows), {}
    for bucket in preprocessor.buckets or (0,):
        members = groups.get(bucket, [])
        features = preprocessor.encode([rows[index] for index in members], bucket) if members else {}
        for name in preprocessor.input_names:
            arrays[f"{bucket}.{name}"] = features.get(name, np.zeros((0, bucket), np.int64))
        arrays[f"{bucket}.logits"] = np.asarray(logits[members], np.float32)
    return arrays


def quantized_nodes(onnx_file: Path) -> list[str]:
    """Returns the names of the GEMM nodes with DequantizeLinear on both inputs, cast or not."""
    graph = onnx.load(str(onnx_file), load_external_data=False).graph
    made: set[str] = set()
    for node in graph.node:
        if node.op_type == "DequantizeLinear" or (node.op_type == "Cast" and node.input[0] in made):
            made |= set(node.output)
    gemms = [node for node in graph.node if node.op_type in ("MatMul", "Gemm", "Conv")]
    return [node.name for node in gemms if node.input[0] in made and node.input[1] in made]


def float_precision(onnx_file: Path) -> str:
    """Returns what a graph runs its float part in, fp32, fp16 or bf16: the narrowest float type that it stores or casts to."""
    graph = onnx.load(str(onnx_file), load_external_data=False).graph
    casts = {attribute.i for node in graph.node if node.op_type == "Cast" for attribute in node.attribute if attribute.name == "to"}
    types = casts | {item.data_type for item in graph.initializer}
    return "fp16" if TensorProto.FLOAT16 in types else "bf16" if TensorProto.BFLOAT16 in types else "fp32"


def attentions(onnx_file: Path) -> list[str]:
    """Returns the names of the last products of attention, one for each."""
    graph = onnx.load(str(onnx_file), load_external_data=False).graph
    return [node.name for node in graph.node if node.op_type == "MatMul" and node.name.rpartition("/")[2].split(".")[0] == "pv"]


def readme(name: str) -> str:
    """Returns the README of the repository."""
    return _README.replace("@NAME@", name)


def _model(name: str, inputs: dict[str, tuple[int, list[int]]], outputs: dict[str, tuple[int, list[int]]], max_batch_size: int) -> Any:
    config = pb.ModelConfig(name=name, max_batch_size=max_batch_size)
    for value, (kind, dims) in inputs.items():
        config.input.add(name=value, data_type=kind, dims=dims)
    for value, (kind, dims) in outputs.items():
        config.output.add(name=value, data_type=kind, dims=dims)
    return config


def _python(
    name: str, inputs: dict[str, tuple[int, list[int]]], outputs: dict[str, tuple[int, list[int]]], max_batch_size: int, instances: int
) -> Any:
    config = _model(name, inputs, outputs, max_batch_size)
    config.backend = "python"
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=instances)
    return config


def _plan(
    name: str,
    inputs: dict[str, tuple[int, list[int]]],
    outputs: dict[str, tuple[int, list[int]]],
    buckets: Sequence[int],
    max_batch_size: int,
) -> Any:
    """One instance on each GPU with all profiles; no default file, so that a GPU without a plan is an error."""
    config = _model(name, inputs, outputs, max_batch_size)
    config.platform = "tensorrt_plan"
    config.dynamic_batching.SetInParent()
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU, count=1, profile=[str(index) for index in range(max(1, len(buckets)))])
    for bucket in buckets or (0,):
        warm_up = config.model_warmup.add(name=f"bucket {bucket}" if bucket else "image", batch_size=1)
        for value, (kind, dims) in inputs.items():
            sample = warm_up.inputs[value]
            sample.data_type, sample.zero_data = kind, True
            sample.dims.extend([bucket] if bucket else dims)
    return config


def _write_model(folder: Path, config: Any) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(to_text(config), encoding="utf-8")
    if config.platform == "ensemble":  # Triton needs the version folder, and copying tools drop empty folders
        (folder / "1" / ".keep").touch()


def _write_python(version: Path, template: str, preprocessor: Preprocessor) -> None:
    shutil.copyfile(Path(__file__).with_name(template), version / "model.py")
    shutil.copyfile(preprocess.__file__, version / "preprocess.py")
    preprocessor.save(version)


def _copy_graph(onnx_file: Path, out: Path) -> None:
    shutil.copyfile(onnx_file, out)
    data = onnx_file.with_name(f"{onnx_file.name}.data")  # external data for weights above 2 GB; the graph refers to this name
    if data.exists():
        shutil.copyfile(data, out.with_name(data.name))


def _spec(
    out: Path, names: _Names, preprocessor: Preprocessor, inputs: dict[str, tuple[int, list[int]]], max_batch_size: int
) -> dict[str, Any]:
    fused = (out / FUSED).exists()
    return {
        "schema": 1,
        "model": names.plan,
        "task": preprocessor.task,
        "onnx": ONNX,
        "onnx_sha256": hashlib.sha256((out / ONNX).read_bytes()).hexdigest(),
        "fused": FUSED if fused else None,
        "fused_sha256": hashlib.sha256((out / FUSED).read_bytes()).hexdigest() if fused else None,
        "inputs": list(inputs),
        "buckets": list(preprocessor.buckets),
        "max_batch_size": max_batch_size,
        "int8_gemms": quantized_nodes(out / ONNX),
        "attentions": attentions(out / ONNX),
        "float_precision": float_precision(out / ONNX),
    }


def _listed(models: Path) -> list[Any]:
    return [from_text(path.read_text(encoding="utf-8")) for path in sorted(models.glob("*/config.pbtxt"))]


_README = """# @NAME@ for Triton on NVIDIA GPUs

The plans of this repository are **not built yet**: a plan works with one version of TensorRT and one GPU type only. Until `build_plans.py`
has built and checked them, `@NAME@_plan` has no configuration and the ensemble `@NAME@` does not load.

## On the machine that serves

Use the same release of NVIDIA's images in both commands, so that both have the same TensorRT version.

    RELEASE=YY.MM        # TensorRT 10.0 or later
    docker run --rm --gpus all -v "$PWD":/repository nvcr.io/nvidia/tensorrt:$RELEASE-py3 \\
        bash -c "pip install numpy && python3 /repository/build_plans.py"

The script builds one plan for each compute capability of the visible GPUs, runs the golden rows through it (in batches and one by one),
compares the logits, and only then writes `models/@NAME@_plan/config.pbtxt`. Where there is a `model_fused.onnx`, its attention has to run
as fused kernels; where that does not build, `model.onnx` is built. `plans.json` holds the figures of each plan, and why its attention is
not fused. Run it again on a machine with other GPUs to add their plans, and again for each new release. If it prints "not ready" with the
reason, nothing is served.

The two Python models need tokenizers and Pillow, which the server image does not contain:

    printf 'ARG RELEASE\\nFROM nvcr.io/nvidia/tritonserver:$RELEASE-py3\\nRUN pip install tokenizers pillow\\n' | \\
        docker build --build-arg RELEASE=$RELEASE -t gpu-server -
    docker run --rm --gpus all --shm-size 1g -p 8000:8000 -p 8001:8001 -p 8002:8002 -v "$PWD"/models:/models \\
        gpu-server tritonserver --model-repository=/models

    curl -s localhost:8000/v2/models/@NAME@/infer -d \\
        '{"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a fine film"]}]}'

Image models take `IMAGE`, the bytes of a PNG or JPEG file; text-pair models take `TEXT` and `TEXT_PAIR`. Outputs are `LABEL`, `SCORE` and
`LOGITS`.

## What has never been run

None of the commands above was run on the machine that wrote this repository, which had no GPU and no container. That machine checked that
the configurations parse and that their types and shapes match the graph and the profiles. The golden logits are those of torch with the
float part in fp32; a plan whose float part is in halves is held to wider limits (`tolerance.py`).
"""
