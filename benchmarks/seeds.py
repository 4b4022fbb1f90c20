"""Runs of one recipe with several seeds: the accuracy of their int8 models, pooled, and the speed of each beside NNCF, in one run.

    python benchmarks/seeds.py RUN [RUN ...] [--shapes 1x128 8x128] [--timed] [--out FOLDER]

RUNs are finished runs of a recipe for texts, alike but for `seed`; no export is needed. Every int8 model of each RUN is built for OpenVINO
with static shapes and answers the evaluation split. The peer is the baseline of the first RUN in int8 by NNCF, calibrated on 512 rows of
the train split with its settings for Transformers. All engines take turns (foundation/measure/latency.py).

Prints a row for each model of each RUN, and one for each stage over all RUNs: the metric, the loss against the baseline in torch (paired;
over RUNs rows are drawn, and the metric of each sample is averaged over the RUNs), p50 and p90, and how many times faster than NNCF it is,
with the 95 % interval over turns (over RUNs the geometric mean, the smallest and the largest). Writes `seeds.json` with hardware and
versions. The command makes and evaluates the engines, and resumes; with `--timed` it takes the latencies and prints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from compress.reading.load import load_data
from compress.recipe import Recipe, check
from compress.report.intervals import paired_bootstrap
from export.engines.spec import EngineSpec
from export.graph.quantized import precision_of
from foundation.artifacts.artifact import read_json, write_json, writing
from foundation.artifacts.run_folder import Run, open_run
from foundation.artifacts.timed import Timing
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Data
from foundation.labels.form import Labels
from foundation.machine.environment import fingerprint
from foundation.measure.answers import load_logits
from foundation.measure.latency import Shape, measure
from foundation.measure.metrics import METRICS, Metric
from foundation.measure.turns import ratio
from foundation.models.config import label_names
from foundation.models.folder import Checkpoint
from parts.our_engine import answers_of_engine, built
from parts.peer_engines import nncf_int8, ordinary_export

NNCF, ROWS = "NNCF", 512
"""Name of the peer, and the rows that calibrate it."""


def main() -> None:
    """Builds and evaluates, or measures; prints a Markdown table."""
    arguments = parse()
    runs = {folder.name: open_run(folder) for folder in arguments.runs}
    recipe = check(next(iter(runs.values())).recipe)
    arguments.out.mkdir(parents=True, exist_ok=True)
    models = {(run.folder.name, name): path for run in runs.values() for name, path in int8_of(run).items()}
    if not arguments.timed:
        evaluate(models, runs, recipe, arguments.out)
    specs = engines(models, recipe, arguments.out)
    if arguments.timed:
        document = read_json(arguments.out / "evaluated.json")
        timed = measure(list(specs.values()), arguments.shapes, ConsoleProgress())
        rows = {(list(specs)[job], row.shape): row for job, row in timed}
        document |= {"environment": fingerprint(), "latency": [{"name": name, **row.written()} for (name, _), row in rows.items()]}
        write_json(arguments.out / "seeds.json", document)
        print(table(document, rows, arguments.shapes))
    print(json.dumps(fingerprint(), default=str))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--shapes", type=shape, nargs="+", default=[(1, 128), (8, 128)], help="batch x tokens, such as 1x128")
    parser.add_argument("--timed", action="store_true", help="only take the latencies, and print the table")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"), help="where to work")
    arguments = parser.parse_args()
    if len({folder.name for folder in arguments.runs}) < len(arguments.runs):
        parser.error("two runs have folders of one name: give each a name of its own")
    return arguments


def shape(text: str) -> tuple[int, int]:
    """Returns the batch size and the tokens of a shape such as 8x128."""
    batch, _, tokens = text.partition("x")
    return int(batch), int(tokens)


def int8_of(run: Run) -> dict[str, Path]:
    """Returns the folders of the int8 models of a run by the id of their stage."""
    return {name: found.path for name, found in run.variants.items() if precision_of(Checkpoint(found.path)) == "int8"}


def engines(models: Mapping[tuple[str, str], Path], recipe: Recipe, out: Path) -> dict[str, EngineSpec]:
    """Returns every engine by `<run> <stage>`, and the peer, which are built unless they are there."""
    specs = {f"{run} {stage}": built(checkpoint, out / f"{run}-{stage}", recipe) for (run, stage), checkpoint in models.items()}
    return {NNCF: replace(next(iter(specs.values())), path=str(out / NNCF / "nncf.xml")), **specs}


def evaluate(models: Mapping[tuple[str, str], Path], runs: Mapping[str, Run], recipe: Recipe, out: Path) -> None:
    """Builds all engines, and writes what each answers to the evaluation split, and its figures."""
    data = load_data(recipe.data, recipe.model.task, label_names(recipe.model), print)
    first = next(iter(runs.values()))
    specs = engines(models, recipe, out)
    if not (out / NNCF).is_dir():
        with writing(out / NNCF) as folder:
            beside = Path(list(specs.values())[1].path).parent
            onnx = ordinary_export(first.variants[first.baseline].path, beside, folder / "ordinary.onnx")
            nncf_int8(onnx, beside, data.calibration(ROWS, recipe.seed).rows, folder / "nncf.xml")
    baseline = load_logits(first.predictions(first.baseline))
    answers = {name: answers_known(spec, data, out / f"{name.replace(' ', '-')}-answers") for name, spec in specs.items()}
    stages = {stage: [answers[f"{run} {other}"] for run, other in models if other == stage] for _, stage in models}
    groups = {NNCF: [answers[NNCF]], **{f"all {stage}": found for stage, found in stages.items()}}
    groups |= {name: [found] for name, found in answers.items()}
    figures = {name: figures_of(found, baseline, data.evaluation.labels, recipe) for name, found in groups.items()}
    write_json(out / "evaluated.json", {"metric": recipe.model.facts.metric, "n": len(data.evaluation), "figures": figures})


def answers_known(spec: EngineSpec, data: Data, folder: Path) -> Any:
    """Returns what an engine answers to the evaluation split, float32 `[n, ...]`, from `folder` if it was asked before."""
    if not folder.is_dir():
        with writing(folder) as temporary:
            np.save(temporary / "answers.npy", answers_of_engine(spec, data))
    return np.load(folder / "answers.npy")


def figures_of(found: Sequence[Any], baseline: Any, labels: Labels, recipe: Recipe) -> dict[str, float]:
    """Returns the metric of some models, averaged over them, and what they lost against the baseline, with 95 % intervals.

    Args:
        found: What each model answers, float32 `[n, ...]`.
        baseline: What the baseline answers.
        labels: Labels of the same rows.
        recipe: Names the metric.
    """
    metric = METRICS[recipe.model.facts.metric]
    values, true = labels.values(baseline)
    before = np.stack([values] * len(found), axis=1)
    after = np.stack([labels.values(answers)[0] for answers in found], axis=1)
    mean = Metric(partial(mean_over_models, metric), metric.higher_is_better, metric.relative)
    lost = paired_bootstrap(mean, before, after, true)
    value = mean.of(after, true)
    return {"value": value, "lost": mean.drop(mean.of(before, true), value), "low": lost.low, "high": lost.high, "models": len(found)}


def mean_over_models(metric: Metric, answers: Any, labels: Any) -> float:
    """Returns a metric, averaged over the models of answers `[n, models, ...]`."""
    return float(np.mean([metric.of(answers[:, model], labels) for model in range(answers.shape[1])]))


def table(document: dict[str, Any], rows: Mapping[tuple[str, Shape], Timing], shapes: Sequence[tuple[int, int]]) -> str:
    """Returns the result as a Markdown table."""
    columns = [f"{batch} x {tokens} ms (p90) | of NNCF's speed" for batch, tokens in shapes]
    lines = [f"| int8 | {document['metric']} | lost, n = {document['n']} | {' | '.join(columns)} |", "| --- " * (3 + 2 * len(shapes)) + "|"]
    for name, figure in document["figures"].items():
        cells = [f"{figure['value']:.4f}", f"{100 * figure['lost']:.2f} ({100 * figure['low']:.2f} to {100 * figure['high']:.2f})"]
        for at in shapes:
            if (timing := rows.get((name, at))) is None:
                alike = [ratio(rows[NNCF, at], row).value for (other, where), row in rows.items() if where == at and same(name, other)]
                cells += ["", f"{geometric_mean(alike):.2f}x ({min(alike):.2f} to {max(alike):.2f})"]
                continue
            times = ratio(rows[NNCF, at], timing)
            spread = "" if times.low is None else f" ({times.low:.2f} to {times.high:.2f})"
            cells += [f"{timing.median_ms:.2f} ({timing.p90_ms:.2f}){' busy' if timing.busy else ''}", f"{times.value:.2f}x{spread}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def same(pooled: str, name: str) -> bool:
    """Whether an engine, `<run> <stage>`, is one of those that a row over all runs, `all <stage>`, is about."""
    return name != NNCF and name.split()[1] == pooled.split()[1]


if __name__ == "__main__":
    main()
