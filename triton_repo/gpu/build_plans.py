"""Builds, checks, measures and publishes the TensorRT plans of this model repository. Run it on the machine that serves; see README.md.

    compress deploy RUN DIR; cd DIR/model_repository; python3 build_plans.py

It writes into its folder, and so refuses to run within a run folder. For each compute capability of the GPUs that serve it builds a plan,
runs the golden rows through it (in batches and one by one) and compares the logits with the golden logits. Then it times the plan next to a
plan of the float model in 16 bits, and the processes that tokenize and label, which gives their number. The configurations are written last
and only if every plan passes; without them Triton does not load the models. Plans of other machines stay listed if they come from the same
graph, settings and TensorRT version, so one repository can serve several GPU types.

Requires numpy, the Python package `tensorrt` in the version of the server, and what the models need (`wheels/`); in this folder
`tensorrt_plan.py`, `tensorrt_layers.py`, `cuda_driver.py`, `tolerance.py`, `measure_plans.py` and `plan_files.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

sys.dont_write_bytecode = True  # this folder is hashed: nothing may be added to it but what is recorded

import numpy as np
from cuda_driver import CudaError, Device, capabilities, load_driver  # type: ignore[import-not-found]
from measure_plans import latencies, plan_rate, processes, rate  # type: ignore[import-not-found]
from plan_files import (  # type: ignore[import-not-found]
    CONFIG,
    GOLDEN,
    MODELS,
    RECORD,
    ROWS,
    SCHEMA,
    SPEC,
    TIMING_CACHE,
    cpu_instances,
    cuda_graphs,
    file_names,
    graph_digest,
    read_rows,
)
from tensorrt_layers import fused_attentions, gemm_precisions, inspected_layers, with_products  # type: ignore[import-not-found]
from tensorrt_plan import Built, Plan, PlanError, Settings, build  # type: ignore[import-not-found]
from tolerance import judge  # type: ignore[import-not-found]

if TYPE_CHECKING:  # where this file is copied to, types are not read
    from triton_repo.gpu.measure_plans import Timed
    from triton_repo.gpu.plan_files import Attentions, Figures, Parity, Part, Process, Published, Record, Row, Served, Spec

STAGING = "staging"
ARTIFACT = "manifest.json"
"""File next to this repository while it is in the run that made it."""
SOME = "some attentions are no nodes of the graph: no kernel runs them"
SINGLE_ROWS = 4
"""Rows of each bucket that also run one by one: some engines are correct only at batch 1, others only at larger batches."""
PORTABLE = "ampere_plus"
"""Hardware compatibility level: one plan then serves every capability from 8.0 on."""


class Made(TypedDict):
    """A plan that was built."""

    file: str
    built: Built
    reason: str | None
    """Why its attention need not be fused."""
    rival: Built | None
    rival_reason: str | None


class Refused(RuntimeError):
    """A plan must not be served; a one-line message."""


def run(root: Path, trt: ModuleType, driver: CDLL | None, log: Callable[[str], None] = print) -> int:
    """Builds, checks, measures and publishes; returns the exit status.

    Args:
        root: This model repository.
        trt: The module `tensorrt`.
        driver: The CUDA driver, or None.
        log: Prints one line.
    """
    if (root.parent / ARTIFACT).exists():
        log(f"not ready: {root} belongs to a run, where nothing may be written; copy it out first: compress deploy RUN DIR")
        return 1
    spec: Spec = json.loads((root / SPEC).read_text(encoding="utf-8"))
    seen = capabilities(driver)
    if not seen:
        log("no NVIDIA GPU is visible: start the container with --gpus all")
        return 1
    for name in spec["models"].values():
        (root / MODELS / name / CONFIG).unlink(missing_ok=True)  # not served until every plan has passed
    staging = root / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        gpus = serving(spec, seen)
        check_graphs(root, spec)
        built = build_all(root, spec, trt, driver, gpus, log)
        serve = measured(root, spec, gpus, built, log)
    except (PlanError, CudaError, Refused) as error:
        log(f"not ready: {error}")
        shutil.rmtree(staging)
        return 1
    made = {entry["file"] for entry in built.values()}
    kept = {key: entry for key, entry in earlier(root, spec, str(trt.__version__)).items() if entry["file"] not in made}
    publish(root, spec, {**kept, **built}, serve)
    shutil.rmtree(staging)
    listed = ", ".join(sorted(read_record(root)["plans"], key=int))
    log(f"ready: {spec['models']['plan']}, compute capabilities {listed}; {len(gpus)} GPUs")
    return 0


def serving(spec: Spec, seen: Sequence[str]) -> dict[int, tuple[str, int]]:
    """Returns the capability of each GPU that serves, and its number of instances, by its ordinal.

    Raises:
        Refused: A GPU of the settings is not there.
    """
    if spec["groups"] is None:
        return {ordinal: (capability, spec["instances"]) for ordinal, capability in enumerate(seen)}
    wanted = {gpu: group["instances"] for group in spec["groups"] for gpu in group["gpus"]}
    missing = sorted(gpu for gpu in wanted if gpu >= len(seen))
    if missing:
        raise Refused(f"gpu.groups: GPU {missing[0]} is listed, and {len(seen)} GPUs are visible, 0 to {len(seen) - 1}; list those")
    return {gpu: (seen[gpu], count) for gpu, count in sorted(wanted.items())}


def build_all(
    root: Path, spec: Spec, trt: ModuleType, driver: CDLL | None, gpus: Mapping[int, tuple[str, int]], log: Callable[[str], None]
) -> dict[str, Record]:
    """Builds and checks a plan for each capability, or one for all where it is portable; returns their records by capability.

    Raises:
        PlanError: A plan does not build or load.
        Refused: Its logits are wrong, or a GPU does not load it.
    """
    first = dict(reversed([(capability, ordinal) for ordinal, (capability, _) in gpus.items()]))
    portable = spec["settings"]["hardware_compatibility"] == PORTABLE
    old = [capability for capability in first if portable and int(capability) < 80]
    if old:
        raise Refused(f"gpu.hardware_compatibility: {PORTABLE} given, and a GPU has compute capability {old[0]}; it needs 80 or above")
    records: dict[str, Record] = {}
    plan = None
    for capability in sorted(first, key=int):
        device = Device(driver, first[capability])
        if plan is None or not portable:
            plan = both(root, spec, trt, device.capability, log)
        records[capability] = check(root, spec, trt, device, plan, log)
    return records


def both(root: Path, spec: Spec, trt: ModuleType, capability: str, log: Callable[[str], None]) -> Made:
    """Builds the plan on the current GPU, and its rival where the repository holds one.

    Raises:
        PlanError: The plan does not build.
    """
    cache = root / f"{TIMING_CACHE}sm{capability}"
    keeps = spec["settings"]["timing_cache"]
    known = (cache.read_bytes() if cache.exists() else b"") if keeps else None
    built, reason = build_either(root, spec, trt, known, log)
    if keeps:
        cache.write_bytes(built.timing_cache)
        known = built.timing_cache
    file = f"{PORTABLE if spec['settings']['hardware_compatibility'] == PORTABLE else f'sm{capability}'}.plan"
    (root / STAGING / file).write_bytes(built.plan)
    rival, why = None, spec["rival_reason"]
    if spec["rival"] is not None:
        try:
            rival = build(trt, root / spec["rival"], spec["buckets"], spec["max_batch_size"], timing_cache=known, settings=settings(spec))
        except PlanError as error:
            why = str(error)
            log(f"no {spec['rival_precision']} plan to compare with: {why}")
    return {"file": file, "built": built, "reason": reason, "rival": rival, "rival_reason": why}


def check(root: Path, spec: Spec, trt: ModuleType, device: Device, build: Made, log: Callable[[str], None]) -> Record:
    """Checks a plan on a GPU, and times it; returns its record.

    Raises:
        PlanError: The plan does not load.
        Refused: Its logits are wrong.
    """
    built, golden = build["built"], np.load(root / GOLDEN, allow_pickle=False)
    plans = {"plan": Plan(trt, device, built.plan)}
    parity = compare(plans["plan"], golden, spec)
    layers = with_products(inspected_layers(plans["plan"].information()))
    precisions = gemm_precisions(layers, [*spec["gemms"], *(name for name in spec["int8_gemms"] if name not in spec["gemms"])])
    attention: Attentions = {
        "fused": fused_attentions(layers, spec["attentions"]),
        "of": len(spec["attentions"]),
        "reason": build["reason"],
    }
    count = sum(precisions.get(name) == "int8" for name in spec["int8_gemms"])
    log(
        f"sm{device.capability}: built in {built.seconds:.0f} s; {count} of {len(spec['int8_gemms'])} quantized GEMMs run in int8; "
        f"{attention['fused']} of {attention['of']} attentions fused; {parity}"
    )
    if not parity["passed"]:
        raise Refused(f"the logits of the plan for sm{device.capability} differ from the golden logits: {parity}")
    if build["rival"] is not None:
        plans["rival"] = Plan(trt, device, build["rival"].plan)
    times, refused = timed(plans, golden, spec, log)
    return {
        "file": build["file"],
        "sha256": hashlib.sha256(built.plan).hexdigest(),
        "onnx_sha256": spec["onnx_sha256"],
        "tensorrt": str(trt.__version__),
        "settings": spec["settings"],
        "seconds": built.seconds,
        "size_bytes": len(built.plan),
        "float_precision": spec["float_precision"],
        "parity": parity,
        "attention": attention,
        "int8_gemms": count,
        "precisions": precisions,
        "int8_share": int8_share(spec["gemms"], precisions),
        "graphs": {"used": "plan" not in refused, "reason": refused.get("plan")},
        "latency": times,
        "rows_per_s": plan_rate(times, golden),
        "rival": {
            "precision": spec["rival_precision"],
            "sha256": None if build["rival"] is None else hashlib.sha256(build["rival"].plan).hexdigest(),
            "onnx_sha256": spec["rival_sha256"],
            "graphs": "rival" in plans and "rival" not in refused,
            "reason": build["rival_reason"],
        },
    }


def timed(
    plans: Mapping[str, Plan], golden: Mapping[str, np.ndarray], spec: Spec, log: Callable[[str], None]
) -> tuple[list[Timed], dict[str, str]]:
    """Returns the latencies of a plan and its rival, and why they do not run as CUDA graphs, by the names of those that do not."""
    refused = {name: why for name, one in plans.items() if (why := graph_refusal(one, golden, spec, name == "plan")) is not None}
    for name, why in refused.items():
        log(f"  no CUDA graphs of the {name}: {why}")
    times = latencies(plans, golden, spec, [name for name in plans if name not in refused])
    for row in times:
        beside = f", {row['speedup']:.2f} times as fast as {spec['rival_precision']}" if row["speedup"] is not None else ""
        log(f"  {row['batch']} x {row['sequence'] or 'image'}: {row['plan']['p50_ms']:.3f} ms{beside}")
    return times, refused


def graph_refusal(plan: Plan, golden: Mapping[str, np.ndarray], spec: Spec, judged: bool) -> str | None:
    """Returns why a plan does not run as CUDA graphs; None where it does.

    Args:
        plan: On the GPU that serves.
        golden: The golden arrays.
        spec: The spec of the repository.
        judged: Whether the answers of the graphs have to be the golden ones.
    """
    if not spec["graph_sizes"]:
        return "gpu.cuda_graphs: false"
    try:
        parity = compare(plan, golden, spec, graph=True)
    except (PlanError, CudaError) as error:
        return str(error)
    return f"recorded, its logits differ from the golden logits: {parity}" if judged and not parity["passed"] else None


def int8_share(gemms: Mapping[str, int], precisions: Mapping[str, str]) -> float | None:
    """Returns the MACs of weight GEMMs that run in int8 / MACs of all; None where they are not known, or the precision of one is not.

    Args:
        gemms: MACs by node.
        precisions: Precision by node.
    """
    if not gemms or any(name not in precisions for name in gemms):
        return None
    return sum(macs for name, macs in gemms.items() if precisions[name] == "int8") / sum(gemms.values())


def settings(spec: Spec) -> Settings:
    """Returns the settings of the builder."""
    given = spec["settings"]
    return Settings(given["workspace_bytes"], given["optimization_level"], given["hardware_compatibility"], given["refit"])


def build_either(root: Path, spec: Spec, trt: ModuleType, cache: bytes | None, log: Callable[[str], None]) -> tuple[Built, str | None]:
    """Builds the graph whose attention has to be fused, and where that does not build or is not there, the other one.

    Returns:
        What was built, and why its attention need not be fused, or None.

    Raises:
        PlanError: Neither builds.
    """
    shapes = spec["buckets"], spec["max_batch_size"]
    reason = "this repository has no graph with attention nodes"
    if spec["fused"] is not None:
        try:
            built = build(trt, root / spec["fused"], *shapes, timing_cache=cache, settings=settings(spec))
        except PlanError as error:
            reason = str(error)
            log(f"attention is not fused: {reason}")
        else:
            return built, None if len(spec["attentions"]) == sum(len(gate.nodes) for gate in built.gates) else SOME
    return build(trt, root / spec["onnx"], *shapes, timing_cache=cache, settings=settings(spec)), reason


def compare(plan: Plan, golden: Mapping[str, np.ndarray], spec: Spec, graph: bool = False) -> Parity:
    """Runs the golden rows in batches, and some of each bucket one by one, and judges both separately; as CUDA graphs where asked for."""
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"batches": [], "single": []}
    for bucket in spec["buckets"] or [0]:
        expected = golden[f"{bucket}.logits"]
        features = {name: golden[f"{bucket}.{name}"] for name in spec["inputs"]}
        if len(expected):
            pairs["batches"].append((expected, plan.predict(features, graph=graph)))
        for row in range(min(SINGLE_ROWS, len(expected))):
            one = {name: array[row : row + 1] for name, array in features.items()}
            pairs["single"].append((expected[row : row + 1], plan.predict(one, graph=graph)))

    def judged(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> Figures:
        expected, logits = (np.concatenate(part) for part in zip(*found, strict=True))
        return compared(expected, logits, spec["unit"], spec["float_precision"])

    batches, single = judged(pairs["batches"]), judged(pairs["single"])
    return {"batches": batches, "single": single, "passed": bool(batches["passed"] and single["passed"])}


def compared(expected: np.ndarray, logits: np.ndarray, unit: float, float_precision: str) -> Figures:
    """Compares logits [n, C] with the golden logits, in units of `unit`, within the limits of what the float part runs in; for regression
    (C = 1) there are no classes that could differ."""
    expected, logits = expected.astype(np.float64), logits.astype(np.float64)
    changed = logits.argmax(axis=1) != expected.argmax(axis=1)
    figures = judge(changed, np.abs(logits - expected) / unit, float_precision)
    return {**figures, "median_abs": round(figures["median_abs"], 6), "max_abs": round(figures["max_abs"], 6)}


def measured(
    root: Path, spec: Spec, gpus: Mapping[int, tuple[str, int]], built: Mapping[str, Record], log: Callable[[str], None]
) -> Served:
    """Returns the serving setup.

    Raises:
        Refused: The packages of the models are not installed.
    """
    total, cores = sum(built[capability]["rows_per_s"] for capability, _ in gpus.values()), len(os.sched_getaffinity(0))
    given = spec["processes"]
    works = None if all(given.values()) else python_work(root, spec)

    def of_part(part: Part) -> Process:
        count = given[part]
        one = None if count is not None or works is None else rate(*works[part])
        found: Process = {"processes": count or processes(total, one or total, cores), "rows_per_s": one}
        told = "given" if one is None else f"{one:.0f} rows/s each, {total:.0f} rows/s on all GPUs, {cores} cores"
        log(f"{part}: {found['processes']} processes ({told})")
        return found

    return {
        "gpus": [{"gpu": gpu, "capability": capability, "instances": count} for gpu, (capability, count) in gpus.items()],
        "rows_per_s": total,
        "cores": cores,
        "preprocess": of_part("preprocess"),
        "postprocess": of_part("postprocess"),
    }


def python_work(root: Path, spec: Spec) -> dict[Part, tuple[Callable[[Any], object], Sequence[Row | np.ndarray]]]:
    """Returns the functions of `preprocess` and `postprocess` for one row, and the golden rows to time them with.

    Raises:
        Refused: The packages of the models are not installed.
    """
    folder = root / MODELS / spec["models"]["preprocess"] / "1"
    try:
        module, responses = (_loaded(folder / f"{name}.py") for name in ("preprocess", "response"))
    except ImportError as error:
        raise Refused(
            f"{error}: what the models need is not installed; pip install --no-index --no-deps wheels/*.whl, or give "
            "gpu.preprocess_processes and gpu.postprocess_processes"
        ) from error
    preprocessor, golden = module.Preprocessor.load(folder), np.load(root / GOLDEN, allow_pickle=False)
    logits = np.concatenate([golden[f"{bucket}.logits"] for bucket in spec["buckets"] or [0]])
    return {
        "preprocess": (lambda row: preprocessor.encode([row]), read_rows(root / ROWS)),
        "postprocess": (lambda row: responses.RESPONSES[preprocessor.response].of(row, preprocessor.labels), [row[None] for row in logits]),
    }


def _loaded(file: Path) -> ModuleType:
    """Returns the module in a file of the repository."""
    found = importlib.util.spec_from_file_location(f"{file.stem}_of_repository", file)
    assert found is not None, f"{file} is a file of Python"
    assert found.loader is not None, f"{file} is a file of Python"
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def publish(root: Path, spec: Spec, plans: Mapping[str, Record], serve: Served) -> None:
    """Moves the plans into the version folder of the model, writes the record and, last, the configurations."""
    names, models = spec["models"], root / MODELS
    version = models / names["plan"] / "1"
    version.mkdir(parents=True, exist_ok=True)
    for plan in sorted((root / STAGING).glob("*.plan")):
        plan.replace(version / plan.name)
    added = {"preprocess": cpu_instances(serve["preprocess"]["processes"]), "postprocess": cpu_instances(serve["postprocess"]["processes"])}
    recorded = all("graphs" in entry and entry["graphs"]["used"] for entry in plans.values())  # one configuration for all machines
    added["plan"] = file_names({key: value["file"] for key, value in plans.items()}) + cuda_graphs(spec["graph_sizes"] if recorded else [])
    texts = {part: (root / f"{part}.pbtxt").read_text(encoding="utf-8") + text for part, text in added.items()}
    files = {f"{MODELS}/{names['plan']}/1/{entry['file']}": entry["sha256"] for entry in plans.values()}
    files |= {f"{MODELS}/{names[part]}/{CONFIG}": hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()}
    record = {"schema": SCHEMA, "plans": plans, "serving": serve, "files": files}
    (root / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for part, text in texts.items():
        temporary = models / names[part] / f".{CONFIG}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(models / names[part] / CONFIG)


def earlier(root: Path, spec: Spec, version: str) -> dict[str, Record]:
    """Returns the records of earlier plans that are still valid: same graph, settings and TensorRT version, existing file."""
    folder = root / MODELS / spec["models"]["plan"] / "1"
    same = spec["onnx_sha256"], spec["settings"], version
    return {
        capability: entry
        for capability, entry in read_record(root)["plans"].items()
        if (entry["onnx_sha256"], entry["settings"], entry["tensorrt"]) == same and (folder / entry["file"]).exists()
    }


def read_record(root: Path) -> Published:
    """Returns the record of what was published; without plans before."""
    path = root / RECORD
    record: Published = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"plans": {}}
    return record


def check_graphs(root: Path, spec: Spec) -> None:
    """Checks that the graphs and their external weights have not changed since the repository was written.

    Raises:
        Refused: One has changed.
    """
    graphs = ((spec["onnx"], spec["onnx_sha256"]), (spec["fused"], spec["fused_sha256"]), (spec["rival"], spec["rival_sha256"]))
    for file, expected in graphs:
        digest = None if file is None else graph_digest(root / file)
        if digest != expected:
            raise Refused(f"{file} has changed since this repository was written: sha256 {digest}, {expected} expected")


if __name__ == "__main__":
    sys.exit(run(Path(__file__).resolve().parent, importlib.import_module("tensorrt"), load_driver()))
