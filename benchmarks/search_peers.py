"""Our search beside Olive's, over post-training quantization alone: same model, rows, objectives and minutes; one run measures both fronts.

    python benchmarks/search_peers.py --olive PYTHON [--minutes 20] [--recipe sst2-minilm-ptq-2693] [--set KEY=VALUE ...] [--out FOLDER]

PYTHON is that of an environment of Olive's own: `pip install olive-ai==0.13.0 onnxruntime openvino nncf torch torchmetrics requests`. Ours
is `compress search` over settings of `quantize` (`SPACE`), Olive's is in `olive_worker.py`: its passes for ONNX Runtime and OpenVINO. Both
choose by accuracy on the selection rows and by the geometric mean over the shapes of the target of the median latency; Olive calibrates on
the 512 rows that ours takes (128 of them in ONNX Runtime). `--minutes` is the work of a search, conversion and baseline included; the
evaluation of our front comes after it.

The models of both fronts and torch fp32 then answer every evaluation row and take turns at `SHAPES`, each in a process of its own, opened
alike: OpenVINO in static shapes, Olive's with fp32 beside int8 and, where the processor has it, once more with bf16. Prints both fronts,
and for each point of Olive's whether one of ours is at least as accurate and at every shape at least as fast; writes `search-peers.json`
with hardware and versions. A search that is done in FOLDER is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from search import CALIBRATION_ROWS, TORCH, references, served

from compress.commands.recipes import find
from compress.reading.load import load_data
from compress.recipe import Recipe, read
from compress.report import intervals
from compress.run.implicit import shapes
from compress.search.search import search
from export.engines.openvino import computes_bf16
from export.engines.spec import EngineSpec
from foundation.artifacts.run_folder import Run, open_run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Data
from foundation.machine.environment import fingerprint
from foundation.measure.latency import measure
from foundation.measure.metrics import METRICS
from foundation.models.config import label_names
from foundation.standalone.preprocess import Preprocessor
from parts.our_engine import answers_of_engine

SHAPES: list[tuple[int, int | None]] = [(1, 32), (1, 128), (8, 128)]
SPACE: dict[str, list[Any]] = {
    "quantize.calibration.method": [None, "mse", "entropy"],  # none: minmax with smoothing, percentile without
    "quantize.smoothquant": [True, False],
    "quantize.rounding": ["nearest", "gptq"],
    "quantize.bias_correction": [False, True],
    "quantize.attention": [False, True],
    "quantize.residual": [False, True],
}
TRIALS = 1000
"""More than there are combinations: the minutes end the search."""


def main() -> None:
    """Searches twice, measures both fronts, prints."""
    arguments, progress = parse(), ConsoleProgress()
    recipe = read(find(arguments.recipe), [*settings(arguments.minutes), *arguments.set])
    data = load_data(recipe.data, recipe.model.task, label_names(recipe.model), progress.log, recipe.tokenizer or recipe.model.path)
    found = search(recipe, arguments.out / "ours", progress=progress)
    if not found.contents["front"]:
        raise InputError("--minutes", f"{arguments.minutes:g} given", "no candidate of ours was finished", "give more")
    runs = [open_run(found.folder / point["run"]) for point in found.contents["front"]]
    reference = references(runs[0], recipe, data, arguments.out, nncf=False)
    theirs = olive(reference[TORCH], runs[0], recipe, data, arguments)
    fronts = {"ours": of_ours(found.contents["front"], runs, found.folder), "olive": of_olive(reference[TORCH], theirs["front"])}
    points = {name: point for front in fronts.values() for name, point in front.items()}
    specs = reference | {name: point.spec for name, point in points.items()}
    rows = measure(list(specs.values()), SHAPES, progress)
    answers = {name: answers_of_engine(spec, data) for name, spec in specs.items()}
    latency = [{"name": list(specs)[job], **row.written()} for job, row in rows]
    metric = METRICS[recipe.model.facts.metric]
    document = {
        "environment": fingerprint(),
        "minutes": arguments.minutes,
        "seconds": {"ours": found.contents["seconds"], "olive": theirs["seconds"]},
        "tried": {"ours": sum(one["results"] is not None for one in found.contents["candidates"]), "olive": len(theirs["tried"])},
        "accuracy": {name: intervals.single(metric, given, data.evaluation.labels).written() for name, given in answers.items()},
        "latency": latency,
        "settings": {name: points[name].settings if name in points else "" for name in specs},
        "points": compared(fronts, answers, latency, data),
        "searches": {"ours": found.contents["front"], "olive": theirs},
    }
    (arguments.out / "search-peers.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join([told(document), table(document), verdicts(document)]))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--olive", type=Path, required=True, metavar="PYTHON", help="the Python of Olive's environment")
    parser.add_argument("--minutes", type=float, default=20.0, help="work of each search")
    parser.add_argument("--recipe", default="sst2-minilm-ptq-2693", help="gives model, data and target: a file, or a shipped one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of compress run; repeatable")
    parser.add_argument("--out", type=Path, default=Path("runs/search-peers-ptq"), help="where to work")
    return parser.parse_args()


def settings(minutes: float) -> list[str]:
    """Returns what makes the recipe one of a search over quantization alone, without goals: the whole front is wanted."""
    wanted = {"space": SPACE, "objectives": ["metric", "latency"], "budget": {"trials": TRIALS, "hours": minutes / 60}}
    return [
        "stages=[{quantize: {mode: ptq}}, {export: {}}]",
        "goals.max_drop=null",
        "goals.min_speedup=null",
        f"search={json.dumps(wanted)}",
    ]


def olive(torch: EngineSpec, run: Run, recipe: Recipe, data: Data, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what Olive's search found: `seconds`, `tried` and `front` of `olive_worker.py`."""
    folder = arguments.out / "olive"
    answer = folder / "olive.json"
    if not answer.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        processor, splits = Preprocessor.load(Path(torch.folder)), {"calibration": data.calibration(CALIBRATION_ROWS, recipe.seed)}
        rows = {
            f"{kind}/{name}": values
            for kind, split in (splits | {"selection": data.selection}).items()
            for name, values in processor.encode(split.rows, recipe.data.max_length).items()
        }
        np.savez(folder / "rows.npz", labels=data.selection.labels.array, **rows)
        given = [f"{batch}x{length}" for batch, length in shapes(recipe.model.task, recipe.target)]
        command = [arguments.olive, "-P", Path(__file__).parent / "workers" / "olive_worker.py", torch.path, folder / "rows.npz", folder]
        options = ["--minutes", arguments.minutes, "--threads", recipe.target.num_threads, "--shapes", *given]
        environment = {**os.environ, "OLIVE_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([str(part) for part in (*command, *options)], check=True, env=environment)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class Point:
    """A point of a front."""

    spec: EngineSpec
    """How it is opened."""
    settings: str
    """What it is made by."""


def of_ours(points: Sequence[Mapping[str, Any]], runs: Sequence[Run], folder: Path) -> dict[str, Point]:
    """Returns the points of our front, each opened as its run serves it."""
    found = {}
    for point, run in zip(points, runs, strict=True):
        spec = served(run, folder / point["run"] / "report.json")
        kind = f"{spec.engine} {spec.precision}" + (f" beside {spec.float_precision}" if spec.precision == "int8" else "")
        values = [f"{path.removeprefix('quantize.')} {json.dumps(value)}" for path, value in point["values"].items()]
        found[f"ours {point['number']}"] = Point(spec, ", ".join([kind, *values]).replace('"', ""))
    return found


def of_olive(torch: EngineSpec, points: Sequence[Mapping[str, Any]]) -> dict[str, Point]:
    """Returns the points of Olive's front; those in OpenVINO once with each float precision beside int8."""
    found = {}
    for number, point in enumerate(points):
        values = ", ".join(f"{name} {value}" for name, value in point["settings"].items())
        if point["kind"] != "openvino":
            spec = replace(torch, engine="onnxruntime", mode="dynamic", precision="int8", path=point["file"])
            found[f"Olive {number}"] = Point(spec, f"{point['kind']} int8, {values}")
            continue
        for rest in ("fp32", "bf16") if computes_bf16() else ("fp32",):
            spec = replace(torch, engine="openvino", mode="static", precision="int8", float_precision=rest, path=point["file"])
            found[f"Olive {number}, {rest}"] = Point(spec, f"openvino int8 beside {rest}, {values}")
    return found


def compared(
    fronts: Mapping[str, Mapping[str, Point]], answers: Mapping[str, Any], latency: Sequence[Mapping[str, Any]], data: Data
) -> list[dict[str, Any]]:
    """Returns for each point of Olive's the one of ours to hold beside it.

    Where some of ours are at least as accurate and at every shape at least as fast, it is the fastest of these. Elsewhere it is the most
    accurate of those that are as fast, or, where none is, the fastest.

    Returns:
        `olive`, `ours`, `dominated`, `times` (ours / Olive's by shape) and `lost` (accuracy of Olive's less that of ours, with interval).
    """
    p50 = {(row["name"], (row["batch"], row["sequence"])): float(row["p50_ms"]) for row in latency}
    labels, found = data.evaluation.labels, []
    right = {name: int((given.argmax(axis=1) == labels.array).sum()) for name, given in answers.items()}
    for theirs in fronts["olive"]:
        times = {name: [p50[name, shape] / p50[theirs, shape] for shape in SHAPES] for name in fronts["ours"]}
        as_fast = [name for name in times if max(times[name]) <= 1]
        as_good = [name for name in as_fast if right[name] >= right[theirs]]
        if as_fast and not as_good:
            best = max(as_fast, key=lambda name: right[name])
        else:
            best = min(as_good or times, key=lambda name: prod(times[name]))
        lost = intervals.paired(METRICS["accuracy"], answers[theirs], answers[best], labels)
        found.append({"olive": theirs, "ours": best, "dominated": bool(as_good), "times": times[best], "lost": lost.written()})
    return found


def told(document: Mapping[str, Any]) -> str:
    """Returns the work of both searches and the outcome in one line."""
    seconds, tried, points = document["seconds"], document["tried"], document["points"]
    return (
        f"ours: {tried['ours']} candidates in {seconds['ours'] / 60:.1f} min; Olive: {tried['olive']} in {seconds['olive'] / 60:.1f} min; "
        f"one of ours is as good as {sum(point['dominated'] for point in points)} of {len(points)} points of Olive's"
    )


def table(document: Mapping[str, Any]) -> str:
    """Returns both fronts as a Markdown table: settings, accuracy with its interval, p50 at each shape."""
    p50 = {(row["name"], (row["batch"], row["sequence"])): row["p50_ms"] for row in document["latency"]}
    heads = " | ".join(f"{words(shape)} ms" for shape in SHAPES)
    lines = [f"| | settings | accuracy (95 %) | {heads} |", "| --- " * (3 + len(SHAPES)) + "|"]
    for name, cell in document["accuracy"].items():
        times = " | ".join(f"{p50[name, shape]:.2f}" for shape in SHAPES)
        accuracy = f"{cell['value']:.4f} ({cell['low']:.4f} to {cell['high']:.4f})"
        lines.append(f"| {name} | {document['settings'][name]} | {accuracy} | {times} |")
    return "\n".join(lines)


def verdicts(document: Mapping[str, Any]) -> str:
    """Returns for each point of Olive's the one of ours beside it, as a Markdown table."""
    heads = " | ".join(f"time at {words(shape)}" for shape in SHAPES)
    lines = [f"| point of Olive's | as good in ours | beside it | points lost (95 %) | {heads} |", "| --- " * (4 + len(SHAPES)) + "|"]
    for point in document["points"]:
        lost = point["lost"]
        loss = f"{100 * lost['difference']:.2f} ({100 * lost['low']:.2f} to {100 * lost['high']:.2f})"
        times = " | ".join(f"{time:.2f}x" for time in point["times"])
        lines.append(f"| {point['olive']} | {'yes' if point['dominated'] else 'no'} | {point['ours']} | {loss} | {times} |")
    return "\n".join(lines)


def words(shape: tuple[int, int | None]) -> str:
    """Returns a shape as text."""
    return f"{shape[0]}x{shape[1]}"


if __name__ == "__main__":
    main()
