"""What zeros buy after compaction: accuracy and latency of int8 models with zeros beside the dense int8 model, in one run.

    python benchmarks/compaction.py --model FOLDER --data FOLDER [--stages STAGES] [--set KEY=VALUE ...] [--out FOLDER]

The first FOLDER holds MiniLM fine-tuned on SST-2, the second the SST-2 files that recipes/sst2-minilm-ptq-2693.yaml names. STAGES are a
list of `sparsify` and `compact`, each of which begins with the model before it. The dense model and the output of every stage are quantized
to int8 and built for OpenVINO and ONNX Runtime. The engines take turns (foundation/measure/latency.py) at 1 x 128 and 8 x 128. Prints a
table: the share of the weights of the dense model's blocks that are gone or 0, accuracy over the evaluation split with its 95 % interval,
points lost against the dense model in the same engine (paired, 95 %), latency, and the time as a multiple of the dense model in the same
engine. The command makes and evaluates the engines, and resumes; with `--timed` it takes the latencies and prints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from compress.recipe import Recipe, read
from compress.report.intervals import paired_counts, wilson
from compress.run.prepare import prepare
from export.engines.onnxruntime import properties, with_uint8_activations
from export.engines.spec import EngineSpec, spec_of
from foundation.artifacts.artifact import Artifact, read_json, write_json, writing
from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.timed import Timing
from foundation.core.arrays import Array
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Data
from foundation.machine.environment import fingerprint
from foundation.measure.latency import Shape, measure
from foundation.measure.turns import ratio
from foundation.models.checkpoint import load_float
from foundation.models.importing import import_model
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from foundation.training.kept_zeros import block_linears
from parts.our_engine import answers_of_engine, built

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [(1, 128), (8, 128)]
ENGINES = ("openvino", "onnxruntime")
DENSE = "dense"
STAGES = "[{sparsify: {method: lasso, pattern: {slices: 32}, sparsity: 0.8}}, {compact: {}}]"


def main() -> None:
    """Trains, builds and evaluates, or measures; prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned MiniLM")
    parser.add_argument("--data", type=Path, required=True, help="SST-2 folder")
    parser.add_argument("--stages", default=STAGES, help="list of the stages sparsify and compact")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    parser.add_argument("--out", type=Path, default=Path("runs/compaction"), help="where to work")
    parser.add_argument("--timed", action="store_true", help="only take the latencies, and print the table")
    arguments = parser.parse_args()
    stages = json.dumps([*yaml.safe_load(arguments.stages), {"quantize": {}}])
    settings = [f"model.path={arguments.model}", f"data.path={arguments.data}", f"stages={stages}", "target.sequence_lengths=[128]"]
    recipe = read(ROOT / "recipes" / "sst2-minilm-ptq-2693.yaml", [*settings, *arguments.set])
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.timed:
        make(recipe, arguments.out)
    specs, known = engines(recipe, arguments.out), arguments.out / "accuracy.json"
    rows = measure(list(specs.values()), SHAPES, ConsoleProgress()) if arguments.timed else []
    print(table(read_json(known), {(list(specs)[job], row.shape): row for job, row in rows}) if rows else read_json(known))
    print(json.dumps(fingerprint(), default=str))


def make(recipe: Recipe, out: Path) -> None:
    """Makes the int8 models, and evaluates their engines."""
    context = prepare(recipe, out / "run", ConsoleProgress())
    *stages, quantize = recipe.stages
    source = step(out / "baseline", lambda folder: import_model(recipe.model, context.data.labels, context.seed, folder))
    context = replace(context, checkpoints={"baseline": source}, teachers=(source,))
    floats = {DENSE: source}
    for stage in stages:
        floats[stage.id] = step(out / stage.id, ran(stage, list(floats.values())[-1], context, out))
    for name, parent in floats.items():
        step(out / f"{name}-int8", ran(quantize, parent, context, out))
    data, weights = context.data, nonzero_weights(source.path)
    answers = {name: answers_of_engine(spec, data) for name, spec in engines(recipe, out).items()}
    figures = {}
    for name, logits in answers.items():
        engine, model = name.split()
        right, before = correct(logits, data), correct(answers[f"{engine} {DENSE}"], data)
        fell, rose = int((before & ~right).sum()), int((right & ~before).sum())
        change = paired_counts(fell, rose, len(right))
        figures[name] = {
            "zeros": 1 - nonzero_weights(floats[model].path) / weights,
            "accuracy": [float(right.mean()), *wilson(int(right.sum()), len(right))],
            "lost": [(fell - rose) / len(right), *change],
        }
        print(name, figures[name], flush=True)
    write_json(out / "accuracy.json", figures)


def correct(logits: Array, data: Data) -> Array:
    """Returns which rows of the evaluation split are classified correctly, bool [n]."""
    values, labels = data.evaluation.labels.values(logits)
    return np.asarray(np.argmax(values, axis=1) == labels)


def nonzero_weights(checkpoint: Path) -> int:
    """Returns the number of weights other than 0 of the linear layers in the blocks of a float checkpoint."""
    return sum(int(torch.count_nonzero(layer.weight)) for layer in block_linears(load_float(checkpoint)).values())


def step(folder: Path, work: Callable[[Path], object]) -> Artifact:
    """Returns an artifact, which `work` makes unless it is there."""
    if not folder.is_dir():
        with writing(folder) as temporary:
            work(temporary)
    return Artifact(folder, {"id": folder.name, "stage": "model", "digest": folder.name})


def ran(stage: Stage, parent: Artifact, context: Context, out: Path) -> Callable[[Path], object]:
    """Returns what runs a stage into a folder."""
    return lambda folder: stage.run(parent, replace(context, scratch=out / f"scratch-{stage.id}"), folder)


def engines(recipe: Recipe, out: Path) -> dict[str, EngineSpec]:
    """Returns the engines of the int8 models by `<engine> <model>`, which are built unless they are there."""
    found: dict[str, EngineSpec] = {}
    for name in models(recipe):
        folder = out / f"{name}-engine"
        openvino = built(out / f"{name}-int8", folder, recipe) if not folder.is_dir() else None
        if openvino is not None:
            with_uint8_activations(folder / "model.onnx", folder)
        build = Build(precision="int8", float_precision="fp32", folder=".")
        entries: Sequence[Engine] = (
            Engine(engine="openvino", mode="static", file="openvino.xml"),
            Engine(engine="onnxruntime", mode="dynamic", file="model_uint8.onnx", properties=properties(recipe.target.num_threads)),
        )
        found |= {f"{entry.engine} {name}": spec_of(folder, build, entry, recipe.target) for entry in entries}
    return found


def models(recipe: Recipe) -> list[str]:
    """Returns the names of the models: the dense one, and the output of every stage before quantization."""
    return [DENSE, *(stage.id for stage in recipe.stages[:-1])]


def table(figures: dict[str, dict[str, Any]], timed: dict[tuple[str, Shape], Timing]) -> str:
    """Returns the result as a Markdown table."""
    heads = " | ".join(f"{batch} x {sequence} ms (p90) | of dense" for batch, sequence in SHAPES)
    lines = [f"| engine | model | zeros | accuracy | points lost | {heads} |", "| --- " * (5 + 2 * len(SHAPES)) + "|"]
    for name, figure in figures.items():
        engine, model = name.split()
        cells = []
        for shape in SHAPES:
            own, share = timed[name, shape], ratio(timed[name, shape], timed[f"{engine} {DENSE}", shape])
            spread = "" if share.low is None else f" ({share.low:.2f} to {share.high:.2f})"
            cells.append(f"{own.median_ms:.2f} ({own.p90_ms:.2f}){' busy' if own.busy else ''} | {share.value:.2f}x{spread}")
        value, low, high = figure["accuracy"]
        points = "" if model == DENSE else "{:.2f} ({:.2f} to {:.2f})".format(*(100 * part for part in figure["lost"]))
        start = f"| {engine} | {model} | {figure['zeros']:.1%} | {value:.4f} ({low:.4f} to {high:.4f}) | {points} | "
        lines.append(f"{start}{' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
