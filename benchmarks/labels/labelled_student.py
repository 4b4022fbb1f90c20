"""A small classifier of sentiments that has seen no label of the data: its labels come from a language model.

    python benchmarks/labels/labelled_student.py --labeller SMOLLM2 --model MINILM --data SST2 [--rows 1200] [--write 0] [--seeds 0]
        [--set stages.distill.teacher.orders=2] [--out FOLDER]

SMOLLM2 is made by `benchmarks/smollm2.py`; MINILM holds all-MiniLM-L6-v2, whose head is new; SST2 the sentence-level files of SST-2. One
recipe with one stage `distill` is run for each seed: the labeller labels `--rows` sentences of the train file (chosen by hash of their
content) and the selection rows with the prompts of `sst2-prompts.yaml`, and the student learns them. The labels of the train file are not
read; the weights kept are those that agree most with the labeller on the selection rows. With --write the labeller also writes that many
texts for each label.

Prints for each seed the accuracy of the student on dev and test (n = 2,693) with its 95 % interval, the label-free baseline (the class that
is most frequent in these rows), the paired 95 % interval of the difference (Tango's score interval), the labeller's own accuracy on the
selection rows, its agreement, the queries that were new, and the minutes of the stage. Exits with 1 if an interval does not lie above 0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from compress.pipeline import run
from compress.recipe import read
from compress.report.intervals import wilson
from foundation.artifacts.run_folder import open_run
from foundation.core.progress import ConsoleProgress
from foundation.core.resampling import paired_score
from foundation.machine.environment import fingerprint
from foundation.measure.answers import load_predictions

PROMPTS = Path(__file__).parent / "sst2-prompts.yaml"
TRAIN_ROWS = 6920
RECIPE = """
name: {name}
seed: {seed}
model: {{path: {model}, task: text-classification, head: new}}
data:
  path: {data}
  header: false
  files:
    train: sentence_level_train.tsv.gz
    test: [sentence_level_dev.tsv, sentence_level_test.tsv]
  columns: {{text: 0, label: 1}}
  max_length: 64
stages:
  - distill:
      teacher: {{path: {labeller}, prompt: {prompts}, labels: {{0: negative, 1: positive}}, orders: 2, calibration: batch}}
      fraction: {fraction:.6f}
      epochs: {epochs:g}
      learning_rate: 1.0e-4
      batch_size: 16
"""


def main() -> None:
    """Runs the recipes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labeller", type=Path, required=True, help="folder of a causal language model")
    parser.add_argument("--model", type=Path, required=True, help="folder of an encoder; its head is new")
    parser.add_argument("--data", type=Path, required=True, help="folder of the sentence-level files of SST-2")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="prompt file")
    parser.add_argument("--rows", type=int, default=1200, help="rows to label")
    parser.add_argument("--write", type=int, default=0, help="texts to write for each label")
    parser.add_argument("--epochs", type=float, default=4, help="passes of the student")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of the student's head and of the order of rows")
    parser.add_argument("--set", nargs="+", default=[], help="other keys of the recipe, as of compress run")
    parser.add_argument("--out", type=Path, default=Path("runs/labelled-student"), help="where to work")
    arguments = parser.parse_args()
    rows = [measured(seed, arguments) for seed in arguments.seeds]
    (arguments.out / "labelled_student.json").write_text(json.dumps({"environment": fingerprint(), "rows": rows}, indent=1) + "\n")
    print(table(rows))
    raise SystemExit(any(row["low"] <= 0 for row in rows))


def measured(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of a student."""
    file = arguments.out / f"recipe-{seed}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    keys = {name: str(getattr(arguments, name).resolve()) for name in ("labeller", "model", "data", "prompts")}
    fraction = min(1.0, arguments.rows / (0.95 * TRAIN_ROWS))
    keys |= {"name": f"labelled-{seed}", "seed": seed, "epochs": arguments.epochs, "fraction": fraction}
    file.write_text(RECIPE.format(**keys), encoding="utf-8")
    settings = [*arguments.set, *([f"stages.distill.teacher.write={{rows: {arguments.write}}}"] if arguments.write else [])]
    # One folder for all seeds: answers of the labeller are found there.
    finished = open_run(run(read(file, settings), arguments.out / "run", progress=ConsoleProgress()).folder)
    logits, labels = load_predictions(finished.predictions("distill"), "text-classification")
    right = logits.argmax(axis=1) == labels.array
    constant = labels.array == np.bincount(labels.array).argmax()
    n, z = len(right), NormalDist().inv_cdf(0.975)
    difference = paired_score(int((right & ~constant).sum()), int((constant & ~right).sum()), n, z)
    own = wilson(int(right.sum()), n)
    stage = finished.artifacts["distill"]
    return {
        "seed": seed,
        "n": n,
        "rows": stage.metrics["rows"],
        "accuracy": float(right.mean()),
        "own": [own.low, own.high],
        "constant": float(constant.mean()),
        "low": difference.low,
        "high": difference.high,
        "labeller": stage.metrics["labeller"],
        "minutes": stage.manifest["seconds"] / 60,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the result as a Markdown table."""
    heads = ("seed", "rows", "student", "95 %", "most frequent class", "difference, 95 %", "labeller on selection rows", "agreement")
    lines = [f"| {' | '.join(heads)} | new queries | minutes | n |", "| --- " * (len(heads) + 3) + "|"]
    for row in rows:
        labeller = row["labeller"]
        cells = [str(row["seed"]), str(row["rows"]), f"{row['accuracy']:.4f}", f"{row['own'][0]:.4f} to {row['own'][1]:.4f}"]
        cells += [f"{row['constant']:.4f}", f"{row['low']:+.4f} to {row['high']:+.4f}", f"{labeller['selection_accuracy']:.4f}"]
        cells += [f"{labeller['agreement']:.3f}", str(labeller["new_queries"]), f"{row['minutes']:.1f}", str(row["n"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
