"""Gradients that two processes send compressed, and trainings with them; run by `test_gradients.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.core.target import Gradients, Parallel
from foundation.machine.parallel import Team, joined
from foundation.training.processes.engine import Engine

SIZE, ROWS, STEPS, RANK = 24, 64, 60, 2
WAYS: tuple[Gradients, ...] = ("float32", "fp16", "powersgd")


class Layer(nn.Module):
    """A layer that is read, and one that no loss reads in any step."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x_bI: Tensor) -> Tensor:
        """Returns `[b, SIZE]`."""
        result: Tensor = self.read(x_bI)
        return result


def times(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
    """A loss whose gradient of the weight is the sum over rows of g x^T, given x and g; zero times what nobody reads."""
    x_bI, g_bO = batch
    unread: Any = model.get_submodule("unread")
    return {"times": (model(x_bI) * g_bO).sum(dim=1), "nothing": 0.0 * unread(x_bI).sum(dim=1)}


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
    """Squared errors."""
    x_bI, y_bO = batch
    return {"squares": (model(x_bI) - y_bO).square().mean(dim=1)}


def rows(width: int) -> tuple[Tensor, Tensor]:
    """Rows whose products have rank `width`."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(ROWS, width, generator=generator) @ torch.randn(width, SIZE, generator=generator) for _ in range(2))
    return left, right


def whole(width: int) -> Tensor:
    """The gradient of the weight over all rows, by hand."""
    x_bI, g_bO = rows(width)
    return g_bO.T @ x_bI / ROWS


def gradients(team: Team, way: Gradients, width: int) -> Tensor:
    """The gradient of the weight in every step of a training that changes nothing, `[STEPS, SIZE, SIZE]`."""
    torch.manual_seed(0)
    model, found = Layer(), []
    engine = Engine(times, model, model, team, Parallel(gradients=way, powersgd_rank=RANK), STEPS)
    x_bI, g_bO = (part[team.rank :: team.size] for part in rows(width))
    for _ in range(STEPS):
        model.zero_grad()
        with engine.micro_batch(last=True):
            terms = engine((x_bI, g_bO))
            (torch.stack([term.sum() for term in terms.values()]).sum() / ROWS).backward()  # type: ignore[no-untyped-call]
        assert model.unread.weight.grad is None or bool((model.unread.weight.grad == 0).all())
        assert model.read.weight.grad is not None
        found.append(model.read.weight.grad.clone())
    return torch.stack(found)


def losses(team: Team, way: Gradients) -> Tensor:
    """The loss of every step of a regression, `[4 * STEPS]`."""
    torch.manual_seed(0)
    model, target, found = Layer(), nn.Linear(SIZE, SIZE), []
    x_bI = torch.randn(ROWS, SIZE)
    y_bO = target(x_bI).detach()
    engine = Engine(squares, model, model, team, Parallel(gradients=way, powersgd_rank=RANK), 4 * STEPS)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)  # what comes a step later needs smaller steps
    mine = (x_bI[team.rank :: team.size], y_bO[team.rank :: team.size])
    for _ in range(4 * STEPS):
        optimizer.zero_grad()
        with engine.micro_batch(last=True):
            (engine(mine)["squares"].sum() / ROWS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(float(squares(model, (x_bI, y_bO))["squares"].detach().mean()))
    return torch.tensor(found)


def together(folder: Path) -> None:
    """Writes what two processes come to, by way; and checks that both come to the same."""
    with joined() as team:
        found = {f"{way} {width}": gradients(team, way, width) for way in WAYS for width in (RANK, SIZE)}
        found |= {f"{way} losses": losses(team, way) for way in WAYS}
        for name, value in found.items():
            first, second = team.gather(value)
            assert torch.equal(first, second), name
        if team.is_first:
            torch.save(found, folder / "found.pt")
