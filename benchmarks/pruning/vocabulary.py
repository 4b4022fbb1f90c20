"""What cutting the vocabulary to the data of a task saves and changes.

    python benchmarks/pruning/vocabulary.py [--recipe NAME] [--set KEY=VALUE ...] [--rows 5000] [--out FOLDER]

Runs recipes/NAME.yaml (sst2-minilm where absent) with one stage that takes nothing but tokens away. Then asks both models in fp32 a sample
of the train rows, all of whose tokens are kept, and the whole evaluation split, some rows of which are split into smaller pieces. Prints
for each kind of row n, how many predictions differ, the largest difference of a logit and the primary metric before and after; and how
large both models are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.pipeline import run
from compress.reading.load import load_data
from compress.recipe import Recipe, read
from foundation.artifacts.run_folder import Run, open_run
from foundation.core.progress import ConsoleProgress
from foundation.labels.tasks import TASKS
from foundation.machine.environment import fingerprint
from foundation.measure.metrics import metrics
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.config import label_names
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor

ROOT = Path(__file__).resolve().parents[2]
STAGES = "stages=[{prune: {granularity: [vocabulary]}}]"
VARIANTS = ("baseline", "prune")
BATCH = 64


def main() -> None:
    """Cuts, asks both models, prints."""
    arguments = parse()
    recipe = read(ROOT / "recipes" / f"{arguments.recipe}.yaml", [*arguments.set, STAGES, "goals={int8_faster: false}"])
    finished = open_run(run(recipe, arguments.out, progress=ConsoleProgress()).folder)
    rows, weights = changes(finished, recipe, arguments.rows), sizes(finished)
    document = {"environment": fingerprint(), "rows": rows, "sizes": weights}
    (arguments.out / "vocabulary.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("| rows | n | predictions that differ | largest difference of a logit | before | after |\n" + "| --- " * 6 + "|")
    for row in rows:
        figures = (f"{row[key]:.4f}" for key in ("before", "after"))
        print(f"| {row['name']} | {row['n']} | {row['changed']} | {row['largest']:.2g} | {' | '.join(figures)} |")
    print("\n| | before | after |\n| --- | --- | --- |")
    for name, (before, after) in weights.items():
        print(f"| {name} | {before:,} | {after:,} |")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="sst2-minilm", help="name of a shipped recipe")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    parser.add_argument("--rows", type=int, default=5000, help="train rows to ask")
    parser.add_argument("--out", type=Path, default=Path("runs/vocabulary"), help="where to work")
    return parser.parse_args()


def changes(finished: Run, recipe: Recipe, num_rows: int) -> list[dict[str, Any]]:
    """Returns what differs between the two models, by kind of row."""
    task = recipe.model.task
    data = load_data(recipe.data, task, label_names(recipe.model), lambda line: None)
    folders = [finished.variants[variant].path for variant in VARIANTS]
    prepared = [Checkpoint(folder).preprocessor(task, recipe.data.max_length, recipe.target) for folder in folders]
    sample = np.random.default_rng(recipe.seed).choice(len(data.train), min(num_rows, len(data.train)), replace=False)
    train, labels = [data.train.rows[index] for index in sample], data.train.labels[sample]
    asked = [*train, *data.evaluation.rows]
    logits = [predict(load(folder), processor, asked, BATCH) for folder, processor in zip(folders, prepared, strict=True)]
    before, after = (pieces(processor, asked) for processor in prepared)
    same = np.array([old == new for old, new in zip(before, after, strict=True)])
    truth, is_train = labels.joined(data.evaluation.labels), np.arange(len(asked)) < len(train)
    kinds = {
        "train": is_train,
        "evaluation, same tokens": ~is_train & same,
        "evaluation, other pieces": ~is_train & ~same,
        "evaluation": ~is_train,
    }
    found = []
    for name, where in kinds.items():
        old, new = (answers[where] for answers in logits)
        changed, _ = TASKS[task].answer.differences(old, new)
        own = truth[np.flatnonzero(where)]
        figures = {key: metrics(task, answers, own)[TASKS[task].metric] for key, answers in (("before", old), ("after", new))}
        largest = float(np.abs(old - new).max(initial=0.0))
        found.append({"name": name, "n": int(where.sum()), "changed": int(changed.sum()), "largest": largest, **figures})
    return found


def pieces(prepared: Preprocessor, rows: Sequence[Any]) -> list[list[str]]:
    """Returns what rows are split into."""
    assert prepared.tokenizer is not None, "a text preprocessor has a tokenizer"
    return [row.tokens for row in prepared.tokenizer.encode_batch(list(rows))]


def sizes(finished: Run) -> dict[str, tuple[int, int]]:
    """Returns the entries of the vocabulary and the bytes of the weights, before and after."""
    folders = [finished.variants[variant].path for variant in VARIANTS]
    tokens = [json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"] for folder in folders]
    weights = [(folder / "model.safetensors").stat().st_size for folder in folders]
    return {"tokens of the vocabulary": (tokens[0], tokens[1]), "model.safetensors, bytes": (weights[0], weights[1])}


if __name__ == "__main__":
    main()
