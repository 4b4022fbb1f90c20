"""Searches, then holds the front beside a hand-made recipe and int8 by NNCF: all engines in one run, taking turns.

    python benchmarks/search.py [--recipe sst2-minilm-search] [--by-hand sst2-minilm] [--set KEY=VALUE ...] [--nncf]
        [--out FOLDER]

Every point of the front, and the recipe made by hand, is opened as its run would serve it. `--nncf` adds int8 by NNCF of the baseline, in
static shapes and calibrated on the same rows, and shows ratios against it; for text classification. `--set` reaches the search and the
recipe made by hand alike: local copies, for instance. Prints a table and writes `search-peers.json` with hardware and versions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.commands.recipes import find
from compress.pipeline import run
from compress.reading.load import load_data
from compress.recipe import Recipe, read
from compress.report import evaluations, intervals
from compress.run.implicit import shapes
from compress.search.search import search
from export.engines.spec import EngineSpec, spec_of, torch_spec
from foundation.artifacts.run_folder import Run, open_run
from foundation.artifacts.store import share
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.splits import Data
from foundation.machine.environment import fingerprint
from foundation.measure.latency import measure
from foundation.measure.metrics import METRICS
from foundation.models.config import label_names
from foundation.models.folder import Checkpoint
from parts.our_engine import answers_of_engine
from parts.peer_engines import nncf_int8, ordinary_export

CALIBRATION_ROWS = 512
NNCF = "openvino int8 by NNCF, static"
TORCH = "torch fp32"


def main() -> None:
    """Searches, runs what is compared, measures, prints."""
    arguments = parse()
    recipe, progress = read(find(arguments.recipe), arguments.set), ConsoleProgress()
    found = search(recipe, arguments.out / "search", progress=progress)
    names = {point["name"]: found.folder / point["run"] for point in found.contents["front"]}
    data = load_data(recipe.data, recipe.model.task, label_names(recipe.model), progress.log, recipe.tokenizer or recipe.model.path)
    if arguments.by_hand:
        by_hand = read(find(arguments.by_hand), [one for one in arguments.set if not one.startswith("search.")])
        share(arguments.out / "by-hand", found.folder)  # what both train alike is trained once
        names[f"by hand: {by_hand.name}"] = run(by_hand, arguments.out / "by-hand", progress=progress).folder
    runs = {name: open_run(folder) for name, folder in names.items()}
    specs = {name: served(one, folder / "report.json") for (name, one), folder in zip(runs.items(), names.values(), strict=True)}
    specs |= references(next(iter(runs.values())), recipe, data, arguments.out, arguments.nncf)
    rows = measure(list(specs.values()), shapes(recipe.model.task, recipe.target), progress)
    document = {
        "environment": fingerprint(),
        "metric": recipe.model.facts.metric,
        "seconds": found.contents["seconds"],
        "recommended": (found.contents["recommended"] or {}).get("name"),
        "accuracy": evaluate(specs, recipe, data),
        "latency": [{"name": list(specs)[job], **row.written()} for job, row in rows],
    }
    (arguments.out / "search-peers.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="sst2-minilm-search", help="a recipe with a search: a file, or the name of a shipped one")
    parser.add_argument("--by-hand", help="a recipe to stand beside the front, such as sst2-minilm")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of compress run; repeatable")
    parser.add_argument("--nncf", action="store_true", help="also int8 by NNCF of the baseline")
    parser.add_argument("--out", type=Path, default=Path("runs/search-peers"), help="where to work")
    return parser.parse_args()


def served(found: Run, report: Path) -> EngineSpec:
    """Returns how the engine that a run serves is opened."""
    exported, chosen = found.of_kind("engine"), json.loads(report.read_text(encoding="utf-8"))["served"]
    assert exported is not None
    for build in evaluations.exported(found).builds:
        for entry in build.engines:
            if build.key(entry) == tuple(chosen[key] for key in ("variant", "precision", "float_precision", "engine", "mode")):
                return spec_of(exported.path, build, entry, Target.model_validate(found.recipe["target"]))
    raise LookupError(f"{report}: what it serves is not in export.json")


def references(found: Run, recipe: Recipe, data: Data, out: Path, nncf: bool) -> dict[str, EngineSpec]:
    """Returns the baseline in torch, and where that is asked for its int8 by NNCF."""
    exported = found.of_kind("engine")
    assert exported is not None
    name, baseline = next(iter(found.variants.items()))
    builds = evaluations.exported(found).builds
    build = next(build for build in builds if (build.variant, build.precision) == (name, "fp32"))
    folder = exported.path / build.folder
    specs = {TORCH: torch_spec(Checkpoint(baseline.path), folder, "fp32", recipe.target)}
    if nncf:
        entry = next(entry for entry in build.engines if (entry.engine, entry.mode) == ("openvino", "static"))
        rows = data.calibration(CALIBRATION_ROWS, recipe.seed).rows
        made = nncf_int8(ordinary_export(baseline.path, folder, out / "ordinary.onnx"), folder, rows, out / "nncf.xml")
        specs[NNCF] = replace(spec_of(exported.path, build, entry, recipe.target), path=str(made), precision="int8")
    return specs


def evaluate(specs: Mapping[str, EngineSpec], recipe: Recipe, data: Data) -> dict[str, dict[str, Any]]:
    """Returns the primary metric of every engine over the whole evaluation split, with its 95 % interval, and the loss against torch."""
    metric = METRICS[recipe.model.facts.metric]
    logits = {name: answers_of_engine(spec, data) for name, spec in specs.items()}
    labels = data.evaluation.labels
    return {
        name: {**intervals.single(metric, one, labels).written(), "drop": intervals.paired(metric, logits[TORCH], one, labels).written()}
        for name, one in logits.items()
    }


def table(document: Mapping[str, Any]) -> str:
    """Returns the result as a Markdown table: the metric, p50 at each shape, and how often it is as fast as the reference."""
    p50 = {(row["name"], (row["batch"], row["sequence"])): row["p50_ms"] for row in document["latency"]}
    places = list(dict.fromkeys(shape for _, shape in p50))
    base = NNCF if NNCF in document["accuracy"] else TORCH
    heads = [f"{batch}" + (f"x{length}" if length is not None else "") + " ms" for batch, length in places]
    lines = [f"| engine | {document['metric']} (95 %) | n | lost (95 %) | {' | '.join(heads)} |", "| --- " * (4 + len(heads)) + "|"]
    for name, cell in document["accuracy"].items():
        lost = cell["drop"]
        times = [f"{p50[name, shape]:.2f} ({p50[base, shape] / p50[name, shape]:.2f}x)" for shape in places]
        value = f"{cell['value']:.4f} ({cell['low']:.4f} to {cell['high']:.4f})"
        loss = f"{lost['difference']:.4f} ({lost['low']:.4f} to {lost['high']:.4f})"
        mark = " (recommended)" if name == document["recommended"] else ""
        lines.append(f"| {name}{mark} | {value} | {cell['n']} | {loss} | {' | '.join(times)} |")
    return "\n".join([f"ratios against {base}; {document['seconds'] / 3600:.2f} h of work", "", *lines])


if __name__ == "__main__":
    main()
