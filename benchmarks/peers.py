"""Compares this project's int8 with what a user would reach for instead, in one run: accuracy, latency, and their ratios.

    python benchmarks/peers.py --model FOLDER --data FOLDER [--run RUN] [--out FOLDER]

FOLDER holds MiniLM fine-tuned on SST-2, and the SST-2 files that recipes/sst2-minilm-ptq-2693.yaml names; without them the recipe's Hub
ids are used. Peers: torch fp32 and bf16, ONNX Runtime fp32 and dynamic int8, OpenVINO fp32 and bf16 and int8 by NNCF, the latter calibrated
on the same rows as ours and with its settings for Transformers. Every engine has its own process, and the processes take turns
(foundation/measure/latency.py). Other int8 models of RUN, such as members of a family, are timed in OpenVINO beside the one of the stage
`quantize`. Prints a table and writes `peers.json` with hardware, versions, n and percentiles.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.pipeline import run
from compress.reading.load import load_data
from compress.recipe import Recipe, read
from compress.report import evaluations
from compress.report.intervals import wilson
from export.engines.openvino import computes_bf16
from export.engines.spec import EngineSpec, spec_of, torch_spec
from foundation.artifacts.exported import Build
from foundation.artifacts.run_folder import Run, open_run, unfinished
from foundation.core.progress import ConsoleProgress
from foundation.machine.environment import fingerprint
from foundation.measure.latency import measure
from foundation.measure.metrics import metrics
from foundation.models.config import label_names
from foundation.models.folder import Checkpoint
from parts.our_engine import answers_of_engine
from parts.peer_engines import nncf_int8, onnxruntime_dynamic_int8, ordinary_export

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [(1, 32), (1, 128), (8, 128)]
CALIBRATION_ROWS = 512


def main() -> None:
    """Runs the recipe up to its engines, or takes a finished run, builds the peers, measures all of them, prints."""
    arguments = parse()
    settings = [f"stages={arguments.stages}", "target.engines=[openvino, onnxruntime]"]
    settings += [f"model.path={arguments.model}"] if arguments.model else []
    settings += [f"data.path={arguments.data}"] if arguments.data else []
    recipe = read(ROOT / "recipes" / "sst2-minilm-ptq-2693.yaml", settings)
    progress = ConsoleProgress()
    if arguments.run and unfinished(arguments.run):
        sys.exit(f"{arguments.run}: its last run has not ended, and what would be measured is the one before; run the same command again")
    ours = open_run(arguments.run or run(recipe, arguments.out / "run", progress=progress).folder)
    arguments.out.mkdir(parents=True, exist_ok=True)
    specs = engines(ours, recipe, arguments.out)
    rows = measure(list(specs.values()), SHAPES, progress)
    accuracy = evaluate(specs, recipe)
    document = {
        "environment": fingerprint(),
        "accuracy": accuracy,
        "latency": [{"name": list(specs)[job], **row.written()} for job, row in rows],
    }
    (arguments.out / "peers.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="fine-tuned checkpoint; the recipe's Hub id where absent")
    parser.add_argument("--data", type=Path, help="SST-2 folder; the recipe's Hub id where absent")
    parser.add_argument("--stages", default="[{quantize: {mode: ptq}}, {export: {}}]", help="what is done to the model before it is ours")
    parser.add_argument(
        "--run", type=Path, help="a finished run of a recipe on the same model and data, in OpenVINO at least, instead of --stages"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="where to work")
    return parser.parse_args()


def engines(ours: Run, recipe: Recipe, out: Path) -> dict[str, EngineSpec]:
    """Returns every engine by the name it has in the table."""
    exported = ours.of_kind("engine")
    assert exported is not None
    by_name = {build.folder: build for build in evaluations.exported(ours).builds}
    floating, int8 = by_name["baseline-fp32"], by_name["quantize-int8"]

    def spec(build: Build, engine: str, mode: str) -> EngineSpec:
        entry = next(e for e in build.engines if (e.engine, e.mode, e.float_precision) == (engine, mode, "fp32"))
        return spec_of(exported.path, build, entry, recipe.target)

    float_static, float_dynamic = spec(floating, "openvino", "static"), spec(floating, "openvino", "dynamic")
    folder = exported.path / floating.folder
    baseline = ours.variants["baseline"].path
    onnx = ordinary_export(baseline, folder, out / "ordinary.onnx")
    ours_float = float_static
    float_static, float_dynamic = replace(float_static, path=str(onnx)), replace(float_dynamic, path=str(onnx))
    data = load_data(recipe.data, recipe.model.task, label_names(recipe.model), print)
    nncf = nncf_int8(onnx, folder, data.calibration(CALIBRATION_ROWS, recipe.seed).rows, out / "nncf.xml")
    nncf_static, ours_static = replace(float_static, path=str(nncf), precision="int8"), spec(int8, "openvino", "static")
    halves = {
        "openvino int8 by NNCF, static, rest bf16": replace(nncf_static, float_precision="bf16"),
        "ours: openvino int8, static, rest bf16": replace(ours_static, float_precision="bf16"),
    }
    further = {
        f"ours: openvino int8, static, {folder.removesuffix('-int8')}": spec(build, "openvino", "static")
        for folder, build in by_name.items()
        if build.precision == "int8" and build is not int8
    }
    others: dict[str, EngineSpec] = {}
    if any(entry.engine == "onnxruntime" for entry in int8.engines):
        onnxruntime = replace(spec(floating, "onnxruntime", "dynamic"), path=str(onnx))
        dynamic = replace(onnxruntime, path=str(onnxruntime_dynamic_int8(onnx, out / "dynamic.onnx")), precision="int8")
        others = {
            "onnxruntime fp32": onnxruntime,
            "onnxruntime int8, dynamic quantization": dynamic,
            "ours: onnxruntime int8": spec(int8, "onnxruntime", "dynamic"),
        }
    return {
        "torch fp32": torch_spec(Checkpoint(baseline), folder, "fp32", recipe.target),
        "torch bf16": torch_spec(Checkpoint(baseline), folder, "bf16", recipe.target),
        "openvino fp32, dynamic": float_dynamic,
        "openvino fp32, static": float_static,
        "openvino bf16, static": replace(float_static, precision="bf16", float_precision="bf16"),
        "openvino int8 by NNCF, dynamic": replace(float_dynamic, path=str(nncf), precision="int8"),
        "openvino int8 by NNCF, static": nncf_static,
        "ours: openvino bf16, static": replace(ours_float, precision="bf16", float_precision="bf16"),
        "ours: openvino int8, dynamic": spec(int8, "openvino", "dynamic"),
        "ours: openvino int8, static": ours_static,
        **further,
        **(halves if computes_bf16() else {}),
        **others,
    }


def evaluate(specs: dict[str, EngineSpec], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Returns the accuracy of every engine over the whole evaluation split, with its 95 % Wilson interval."""
    data = load_data(recipe.data, recipe.model.task, label_names(recipe.model), lambda line: None)
    found: dict[str, dict[str, Any]] = {}
    answers: dict[str, Any] = {}
    for name, spec in specs.items():
        logits = answers_of_engine(spec, data)
        answers[name] = logits.argmax(axis=1)
        value = metrics(recipe.model.task, logits, data.evaluation.labels)["accuracy"]
        low, high = wilson(round(value * len(data.evaluation)), len(data.evaluation))
        agreement = float((answers[name] == answers["torch fp32"]).mean())
        found[name] = {"value": value, "low": low, "high": high, "n": len(data.evaluation), "agreement_with_fp32": agreement}
        print(f"{name}: {value:.4f}")
    return found


def table(document: dict[str, Any]) -> str:
    """Returns the result as a Markdown table: accuracy, p50 at each shape, speed-up against torch fp32 in brackets."""
    p50 = {(row["name"], row["batch"], row["sequence"]): row["p50_ms"] for row in document["latency"]}
    heads = [f"{batch}x{sequence} ms" for batch, sequence in SHAPES]
    lines = [f"| engine | accuracy | agreement | {' | '.join(heads)} |", "| --- | --- | --- |" + " --- |" * len(SHAPES)]
    for name, figures in document["accuracy"].items():
        cells = [f"{p50[name, *shape]:.2f} ({p50['torch fp32', *shape] / p50[name, *shape]:.2f}x)" for shape in SHAPES]
        lines.append(f"| {name} | {figures['value']:.4f} | {figures['agreement_with_fp32']:.4f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
