"""Bytes that processes send in a step in which they share each layer, measured and by formula, for meshes of several shapes.

    python benchmarks/training/tensor_parallel.py [--processes 4 8] [--hidden 64] [--tokens 16] [--rows 8]

A small BERT takes a step in processes on this machine (gloo). Every collective is recorded with its sizes (torch's flight recorder), and
counted as a ring sends it; a ring is the least that is possible. Models of two depths are measured: the difference is what the blocks send,
without embeddings and head. The formulas, also of shapes that are not implemented here, are in `compress/devices/traffic.py`. gloo has no
scatter that sums: torch sums whole tensors there, which sends twice as much. "gloo" is the formula with that, and without norms and biases.
Prints a Markdown table: KiB that each process sends for a block in a step, in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["TORCH_FR_BUFFER_SIZE"] = "100000"

import numpy as np
import torch
from torch import Tensor, nn

from compress.devices import traffic
from foundation.core.target import Parallel
from foundation.machine.parallel import joined
from foundation.training.processes.division import divided
from foundation.training.processes.engine import Engine
from tests.ranks import in_ranks

DEPTHS = (2, 4)
VOCABULARY = 64


def model_of(depth: int, hidden: int, heads: int, tokens: int) -> Any:
    """Returns a BERT without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        max_position_embeddings=tokens,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config).train()


def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Returns the loss of every row."""
    ids, labels = batch
    return {"loss": nn.functional.cross_entropy(model(input_ids=ids).logits, labels, reduction="none")}


def recorded() -> list[dict[str, Any]]:
    """Returns the collectives so far."""
    from torch._C import _distributed_c10d as recorder

    read: Any = recorder
    entries: list[dict[str, Any]] = json.loads(read._dump_fr_trace_json()).get("entries", [])
    return entries


def sent(entry: dict[str, Any], groups: dict[str, int]) -> float:
    """Returns the bytes that this process sends in a collective, as a ring sends it.

    Args:
        entry: The collective.
        groups: Size of each process group.
    """
    kind = entry["profiling_name"].removeprefix("gloo:")
    count = groups[entry["process_group"][0]]
    width = {"Float": 4, "Double": 8, "Long": 8, "Byte": 1}[entry["input_dtypes"][0]]
    given = width * sum(math.prod(size) for size in entry["input_sizes"])
    if "all_reduce" in kind or "allreduce" in kind:
        return 2 * given * (count - 1) / count
    if "reduce_scatter" in kind:
        return given * (count - 1) / count
    if "gather" in kind:
        return float(given * (count - 1))
    raise ValueError(f"a collective that is not counted: {kind}")


def step(folder: Path, depth: int, given: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Takes a step, and writes the bytes that this process sends in it."""
    with joined() as first:
        parallel = Parallel(**settings)
        team, model = parallel.of(first), model_of(depth, given.hidden, given.heads, given.tokens)
        divided(model, team, parallel, "finetune")
        draw = torch.Generator().manual_seed(1)
        ids, labels = torch.randint(0, VOCABULARY, (given.rows, given.tokens), generator=draw), torch.zeros(given.rows, dtype=torch.long)
        own = torch.from_numpy(team.share(np.arange(given.rows)))
        engine = Engine(objective, model, nn.ModuleList([model]), team, parallel)
        for _ in range(2):  # the second step, after what is done once
            model.zero_grad()
            before = len(recorded())
            with engine.micro_batch(last=True):
                terms = engine((ids[own], labels[own]))
                (terms["loss"].sum() / given.rows).backward()
        entries = recorded()[before:]
        known: Any = torch.distributed.distributed_c10d._world  # the recorder of gloo has no sizes of groups
        groups = {name: group.size() for group, name in known.pg_names.items()}
        (folder / f"{first.rank}.json").write_text(json.dumps(sum(sent(entry, groups) for entry in entries)))


def measured(count: int, given: argparse.Namespace, settings: dict[str, Any]) -> float:
    """Returns the bytes that the busiest process sends for a block."""
    totals = []
    for depth in DEPTHS:
        with tempfile.TemporaryDirectory() as folder:
            in_ranks(count, step, Path(folder), depth, given, settings)
            totals.append([json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)])
    return float(max(more - less for less, more in zip(*totals, strict=True)) / (DEPTHS[1] - DEPTHS[0]))


def main() -> None:
    """Prints a row for every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    given = parser.parse_args()
    parts = traffic.parts_of(model_of(1, given.hidden, given.heads, given.tokens), "model")
    tokens = given.rows * given.tokens
    print("| processes | shape | setting | measured | gloo | formula |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    for count in given.processes:
        for _, name, sends in traffic.shapes(count):
            settings = _settings(name, count)
            cells = ["not implemented", "", ""]
            if settings is not None:
                summed = _summed(parts, tokens, settings)
                cells = [f"`{json.dumps(settings)}`", f"{measured(count, given, settings) / 1024:.2f}", f"{summed / 1024:.2f}"]
            print(f"| {count} | {name} | {' | '.join(cells)} | {4 * sends(parts, tokens) / 1024:.2f} |", flush=True)


def _summed(parts: traffic.Parts, tokens: int, settings: dict[str, Any]) -> float:
    """Returns the bytes that gloo sends for a block, by formula: it sums where others scatter."""
    if "mesh" in settings:
        return 4 * traffic.grid(parts, tokens, *settings["mesh"], 2.0)
    if "sequence" in settings:
        return 4 * traffic.one_d_sequence(parts, tokens, settings["tensor"], 2.0)
    return 4 * traffic.one_d(parts, tokens, settings["tensor"])


def _settings(name: str, count: int) -> dict[str, Any] | None:
    """Returns the section `parallel` of a shape; None where there is none."""
    if name.startswith("1-D"):
        return {"tensor": count, **({"sequence": True} if name.endswith("sequence") else {})}
    if name.startswith("grid"):
        rows, _, columns = name.removeprefix("grid of ").partition(" x ")
        return {"mesh": [int(rows), int(columns)]}
    return None


if __name__ == "__main__":
    main()
