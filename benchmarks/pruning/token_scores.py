"""Which tokens may leave a classifier: accuracy without training by how they are chosen, for some shares that stay behind each layer.

    python benchmarks/pruning/token_scores.py --model FOLDER --data SST2 [--rows 1500]

FOLDER is a BERT-like classifier of SST-2, SST2 holds train.tsv.gz and dev.tsv. Every sentence of dev.tsv goes through the model on its own,
without padding; behind each layer ceil(share n) of its n tokens stay, the first one always. Scores:

    first row     attention of the first token, mean over the heads (EViT)
    all rows      attention of all tokens, summed (PoWER-BERT)
    length        length of the states behind the layer
    chance        none
    fitted        `prune.tokens.significance` on sentences of train.tsv.gz of more than six words: what `prune: {tokens: ...}` takes
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from foundation.models.architecture.attention import find_attentions
from foundation.models.architecture.blocks import blocks_of, states_of
from foundation.models.architecture.dropped_tokens import most_significant, staying
from foundation.models.inputs.tokenizer import load_tokenizer
from foundation.training.train import Batch
from prune.tokens.significance import significance
from prune.tokens.tokens import shares_of

SHARES: tuple[tuple[float, ...], ...] = ((0.5,), (1.0, 0.5), (1.0, 1.0, 0.5), (0.75, 0.55, 0.4, 0.3, 0.25))
BATCH = 50
Score = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Scores `[1, L]` from states before a layer and behind it `[1, L, D]`, its attention `[1, H, L, L]`, and its number."""


def main() -> None:
    """Prints a row of accuracies for each choice of shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1500, help="sentences that `significance` is fitted on")
    given = parser.parse_args()
    tokenizer = load_tokenizer(str(given.model))
    model = AutoModelForSequenceClassification.from_pretrained(given.model, attn_implementation="eager").eval()
    with gzip.open(given.data / "train.tsv.gz", "rt") as file:
        train = [text for text, _ in read(file) if len(text.split()) > 6]
    chosen = np.random.default_rng(0).permutation(len(train))[: given.rows]
    fitted = significance(model, batches([train[row] for row in chosen], tokenizer), "text-classification", "model")
    random = torch.Generator().manual_seed(0)
    scores: dict[str, Score] = {
        "first row": lambda before, behind, attention, layer: attention[:, :, 0].mean(1),
        "all rows": lambda before, behind, attention, layer: attention.mean((1, 2)),
        "length": lambda before, behind, attention, layer: behind.norm(dim=-1),
        "chance": lambda before, behind, attention, layer: torch.rand(behind.shape[:2], generator=random),
        "fitted": lambda before, behind, attention, layer: before @ fitted[layer],
    }
    with (given.data / "dev.tsv").open() as file:
        rows = list(read(file))
    texts, labels = [text for text, _ in rows], np.array([label for _, label in rows])
    depth = len(blocks_of(model, "model"))
    print(f"n = {len(texts)}, all tokens {accuracy(model, tokenizer, texts, labels, (1.0,) * depth, scores['length']):.4f}\n")
    print("| shares behind the layers | " + " | ".join(scores) + " |\n| --- |" + " --- |" * len(scores))
    for shares in SHARES:
        whole = shares_of(shares, depth, "shares")
        found = [accuracy(model, tokenizer, texts, labels, whole, score) for score in scores.values()]
        print(f"| {', '.join(f'{share:g}' for share in whole[:-1])} | " + " | ".join(f"{value:.4f}" for value in found) + " |", flush=True)


def read(file: Any) -> Iterator[tuple[str, int]]:
    """Yields texts and labels of a file of GLUE."""
    for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
        yield row["sentence"], int(row["label"])


def batches(texts: Sequence[str], tokenizer: Any) -> Iterator[Batch]:
    """Yields rows without labels."""
    for start in range(0, len(texts), BATCH):
        features = tokenizer(list(texts[start : start + BATCH]), padding=True, truncation=True, max_length=128, return_tensors="pt")
        yield Batch(dict(features), torch.zeros(0), np.arange(0), 0, 1)


@torch.inference_mode()
def accuracy(model: Any, tokenizer: Any, texts: Sequence[str], labels: Any, shares: Sequence[float], score: Score) -> float:
    """Returns the accuracy with these shares of the tokens behind each layer."""
    blocks, seen = list(blocks_of(model, "model").values()), {}
    handles = [
        model.get_submodule(attention.module).register_forward_hook(
            lambda module, args, output, layer=layer: seen.update({layer: output[1]})
        )
        for layer, attention in find_attentions(model, "model").own.items()
    ]
    right = 0
    for text, label in zip(texts, labels, strict=True):
        row = tokenizer(text, truncation=True, max_length=128, return_tensors="pt")
        states_1LD = model.base_model.embeddings(input_ids=row.input_ids, token_type_ids=row.token_type_ids)
        for layer, block in enumerate(blocks):
            before_1LD, states_1LD = states_1LD, states_of(block(states_1LD))
            if layer < len(blocks) - 1 and shares[layer] < 1:
                count = min(staying(row.input_ids.shape[1], shares[layer]), states_1LD.shape[1])
                kept_1K = most_significant(score(before_1LD, states_1LD, seen[layer], layer), count)
                states_1LD = states_1LD[:, kept_1K[0]]
        right += int(model.classifier(model.base_model.pooler(states_1LD)).argmax()) == label
    for handle in handles:
        handle.remove()
    return right / len(texts)


if __name__ == "__main__":
    main()
