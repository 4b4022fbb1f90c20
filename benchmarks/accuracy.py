"""What int8 keeps of fp32 on several tasks and seeds: this project's PTQ and QAT with distillation beside NNCF and ONNX Runtime.

    python benchmarks/accuracy.py --model MINILM --data FOLDER [--tasks sst2 mrpc stsb cifar10] [--seeds 0 1 2] [--out FOLDER]

MINILM is a MiniLM-L6 whose backbone is taken; FOLDER holds sst2, mrpc, stsb and cifar10 as their authors distribute them. For each task
and seed one float model is fine-tuned by the stage `finetune`; every method then starts from that same checkpoint, calibrates on the same
512 training rows, and is asked the whole evaluation split in the engine that would serve it (static shapes), ours also with its float
part in bf16. A finished cell is never computed again.

Prints for each task the mean over the seeds, the share of the fp32 metric that is kept, agreement with fp32, and the 95 % paired
bootstrap interval of the difference to fp32: rows are drawn, and the metric of each sample is averaged over the seeds. Then, in the same
way, the difference of ours to the best that others made of the same model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compress.pipeline import run
from compress.reading.load import load_data
from compress.recipe import Recipe, read
from compress.report.intervals import paired_bootstrap
from export.engines.openvino import computes_bf16
from export.engines.spec import EngineSpec
from foundation.artifacts.run_folder import open_run
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Data
from foundation.labels.tasks import TASKS as KINDS
from foundation.labels.value import Numbers
from foundation.machine.environment import fingerprint
from foundation.measure.answers import load_logits
from foundation.measure.metrics import Metric, metrics
from foundation.models.config import label_names
from parts.our_engine import answers_of_engine, built
from parts.peer_engines import nncf_int8, onnxruntime_dynamic_int8, onnxruntime_static_int8, ordinary_export

ROOT = Path(__file__).resolve().parent.parent
CALIBRATION_ROWS = 512
FLOAT, PTQ, QAT = "torch fp32", "ours: ptq", "ours: qat and distillation"


@dataclass(frozen=True)
class Task:
    """One row of the table: a shipped recipe, its training, and where the files of its data lie."""

    recipe: str
    finetune: str
    qat: str
    settings: tuple[str, ...]


TASKS = {
    "sst2": Task(
        "sst2-minilm-ptq-2693",
        "{epochs: 0.5, learning_rate: 2.0e-5}",
        "{epochs: 0.2}",
        ("data.path={data}/sst2",),
    ),
    "mrpc": Task(
        "mrpc-minilm",
        "{epochs: 4, learning_rate: 5.0e-5}",
        "{epochs: 1}",
        (
            "data.path={data}/mrpc",
            'data.columns={{text: "#1 String", text_pair: "#2 String", label: Quality}}',
            "data.files={{train: [train.tsv.gz, {{file: train_missing_row.tsv, header: false, "
            "columns: {{label: 0, text: 3, text_pair: 4}}}}], test: [dev.tsv, msr_paraphrase_test.txt.gz]}}",
        ),
    ),
    "stsb": Task(
        "stsb-minilm",
        "{epochs: 4, learning_rate: 5.0e-5}",
        "{epochs: 1}",
        (
            "data.path={data}/stsb",
            "data.columns={{text: sentence1, text_pair: sentence2, label: score}}",
            "data.files={{train: train.tsv.gz, test: [dev.tsv, {{file: sts-test.tsv, header: false, "
            "columns: {{text: 5, text_pair: 6, label: 4}}}}]}}",
        ),
    ),
    "cifar10": Task(
        "cifar10-vit",
        "{epochs: 10, learning_rate: 1.0e-3, batch_size: 64}",
        "{epochs: 1, learning_rate: 1.0e-5}",
        ("data.path={data}/cifar10", "data.files={{train: subset_train.tar.gz, test: subset_test.tar.gz}}"),
    ),
}


def main() -> None:
    """Fills the cells that are missing, prints the table."""
    arguments = parse()
    cells: dict[str, list[dict[str, Any]]] = {}
    for task in arguments.tasks:
        for seed in arguments.seeds:
            folder = arguments.out / f"{task}-{seed}"
            if not (folder / "answers.json").exists():
                measure_cell(task, seed, arguments, folder)
            cells.setdefault(task, []).append(json.loads((folder / "answers.json").read_text(encoding="utf-8")))
    rows, duels = [], []
    for task, seeds in cells.items():
        kind, (stacked, labels) = seeds[0]["task"], answers_of(task, seeds, arguments.out)
        rows += summarize(task, kind, stacked, labels)
        duels += against_best(task, kind, stacked, labels)
    document = {"environment": fingerprint(), "rows": rows, "against the best of the others": duels}
    (arguments.out / "accuracy.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(rows) + "\n\n" + duel_table(duels))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a MiniLM-L6; its head is replaced")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="tasks to measure; all where absent")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of fine-tuning and of QAT")
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"), help="where to work")
    return parser.parse_args()


def measure_cell(task: str, seed: int, arguments: argparse.Namespace, folder: Path) -> None:
    """Fine-tunes one model, quantizes it every way, and writes what each answers on the evaluation split."""
    chosen, progress = TASKS[task], ConsoleProgress()
    common = [setting.format(data=arguments.data) for setting in chosen.settings]
    common += [f"seed={seed}", "goals={}", "target={engines: [openvino], batch_sizes: [8], sequence_lengths: [32]}"]

    def recipe(stages: str, *settings: str) -> Recipe:
        return read(ROOT / "recipes" / f"{chosen.recipe}.yaml", [*common, f"stages={stages}", *settings])

    own = () if chosen.recipe == "cifar10-vit" else (f"model.path={arguments.model}", "model.head=new")
    asked = {PTQ: "{mode: ptq}", QAT: f"{{mode: qat, qat: {chosen.qat}}}"}
    recipes = {name: recipe(f"[{{finetune: {chosen.finetune}}}, {{quantize: {method}}}]", *own) for name, method in asked.items()}
    finished = {name: open_run(run(one, folder / "run", progress=progress).folder) for name, one in recipes.items()}  # trained once
    trained, floating = finished[PTQ], finished[PTQ].variants["finetune"].path
    checkpoints = {name: one.variants["quantize"].path for name, one in finished.items()}
    asking = recipes[PTQ]
    data = load_data(asking.data, asking.model.task, label_names(asking.model), lambda line: None)
    answers = {FLOAT: load_logits(trained.predictions("finetune"))}
    for name, spec in engines(checkpoints, floating, asking, data, folder).items():
        answers[name] = answers_of_engine(spec, data)
    np.savez(folder / "answers.npz", **answers, labels=data.evaluation.labels.array)
    document = {"task": asking.model.task, "seed": seed, "n": len(data.evaluation), "names": list(answers)}
    (folder / "answers.json").write_text(json.dumps(document) + "\n", encoding="utf-8")


def engines(checkpoints: Mapping[str, Path], floating: Path, recipe: Recipe, data: Data, out: Path) -> dict[str, EngineSpec]:
    """Returns every engine by the name it has in the table: ours of each checkpoint, and what others make of the float model."""
    specs: dict[str, EngineSpec] = {}
    for name, checkpoint in checkpoints.items():
        folder = out / "engines" / name.split()[1]
        openvino = built(checkpoint, folder, recipe)
        specs[name] = openvino
        if computes_bf16():
            specs[f"{name}, rest bf16"] = replace(openvino, float_precision="bf16")
    folder = out / "engines" / "float"
    openvino, onnx = built(floating, folder, recipe), ordinary_export(floating, folder, folder / "ordinary.onnx")
    rows = data.calibration(CALIBRATION_ROWS, recipe.seed).rows
    by_nncf, dynamic = nncf_int8(onnx, folder, rows, folder / "nncf.xml"), onnxruntime_dynamic_int8(onnx, folder / "dynamic.onnx")
    static = onnxruntime_static_int8(onnx, folder, rows, folder / "static.onnx")
    runtime = replace(openvino, engine="onnxruntime", mode="dynamic", precision="int8")
    return {
        **specs,
        "NNCF ptq, OpenVINO": replace(openvino, path=str(by_nncf), precision="int8"),
        "ONNX Runtime dynamic int8": replace(runtime, path=str(dynamic)),
        "ONNX Runtime static int8": replace(runtime, path=str(static)),
    }


def summarize(task: str, kind: str, stacked: dict[str, Any], labels: Any) -> list[dict[str, Any]]:
    """Returns a row for each method: means over the seeds, and the paired interval of the difference to fp32."""
    metric = partial(mean_metric, kind)
    rows = []
    for name in stacked:
        value, reference = metric(stacked[name], labels), metric(stacked[FLOAT], labels)
        interval = paired_bootstrap(Metric(metric), stacked[name], stacked[FLOAT], labels)
        row = {"task": task, "name": name, "seeds": stacked[name].shape[1], "n": len(labels), "metric": KINDS[kind].metric, "value": value}
        row |= {"kept": value / reference, "low": interval.low, "high": interval.high, "agreement": agreement(kind, stacked, name)}
        rows.append(row)
    return rows


def answers_of(task: str, seeds: list[dict[str, Any]], out: Path) -> tuple[dict[str, Any], Any]:
    """Returns what every method answers, `[n, seeds, C]` by its name, and the labels `[n]`."""
    loaded = [np.load(out / f"{task}-{cell['seed']}" / "answers.npz") for cell in seeds]
    return {name: np.stack([archive[name] for archive in loaded], axis=1) for name in seeds[0]["names"]}, loaded[0]["labels"]


def against_best(task: str, kind: str, stacked: dict[str, Any], labels: Any) -> list[dict[str, Any]]:
    """Returns for each of our methods the paired interval of its difference to the best that others made of the same model."""
    metric = partial(mean_metric, kind)
    values = {name: metric(answers, labels) for name, answers in stacked.items()}
    best = max((name for name in values if name != FLOAT and not name.startswith("ours")), key=values.__getitem__)
    rows = []
    for name in (PTQ, QAT):
        interval = paired_bootstrap(Metric(metric), stacked[name], stacked[best], labels)
        row = {"task": task, "name": name, "best": best, "difference": values[name] - values[best]}
        rows.append({**row, "low": interval.low, "high": interval.high})
    return rows


def mean_metric(kind: str, logits: Any, truth: Any) -> float:
    """Returns the primary metric, averaged over the seeds.

    Args:
        kind: The task.
        logits: What the models of all seeds answer, `[n, seeds, C]`.
        truth: Labels `[n]`.
    """
    row, seeds = KINDS[kind], range(logits.shape[1])
    return float(np.mean([metrics(kind, logits[:, seed], row.answer.FORM(truth))[row.metric] for seed in seeds]))


def agreement(kind: str, stacked: dict[str, Any], name: str) -> float:
    """Returns the share of rows answered as fp32 does; for regression the Pearson correlation with its answers."""
    if KINDS[kind].answer.FORM is Numbers:
        pairs = [(stacked[name][:, seed, 0], stacked[FLOAT][:, seed, 0]) for seed in range(stacked[name].shape[1])]
        return float(np.mean([np.corrcoef(ours, theirs)[0, 1] for ours, theirs in pairs]))
    return float(np.mean(stacked[name].argmax(axis=2) == stacked[FLOAT].argmax(axis=2)))


def duel_table(rows: list[dict[str, Any]]) -> str:
    """Returns the differences to the best of the others as a Markdown table."""
    lines = ["| task | ours | best of the others | difference, 95 % |", "| --- " * 4 + "|"]
    for row in rows:
        figures = f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
        lines.append(f"| {row['task']} | {row['name']} | {row['best']} | {figures} |")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the result as a Markdown table."""
    lines = ["| task | method | metric, mean | kept | difference to fp32, 95 % | agreement | n x seeds |", "| --- " * 7 + "|"]
    for row in rows:
        interval = "" if row["name"] == FLOAT else f"{row['low']:+.4f} to {row['high']:+.4f}"
        cells = [row["task"], row["name"], f"{row['value']:.4f}", f"{row['kept']:.2%}", interval, f"{row['agreement']:.4f}"]
        lines.append(f"| {' | '.join(cells)} | {row['n']} x {row['seeds']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
