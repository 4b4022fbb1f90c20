"""A mixture trained with its experts spread over processes, beside one process: losses, bytes sent, weights held, choices dropped.

    python benchmarks/training/expert_parallel.py FILE [--processes 2 4] [--capacity 1.0 1.25 2.0] [--steps 60]

FILE is a text; its bytes are the tokens. A Mixtral of 4 layers with 8 experts each (two for a token) takes steps on the same rows in one
process and in several on this machine (gloo), with AdamW. Where experts have a capacity, choices beyond it are dropped. Prints a Markdown
table: the loss of step 20 and the mean loss of the last ten steps (rounding sends tokens to other experts in time, so that trainings part),
MiB that the busiest process sends to others by all-to-all in a step, the same by the formula
4 layers S D (P - 1) / P numbers for an even router and no capacity, the share of the weights that a process holds, and the share of the
choices that were dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor, nn

from foundation.core.target import Parallel
from foundation.machine.environment import fingerprint
from foundation.machine.parallel import joined
from foundation.training.processes.division import divided
from foundation.training.processes.engine import Engine
from tests.ranks import in_ranks

LAYERS, EXPERTS, TOP, HIDDEN, LENGTH, EARLY, LAST = 4, 8, 2, 64, 64, 20, 10


def model() -> Any:
    """Returns the mixture."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP,
        max_position_embeddings=LENGTH,
        attn_implementation="eager",
    )
    return MixtralForCausalLM(config).train()


def objective(mixture: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Returns the loss of every row."""
    logits = mixture(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return {"loss": losses.view(len(ids), -1).mean(dim=1)}


def trained(folder: Path, given: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Trains, in every process; each writes its figures."""
    import torch.distributed as dist

    sent, exchange = [0], getattr(dist, "all_to_all_single", None)

    def counted(into: Tensor, rows: Tensor, received: list[int], parts: list[int], group: Any = None) -> None:
        away = sum(size for rank, size in enumerate(parts) if rank != dist.get_rank(group))
        sent[0] += away * (rows.numel() // max(1, len(rows)))
        exchange(into, rows, received, parts, group=group)  # type: ignore[misc]

    text = np.frombuffer(given.file.read_bytes(), np.uint8)
    rows = torch.from_numpy(text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int64))
    with joined() as first:
        parallel = Parallel(**settings)
        team, mixture = parallel.of(first), model()
        division = divided(mixture, team, parallel, "finetune")
        engine = Engine(objective, mixture, nn.ModuleList([mixture]), team, parallel)
        optimizer = torch.optim.AdamW(mixture.parameters(), lr=3e-3)
        losses: list[float] = []
        dist.all_to_all_single = counted
        for step in range(given.steps):
            picked = np.random.default_rng(step).choice(len(rows), given.rows, replace=False)
            with engine.micro_batch(last=True):
                terms = engine(rows[torch.from_numpy(team.share(picked))])["loss"]
                (terms.sum() / given.rows).backward()
            division.sum_gradients()
            optimizer.step()
            optimizer.zero_grad()
            losses += [total / given.rows for total in team.total([float(terms.sum().detach())])]
        spread = division.spread
        chosen, dropped = team.total([spread.chosen, spread.dropped] if spread else [1, 0])
        held = sum((weight.to_local() if hasattr(weight, "to_local") else weight).numel() for weight in mixture.parameters())
        figures = {
            "early": losses[EARLY - 1],
            "loss": float(np.mean(losses[-LAST:])),
            "sent": sent[0] / given.steps,
            "held": held,
            "dropped": dropped / chosen,
        }
        (folder / f"{first.rank}.json").write_text(json.dumps(figures))


def figures_of(count: int, given: argparse.Namespace, settings: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of a training in some processes: the busiest one's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(count, trained, Path(folder), given, settings)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]
    return {**found[0], "sent": max(each["sent"] for each in found)}


def main() -> None:
    """Trains in every way, and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a text")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--capacity", type=float, nargs="*", default=[1.0, 1.25, 2.0], help="capacity factors, with the first number")
    parser.add_argument("--steps", type=int, default=60, help="steps of a training")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step, over all processes")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cases: list[tuple[int, dict[str, Any]]] = [(1, {})]
    cases += [(count, {"experts": count, "strategy": strategy}) for count in given.processes for strategy in ("ddp", "fsdp2")]
    cases += [(given.processes[-1], {"experts": given.processes[0]})]
    cases += [(given.processes[0], {"experts": given.processes[0], "expert_capacity": factor}) for factor in given.capacity]
    whole = sum(weight.numel() for weight in model().parameters())
    print("| processes | parallel | loss, step 20 | last 10 steps | MiB sent | by formula | weights held | dropped |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for count, settings in cases:
        found = figures_of(count, given, settings)
        spread = settings.get("experts", 1)
        numbers = 4 * LAYERS * (given.rows * LENGTH * TOP / count) * HIDDEN * (spread - 1) / spread
        formula = f"{4 * numbers / 2**20:.2f}" if spread > 1 else ""
        sent = f"{found['sent'] / 2**20:.2f}" if spread > 1 else ""
        print(
            f"| {count} | `{json.dumps(settings)}` | {found['early']:.5f} | {found['loss']:.4f} | {sent} | {formula} "
            f"| {found['held'] / whole:.2f} | {found['dropped']:.1%} |",
            flush=True,
        )
    print(json.dumps(fingerprint(), default=str))


if __name__ == "__main__":
    main()
