"""What zeros buy after compaction: accuracy and latency of int8 models with zeros beside the dense int8 model, in one run.

    python benchmarks/compaction.py [--recipe RECIPE] [--stages STAGES] [--set KEY=VALUE ...] [--nncf] [--out FOLDER]

RECIPE names model and data, by default MiniLM and SST-2 (recipes/sst2-minilm-ptq-2693.yaml: give `--set model.path=FOLDER --set
data.path=FOLDER`). STAGES are a list of `finetune`, `distill`, `sparsify`, `prune` and `compact`, each of which begins with the model
before it. The dense model is the output of the last `finetune`, or of a `distill` that comes before all other stages but `finetune`, else
the model itself; a `distill` after `compact` trains what is left further. The teacher is the output of the last `finetune`, else the model
itself. The dense model and the output of every later stage are quantized to int8 and built for OpenVINO and ONNX Runtime.
The engines take turns (foundation/measure/latency.py) at the batch sizes of the target and its longest rows. `--nncf` adds the dense
model in int8 by NNCF, which needs the package, for OpenVINO.

Prints a table: the share of the weights of the dense model's blocks that are gone or 0, the metric over the evaluation split with its 95 %
interval, the loss against the dense model in the same engine (paired, 95 %; of perplexity relative), latency, and the time as a multiple of
the dense model in the same engine, and of NNCF. The command makes and evaluates the engines, and resumes; with `--timed` it takes the
latencies and prints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from compress.recipe import Recipe, read
from compress.report.intervals import paired, single
from compress.run.prepare import prepare
from distill.distill import Distill
from export.engines.onnxruntime import properties, with_uint8_activations
from export.engines.spec import EngineSpec, spec_of
from foundation.artifacts.artifact import Artifact, read_json, write_json, writing
from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.timed import Timing
from foundation.core.progress import ConsoleProgress
from foundation.labels.tasks import TASKS
from foundation.machine.environment import fingerprint
from foundation.measure.latency import Shape, measure
from foundation.measure.metrics import METRICS
from foundation.measure.turns import ratio
from foundation.models.checkpoint import load_float
from foundation.models.importing import import_model
from foundation.models.inputs.tokenizer import resolve_tokenizer
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from foundation.training.finetune import Finetune
from foundation.training.kept_zeros import block_linears
from parts.our_engine import answers_of_engine, built
from parts.peer_engines import nncf_int8, ordinary_export

ROOT = Path(__file__).resolve().parent.parent
DENSE, NNCF = "dense", "nncf"
NNCF_ROWS = 512
"""Calibration rows of NNCF."""
STAGES = "[{sparsify: {method: lasso, pattern: {slices: 32}, sparsity: 0.8}}, {compact: {}}]"


def main() -> None:
    """Trains, builds and evaluates, or measures; prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "sst2-minilm-ptq-2693.yaml", help="model and data")
    parser.add_argument("--stages", default=STAGES, help="list of the stages before quantize")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    parser.add_argument("--out", type=Path, default=Path("runs/compaction"), help="where to work")
    parser.add_argument("--nncf", action="store_true", help="also the dense model in int8 by NNCF")
    parser.add_argument("--timed", action="store_true", help="only take the latencies, and print the table")
    arguments = parser.parse_args()
    stages = json.dumps([*yaml.safe_load(arguments.stages), {"quantize": {}}])
    recipe = read(arguments.recipe, [f"stages={stages}", *arguments.set])
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.timed:
        make(recipe, arguments.out, arguments.nncf)
    specs, known = engines(recipe, arguments.out), arguments.out / "figures.json"
    if arguments.timed:
        timed = shapes(recipe)
        rows = measure(list(specs.values()), timed, ConsoleProgress())
        print(table(read_json(known), {(list(specs)[job], row.shape): row for job, row in rows}, timed))
    print(json.dumps(fingerprint(), default=str))


def make(recipe: Recipe, out: Path, nncf: bool) -> None:
    """Makes the int8 models, by NNCF too where asked, and evaluates their engines."""
    context = prepare(recipe, out / "run", ConsoleProgress())
    *stages, quantize = recipe.stages
    tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
    source = step(out / "baseline", lambda folder: import_model(recipe.model, context.data.labels, context.seed, folder, tokenizer))
    context = replace(context, checkpoints={"baseline": source}, teachers=(source,))
    floats = {DENSE: source}
    for stage in stages:
        made = step(out / stage.id, ran(stage, list(floats.values())[-1], context, out))
        if isinstance(stage, Finetune):
            floats, context = {DENSE: made}, replace(context, checkpoints={"baseline": made}, teachers=(made,))
        elif isinstance(stage, Distill) and len(floats) == 1:
            floats = {DENSE: made}
        else:
            floats[stage.id] = made
    for name, parent in floats.items():
        step(out / f"{name}-int8", ran(quantize, parent, context, out))
    if nncf:
        dense = Path(engines(recipe, out)[f"openvino {DENSE}"].path).parent
        step(out / NNCF, lambda folder: by_nncf(floats[DENSE].path, dense, context, folder))
    split, weights = context.data.evaluation, nonzero_weights(floats[DENSE].path)
    answers = {name: answers_of_engine(spec, context.data) for name, spec in engines(recipe, out).items()}
    metric, figures = METRICS[context.facts.metric], {}
    for name, predictions in answers.items():
        engine, model = name.split()
        figures[name] = {
            "zeros": 1 - nonzero_weights(floats.get(model, floats[DENSE]).path) / weights,
            "value": single(metric, predictions, split.labels).model_dump(),
            "lost": paired(metric, answers[f"{engine} {DENSE}"], predictions, split.labels).model_dump(),
        }
        print(name, figures[name], flush=True)
    write_json(out / "figures.json", figures)


def by_nncf(checkpoint: Path, engine: Path, context: Context, folder: Path) -> None:
    """Writes the int8 model that NNCF makes of a float checkpoint; `engine` is the folder of an engine of the same model."""
    onnx = ordinary_export(checkpoint, engine, folder / "ordinary.onnx")
    nncf_int8(onnx, engine, context.data.calibration(NNCF_ROWS, context.seed).rows, folder / f"{NNCF}.xml")


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
    if (out / NNCF).is_dir():
        found[f"openvino {NNCF}"] = replace(found[f"openvino {DENSE}"], path=str(out / NNCF / f"{NNCF}.xml"))
    return found


def models(recipe: Recipe) -> list[str]:
    """Returns the names of the models: the dense one, and the output of every later stage before quantization."""
    stages = [stage for stage in recipe.stages[:-1] if not isinstance(stage, Finetune)]
    while stages and isinstance(stages[0], Distill):
        stages = stages[1:]
    return [DENSE, *(stage.id for stage in stages)]


def shapes(recipe: Recipe) -> list[Shape]:
    """Returns the shapes that are timed: every batch size, of texts with rows of the largest length."""
    length = max(recipe.target.sequence_lengths) if TASKS[recipe.model.task].modality == "text" else None
    return [(batch, length) for batch in recipe.target.batch_sizes]


def table(figures: dict[str, dict[str, Any]], timed: dict[tuple[str, Shape], Timing], shapes: Sequence[Shape]) -> str:
    """Returns the result as a Markdown table."""
    peers = [f"openvino {NNCF}"] if f"openvino {NNCF}" in figures else []
    of = " | ".join(["of dense", *["of NNCF"] * len(peers)])
    heads = " | ".join(f"{batch}{f' x {length}' if length else ''} ms (p90) | {of}" for batch, length in shapes)
    lines = [f"| engine | model | zeros | metric | lost | {heads} |", "| --- " * (5 + (2 + len(peers)) * len(shapes)) + "|"]
    for name, figure in figures.items():
        engine, model = name.split()
        cells = []
        for shape in shapes:
            timing = timed[name, shape]
            shares = [ratio(timing, timed[other, shape]) for other in (f"{engine} {DENSE}", *peers)]
            spreads = ["" if share.low is None else f" ({share.low:.2f} to {share.high:.2f})" for share in shares]
            multiples = " | ".join(f"{share.value:.2f}x{spread}" for share, spread in zip(shares, spreads, strict=True))
            cells.append(f"{timing.median_ms:.2f} ({timing.p90_ms:.2f}){' busy' if timing.busy else ''} | {multiples}")
        value, lost = figure["value"], figure["lost"]
        own = f"{value['value']:.4f} ({value['low']:.4f} to {value['high']:.4f})"
        change = "" if model == DENSE else f"{100 * lost['difference']:.2f} ({100 * lost['low']:.2f} to {100 * lost['high']:.2f})"
        lines.append(f"| {engine} | {model} | {figure['zeros']:.1%} | {own} | {change} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
