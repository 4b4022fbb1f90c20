"""Gradients that two processes sum through the engine, and what they should be; run by `test_engine.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.machine.parallel import Team, joined
from foundation.machine.sharding import full, shard
from foundation.training.choices import Optimizer
from foundation.training.optimizers import optimizer_of
from foundation.training.processes import engine as module
from foundation.training.processes.engine import Engine

ROWS, PARTS = 8, 2
"""Rows of a step; micro-batches of each process."""


class Body(nn.Module):
    """Two blocks, a layer that no loss reads, a frozen layer, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.unread, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x_bI: Tensor) -> Tensor:
        """Returns `[b, 6]`."""
        for block in self.blocks:
            x_bI = torch.tanh(block(x_bI))
        result: Tensor = self.scalar * self.frozen(x_bI)
        return result


class Twice(nn.Module):
    """An objective that runs the body twice, has a projection of its own, and leaves it out for rows whose first value is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.idle = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, body: nn.Module, x_bI: Tensor) -> Mapping[str, Tensor]:
        """Returns two terms, or one."""
        first_bI, second_bI = body(x_bI), body(0.5 * x_bI)
        terms = {"apart": (first_bI - second_bI).square().sum(dim=1)}
        return {**terms, "projected": self.projection(first_bI).sum(dim=1)} if bool(x_bI[0, 0] > 0) else terms


def setting() -> tuple[Body, Twice, Tensor]:
    """The same model, objective and rows `[8, 6]` in every process; only rows 0 to 3, the first micro-batches, need the projection."""
    torch.manual_seed(0)
    body, twice, x_bI = Body(), Twice(), torch.randn(ROWS, 6)
    x_bI[:, 0] = x_bI[:, 0].abs() * torch.tensor([1, 1, 1, 1, -1, -1, -1, -1])
    return body, twice, x_bI


def gradients(team: Team) -> dict[str, Tensor]:
    """The gradients of a step of all processes in micro-batches, whole; parameters without a gradient are left out.

    Also checks that only the last micro-batch communicates, once per bucket, and that the hooks run inside backward.
    """
    body, twice, x_bI = setting()
    if team.shards:
        shard(body, body.blocks)
    trained = nn.ModuleList([body, twice])
    engine = Engine(twice, body, trained, team)
    during: list[int] = []
    for part in range(PARTS):
        rows = x_bI[part * ROWS // PARTS : (part + 1) * ROWS // PARTS][team.rank :: team.size]
        with engine.micro_batch(last=part == PARTS - 1), noted(during, part):
            terms = engine(rows)
            (sum(term.sum() for term in terms.values()) / ROWS).backward()  # type: ignore[union-attr]
    if team.size > 1:
        assert set(during) == {PARTS - 1}, during
    found = {name: parameter.grad for name, parameter in trained.named_parameters() if parameter.grad is not None}
    return {name: full(gradient).clone() for name, gradient in found.items()}


def weights_after(team: Team) -> dict[str, Tensor]:
    """The weights, whole, after five steps of LAMB."""
    body, twice, x_bI = setting()
    if team.shards:
        shard(body, body.blocks)
    trained = nn.ModuleList([body, twice])
    engine, optimizer = Engine(twice, body, trained, team), optimizer_of(Optimizer(name="lamb"), trained, 0.01, 0.1)
    for _ in range(5):
        with engine.micro_batch(last=True):
            terms = engine(x_bI[team.rank :: team.size])
            (sum(term.sum() for term in terms.values()) / ROWS).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(parameter.detach()).clone() for name, parameter in trained.named_parameters()}


class noted:
    """Within the block, every sum of a bucket appends the number of the micro-batch."""

    def __init__(self, during: list[int], part: int) -> None:
        self.during, self.part, self.original = during, part, module.summed

    def __enter__(self) -> None:
        def summed(gradients: Tensor, group: Any = None) -> Any:
            self.during.append(self.part)
            return self.original(gradients, group)

        module.summed = summed

    def __exit__(self, *_: object) -> None:
        module.summed = self.original


def together(folder: Path) -> None:
    """Writes the gradients that two processes come to, by plan."""
    plans: Mapping[str, Callable[[Team], Team]] = {
        "ddp": lambda team: team,
        "fsdp2": lambda team: replace(team, strategy="fsdp2"),
    }
    with joined() as team:
        found = {name: gradients(plan(team)) for name, plan in plans.items()}
        found |= {f"{name} lamb": weights_after(plan(team)) for name, plan in plans.items()}
        if team.is_first:
            torch.save(found, folder / "gradients.pt")
