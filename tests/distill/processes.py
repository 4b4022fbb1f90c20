"""Trainings that one process and two come to the same in; run by `test_processes.py`, alone and as `processes.py FOLDER` under torchrun."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.artifacts.artifact import Artifact
from compress.core.target import Target
from compress.data.splits import Data
from compress.machine.parallel import ALONE, Strategy, Team, joined, leave
from compress.stage.context import Context
from compress.stage.stage import Stage
from compress.training import train
from compress.training.finetune import Finetune
from distill import teacher
from distill.distill import Distill
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize
from tests.distill.conftest import LABELS, sentences
from tests.told import Told

ROWS, BATCH = 46, 5
"""Ten steps an epoch; the last of them has a single row, fewer than processes."""
STEADY = {"learning_rate": 2e-3, "batch_size": BATCH, "epochs": 5}
CASES: Mapping[str, tuple[str, Stage]] = {
    "finetune": ("still", Finetune(**STEADY, weight_decay=0.1)),
    "answers": ("still", Distill(**{**STEADY, "epochs": 1}, student={"layers": 2}, loss="soft_target")),  # type: ignore[arg-type]
    "inside": (
        "still",
        Distill(
            **STEADY,  # type: ignore[arg-type]
            micro_batch_size=2,
            student={"layers": 2, "hidden": 8, "heads": 2},  # type: ignore[arg-type]
            losses=[{"name": "hidden"}, {"name": "minilmv2"}, {"name": "soft_target", "steps": [0.5, 1.0]}],  # type: ignore[arg-type]
        ),
    ),
    "int8": ("still", Quantize(mode="qat", qat={**STEADY, "learning_rate": 1e-5, "soft_weight": 0.5, "keep": "last"})),  # type: ignore[arg-type]
    "pruned": ("still", Prune(sparsity=0.4, recover=STEADY)),  # type: ignore[arg-type]
    "pruned in steps": (
        "still",
        Prune(sparsity=0.4, schedule="cubic", iterations=2, least_squares=False, recover={**STEADY, "hidden_weight": 0.5}),  # type: ignore[arg-type]
    ),
    "zeros": ("still", Sparsify(method="magnitude", sparsity=0.5, recover=STEADY)),  # type: ignore[arg-type]
}
WHOLE = ("int8", "pruned", "pruned in steps", "zeros")
"""Those that hold the whole model in every process: with fsdp2 the first one trains alone."""
KILLED: Mapping[str, Stage] = {
    "distilled": Distill(student={"layers": 2}, loss="soft_target", epochs=1, learning_rate=2e-3, batch_size=BATCH),  # type: ignore[arg-type]
    "int8": Quantize(mode="qat", qat={**STEADY, "epochs": 1, "dropout": True, "keep": "last"}),  # type: ignore[arg-type]
}
"""Stages on a model with dropout, of ten steps each."""


class Killed(Exception):
    """Stands for a kill."""


def context_of(folder: Path, kind: str, scratch: Path, team: Team) -> Context:
    """The context of a stage on one of the two checkpoints in `folder`: one drops out, one does not."""
    splits = [sentences(num_rows, seed) for seed, num_rows in enumerate((ROWS, 20, 20))]
    data = Data(splits[0], splits[1], splits[2], LABELS[2])
    baseline = Artifact(folder / kind, {"id": "baseline", "stage": "model", "digest": "0" * 64})
    mine = scratch if team.is_first else scratch.with_name(f"{scratch.name}.{team.rank}")
    target = Target(sequence_lengths=(8,))
    return Context("text-classification", data, 16, target, 0, Told(), mine, {"baseline": baseline}, teachers=(baseline,), team=team)


def run(folder: Path, kind: str, stage: Stage, out: Path, scratch: Path, team: Team) -> dict[str, Any]:
    """Runs one stage in float32; returns its figures, the norm of the gradient of every step as `norms`, and `rows`: how many it took."""
    context = context_of(folder, kind, scratch, team)
    out.mkdir(parents=True, exist_ok=True)
    train.autocast_dtype = teacher.autocast_dtype = lambda device: torch.float32
    norms, clip, backward, rows = [], train._Loop._clip, train._Loop._backward, [0]

    def noted(self: Any) -> float:
        norms.append(clip(self))
        return norms[-1]

    def counted(self: Any, indices: Any, counts: bool, total: int) -> Any:
        rows[0] += counts * len(indices)
        return backward(self, indices, counts, total)

    train._Loop._clip, train._Loop._backward = noted, counted  # type: ignore[method-assign]
    try:
        return {**trained(stage.run(context.baseline, context, out)), "norms": norms, "rows": rows[0]}
    finally:
        train._Loop._clip, train._Loop._backward = clip, backward  # type: ignore[method-assign]


def trained(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a training, wherever a stage puts them: those of several iterations one after another."""
    if isinstance(figures.get("steps"), list):
        parts = figures["steps"]
        return {
            "losses": [entry for part in parts for entry in part["losses"]],
            "selection": [entry for part in parts for entry in part["selection"]],
            "steps": sum(part["steps"] for part in parts),
        }
    found = figures.get("qat") or figures.get("recovery") or figures
    if not found:  # the first process alone has figures
        return {}
    values = found["selection"]
    return {**found, "selection": values["values"] if isinstance(values, dict) else values}


@contextlib.contextmanager
def dying(step: int) -> Iterator[None]:
    """Every process is killed after a step; every step before has its checkpoint."""
    original, seconds = train._Loop._look, train.TrainConfig.model_fields["checkpoint_seconds"].default

    def look(self: Any, *arguments: Any) -> None:
        if self.history.steps == step + 1:
            raise Killed
        original(self, *arguments)

    train._Loop._look = look  # type: ignore[method-assign]
    train.TrainConfig.model_fields["checkpoint_seconds"].default = 0.0
    train.TrainConfig.model_rebuild(force=True)
    try:
        yield
    finally:
        train._Loop._look = original  # type: ignore[method-assign]
        train.TrainConfig.model_fields["checkpoint_seconds"].default = seconds
        train.TrainConfig.model_rebuild(force=True)


def together(folder: Path) -> None:
    """What two processes do; writes one folder for each case, and `results.json`."""
    strategies: tuple[Strategy, ...] = ("ddp", "fsdp2")
    results: dict[str, Any] = {}
    with joined() as first:
        for strategy in strategies:
            team = replace(first, strategy=strategy)

            def out(name: str, strategy: str = strategy) -> Path:
                return folder / strategy / (name if first.is_first else f"{name}.{first.rank}")

            for name, (kind, stage) in CASES.items():
                if stage.team(team) is ALONE:
                    continue
                results[f"{strategy} {name}"] = run(folder, kind, stage, out(name), folder / strategy / f"{name}-scratch", team)
            for name, stage in KILLED.items():
                if stage.team(team) is ALONE:
                    continue
                scratch = folder / strategy / f"killed-{name}-scratch"
                run(folder, "dropping", stage, out(f"whole-{name}"), folder / strategy / f"whole-{name}-scratch", team)
                with dying(4), contextlib.suppress(Killed):
                    run(folder, "dropping", stage, out(f"killed-{name}"), scratch, team)
                torch.manual_seed(99 + first.rank)  # new processes have other generators
                results[f"{strategy} resumed {name}"] = run(folder, "dropping", stage, out(f"resumed-{name}"), scratch, team)
        drawn = first.gather(torch.tensor([float(first.rank)]))
        results["ranks"] = [float(value) for value in drawn]
        if first.is_first:
            (folder / "results.json").write_text(json.dumps(results))


def alone(folder: Path) -> dict[str, Any]:
    """What one process does."""
    return {
        name: run(folder, kind, stage, folder / "alone" / name, folder / "alone" / f"{name}-scratch", ALONE)
        for name, (kind, stage) in CASES.items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    together(Path(sys.argv[1]))
    leave(0)
