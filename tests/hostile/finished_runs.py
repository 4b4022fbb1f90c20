"""A finished run, written without running anything: a model, its evaluation, and the lock file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from compress.recipe import check, dump
from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact, Kind
from foundation.artifacts.chain import write_chain
from foundation.artifacts.run_folder import open_run, write_lock
from foundation.labels.classes import ClassIds
from foundation.machine.environment import fingerprint
from foundation.measure.answers import save_predictions
from foundation.measure.engine_process import write_rows
from tests.tiny_recipes import tiny_vit

ROWS = 12


def recipe() -> dict[str, Any]:
    """Returns the recipe of the run."""
    return dump(check(tiny_vit("tiny") | {"stages": [{"finetune": {"epochs": 1}}]}))


def write_run(folder: Path) -> Path:
    """Writes the run into `folder`."""
    labels = ClassIds(np.arange(ROWS, dtype=np.int64) % 10)
    logits = np.eye(10, dtype=np.float32)[(labels.array + (np.arange(ROWS) == 0)) % 10]

    def made(name: str, stage: str, kind: Kind, metrics: dict[str, Any]) -> tuple[Artifact, bool, float]:
        key = artifact.digest(name)
        with artifact.writing(folder / "stages" / f"{name}-{key[:8]}") as out:
            (out / "content.txt").write_text(name)
            if kind == "evaluation":
                save_predictions(out / "torch.safetensors", logits, labels)
            fields = {"stage": stage, "config": {}, "seed": 0, **fingerprint(), "metrics": metrics, "seconds": 1.0, "peak_memory_bytes": 1}
            artifact.seal(out, id=name, kind=kind, key=key, parents=[], fields=fields)
        return artifact.load(folder / "stages" / f"{name}-{key[:8]}"), False, 1.0

    figures = {"metrics": {"accuracy": 11 / 12}, "n": ROWS, "predictions": "torch.safetensors", "parameters": 10, "macs": 10}
    steps = {
        "model": made("model", "model", "checkpoint", {}),
        "finetune": made("finetune", "finetune", "checkpoint", {}),
        "evaluate-finetune": made("evaluate-finetune", "evaluate", "evaluation", figures),
    }
    write_lock(folder, recipe(), fingerprint(), steps)
    write_rows(folder / "golden.safetensors", [f"row {index}" for index in range(4)], {"logits.finetune.torch": logits[:4]})
    (folder / "flips.jsonl").write_text("")
    (folder / ".lock").touch()
    write_chain(open_run(folder))
    return folder
