"""Builds, checks and publishes the TensorRT plans of this model repository. Run it on the machine that serves; see README.md.

    compress deploy RUN DIR; cd DIR/model_repository; python3 build_plans.py

It writes into its folder, and so refuses to run within a run folder. For each compute capability of the visible GPUs it builds a plan,
runs the golden rows through it (in batches and one by one) and compares the logits with the golden logits. The configuration of the plan,
with `cc_model_filenames`, is written last and only if every plan passes; without it Triton does not load the model. Plans of other
machines stay listed if they come from the same graph and TensorRT version, so one repository can serve several GPU types.

Requires numpy and the Python package `tensorrt` in the version of the server, and in this folder `tensorrt_plan.py`, `cuda_driver.py` and
`tolerance.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # this folder is hashed: nothing may be added to it but plans

import numpy as np
from cuda_driver import CudaError, Device, capabilities, load_driver  # type: ignore[import-not-found]
from tensorrt_plan import Plan, PlanError, build, fused_attentions, gemm_precisions, with_products  # type: ignore[import-not-found]
from tolerance import judge  # type: ignore[import-not-found]

SPEC, BASE_CONFIG, GOLDEN, RECORD, STAGING, TIMING_CACHE = "gpu.json", "plan.pbtxt", "golden.npz", "plans.json", "staging", "timing-cache"
ARTIFACT = "manifest.json"
"""File beside this repository while it lies in the run that made it."""
SOME = "some attentions are no nodes of the graph: no kernel runs them"
SINGLE_ROWS = 4
"""Rows of each bucket that also run one by one: some engines are correct only at batch 1, others only at larger batches."""


class Refused(RuntimeError):
    """A plan must not be served; a one-line message."""


def run(root: Path, trt: Any, driver: Any, log: Callable[[str], None] = print) -> int:
    """Builds, checks and publishes; returns the exit status.

    Args:
        root: This model repository.
        trt: The module `tensorrt`.
        driver: The CUDA driver, or None.
        log: Prints one line.
    """
    if (root.parent / ARTIFACT).exists():
        log(f"not ready: {root} belongs to a run, where nothing may be written; copy it out first: compress deploy RUN DIR")
        return 1
    spec = json.loads((root / SPEC).read_text(encoding="utf-8"))
    found = dict(reversed([(capability, ordinal) for ordinal, capability in enumerate(capabilities(driver))]))
    if not found:
        log("no NVIDIA GPU is visible: start the container with --gpus all")
        return 1
    model = root / "models" / spec["model"]
    (model / "config.pbtxt").unlink(missing_ok=True)  # not served until every plan has passed
    staging = root / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        check_graph(root, spec)
        built = {capability: make(root, spec, trt, Device(driver, found[capability]), log) for capability in sorted(found, key=int)}
    except (PlanError, CudaError, Refused) as error:
        log(f"not ready: {error}")
        shutil.rmtree(staging)
        return 1
    publish(root, spec, model, {**earlier(root, spec, model, str(trt.__version__)), **built})
    shutil.rmtree(staging)
    log(f"ready: {spec['model']}, compute capabilities {', '.join(sorted(read_record(root), key=int))}")
    return 0


def make(root: Path, spec: Mapping[str, Any], trt: Any, device: Device, log: Callable[[str], None]) -> dict[str, Any]:
    """Builds one plan into the staging folder and checks it.

    Returns:
        Its record: file, hash of the graph, TensorRT version, seconds, size, what its float part runs in, parity, precisions of the GEMMs,
        and `attention`: how many are `fused`, `of` how many, and the `reason` why they need not be, None where all of them have to.

    Raises:
        PlanError: The plan does not build or load.
        Refused: Its logits are wrong.
    """
    cache = root / f"{TIMING_CACHE}-sm{device.capability}"
    known = cache.read_bytes() if cache.exists() else b""
    built, reason = build_either(root, spec, trt, known, log)
    cache.write_bytes(built.timing_cache)
    file = f"sm{device.capability}.plan"
    (root / STAGING / file).write_bytes(built.plan)
    plan = Plan(trt, device, built.plan)
    parity = compare(plan, np.load(root / GOLDEN, allow_pickle=False), spec)
    layers = with_products(plan.layers())
    precisions = gemm_precisions(layers, spec["int8_gemms"])
    attention = {"fused": fused_attentions(layers, spec["attentions"]), "of": len(spec["attentions"]), "reason": reason}
    count = sum(precision == "int8" for precision in precisions.values())
    log(
        f"sm{device.capability}: built in {built.seconds:.0f} s; {count} of {len(spec['int8_gemms'])} quantized GEMMs run in int8; "
        f"{attention['fused']} of {attention['of']} attentions fused; {parity}"
    )
    if not parity["passed"]:
        raise Refused(f"the logits of the plan for sm{device.capability} differ from the golden logits: {parity}")
    return {
        "file": file,
        "sha256": hashlib.sha256(built.plan).hexdigest(),
        "onnx_sha256": spec["onnx_sha256"],
        "tensorrt": str(trt.__version__),
        "seconds": built.seconds,
        "size_bytes": len(built.plan),
        "float_precision": spec["float_precision"],
        "parity": parity,
        "attention": attention,
        "int8_gemms": count,
        "precisions": precisions,
    }


def build_either(root: Path, spec: Mapping[str, Any], trt: Any, cache: bytes, log: Callable[[str], None]) -> tuple[Any, str | None]:
    """Builds the graph whose attention has to be fused, and where that does not build or is not there, the other one.

    Returns:
        What was built, and why its attention need not be fused, or None.

    Raises:
        PlanError: Neither builds.
    """
    settings = spec["buckets"], spec["max_batch_size"]
    reason = "this repository has no graph with attention nodes"
    if spec["fused"] is not None:
        try:
            built = build(trt, root / spec["fused"], *settings, timing_cache=cache)
        except PlanError as error:
            reason = str(error)
            log(f"attention is not fused: {reason}")
        else:
            return built, None if len(spec["attentions"]) == sum(len(gate.nodes) for gate in built.gates) else SOME
    return build(trt, root / spec["onnx"], *settings, timing_cache=cache), reason


def compare(plan: Plan, golden: Mapping[str, np.ndarray], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the golden rows in batches, and some of each bucket one by one, and judges both separately.

    Returns:
        `batches` and `single`: results of `compared`; `passed`: whether both passed.
    """
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"batches": [], "single": []}
    for bucket in spec["buckets"] or [0]:
        expected = golden[f"{bucket}.logits"]
        features = {name: golden[f"{bucket}.{name}"] for name in spec["inputs"]}
        if len(expected):
            pairs["batches"].append((expected, plan.predict(features)))
        for row in range(min(SINGLE_ROWS, len(expected))):
            one = {name: array[row : row + 1] for name, array in features.items()}
            pairs["single"].append((expected[row : row + 1], plan.predict(one)))
    judged = {}
    for kind, found in pairs.items():
        judged[kind] = compared(
            np.concatenate([first for first, _ in found]),
            np.concatenate([second for _, second in found]),
            spec["unit"],
            spec["float_precision"],
        )
    return {**judged, "passed": all(figures["passed"] for figures in judged.values())}


def compared(expected: np.ndarray, logits: np.ndarray, unit: float, float_precision: str) -> dict[str, Any]:
    """Compares logits [n, C] with the golden logits, in units of `unit`, within the limits of what the float part runs in; for regression
    (C = 1) there are no classes that could differ."""
    expected, logits = expected.astype(np.float64), logits.astype(np.float64)
    changed = logits.argmax(axis=1) != expected.argmax(axis=1)
    figures = judge(changed, np.abs(logits - expected) / unit, float_precision)
    return {**figures, "median_abs": round(figures["median_abs"], 6), "max_abs": round(figures["max_abs"], 6)}


def publish(root: Path, spec: Mapping[str, Any], model: Path, record: Mapping[str, Any]) -> None:
    """Moves the plans into the version folder of the model, writes the record and, last, the configuration."""
    version = model / "1"
    version.mkdir(parents=True, exist_ok=True)
    for plan in sorted((root / STAGING).glob("*.plan")):
        plan.replace(version / plan.name)
    (root / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    config = (root / BASE_CONFIG).read_text(encoding="utf-8") + file_names({key: value["file"] for key, value in record.items()})
    temporary = model / ".config.pbtxt"
    temporary.write_text(config, encoding="utf-8")
    temporary.replace(model / "config.pbtxt")


def file_names(files: Mapping[str, str]) -> str:
    """Returns `cc_model_filenames` in protobuf text format, ready to append to a configuration.

    Args:
        files: File by capability, such as {"80": "sm80.plan"}; Triton's key is then "8.0".
    """
    lines = []
    for capability, file in sorted(files.items(), key=lambda item: int(item[0])):
        if not re.fullmatch(r"[0-9]{2,3}", capability) or not re.fullmatch(r"sm[0-9]{2,3}\.plan", file):
            raise Refused(f"capability {capability!r}, file {file!r}: two or three digits and sm<digits>.plan are allowed")
        lines.append(f'cc_model_filenames {{ key: "{capability[:-1]}.{capability[-1]}" value: "{file}" }}\n')
    return "".join(lines)


def earlier(root: Path, spec: Mapping[str, Any], model: Path, version: str) -> dict[str, Any]:
    """Returns the records of earlier plans that are still valid: same graph, same TensorRT version, existing file."""
    return {
        capability: entry
        for capability, entry in read_record(root).items()
        if entry["onnx_sha256"] == spec["onnx_sha256"] and entry["tensorrt"] == version and (model / "1" / entry["file"]).exists()
    }


def read_record(root: Path) -> dict[str, Any]:
    """Returns the records of all published plans by compute capability."""
    path = root / RECORD
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def check_graph(root: Path, spec: Mapping[str, Any]) -> None:
    """Checks that the graphs have not changed since the repository was written.

    Raises:
        Refused: One has changed.
    """
    for name in ("onnx", "fused"):
        if spec[name] is None:
            continue
        digest, expected = hashlib.sha256((root / spec[name]).read_bytes()).hexdigest(), spec[f"{name}_sha256"]
        if digest != expected:
            raise Refused(f"{spec[name]} has changed since this repository was written: sha256 {digest}, {expected} expected")


if __name__ == "__main__":
    sys.exit(run(Path(__file__).resolve().parent, importlib.import_module("tensorrt"), load_driver()))
