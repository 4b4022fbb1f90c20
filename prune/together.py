"""How several processes train a model that the first one prunes: it broadcasts the model's path.

    first     score, choose, cut, measure ---> checkpoint in its scratch folder ---> train
    others    wait without spinning       ---> load it                          ---> train

So all start from the same units, whatever rounding or a clock on another machine would have chosen. Masks are learned together on the model
before it is cut, in the same way. All processes see the run folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from foundation.artifacts.artifact import writing
from foundation.machine.parallel import Team
from foundation.models.architecture.origin import Origin
from foundation.models.checkpoint import load, save

FOLDER = "cut"


class Handed(TypedDict):
    """A `Cut`, as the first process hands it out."""

    model: str
    source: str
    origin: list[Any] | None
    """The fields of the `Origin`."""


@dataclass(frozen=True)
class Cut:
    """A model before all processes train it."""

    model: nn.Module
    source: Path
    """Checkpoint with the tokenizer or image processor."""
    origin: Origin | None
    """Parts of the incoming model that it consists of; None if it has no uniform width."""


def broadcast_cut(team: Team, cut: Cut | None, scratch: Path) -> None:
    """Gives the model of the first process to the others, which call `received`.

    Args:
        team: The processes.
        cut: The model; None if there is nothing to train, for instance because an earlier attempt has done so.
        scratch: Scratch folder of the first process.
    """
    if team.size == 1:
        return
    told: Handed | None = None
    if cut is not None:
        with writing(scratch / FOLDER) as temporary:
            save(cut.model, cut.source, temporary, "Not trained yet")
        origin = None if cut.origin is None else [cut.origin.layers, cut.origin.hidden, cut.origin.heads]
        told = {"model": str(scratch / FOLDER), "source": str(cut.source), "origin": origin}
    team.broadcast(told)


def received(team: Team) -> Cut | None:
    """Returns the model that the first process broadcasts; None if there is nothing to train."""
    told: Handed | None = team.broadcast(None)
    if told is None:
        return None
    origin = None if told["origin"] is None else Origin(*map(tuples, told["origin"]))
    return Cut(load(Path(told["model"])), Path(told["source"]), origin)


def tuples(value: Any) -> Any:
    """Converts nested lists, as read from JSON, to nested tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value
