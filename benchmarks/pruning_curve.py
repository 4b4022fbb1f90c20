"""What pruning buys and costs: accuracy against the measured latency of the int8 engine, for several sparsities and methods.

    python benchmarks/pruning_curve.py --set model.path=MODEL --set data.path=DATA [--methods activation joint] [--sparsities 0.3 0.5 0.7]
    python benchmarks/pruning_curve.py --set model.path=MODEL --set data.path=DATA --latency 4.0 6.0 [--at 8x128]

Settings are those of `compress run`, on top of recipes/sst2-minilm.yaml (`--recipe` for another one); MODEL is fine-tuned. Every cell
is a run: prune with `--epochs` of recovery (0: none), quantize; its engine is OpenVINO's in static shapes. The model that is not pruned is
quantized once, and its engine takes turns with that of the cell, so that their ratio means something. A finished cell is never computed
again. With --build nothing is measured: what it builds, one method in each of several processes say, is found by a later call that has
the machine for itself.

Prints a Markdown table: n, accuracy and its 95 % interval in the engine, median latency at every target shape, and its ratio to the int8
engine that is not pruned. With `--latency` the search for a latency instead: asked for, predicted, and the median of five processes of
each of the two engines, in turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from our_engine import answers_of_engine, built, opened

from compress.data import load_data
from compress.environment import fingerprint
from compress.implicit import shapes
from compress.latency import Shape, measure
from compress.model import label_names
from compress.pipeline import run
from compress.progress import ConsoleProgress
from compress.recipe import Recipe, read
from compress.run_folder import Run, open_run
from compress.statistics import primary, single
from export.engine import EngineSpec

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 5
WHOLE = "not pruned"


def main() -> None:
    """Fills the cells that are missing, prints the table."""
    arguments = parse()
    if arguments.build:
        for method in arguments.methods:
            for sparsity in arguments.sparsities:
                finished(recipe(arguments, prune(arguments, method, sparsity)), runs_of(arguments, method))
        return
    reference = finished(recipe(arguments, None), arguments.out / "whole")
    if arguments.latency:
        cells = [searched(arguments, method, asked, reference) for method in arguments.methods for asked in arguments.latency]
        name, text = "search", search_table(cells)
    else:
        pairs = [(method, sparsity) for method in arguments.methods for sparsity in arguments.sparsities]
        cells = [curve_cell(arguments, WHOLE, 0.0, reference), *(curve_cell(arguments, *pair, reference) for pair in pairs)]
        name, text = "curve", curve_table(cells)
    document = {"environment": fingerprint(), "cells": cells}
    (arguments.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(text)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "sst2-minilm.yaml", help="model, data and target")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    parser.add_argument("--methods", nargs="+", default=["activation"], help="methods of the stage prune")
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.3, 0.5, 0.7], help="shares that are taken away")
    parser.add_argument("--measure", choices=["macs", "parameters", "latency"], default="macs", help="what a sparsity is a share of")
    parser.add_argument("--latency", nargs="+", type=float, help="milliseconds to search for, in place of sparsities")
    parser.add_argument("--at", help="BATCHxSEQUENCE of these milliseconds, or BATCH for images; the largest target shape where absent")
    parser.add_argument("--build", action="store_true", help="build the cells of a curve, and leave measuring to a later call")
    parser.add_argument("--epochs", type=float, default=1, help="passes over the train split of recovery; 0: no recovery")
    parser.add_argument("--learn-epochs", type=float, default=2, help="those of masks, for joint and movement")
    parser.add_argument("--out", type=Path, default=Path("runs/pruning-curve"), help="where to work")
    return parser.parse_args()


def recipe(arguments: argparse.Namespace, asked: dict[str, Any] | None) -> Recipe:
    """Returns the recipe of one cell; None for the model that is not pruned."""
    stages: list[dict[str, Any]] = [{"quantize": {}}]
    if asked is not None:
        recover = {"epochs": arguments.epochs} if arguments.epochs else None
        settings = {"recover": recover, "learn": {"epochs": arguments.learn_epochs}, **asked}
        stages.insert(0, {"prune": settings})
    return read(arguments.recipe, [*arguments.set, f"stages={json.dumps(stages)}", "goals={int8_faster: false}"])


def prune(arguments: argparse.Namespace, method: str, sparsity: float) -> dict[str, Any]:
    """Returns what a cell asks of the stage `prune`."""
    return {"method": method, "sparsity": sparsity, "measure": arguments.measure}


def runs_of(arguments: argparse.Namespace, method: str) -> Path:
    """Returns the folder of all runs of a method: what they have in common, the model that is not pruned, is made there once."""
    return Path(arguments.out) / method


def finished(asked: Recipe, folder: Path) -> tuple[Run, Recipe]:
    """Runs a recipe, or finds that it was run already."""
    return open_run(run(asked, folder, progress=ConsoleProgress()).folder), asked


def curve_cell(arguments: argparse.Namespace, method: str, sparsity: float, reference: tuple[Run, Recipe]) -> dict[str, Any]:
    """Returns what one method makes of one sparsity."""
    file = arguments.out / f"{method.replace(' ', '-')}-{sparsity:g}-{arguments.measure}-{arguments.epochs:g}.json"
    if file.exists():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    made = reference
    if method != WHOLE:
        made = finished(recipe(arguments, prune(arguments, method, sparsity)), runs_of(arguments, method))
    rows = measure([engine(*reference), engine(*made)], shapes(made[1].model.task, made[1].target), ConsoleProgress())
    before, after = ([row for row in rows if row["job"] == job] for job in (0, 1))
    cell = {
        "method": method,
        "sparsity": sparsity,
        "accuracy": accuracy(engine(*made), made[1]),
        "latency": [
            {"shape": [new["batch"], new["sequence"]], "p50_ms": new["p50_ms"], "whole_ms": old["p50_ms"], "n": new["n"]}
            for old, new in zip(before, after, strict=True)
        ],
    }
    return kept(file, cell)


def searched(arguments: argparse.Namespace, method: str, asked_ms: float, reference: tuple[Run, Recipe]) -> dict[str, Any]:
    """Returns what the search for a latency came to."""
    asked = reference[1]
    at = shapes(asked.model.task, asked.target)[-1] if arguments.at is None else shape_of(arguments.at)
    file = arguments.out / f"{method}-{asked_ms:g}ms-{shape_name(at)}-{arguments.epochs:g}.json"
    if file.exists():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    latency = {"batch": at[0], "value": asked_ms, **({} if at[1] is None else {"sequence": at[1]})}
    made = finished(recipe(arguments, {"method": method, "measure": "latency", "latency_ms": latency}), runs_of(arguments, method))
    turns = [measure([engine(*reference), engine(*made)], [at], ConsoleProgress()) for _ in range(PROCESSES)]
    told = made[0].artifacts["prune"].metrics["latency"]
    cell = {
        "method": method,
        "shape": list(at),
        "asked_ms": asked_ms,
        "predicted_ms": told["after"]["predicted_ms"],
        "searched_ms": told["after"]["measured_ms"],
        "rounds": len(told["rounds"]),
        "measured_ms": median(turn[1]["p50_ms"] for turn in turns),
        "whole_ms": median(turn[0]["p50_ms"] for turn in turns),
        "accuracy": accuracy(engine(*made), made[1]),
    }
    return kept(file, cell)


def kept(file: Path, cell: dict[str, Any]) -> dict[str, Any]:
    """Writes a finished cell; returns it."""
    file.write_text(json.dumps(cell) + "\n", encoding="utf-8")
    return cell


def engine(made: Run, asked: Recipe) -> EngineSpec:
    """Returns the int8 engine of a run; builds it where it is not there yet."""
    checkpoint = made.variants["quantize"].path
    folder = made.folder / "engines" / checkpoint.name
    return opened(checkpoint, folder, asked) if folder.exists() else built(checkpoint, folder, asked)


def accuracy(spec: EngineSpec, asked: Recipe) -> dict[str, Any]:
    """Returns the primary metric of an engine on the evaluation split, with n and its 95 % interval."""
    task = asked.model.task
    data = load_data(asked.data, task, label_names(asked.model), lambda line: None)
    return single(primary(task), answers_of_engine(spec, data), data.evaluation.labels)


def shape_of(text: str) -> Shape:
    """Reads `8x128`, or `8` for images."""
    batch, _, sequence = text.partition("x")
    return int(batch), int(sequence) if sequence else None


def shape_name(shape: Shape) -> str:
    """Writes a shape as it is read."""
    return f"{shape[0]}" + (f"x{shape[1]}" if shape[1] is not None else "")


def interval(cell: dict[str, Any]) -> str:
    """Writes the 95 % interval of a metric."""
    return f"{cell['low']:.4f} to {cell['high']:.4f}"


def curve_table(cells: list[dict[str, Any]]) -> str:
    """Returns the curve as a Markdown table."""
    names = [shape_name(tuple(entry["shape"])) for entry in cells[0]["latency"]]
    columns = ["method", "sparsity", "n", "accuracy", "95 %", *(f"p50 ms {name}" for name in names), *(f"ratio {name}" for name in names)]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for cell in cells:
        found = cell["accuracy"]
        values = [cell["method"], f"{cell['sparsity']:g}", str(found["n"]), f"{found['value']:.4f}", interval(found)]
        values += [f"{entry['p50_ms']:.3f}" for entry in cell["latency"]]
        values += [f"{entry['p50_ms'] / entry['whole_ms']:.3f}" for entry in cell["latency"]]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def search_table(cells: list[dict[str, Any]]) -> str:
    """Returns the searches as a Markdown table."""
    columns = (
        "method",
        "shape",
        "asked ms",
        "predicted ms",
        "in the search ms",
        "measured ms",
        "off by",
        "not pruned ms",
        "accuracy",
        "95 %",
    )
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for cell in cells:
        times = [f"{cell[key]:.3f}" for key in ("asked_ms", "predicted_ms", "searched_ms", "measured_ms")]
        found = [f"{cell['measured_ms'] / cell['asked_ms'] - 1:+.1%}", f"{cell['whole_ms']:.3f}", f"{cell['accuracy']['value']:.4f}"]
        lines.append(f"| {' | '.join([cell['method'], shape_name(tuple(cell['shape'])), *times, *found, interval(cell['accuracy'])])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
