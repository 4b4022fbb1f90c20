"""Writes data with two adapters, and a recipe: single sentences of SST-2 and pairs of MRPC, for a model that was fine-tuned on SST-2.

    python benchmarks/server/parts/adapter_data.py --model MODEL --sst2 FOLDER --mrpc FOLDER --out FOLDER [--rows 900 450] [--epochs 3]
    compress run FOLDER/recipe.yaml --out RUN

FOLDER of SST-2 holds train.tsv.gz and dev.tsv, of MRPC train.tsv.gz and msr_paraphrase_test.txt.gz. Of each training file the first --rows
are taken (MRPC, SST-2), and of each test file the first --tested. A sentence is a pair with an empty second text; both tasks have two
classes, which keep the names of the model's.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

Row = dict[str, str | int]


def sentences(file: Path) -> Iterator[Row]:
    """Yields the sentences of a file of SST-2."""
    for row in _rows(file):
        yield {"text": row["sentence"], "text_pair": "", "label": int(row["label"]), "task": "sst2"}


def pairs(file: Path) -> Iterator[Row]:
    """Yields the pairs of a file of MRPC."""
    for row in _rows(file):
        yield {"text": row["#1 String"], "text_pair": row["#2 String"], "label": int(row["Quality"]), "task": "mrpc"}


def _rows(file: Path) -> Iterator[dict[str, str]]:
    opening = gzip.open if file.suffix == ".gz" else open
    with opening(file, "rt", encoding="utf-8-sig") as stream:
        yield from csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)


def recipe(model: str, data: Path, epochs: float) -> str:
    """Returns the recipe, YAML."""
    return f"""\
name: two-adapters
model: {{path: {model}, task: text-classification}}
data: {{path: {data}, columns: {{text: text, text_pair: text_pair, label: label, adapter: task}}, max_length: 128}}
target: {{engines: [openvino, onnxruntime], batch_sizes: [1, 8], sequence_lengths: [32, 64, 128]}}
stages:
  - quantize: {{}}
  - adapters: {{lora: {{rank: 8, alpha: 16}}, epochs: {epochs:g}, learning_rate: 1.0e-3}}
  - export: {{variants: all}}
  - triton_repo: {{}}
"""


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    for name in ("sst2", "mrpc", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs=2, default=(900, 450))
    parser.add_argument("--tested", type=int, default=500)
    parser.add_argument("--epochs", type=float, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train = [(pairs(options.mrpc / "train.tsv.gz"), options.rows[0]), (sentences(options.sst2 / "train.tsv.gz"), options.rows[1])]
    test = [(pairs(options.mrpc / "msr_paraphrase_test.txt.gz"), options.tested), (sentences(options.sst2 / "dev.tsv"), options.tested)]
    for split, parts in (("train", train), ("test", test)):
        rows = [row for part, count in parts for row in itertools.islice(part, count)]
        (options.out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (options.out / "recipe.yaml").write_text(recipe(options.model, options.out.resolve(), options.epochs), encoding="utf-8")


if __name__ == "__main__":
    main()
