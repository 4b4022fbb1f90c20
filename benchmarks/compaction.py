"""What zeros buy after compaction: accuracy and latency of an int8 model with 80 % zeros beside the dense int8 model, in one run.

    python benchmarks/compaction.py --model FOLDER --data FOLDER [--sparsify SETTINGS] [--set KEY=VALUE ...] [--out FOLDER]

The first FOLDER holds MiniLM fine-tuned on SST-2, the second the SST-2 files that recipes/sst2-minilm-ptq-2693.yaml names. Three int8
models are built for OpenVINO and ONNX Runtime: `dense` (no zeros), `zeros` (zeros multiplied like other numbers) and `compacted`. The
engines take turns (foundation/measure/latency.py) at 1 x 128 and 8 x 128. Prints a table: accuracy over the evaluation split with its 95 %
interval, latency, and the time as a multiple of the dense model in the same engine. The command makes and evaluates the engines, and
resumes; with `--timed` it takes the latencies and prints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from compress.recipe import Recipe, read
from compress.report.intervals import wilson
from compress.run.prepare import prepare
from export.engines.onnxruntime import properties, with_uint8_activations
from export.engines.spec import EngineSpec, spec_of
from foundation.artifacts.artifact import Artifact, read_json, write_json, writing
from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.timed import Timing
from foundation.core.progress import ConsoleProgress
from foundation.machine.environment import fingerprint
from foundation.measure.latency import Shape, measure
from foundation.measure.metrics import metrics
from foundation.measure.turns import ratio
from foundation.models.importing import import_model
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from parts.our_engine import answers_of_engine, built

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [(1, 128), (8, 128)]
ENGINES = ("openvino", "onnxruntime")
MODELS = ("dense", "zeros", "compacted")
SPARSIFY = "{method: lasso, pattern: {slices: 32}, sparsity: 0.8}"


def main() -> None:
    """Trains, builds and evaluates, or measures; prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned MiniLM")
    parser.add_argument("--data", type=Path, required=True, help="SST-2 folder")
    parser.add_argument("--sparsify", default=SPARSIFY, help="settings of the stage sparsify")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    parser.add_argument("--out", type=Path, default=Path("runs/compaction"), help="where to work")
    parser.add_argument("--timed", action="store_true", help="only take the latencies, and print the table")
    arguments = parser.parse_args()
    stages = f"[{{sparsify: {arguments.sparsify}}}, {{compact: {{}}}}, {{quantize: {{}}}}]"
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
    """Makes the three int8 models, and evaluates their engines."""
    context = prepare(recipe, out / "run", ConsoleProgress())
    sparsify, compact, quantize = recipe.stages
    source = step(out / "baseline", lambda folder: import_model(recipe.model, context.data.labels, context.seed, folder))
    context = replace(context, checkpoints={"baseline": source}, teachers=(source,))
    sparse = step(out / "sparse", ran(sparsify, source, context, out))
    compacted = step(out / "compact", ran(compact, sparse, context, out))
    for name, parent in zip(MODELS, (source, sparse, compacted), strict=True):
        step(out / f"{name}-int8", ran(quantize, parent, context, out))
    found = {}
    for name, spec in engines(recipe, out).items():
        value = metrics(recipe.model.task, answers_of_engine(spec, context.data), context.data.evaluation.labels)["accuracy"]
        found[name] = (value, *wilson(round(value * len(context.data.evaluation)), len(context.data.evaluation)))
        print(name, found[name], flush=True)
    write_json(out / "accuracy.json", found)


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
    """Returns the engines of the three int8 models by `<engine> <model>`, which are built unless they are there."""
    found = {}
    for name in MODELS:
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


def table(accuracy: dict[str, list[float]], timed: dict[tuple[str, Shape], Timing]) -> str:
    """Returns the result as a Markdown table."""
    heads = " | ".join(f"{batch} x {sequence} ms (p90) | of dense" for batch, sequence in SHAPES)
    lines = [f"| engine | model | accuracy | {heads} |", "| --- " * (3 + 2 * len(SHAPES)) + "|"]
    for engine in ENGINES:
        for model in MODELS:
            cells = []
            for shape in SHAPES:
                own, share = timed[f"{engine} {model}", shape], ratio(timed[f"{engine} {model}", shape], timed[f"{engine} dense", shape])
                spread = "" if share.low is None else f" ({share.low:.2f} to {share.high:.2f})"
                cells.append(f"{own.median_ms:.2f} ({own.p90_ms:.2f}){' busy' if own.busy else ''} | {share.value:.2f}x{spread}")
            value, low, high = accuracy[f"{engine} {model}"]
            lines.append(f"| {engine} | {model} | {value:.4f} ({low:.4f} to {high:.4f}) | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
