"""Finished runs with their reports, written without running anything: models, their predictions in torch and in an engine, and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compress.recipe import check, dump
from compress.report import report
from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact, Kind
from foundation.artifacts.chain import write_chain
from foundation.artifacts.run_folder import open_run, write_lock
from foundation.labels.classes import ClassIds
from foundation.machine.environment import fingerprint
from foundation.measure.answers import save_predictions
from foundation.measure.engine_process import write_rows
from foundation.measure.metrics import metrics
from tests.tiny_recipes import tiny_vit

CLASSES = 10
TIMES = {"torch": 4.0, "fp32": 2.0, "int8": 1.0}
"""Median latency, ms: the baseline in torch, and the engine of each precision."""


@dataclass(frozen=True)
class Written:
    """What stands in a run."""

    labels: np.ndarray
    models: Mapping[str, np.ndarray]
    """Logits by variant; the first one is the baseline, and `quantize` is int8."""
    groups: np.ndarray | None = None
    rows: str | None = "rows"
    """Digest of the evaluation rows; None as in runs of earlier versions."""
    data: str | None = None
    """Digest of all data in `depends_on`."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the recipe besides its stages."""
    stages: tuple[dict[str, Any], ...] | None = None
    speed: float = 1.0
    """How many times faster the machine was."""
    engines: bool = True


def classes(n: int, seed: int, right: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels `[n]` and logits `[n, 10]` of a model that is right that often."""
    labels = np.random.default_rng(7).integers(0, CLASSES, n)
    draw = np.random.default_rng(seed)
    answers = np.where(draw.random(n) < right, labels, draw.integers(0, CLASSES, n))
    return labels, np.eye(CLASSES, dtype=np.float32)[answers]


def write_run(folder: Path, run: Written) -> Path:
    """Writes a run and its report into `folder`."""
    default: tuple[dict[str, Any], ...] = ({"finetune": {"epochs": 1}}, {"quantize": {}}, {"export": {}})
    stages = run.stages or (default if run.engines else default[:2])[: len(run.models) + run.engines]
    raw = {**tiny_vit(folder.name), "target": {"engines": ["openvino"], "batch_sizes": [1]}, **run.recipe}
    recipe = dump(check({**raw, "stages": list(stages)}))
    names = list(run.models)
    steps = {"model": _made(folder, "model", "checkpoint", {})}
    for place, (name, logits) in enumerate(run.models.items()):
        parents = [steps[names[place - 1]][0].digest] if place else []
        steps[name] = _made(folder, name, "checkpoint", {}, parents=parents)
        steps[f"evaluate-{name}"] = _evaluated(folder, run, name, logits, recipe["model"]["task"])
    if run.engines:
        steps["export"] = _exported(folder, run, recipe["model"]["task"])
        steps["latency"] = _timed(folder, run)
    write_lock(folder, recipe, fingerprint(), steps)
    first = run.models[names[0]]
    write_rows(folder / "golden.safetensors", ["row"], {f"logits.{names[0]}.torch": first[:1]})
    (folder / "flips.jsonl").write_text("")
    (folder / ".lock").touch()
    write_chain(open_run(folder))
    report.write(folder, [])
    return folder


Step = tuple[Artifact, bool, float]


def _made(folder: Path, name: str, kind: Kind, figures: dict[str, Any], **more: Any) -> Step:
    """Writes an artifact; `write` in `more` fills its folder, `parents` and `depends_on` go to its manifest."""
    key = artifact.digest([folder.name, name])
    with artifact.writing(folder / "stages" / f"{name}-{key[:8]}") as out:
        more.get("write", lambda out: (out / "content.txt").write_text(f"{folder} {name}"))(out)
        stage = {"evaluation": "evaluate", "engine": "export"}.get(kind, name)
        fields = {"stage": stage, "config": {}, "seed": 0, **fingerprint(), "metrics": figures, "seconds": 1.0, "peak_memory_bytes": 1}
        fields |= {"depends_on": more["depends_on"]} if more.get("depends_on") else {}
        artifact.seal(out, id=name, kind=kind, key=key, parents=more.get("parents", []), fields=fields)
    return artifact.load(folder / "stages" / f"{name}-{key[:8]}"), False, 1.0


def _evaluated(folder: Path, run: Written, name: str, logits: np.ndarray, task: Any) -> Step:
    figures: dict[str, Any] = {"metrics": metrics(task, logits, ClassIds(run.labels)), "n": len(run.labels), "parameters": 10, "macs": 10}
    figures |= {"predictions": "torch.safetensors"}
    if run.rows is not None:
        figures["evaluation_rows"] = {"left_out_of_train": 0, "in_train": 0, "sha256": run.rows}

    def write(out: Path) -> None:
        save_predictions(out / "torch.safetensors", logits, ClassIds(run.labels), run.groups)

    depends = None if run.data is None else {"data": run.data}
    return _made(folder, f"evaluate-{name}", "evaluation", figures, write=write, depends_on=depends)


def _exported(folder: Path, run: Written, task: Any) -> Step:
    def entry(name: str, logits: np.ndarray) -> dict[str, Any]:
        shares = {"int8_share": 1.0, "int8_share_all": 1.0, "layers": [], "runnable": True, "float_precision": "fp32"}
        figures = metrics(task, logits, ClassIds(run.labels))
        told = {"engine": "openvino", "mode": "static", "predictions": f"{name}.safetensors", "metrics": figures}
        return {**told, **shares, "n": len(run.labels), "size_bytes": 1000 if _precision(name) == "int8" else 4000}

    def write(out: Path) -> None:
        builds = []
        for name, logits in run.models.items():
            save_predictions(out / f"{name}.safetensors", logits, ClassIds(run.labels))
            build = {"variant": name, "precision": _precision(name), "float_precision": "fp32", "folder": f"{name}-{_precision(name)}"}
            builds.append({**build, "engines": [entry(name, logits)]})
        artifact.write_json(out / "export.json", {"builds": builds})

    return _made(folder, "export", "engine", {}, write=write)


def _timed(folder: Path, run: Written) -> Step:
    def row(name: str, engine: str, precision: str, mode: str) -> dict[str, Any]:
        p50 = TIMES["torch" if engine == "torch" else precision] / run.speed
        where = {"variant": name, "engine": engine, "mode": mode, "precision": precision, "float_precision": "fp32", "device": "cpu"}
        figures = {"p50_ms": p50, "p90_ms": p50, "p99_ms": None, "throughput_per_s": 1000 / p50, "n": 30}
        return {**where, "threads": 1, "batch": 1, "sequence": None, **figures}

    def write(out: Path) -> None:
        rows = [row(next(iter(run.models)), "torch", "fp32", "eager")]
        rows += [row(name, "openvino", _precision(name), "static") for name in run.models]
        artifact.write_json(out / "latency.json", rows)

    return _made(folder, "latency", "latency", {}, write=write)


def _precision(variant: str) -> str:
    return "int8" if variant == "quantize" else "fp32"
