"""What a student keeps of its teacher, by loss, task, seed and share of the data; beside the same student trained on labels alone.

    python benchmarks/distillation.py --model MINILM --data FOLDER [--tasks sst2] [--rows 20000] [--epochs 3] [--student '{layers: 3}']
        [--presets soft_target distilbert minilm minilmv2 pkd tinybert mixkd] [--seeds 0 1 2] [--out FOLDER]
    python benchmarks/distillation.py --model MINILM --data FOLDER --fraction 0.1 0.01 --control soft_target --presets mixkd
        --seeds 0 1 2 3 4

MINILM is a MiniLM-L6; FOLDER holds sst2, mrpc, stsb and cifar10 as their authors distribute them. For each task and seed one teacher is
fine-tuned by the stage `finetune` (with --trained MINILM itself is the teacher, as it is), and every student is made of it by the stage
`distill`, from the same layers, on the same rows, for the same steps. The control is `loss: hard_target`, no teacher, unless --control
names another loss to compare with. The weights kept are chosen by the labels of the selection split (with --trained by agreement with the
teacher, as it may have seen those rows). With --corpus every student, that of the control too, learns the inside of its teacher on plain
text before (`loss: minilmv2`). With --augment the presets learn from a masked copy of each row, too, which has no label; the control passes
over its rows twice as often instead. A cell is one run of a recipe; a finished one is never computed again.

--rows limits the rows that students learn from, --fraction takes a share of these, both by hash of their content. The teacher has all.

Prints for each cell the mean over the seeds, the share of the teacher's metric that is kept, the 95 % paired bootstrap interval of the
difference to the control (rows are drawn, and the metric of each sample is averaged over the seeds), minutes of the stage, and these
divided by the rows of its steps: the teacher's answers and the looks at the selection split are part of it, as they are of the teacher's
own fine-tuning, which it is compared with.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import ROOT, TASKS, mean_metric

from compress.pipeline import run
from compress.reading.load import load_data
from compress.recipe import Recipe, read
from compress.report.intervals import paired_bootstrap
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.run_folder import Run, open_run
from foundation.core.progress import ConsoleProgress
from foundation.labels.tasks import TASKS as KINDS
from foundation.machine.environment import fingerprint
from foundation.measure.answers import load_predictions
from foundation.measure.metrics import Metric
from foundation.models.config import label_names

TEACHER = "teacher"
PRESETS = ("soft_target", "distilbert", "minilm", "minilmv2", "pkd", "tinybert", "mixkd", "relational")


def main() -> None:
    """Fills the cells that are missing, prints the table."""
    arguments = parse()
    cells = [
        measure_cell(task, seed, fraction, preset, arguments)
        for task in arguments.tasks
        for seed in arguments.seeds
        for fraction in arguments.fraction
        for preset in dict.fromkeys((arguments.control, *arguments.presets))
    ]
    groups = [(task, fraction) for task in arguments.tasks for fraction in arguments.fraction]
    rows = [row for task, fraction in groups for row in summarize(task, fraction, cells, arguments)]
    document = {"environment": fingerprint(), "rows": rows}
    (arguments.out / "distillation.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a MiniLM-L6; its head is replaced unless --trained")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--trained", action="store_true", help="the model is the teacher as it is")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["sst2"], help="tasks to measure")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), help="values of `loss`, besides the control")
    parser.add_argument("--control", default="hard_target", help="the loss that the others are compared with")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of teacher and students")
    parser.add_argument("--rows", type=int, help="rows to learn from; all where absent")
    parser.add_argument("--fraction", nargs="+", type=float, default=[1.0], help="shares of these rows")
    parser.add_argument("--epochs", type=float, default=3.0, help="passes of a student over its rows at fraction 1")
    parser.add_argument("--same-steps", action="store_true", help="at smaller fractions as many steps as at 1, not as many passes")
    parser.add_argument("--student", default="{layers: 3}", help="the key `student` of the stage, as YAML")
    parser.add_argument("--corpus", type=Path, help="plain text on which the student learns the inside of its teacher first")
    parser.add_argument("--corpus-epochs", type=float, default=1.0, help="passes over it")
    parser.add_argument("--augment", action="store_true", help="the presets learn from masked copies, too")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="peak learning rate of the students")
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"), help="where to work")
    return parser.parse_args()


def measure_cell(task: str, seed: int, fraction: float, preset: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one student and its teacher; trains it where it is not there yet."""
    name = f"{task}-{seed}-{fraction:g}-{preset}"
    file = arguments.out / "cells" / f"{name}.json"
    if not file.exists():
        common = [setting.format(data=arguments.data) for setting in TASKS[task].settings]
        common += [f"seed={seed}", "goals={int8_faster: false}", f"name={task}-{seed}"]
        if TASKS[task].recipe != "cifar10-vit":
            common += [f"model.path={arguments.model}", f"model.head={'keep' if arguments.trained else 'new'}"]
        settings = [*common, f"stages=[{stage_list(task, fraction, preset, common, arguments)}]"]
        recipe = read(ROOT / "recipes" / f"{TASKS[task].recipe}.yaml", settings)
        # One folder for each teacher: its fine-tuning is found there by every later recipe.
        finished = open_run(run(recipe, arguments.out / f"{task}-{seed}", progress=ConsoleProgress()).folder)
        figures = read_cell(finished, recipe, file.with_suffix(".npz"))
        file.write_text(
            json.dumps({"task": task, "seed": seed, "fraction": fraction, "preset": preset, **figures}) + "\n", encoding="utf-8"
        )
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def stage_list(task: str, fraction: float, preset: str, common: list[str], arguments: argparse.Namespace) -> str:
    """Returns the stages of a cell, as YAML."""
    share, epochs = fraction, arguments.epochs
    if arguments.rows is not None:
        recipe = read(ROOT / "recipes" / f"{TASKS[task].recipe}.yaml", [*common, "stages=[{finetune: {}}]"])
        data = load_data(recipe.data, recipe.model.task, label_names(recipe.model), lambda line: None)
        share *= min(1.0, arguments.rows / len(data.train))
    if arguments.same_steps:
        epochs /= fraction
    finetune = "" if arguments.trained else f"{{finetune: {TASKS[task].finetune}}}, "
    copies = arguments.augment and preset != arguments.control
    if arguments.augment and not copies:
        epochs *= 2  # as many steps as with a copy of each row
    keys = f"loss: {preset}, fraction: {share:.6f}, epochs: {epochs:g}, learning_rate: {arguments.learning_rate:.2e}"
    keys += ", augment: {copies: 1}" if copies else ""
    if arguments.corpus is None:
        return f"{finetune}{{distill: {{student: {arguments.student}, {keys}}}}}"
    inside = f"corpus: {{path: {arguments.corpus}}}, loss: minilmv2, epochs: {arguments.corpus_epochs:g}, learning_rate: 4.0e-4"
    general = f"{{distill: {{id: general, student: {arguments.student}, {inside}}}}}"
    return f"{finetune}{general}, {{distill: {{id: distill, {keys}}}}}"


def read_cell(finished: Run, recipe: Recipe, answers: Path) -> dict[str, Any]:
    """Returns the figures of a run, and writes what teacher and student answer."""
    baseline = next(iter(finished.variants))
    logits = {}
    for name, variant in ((TEACHER, baseline), ("student", "distill")):
        logits[name], labels = load_predictions(finished.predictions(variant), recipe.model.task)
    answers.parent.mkdir(parents=True, exist_ok=True)
    np.savez(answers, **logits, labels=labels.array)
    student, teacher = finished.artifacts["distill"], finished.artifacts[baseline]
    stages = {stage.id: stage for stage in recipe.stages}
    taken = milliseconds_per_row(student, stages["distill"].batch_size)
    ratio = taken / milliseconds_per_row(teacher, stages["finetune"].batch_size) if "finetune" in stages else None
    figures = {"kind": recipe.model.task, "rows": student.metrics["rows"], "minutes": student.manifest["seconds"] / 60}
    return {**figures, "milliseconds_per_row": taken, "against_finetuning": ratio}


def milliseconds_per_row(trained: Artifact, batch_size: int) -> float:
    """Returns the time of a whole stage, divided by the rows of its steps."""
    return 1000 * float(trained.manifest["seconds"]) / (trained.metrics["steps"] * batch_size)


def summarize(task: str, fraction: float, cells: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each preset: means over the seeds, and the paired interval of the difference to the control."""
    mine = [cell for cell in cells if (cell["task"], cell["fraction"]) == (task, fraction)]
    kind, control, presets = mine[0]["kind"], arguments.control, list(dict.fromkeys(cell["preset"] for cell in mine))

    def stacked(preset: str, who: str) -> Any:
        archives = [np.load(arguments.out / "cells" / f"{task}-{seed}-{fraction:g}-{preset}.npz") for seed in arguments.seeds]
        return np.stack([archive[who] for archive in archives], axis=1)  # [n, seeds, C]

    metric = partial(mean_metric, kind)
    labels = np.load(arguments.out / "cells" / f"{task}-{arguments.seeds[0]}-{fraction:g}-{control}.npz")["labels"]
    teacher = metric(stacked(control, TEACHER), labels)
    rows = []
    for preset in presets:
        ours = stacked(preset, "student")
        value = metric(ours, labels)
        interval = paired_bootstrap(Metric(metric), ours, stacked(control, "student"), labels)
        of_preset = [cell for cell in mine if cell["preset"] == preset]
        row = {
            "task": task,
            "fraction": fraction,
            "preset": preset,
            "seeds": len(of_preset),
            "n": len(labels),
            "metric": KINDS[kind].metric,
        }
        row |= {"control": control, "value": value, "teacher": teacher, "kept": value / teacher, "low": interval.low, "high": interval.high}
        row |= {name: _mean([cell[name] for cell in of_preset]) for name in ("rows", "minutes", "milliseconds_per_row")}
        rows.append({**row, "against_finetuning": _mean([cell["against_finetuning"] for cell in of_preset])})
    return rows


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the result as a Markdown table."""
    heads = (
        "task",
        "rows",
        "loss",
        "metric, mean",
        "kept",
        "difference to the control, 95 %",
        "minutes",
        "ms a row",
        "against finetuning",
    )
    lines = [f"| {' | '.join(heads)} | n x seeds |", "| --- " * (len(heads) + 1) + "|"]
    for row in rows:
        interval = "" if row["preset"] == row["control"] else f"{row['low']:+.4f} to {row['high']:+.4f}"
        ratio = "" if row["against_finetuning"] is None else f"{row['against_finetuning']:.2f}x"
        cells = [row["task"], f"{row['rows']:.0f}", row["preset"], f"{row['value']:.4f}", f"{row['kept']:.2%}", interval]
        cells += [f"{row['minutes']:.1f}", f"{row['milliseconds_per_row']:.2f}", ratio, f"{row['n']} x {row['seeds']}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
