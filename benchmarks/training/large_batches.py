"""Large batches with LARS and LAMB: batches of 1,024 rows against batches of 32 on SST-2, with the same rows and epochs.

    python benchmarks/training/large_batches.py --model MINILM --data SST2 [--rows 20000] [--epochs 2] [--out FOLDER]

MINILM is a MiniLM-L6, whose head is new; SST2 holds GLUE's files and sentence_level_test.tsv. For each optimizer the learning rate and the
warm-up of 32 rows are turned into those of 1,024 by the rule of its paper, with k = 1,024 / 32:

    adamw  at 32 alone: the usual training
    lamb   learning rate times sqrt(k), warm-up share times k (You et al. 2020)
    lars   learning rate times k, and a longer warm-up: its share times k too (You et al. 2017)

A warm-up is at most half of the steps. Learning rates at 32 are chosen by `--lamb` and `--lars`. Prints the accuracy of each on n = 2,693
evaluation rows, and the paired 95 % interval of the difference to adamw at 32, and to the same optimizer at 32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from variants import SST2, SST2_ROWS, Trained, table, trained

SMALL, LARGE, MICRO = 32, 1024, 64
MOST_WARMUP, WARMUP = 0.5, 0.01
"""Largest share of the steps that the learning rate rises over, and the share at the small batch."""


def settings_of(optimizer: str, batch: int, rate: float) -> list[str]:
    """Returns the settings of a training, with the rate and the warm-up that the rule of its optimizer gives for the batch.

    Args:
        optimizer: Its name.
        batch: Rows of a step.
        rate: Learning rate at `SMALL` rows.
    """
    times = batch / SMALL
    scaled = rate * (times**0.5 if optimizer == "lamb" else times)
    found = {
        "optimizer": f"{{name: {optimizer}}}",
        "batch_size": batch,
        "micro_batch_size": min(batch, MICRO),
        "learning_rate": f"{scaled:.6g}",
        "warmup": min(MOST_WARMUP, WARMUP * times),
    }
    return [f"stages.finetune.{name}={value}" for name, value in found.items()]


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a MiniLM-L6; its head is new")
    parser.add_argument("--data", type=Path, required=True, help="folder of SST-2")
    parser.add_argument("--rows", type=int, default=20_000, help="train rows")
    parser.add_argument("--epochs", type=float, default=2, help="passes")
    parser.add_argument("--adamw", type=float, default=3e-5, help="learning rate of adamw")
    parser.add_argument("--lamb", type=float, default=5e-4, help="learning rate of lamb at 32 rows")
    parser.add_argument("--lars", type=float, default=3e-4, help="learning rate of lars at 32 rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of head, order and dropout")
    parser.add_argument("--out", type=Path, default=Path("runs/large-batches"), help="where to work")
    arguments = parser.parse_args()
    keys = {"model": arguments.model.resolve(), "data": arguments.data.resolve(), "epochs": arguments.epochs, "seed": arguments.seed}
    text = SST2.format(name="batches", fraction=min(1.0, arguments.rows / SST2_ROWS), **keys)
    found: list[Trained] = []
    for optimizer, batches in (("adamw", (SMALL,)), ("lamb", (SMALL, LARGE)), ("lars", (SMALL, LARGE))):
        for batch in batches:
            settings = settings_of(optimizer, batch, getattr(arguments, optimizer))
            found.append(trained(f"{optimizer}-{batch}", text, settings, arguments.out))
    print(table(found, f"adamw-{SMALL}", f"lamb-{SMALL}", f"lars-{SMALL}"))


if __name__ == "__main__":
    main()
