"""Olive's own search over post-training quantization in ONNX Runtime. Runs in an environment of its own, which `search.py --olive` names.

    python benchmarks/olive_worker.py MODEL.onnx ROWS.npz OUT --minutes N

The space is what `OnnxQuantization` declares: static or dynamic, per channel, reduced range, types, calibration method, format. ROWS.npz
holds `calibration/NAME` and `selection/NAME` for each input of the model, int64 `[n, L]`, and `labels`, int64 `[n]`. Objectives are
accuracy on the selection rows and latency of one row. Writes OUT/olive.json: accuracy, latency and file of each point of its Pareto front.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olive.data.registry import Registry
from olive.workflows import run

ROWS: dict[str, np.ndarray] = {}


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of one kind as (features, label)."""

    def __init__(self, kind: str) -> None:
        self.features = {name.split("/")[1]: values for name, values in ROWS.items() if name.startswith(f"{kind}/")}
        count = len(next(iter(self.features.values())))
        self.labels = ROWS["labels"] if kind == "selection" else np.zeros(count, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:
        return {name: torch.from_numpy(values[index]) for name, values in self.features.items()}, int(self.labels[index])


@Registry.register_dataset()
def calibration_rows(**_: Any) -> Rows:
    """Rows for the ranges of activations."""
    return Rows("calibration")


@Registry.register_dataset()
def selection_rows(**_: Any) -> Rows:
    """Rows that candidates are judged on."""
    return Rows("selection")


@Registry.register_post_process()
def likeliest(outputs: Any, **_: Any) -> torch.Tensor:
    """The class with the largest logit."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return torch.as_tensor(logits).argmax(dim=-1)


def main() -> None:
    """Searches and writes the front."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    ROWS.update(np.load(arguments.rows))
    found = run(config(arguments.model, arguments.out, arguments.minutes, arguments.threads))
    front = []
    for number, model in enumerate(found.get_output_models()):
        file = arguments.out / f"olive-{number}.onnx"
        shutil.copyfile(model.model_path, file)
        front.append({"file": str(file), "metrics": dict(model.metrics_value or {}), "from": str(model.model_id)})
    (arguments.out / "olive.json").write_text(json.dumps(front, indent=1, default=str) + "\n", encoding="utf-8")


def config(model: Path, out: Path, minutes: float, threads: int) -> dict[str, Any]:
    """Returns the workflow."""
    data = [
        {
            "name": kind,
            "type": "DummyDataContainer",
            "load_dataset_config": {"type": f"{kind}_rows"},
            "pre_process_data_config": {"type": "skip_pre_process"},
            "post_process_data_config": {"type": "likeliest"},
            "dataloader_config": {"type": "default_dataloader", "batch_size": 1 if kind == "calibration" else 8},
        }
        for kind in ("calibration", "selection")
    ]
    session = {"inference_settings": {"onnx": {"session_options": {"intra_op_num_threads": threads}}}}
    metrics = [
        {
            "name": "accuracy",
            "type": "accuracy",
            "backend": "torch_metrics",
            "data_config": "selection",
            "sub_types": [{"name": "accuracy_score", "priority": 1, "metric_config": {"task": "multiclass", "num_classes": 2}}],
            "user_config": session,
        },
        {
            "name": "latency",
            "type": "latency",
            "data_config": "calibration",
            "sub_types": [{"name": "avg", "priority": 2}],
            "user_config": session,
        },
    ]
    return {
        "input_model": {"type": "OnnxModel", "model_path": str(model)},
        "data_configs": data,
        "evaluators": {"judge": {"type": "OnnxEvaluator", "metrics": metrics}},
        "passes": {"quantization": {"type": "OnnxQuantization", "data_config": "calibration"}},
        "search_strategy": {
            "execution_order": "joint",
            "sampler": "tpe",
            "seed": 0,
            "max_iter": 100_000,
            "max_time": round(60 * minutes),
        },
        "evaluator": "judge",
        "evaluate_input_model": True,
        "output_dir": str(out / "olive"),
        "cache_dir": str(out / "olive-cache"),
        "log_severity_level": 1,
    }


if __name__ == "__main__":
    main()
