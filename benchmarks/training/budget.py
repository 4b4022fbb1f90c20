"""How well `compress plan --budget` foretells trainings that it has not seen, on SST-2 and MRPC.

    python benchmarks/training/budget.py --model MINILM --data FOLDER [--tasks sst2 mrpc] [--out FOLDER]

MINILM is MiniLM-L6-H384 fine-tuned on SST-2; FOLDER holds sst2 and mrpc as their authors distribute them. On SST-2 a student of 3 layers
is studied, which learns from MINILM; on MRPC, whose rows are too few for such a student, the fine-tuning of all layers with a new head.
The short trainings of the budget have at most about 4,000 and 1,800 rows; selection rows are GLUE's development sets. Then the settings of
`HELD_BACK` are trained, which the law has not seen: between the short ones, and beyond them in rows, epochs and layers. Everything resumes,
and finished trainings are found.

Prints the plan, and for each held-back setting the metric on the selection rows, the prediction, and its 90 % interval; then the mean
absolute error beside the evaluation noise (the standard error of the metric over the selection rows), and how many intervals hold.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from compress.budget.budget import Budget, study
from compress.budget.page import lines, write
from compress.budget.setting import Setting
from compress.budget.trainings import Answers, metric_losses, metric_of, trained
from compress.recipe import read
from foundation.core.progress import ConsoleProgress
from foundation.machine.environment import fingerprint

RECIPES = {
    "sst2": """
name: budget-sst2
model: {{path: {model}, task: text-classification}}
data:
  path: {data}/sst2
  columns: {{text: sentence, label: label}}
  files:
    train: train.tsv.gz
    validation: dev.tsv
    test: [{{file: sentence_level_test.tsv, header: false, columns: {{text: 0, label: 1}}}}]
  max_length: 64
stages:
  - distill:
      student: {{layers: 3}}
      loss: soft_target
      epochs: 4
      fraction: {fraction}
      learning_rate: 3.0e-4
      batch_size: 8
      evaluate_every: 100000
""",
    "mrpc": """
name: budget-mrpc
model: {{path: {model}, task: text-classification, head: new}}
data:
  path: {data}/mrpc
  columns: {{text: "#1 String", text_pair: "#2 String", label: Quality}}
  files:
    train: [train.tsv.gz, {{file: train_missing_row.tsv, header: false, columns: {{label: 0, text: 3, text_pair: 4}}}}]
    validation: dev.tsv
    test: msr_paraphrase_test.txt.gz
  max_length: 128
stages:
  - finetune: {{epochs: 4, fraction: {fraction}, learning_rate: 1.0e-4, batch_size: 8, evaluate_every: 100000}}
""",
}
FRACTIONS = {"sst2": 0.12, "mrpc": 1.0}
"""Share of the rows that the recipe has: half of it is what the largest short training has."""
HELD_BACK: dict[str, list[tuple[float, ...]]] = {
    "sst2": [(3000, 3, 3), (1000, 2, 3), (4000, 4, 3), (8000, 1, 3), (8000, 2, 3), (2000, 2, 2), (2000, 1, 6), (4000, 1, 4)],
    "mrpc": [(1400, 3), (450, 3), (1800, 4), (3600, 1), (3600, 2), (900, 3)],
}
"""Rows, epochs and, of a student, layers."""
ALLOWED = 0.3
"""Points that the mean error may exceed the noise by."""


def main() -> None:
    """Trains, predicts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of MiniLM-L6-H384 fine-tuned on SST-2")
    parser.add_argument("--data", type=Path, required=True, help="folder of sst2 and mrpc")
    parser.add_argument("--tasks", nargs="+", choices=RECIPES, default=list(RECIPES), help="what to train on")
    parser.add_argument("--held-back", nargs="+", default=[], metavar="ROWS,EPOCHS[,LAYERS]", help="further settings to foretell")
    parser.add_argument("--out", type=Path, default=Path("runs/budget"), help="where to work")
    arguments = parser.parse_args()
    documents = {task: checked(task, arguments) for task in arguments.tasks}
    document = {"environment": fingerprint(), "tasks": documents}
    (arguments.out / "budget.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(any(not one["within"] for one in documents.values()))


def checked(task: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Makes the plan of a task, trains what was held back, prints and returns how far the plan was off."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"{task}.yaml"
    given = {"model": arguments.model.resolve(), "data": arguments.data.resolve(), "fraction": FRACTIONS[task]}
    file.write_text(RECIPES[task].format(**given), encoding="utf-8")
    budget = study(read(file), arguments.out / task, ConsoleProgress())
    write(budget)
    print("\n".join(lines(budget)), flush=True)
    further = [tuple(map(float, given.split(","))) for given in arguments.held_back]
    settings = [Setting(int(rows), epochs, *map(int, layers)) for rows, epochs, *layers in (*HELD_BACK[task], *further)]
    studied, folder = budget.studied, budget.folder
    answers = [trained(studied, setting, folder, ConsoleProgress("silent")) for setting in settings]
    return foretold(budget, settings, answers)


def foretold(budget: Budget, settings: list[Setting], answers: list[Answers]) -> dict[str, Any]:
    """Prints and returns what was foretold, and what came."""
    came = metric_of(budget.judged, metric_losses(budget.judged, answers).loss)
    values, intervals = budget.predict(settings)
    rows = len(answers[0].labels)
    noise = float(np.mean(np.sqrt(came * (1 - came) / rows)))
    error, holds = float(np.mean(np.abs(values - came))), (intervals[:, 0] <= came) & (came <= intervals[:, 1])
    print("\n| rows | epochs | layers | came | foretold | 90 % | error, points |\n|" + " --- |" * 7)
    for setting, own, value, (low, high) in zip(settings, came, values, intervals, strict=True):
        cells = [
            f"{setting.rows:,}",
            f"{setting.epochs:g}",
            "all" if setting.layers is None else str(setting.layers),
            f"{own:.4f}",
            f"{value:.4f}",
            f"{low:.4f} to {high:.4f}",
        ]
        print(f"| {' | '.join(cells)} | {100 * (value - own):+.1f} |")
    limit = 100 * noise + ALLOWED
    print(f"\nmean absolute error {100 * error:.2f} points, allowed {limit:.2f} (noise of {rows:,} rows {100 * noise:.2f} + {ALLOWED})")
    print(f"90 % intervals that hold: {int(holds.sum())} of {len(holds)}\n", flush=True)
    within = bool(100 * error <= limit)
    return {"error": error, "noise": noise, "holds": int(holds.sum()), "of": len(holds), "within": within, "rows": rows}


if __name__ == "__main__":
    main()
