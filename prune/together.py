"""How several processes fine-tune a pruned model: the first one prunes, and tells the others where the result lies.

    first     score, choose, cut, measure ---> checkpoint in its scratch folder ---> fine-tune
    others    wait without spinning       ---> load it                          ---> fine-tune

So all start from the same units, whatever rounding or a clock on another machine would have chosen. All processes see the run folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from compress.artifacts.artifact import writing
from compress.machine.parallel import Team
from compress.models.architecture.origin import Origin
from compress.models.checkpoint import load, save

FOLDER = "cut"


@dataclass(frozen=True)
class Cut:
    """A pruned model before its fine-tuning."""

    model: nn.Module
    source: Path
    """Checkpoint with the tokenizer or image processor."""
    origin: Origin | None
    """Parts of the incoming model that it consists of; None if it has no uniform width."""


def hand_out(team: Team, cut: Cut | None, scratch: Path) -> None:
    """Gives the pruned model of the first process to the others, which call `handed_out`.

    Args:
        team: The processes.
        cut: The model; None if an earlier attempt has already fine-tuned it.
        scratch: Scratch folder of the first process.
    """
    if team.size == 1:
        return
    told: dict[str, Any] | None = None
    if cut is not None:
        with writing(scratch / FOLDER) as temporary:
            save(cut.model, cut.source, temporary, "Pruned, not fine-tuned yet")
        origin = cut.origin and [cut.origin.layers, cut.origin.hidden, cut.origin.heads]
        told = {"model": str(scratch / FOLDER), "source": str(cut.source), "origin": origin}
    team.broadcast(told)


def handed_out(team: Team, count: int) -> Iterator[tuple[int, Cut]]:
    """Yields the pruned models that another process has to fine-tune, with their numbers from 1; the first one hands out `count`."""
    for number in range(1, count + 1):
        told: dict[str, Any] | None = team.broadcast(None)
        if told is not None:
            origin = None if told["origin"] is None else Origin(*map(tuples, told["origin"]))
            yield number, Cut(load(Path(told["model"])), Path(told["source"]), origin)


def tuples(value: Any) -> Any:
    """Converts nested lists, as read from JSON, to nested tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value
