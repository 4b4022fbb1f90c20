"""Losses that compare the rows of several processes; run by `test_compared.py`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foundation.core.runs import equal
from foundation.labels import text_groups
from foundation.machine.parallel import ALONE, Team, joined
from foundation.machine.sharding import full, shard
from foundation.training.distillation.capture import Captured
from foundation.training.grad_cache import GradCache
from foundation.training.losses.distillation.loss import LossInputs, Setting, Shape
from foundation.training.losses.distillation.relational import Relational
from foundation.training.processes.dealing import Dealing
from foundation.training.processes.engine import Engine
from foundation.training.processes.gathered import NO_ROW
from foundation.training.supervised import supervised
from foundation.training.train import Batch

WIDTH, AT_ONCE = 5, 4
COUNTS = (1, 2, 3, 4, 7)
"""Rows of a batch, or pairs of rows: few and many, none of which three processes divide evenly but the third."""
Found = dict[str, Tensor]


class Body(nn.Module):
    """Vectors of rows `[b, 5]`, as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 8), nn.Linear(8, 6)])

    def forward(self, x_bI: Tensor) -> Any:
        """Returns an object with `logits`."""
        for block in self.blocks:
            x_bI = torch.tanh(block(x_bI))
        return type("Output", (), {"logits": x_bI})


def drawn(rows: int) -> tuple[Body, Tensor, Tensor]:
    """The same model, rows `[rows, 5]` and vectors of a teacher `[rows, 3]` in every process."""
    torch.manual_seed(rows)
    return Body(), torch.randn(rows, WIDTH), torch.randn(rows, 3)


def related(rows: int, team: Team) -> Found:
    """The sum of the losses of `relational` over all processes, and the gradients of the model."""
    body, x_nI, teacher_nE = drawn(rows)
    own = np.arange(rows)[team.rank :: team.size]
    counts = len(own) > 0
    own = own if counts else np.arange(1)
    shape = Shape("bert", 1, WIDTH, 1, 2)
    batch = Batch({}, torch.zeros(len(own)), own, 0, 1, counts)
    ours, theirs = (
        Captured(torch.empty(0), torch.ones(len(own), 1, dtype=torch.bool), last=vectors[:, None])
        for vectors in (body(x_nI[own]).logits, teacher_nE[own])
    )
    setting = Setting(shape, shape, "text-classification", "losses.0", team=team)
    terms = Relational().parts(LossInputs(setting, batch, 1.0, ours, theirs, None), None)  # type: ignore[arg-type]
    total = torch.stack([term.sum() for term in terms.values()])
    (total.sum() * counts).backward()  # type: ignore[no-untyped-call]
    found = {"terms": total.detach() * counts, **{name: grad(weight) for name, weight in body.named_parameters()}}
    return {name: added(value, team) for name, value in found.items()}


def cached(pairs: int, team: Team) -> Found:
    """The sum of the losses of `ranking` over all processes, and the gradients that the engine leaves in each, whole."""
    body, x_nI, _ = drawn(2 * pairs)
    if team.shards:
        shard(body, body.blocks)
    labels = text_groups.labels_of([(f"a {number % 3}", f"b {number}") for number in range(pairs)])
    dealing, indices = Dealing(equal(2 * pairs, 2), 2 * pairs, AT_ONCE, team), np.arange(2 * pairs)
    batches = []
    for part in dealing.parts(indices):
        rows, labels_n4 = (part, labels.array[part]) if len(part) else (indices[:2], np.full((2, 4), NO_ROW, np.float32))
        batches.append(Batch({"x_bI": x_nI[rows]}, torch.from_numpy(labels_n4), rows, 0, 1, len(part) > 0))
    cache = GradCache(supervised("sentence-embedding", team=team, labels=labels), body, "tune")  # type: ignore[arg-type]
    engine = Engine(cache.answers, body, nn.ModuleList([body]), team)
    sums = cache.backward(engine, batches, 2 * pairs, nullcontext)
    return {
        "terms": added(torch.tensor(list(sums.values())), team),
        **{name: full(grad(weight)).clone() for name, weight in body.named_parameters()},
    }


def grad(weight: Tensor) -> Tensor:
    """The gradient of a weight, which it has in every process."""
    assert weight.grad is not None
    return weight.grad


def added(value: Tensor, team: Team) -> Tensor:
    """The sum over processes."""
    if team.size > 1:
        torch.distributed.all_reduce(value)
    return value


def results(team: Team) -> dict[str, Found]:
    """Everything, by name."""
    plans = {"ddp": team} | ({"fsdp2": replace(team, strategy="fsdp2")} if team.size > 1 else {})
    found = {f"relational of {count}": related(count, team) for count in COUNTS}
    return found | {f"{plan}: pairs {count}": cached(count, of) for plan, of in plans.items() for count in COUNTS}


def whole() -> dict[str, Found]:
    """What one process comes to, with the batch in one piece."""
    found = {f"relational of {count}": related(count, ALONE) for count in COUNTS}
    for count in COUNTS:
        body, x_nI, _ = drawn(2 * count)
        labels = text_groups.labels_of([(f"a {number % 3}", f"b {number}") for number in range(count)])
        objective = supervised("sentence-embedding", labels=labels)
        loss_n = objective(body, Batch({"x_bI": x_nI}, torch.from_numpy(labels.array), np.arange(2 * count), 0, 1))["ranking"]
        loss_n.mean().backward()  # type: ignore[no-untyped-call]
        entry = {"terms": loss_n.detach().sum()[None], **{name: grad(weight) for name, weight in body.named_parameters()}}
        found |= {f"{plan}: pairs {count}": entry for plan in ("ddp", "fsdp2")}
    return found


def together(folder: Path) -> None:
    """What several processes do; writes `found.pt`."""
    with joined() as first:
        every = results(first)
        if first.is_first:
            torch.save(every, folder / "found.pt")
