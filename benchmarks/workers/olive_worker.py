"""Olive's own search over post-training quantization on the CPU. Runs in an environment of its own; `search_peers.py` starts it.

    PYTHON -P benchmarks/workers/olive_worker.py MODEL ROWS.npz OUT --minutes N [--threads N] [--shapes 1x32 8x128]

MODEL is a Transformers folder. Three searches of Olive share the minutes, as its samplers of Optuna mix up alternatives of one place:

    openvino           OnnxConversion, OpenVINOConversion, OpenVINOQuantization (NNCF): for Transformers or not, both presets; every point
    onnxruntime-fused  OnnxConversion, OrtTransformersOptimization, OnnxQuantization; TPE
    onnxruntime        OnnxConversion, OnnxQuantization; TPE

The space of OnnxQuantization is what Olive declares: dynamic or static, types, per channel, reduced range, calibration method, format. Two
things are settled, as most points fail otherwise: it preprocesses, without which ONNX Runtime finds that shapes of dynamic quantization
differ, and it quantizes the products alone, because the sums before a softmax, with the mask, span the range of float32.

ROWS.npz holds `calibration/NAME` and `selection/NAME` for each input of the model, int64 [n, L], and `labels`, int64 [n]. Objectives are
those of `compress search`: accuracy on the selection rows, and the geometric mean over the shapes of the median latency. An evaluator of
our own measures both, because Olive's for OpenVINO gives a model of several inputs all of them as its first. Writes OUT/olive.json:
seconds, what was tried, and the Pareto front of all three with file, settings and figures of each point.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from olive.data.registry import Registry
from olive.engine.footprint import FootprintNode
from olive.evaluator.metric_result import MetricResult
from olive.evaluator.registry import Registry as Evaluators
from olive.workflows import run

Features = dict[str, NDArray[Any]]
Predict = Callable[[Features], NDArray[Any]]

METRICS: list[dict[str, Any]] = [
    {
        "name": "accuracy",
        "type": "accuracy",
        "sub_types": [{"name": "accuracy_score", "priority": 1, "metric_config": {"task": "multiclass", "num_classes": 2}}],
    },
    {"name": "latency", "type": "latency", "sub_types": [{"name": "p50", "priority": 2}]},
]
ACCURACY, LATENCY = "accuracy-accuracy_score", "latency-p50"
"""What Olive calls them."""
SETTINGS = (
    *("quant_mode", "precision", "activation_type", "per_channel", "reduce_range"),
    *("calibrate_method", "quant_format"),
)
SETTINGS_OF_NNCF = ("model_type", "preset")
PRODUCTS = ["MatMul", "Gemm", "Attention"]
KEPT_ROWS = 128
"""Calibration rows for ONNX Runtime: by entropy and percentile it keeps all that its tensors were, and they must be of one length."""
BATCH = 8
WARM_UP, MOST_SAMPLES, MOST_SECONDS = 3, 50, 1.0


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Calibration rows as (features, label).

    Args:
        count: So many, padded to the longest of them; absent: all, without padding.
    """

    found: Features
    """By input, int64 [n, L]."""

    def __init__(self, count: int | None = None) -> None:
        self.features = {name: values[:count] for name, values in self.found.items()}
        self.lengths = self.features["attention_mask"].sum(axis=1)
        if count is not None:
            self.lengths[:] = self.lengths.max()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:
        return {name: torch.from_numpy(values[index, : self.lengths[index]]) for name, values in self.features.items()}, 0


@Registry.register_dataset()
def all_rows(**_: Any) -> Rows:
    """Every calibration row."""
    return Rows()


@Registry.register_dataset()
def kept_rows(**_: Any) -> Rows:
    """As many calibration rows as fit in memory."""
    return Rows(KEPT_ROWS)


def as_arrays(item: tuple[Mapping[str, torch.Tensor], Any]) -> Features:
    """Returns the inputs of a calibration row as NNCF takes them."""
    return {name: tensor.numpy() for name, tensor in item[0].items()}


def update(node: FootprintNode, **facts: Any) -> None:
    """Notes facts of a model that Olive has met before.

    Olive's own function (0.13.0) sets a field that there is not, so that every point that begins like an earlier one fails.
    """
    for name, value in facts.items():
        setattr(node, "model_config_data" if name == "model_config" else name, value)


class Judge:
    """Olive's evaluator: accuracy on the selection rows and median latency; keeps every result.

    Args:
        features: Selection rows by input, int64 [n, L].
        labels: int64 [n].
        shapes: (batch, tokens) each.
        threads: CPU threads.
    """

    def __init__(self, features: Features, labels: NDArray[Any], shapes: Sequence[tuple[int, int]], threads: int) -> None:
        self.features, self.labels, self.shapes, self.threads = features, labels, shapes, threads
        self.tried: list[dict[str, float]] = []

    def evaluate(self, model: Any, metrics: Any, device: Any = None, execution_providers: Any = None) -> MetricResult:
        """Returns the accuracy, and the latency in ms, of a model of Olive's."""
        predict = self.opened(model, None)
        right = sum(int((predict(batch).argmax(-1) == labels).sum()) for batch, labels in self.batches())
        times = [median_ms(self.opened(model, shape), self.filled(shape)) for shape in self.shapes]
        accuracy, latency = right / len(self.labels), math.exp(sum(map(math.log, times)) / len(times))
        self.tried.append({"accuracy": accuracy, "latency_ms": latency})
        return MetricResult.model_validate(
            {
                ACCURACY: {"value": accuracy, "priority": 1, "higher_is_better": True},
                LATENCY: {"value": latency, "priority": 2, "higher_is_better": False},
            }
        )

    def batches(self) -> list[tuple[Features, NDArray[Any]]]:
        """Returns the selection rows in batches, padded to their longest row."""
        found = []
        for start in range(0, len(self.labels), BATCH):
            rows = slice(start, start + BATCH)
            length = int(self.features["attention_mask"][rows].sum(axis=1).max())
            found.append(({name: values[rows, :length] for name, values in self.features.items()}, self.labels[rows]))
        return found

    def filled(self, shape: tuple[int, int]) -> Features:
        """Returns inputs of a shape without padding."""
        tokens = np.resize(self.features["input_ids"][self.features["attention_mask"] == 1], shape)
        known = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        return {name: known.get(name, np.zeros_like(tokens)) for name in self.features}

    def opened(self, model: Any, shape: tuple[int, int] | None) -> Predict:
        """Opens a model as the engines that judge the fronts do: OpenVINO in float32 beside int8 and, where one is given, in one shape."""
        if type(model).__name__ == "OpenVINOModelHandler":
            return self._openvino(model.model_config["model"], shape)
        return self._onnxruntime(model.model_path)

    def _openvino(self, path: str, shape: tuple[int, int] | None) -> Predict:
        import openvino

        core = openvino.Core()
        graph = core.read_model(path)
        if shape is not None:
            graph.reshape(dict.fromkeys(graph.inputs, openvino.PartialShape(list(shape))))
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": self.threads, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(graph, "CPU", settings)
        return lambda features: compiled(features)[0]  # type: ignore[no-any-return]

    def _onnxruntime(self, path: str) -> Predict:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda features: session.run(None, features)[0]  # type: ignore[no-any-return]


def median_ms(predict: Predict, features: Features) -> float:
    """Returns the median time of a call, ms."""
    for _ in range(WARM_UP):
        predict(features)
    samples: list[float] = []
    while len(samples) < MOST_SAMPLES and sum(samples) < MOST_SECONDS:
        started = time.perf_counter()
        predict(features)
        samples.append(time.perf_counter() - started)
    return 1e3 * float(np.median(samples))


def main() -> None:
    """Searches and writes the front."""
    arguments = parse()
    rows = np.load(arguments.rows)
    Rows.found, selection = (
        {name.removeprefix(kind): rows[name] for name in rows if name.startswith(kind)} for kind in ("calibration/", "selection/")
    )
    shapes = [(int(batch), int(length)) for batch, length in (shape.split("x") for shape in arguments.shapes)]
    judge = Judge(selection, rows["labels"], shapes, arguments.threads)
    Evaluators.register("both_engines")(lambda **_: judge)
    FootprintNode.update = update
    points: list[dict[str, Any]] = []
    started = time.monotonic()
    for number, kind in enumerate(kinds()):
        left = arguments.minutes - (time.monotonic() - started) / 60
        output = run(workflow(arguments.model, arguments.out, kind, left / (len(kinds()) - number)))
        points += outputs(output, kind, arguments.out)
    found = {"seconds": time.monotonic() - started, "tried": judge.tried, "front": front(points)}
    (arguments.out / "olive.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=["1x32", "1x128", "8x128"])
    return parser.parse_args()


def kinds() -> dict[str, tuple[str, dict[str, list[dict[str, Any]]]]]:
    """Returns for each search the sampler and the passes that Olive chooses from at each place."""
    convert: dict[str, list[dict[str, Any]]] = {"conversion": [{"type": "OnnxConversion"}]}
    fused = {"fusion": [{"type": "OrtTransformersOptimization", "model_type": "bert"}]}
    given = {"data_config": "kept_rows", "op_types_to_quantize": PRODUCTS, "quant_preprocess": True}
    quantized = {"quantization": [{"type": "OnnxQuantization", **given}]}
    nncf = {"type": "OpenVINOQuantization", "data_config": "all_rows", "transform_fn": as_arrays}
    transformer = {**nncf, "model_type": "TRANSFORMER"}
    openvino = {
        "openvino": [{"type": "OpenVINOConversion", "static": False}],
        "quantization": [transformer, {**transformer, "preset": "MIXED"}, nncf, {**nncf, "preset": "MIXED"}],
    }
    return {
        "openvino": ("sequential", {**convert, **openvino}),
        "onnxruntime-fused": ("tpe", {**convert, **fused, **quantized}),
        "onnxruntime": ("tpe", {**convert, **quantized}),
    }


def workflow(model: Path, out: Path, kind: str, minutes: float) -> dict[str, Any]:
    """Returns one search in Olive's terms."""
    sampler, passes = kinds()[kind]
    return {
        "input_model": {"type": "HfModel", "model_path": str(model.resolve()), "task": "text-classification"},
        "data_configs": [rows_of("all_rows"), rows_of("kept_rows")],
        "evaluators": {"judge": {"type": "both_engines", "metrics": METRICS}},
        "passes": passes,
        "search_strategy": {
            "execution_order": "joint",
            "sampler": sampler,
            "sampler_config": {"seed": 0} if sampler == "tpe" else {},
            "max_time": max(1, round(60 * minutes)),
        },
        "evaluator": "judge",
        "evaluate_input_model": False,
        "output_dir": str(out / kind),
        "cache_dir": str(out / "cache"),
        "log_severity_level": 1,
    }


def rows_of(dataset: str) -> dict[str, Any]:
    """Returns how Olive reads calibration rows, one at a time."""
    return {
        "name": dataset,
        "type": "DummyDataContainer",
        "load_dataset_config": {"type": dataset},
        "pre_process_data_config": {"type": "skip_pre_process"},
        "post_process_data_config": {"type": "skip_post_process"},
        "dataloader_config": {"type": "default_dataloader", "batch_size": 1},
    }


def outputs(output: Any, kind: str, out: Path) -> list[dict[str, Any]]:
    """Copies the models of a front of Olive's; returns file, settings and figures of each."""
    found = []
    for number, model in enumerate(output.get_output_models()):
        folder, given = out / f"{kind}-{number}", Path(model.model_path)
        folder.mkdir(exist_ok=True)
        files = [*given.glob("*.xml"), *given.glob("*.bin")] if given.is_dir() else [given]
        for file in files:
            shutil.copyfile(file, folder / file.name)
        config = output.footprint.nodes[model.model_id].pass_run_config or {}
        names = SETTINGS_OF_NNCF if kind == "openvino" else SETTINGS
        found.append(
            {
                "file": str((folder / files[0].name).resolve()),
                "kind": kind,
                "settings": {name: config[name] for name in names if config.get(name) is not None},
                "accuracy": model.metrics_value[ACCURACY]["value"],
                "latency_ms": model.metrics_value[LATENCY]["value"],
            }
        )
    return found


def front(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the points that no other one beats, the most accurate first."""

    def beaten(one: Mapping[str, Any]) -> bool:
        mine = one["accuracy"], -one["latency_ms"]
        others = [(other["accuracy"], -other["latency_ms"]) for other in points]
        return any(theirs != mine and theirs[0] >= mine[0] and theirs[1] >= mine[1] for theirs in others)

    return sorted((one for one in points if not beaten(one)), key=lambda one: (-one["accuracy"], one["latency_ms"]))


if __name__ == "__main__":
    main()
