"""What pruning buys and costs: accuracy against the measured latency of the int8 engine, for several sparsities and methods.

    python benchmarks/pruning/pruning_curve.py --set model.path=MODEL --set data.path=DATA [--methods activation taylor magnitude]
        [--sparsities 0.2 0.3 0.4 0.5 0.6 0.7] [--epochs 1]
    python benchmarks/pruning/pruning_curve.py --set model.path=MODEL --set data.path=DATA --latency 4.0 6.0 [--at 8x128]

Settings are those of `compress run`, on top of recipes/sst2-minilm.yaml (`--recipe` for another one, whose stage `finetune` is kept). Each
method is one run with a branch for each sparsity: prune with `--epochs` of recovery (0: none), quantize. The model that is not pruned is
a branch of its own, so that its engine and those of the others take turns, and a ratio means something. The report of the run shows the
whole curve. With --build it stops before anything is exported or measured: several processes may train a method each, and a later call
measures alone.

Prints a Markdown table: n, accuracy and its 95 % interval in the engine, median latency at every target shape, and its ratio to the int8
engine that is not pruned. With `--latency` each branch searches for a latency instead: asked for, predicted, and the median of five
processes of each engine, in turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from compress.pipeline import run
from compress.recipe import Recipe, read
from compress.report import evaluations
from compress.run.implicit import shapes
from export.engines.spec import EngineSpec, spec_of
from foundation.artifacts.run_folder import Run, open_run
from foundation.core.progress import ConsoleProgress
from foundation.machine.environment import fingerprint
from foundation.measure.latency import Shape, measure

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 5
WHOLE = "whole"


def main() -> None:
    """Runs what is missing, prints the table."""
    arguments = parse()
    rows: list[dict[str, Any]] = []
    for method in arguments.methods:
        finished, recipe = run_method(arguments, method)
        if not arguments.build:
            rows += searched(arguments, method, finished, recipe) if arguments.latency else curve(arguments, method, finished.folder)
    if arguments.build:
        return
    name, table = ("search", search_table) if arguments.latency else ("curve", curve_table)
    document = {"environment": fingerprint(), "rows": rows}
    (arguments.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


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
    parser.add_argument("--build", action="store_true", help="train and quantize, and leave engines and measuring to a later call")
    parser.add_argument("--epochs", type=float, default=1, help="passes over the train split of recovery; 0: no recovery")
    parser.add_argument("--learn-epochs", type=float, default=2, help="those of masks, for joint and movement")
    parser.add_argument("--out", type=Path, default=Path("runs/pruning-curve"), help="where to work")
    return parser.parse_args()


def run_method(arguments: argparse.Namespace, method: str) -> tuple[Run, Recipe]:
    """Runs all branches of a method, or finds that they were run already; returns the run and its recipe."""
    plain = read(arguments.recipe, arguments.set)
    stages = [{stage.NAME: stage.model_dump(mode="json")} for stage in plain.stages if stage.NAME == "finetune"]
    stages.append({"quantize": {"id": WHOLE}})
    for value in arguments.latency or arguments.sparsities:
        if arguments.latency:
            batch, sequence = asked_shape(arguments, plain)
            at = {"batch": batch, "value": value, **({} if sequence is None else {"sequence": sequence})}
            asked: dict[str, Any] = {"measure": "latency", "latency_ms": at}
        else:
            asked = {"measure": arguments.measure, "sparsity": value}
        trained = {"recover": {"epochs": arguments.epochs} if arguments.epochs else None, "learn": {"epochs": arguments.learn_epochs}}
        stages.append({"prune": {"id": f"prune-{name_of(value)}", "input": "baseline", "method": method, **trained, **asked}})
        stages.append({"quantize": {"id": f"int8-{name_of(value)}"}})
    stages += [] if arguments.build else [{"export": {}}]
    recipe = read(arguments.recipe, [*arguments.set, f"stages={json.dumps(stages)}", "goals={int8_faster: false}", f"name={method}"])
    return open_run(run(recipe, arguments.out / method, progress=ConsoleProgress()).folder), recipe


def name_of(value: float) -> str:
    """Writes a sparsity or a latency as a part of an id."""
    return f"{value:g}".replace(".", "_")


def curve(arguments: argparse.Namespace, method: str, folder: Path) -> list[dict[str, Any]]:
    """Returns a row for the model that is not pruned and for each sparsity, from the report of a run."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    engine = report["target"]["engines"][0]
    variants = {variant["id"]: variant for variant in report["variants"]}

    def p50_ms(name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for row in variants[name]["latency"]:
            if (row["engine"], row["precision"]) == (engine, "int8"):
                found.setdefault(shape_name((row["batch"], row["sequence"])), row["p50_ms"])  # the recommended mode comes first
        return found

    whole = p50_ms(WHOLE)
    names = [(0.0, WHOLE), *((sparsity, f"int8-{name_of(sparsity)}") for sparsity in arguments.sparsities)]
    return [
        {
            "method": method,
            "sparsity": sparsity,
            "accuracy": variants[name]["accuracy"][engine],
            "parameters": variants[name]["parameters"],
            "p50_ms": p50_ms(name),
            "ratio": {shape: value / whole[shape] for shape, value in p50_ms(name).items()},
        }
        for sparsity, name in names
    ]


def searched(arguments: argparse.Namespace, method: str, finished: Run, recipe: Recipe) -> list[dict[str, Any]]:
    """Returns for each latency that was asked for what the search came to, and what five processes of the engine that is served say."""
    at = asked_shape(arguments, recipe)
    names = [WHOLE, *(f"int8-{name_of(value)}" for value in arguments.latency)]
    specs = [served(finished, recipe, name) for name in names]
    turns = [measure(specs, [at], ConsoleProgress()) for _ in range(PROCESSES)]
    measured = {name: median(turn[number][1].median_ms for turn in turns) for number, name in enumerate(names)}
    report = json.loads((finished.folder / "report.json").read_text(encoding="utf-8"))
    variants = {variant["id"]: variant for variant in report["variants"]}
    rows = []
    for value in arguments.latency:
        told = finished.artifacts[f"prune-{name_of(value)}"].metrics["latency"]
        name = f"int8-{name_of(value)}"
        row = {"method": method, "shape": shape_name(at), "asked_ms": value, "predicted_ms": told["after"]["predicted_ms"]}
        row |= {"searched_ms": told["after"]["measured_ms"], "rounds": len(told["rounds"])}
        row |= {"measured_ms": measured[name], "whole_ms": measured[WHOLE]}
        rows.append({**row, "accuracy": variants[name]["accuracy"][recipe.target.engines[0]]})
    return rows


def served(finished: Run, recipe: Recipe, name: str) -> EngineSpec:
    """Returns how the engine of a variant is opened in the mode that is recommended."""
    exported = finished.artifacts["export"].path
    build = next(build for build in evaluations.exported(finished).builds if build.variant == name)
    return spec_of(exported, build, build.engines[0], recipe.target)


def asked_shape(arguments: argparse.Namespace, recipe: Recipe) -> Shape:
    """Returns the shape that milliseconds are asked for at."""
    if arguments.at is None:
        return shapes(recipe.model.task, recipe.target)[-1]
    batch, _, sequence = arguments.at.partition("x")
    return int(batch), int(sequence) if sequence else None


def shape_name(shape: Shape) -> str:
    """Writes a shape as it is read: `8x128`, or `8` for images."""
    return f"{shape[0]}" + (f"x{shape[1]}" if shape[1] is not None else "")


def interval(cell: dict[str, Any]) -> str:
    """Writes the 95 % interval of a metric."""
    return f"{cell['low']:.4f} to {cell['high']:.4f}"


def curve_table(rows: list[dict[str, Any]]) -> str:
    """Returns the curve as a Markdown table."""
    names = list(rows[0]["p50_ms"])
    columns = ["method", "sparsity", "n", "accuracy", "95 %", *(f"p50 ms {name}" for name in names), *(f"ratio {name}" for name in names)]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in rows:
        found = row["accuracy"]
        values = [row["method"], f"{row['sparsity']:g}", str(found["n"]), f"{found['value']:.4f}", interval(found)]
        values += [f"{row['p50_ms'][name]:.3f}" for name in names] + [f"{row['ratio'][name]:.3f}" for name in names]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def search_table(rows: list[dict[str, Any]]) -> str:
    """Returns the searches as a Markdown table."""
    times = {"asked ms": "asked_ms", "predicted ms": "predicted_ms", "in the search ms": "searched_ms", "measured ms": "measured_ms"}
    columns = ["method", "shape", *times, "off by", "not pruned ms", "accuracy", "95 %"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in rows:
        values = [row["method"], row["shape"], *(f"{row[key]:.3f}" for key in times.values())]
        values += [f"{row['measured_ms'] / row['asked_ms'] - 1:+.1%}", f"{row['whole_ms']:.3f}"]
        values += [f"{row['accuracy']['value']:.4f}", interval(row["accuracy"])]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
