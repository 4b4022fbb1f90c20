"""What a stage is: a frozen, typed config whose `run` turns one artifact into the files of the next.

A stage knows nothing of caching, locking or naming. The pipeline hands it the parent artifact, a `Context` and an empty folder; the
stage writes its files into that folder and returns the figures that go into the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from compress.artifacts.artifact import Artifact, Kind
from compress.core.config import Config
from compress.data.splits import Data
from compress.stage.context import Context


def is_model(teacher: str) -> bool:
    """Whether a `teacher` names a model outside of the run (Hub id with its owner, or folder) rather than a stage of it."""
    return "/" in teacher


def teachers_named(stage: Any) -> tuple[str, ...]:
    """Returns what the `teacher` of a stage names, in order; nothing for a stage without such a key."""
    named = getattr(stage, "teacher", None)
    return () if named is None else (named,) if isinstance(named, str) else tuple(named)


class Stage(Config):
    """One step of a recipe. A method subclasses it once, sets the class variables and writes `run`."""

    VERSION: ClassVar[int] = 1
    """Raised when the code of the stage changes its output: part of the cache key."""
    NAME: ClassVar[str]
    """The key in the recipe."""
    PRODUCES: ClassVar[Kind] = "checkpoint"
    TOGETHER: ClassVar[bool] = False
    """Whether every process of a run takes part: such a stage comes to the same in each, and only the first one writes."""

    id: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] | None = None
    """Name of this stage in the run; the key where absent. Needed where a key is repeated."""

    def depends(self, context: Context) -> Any:
        """Returns what the output depends on beside config, parent, data, seed, task and target; JSON types, part of the cache key."""
        return None

    def check(self, config: Any, teacher: Any, context: Context) -> None:
        """Finds out what can be found out before the first stage runs; reads no weights.

        Args:
            config: Transformers config of the model that comes in.
            teacher: That of the first teacher; None for stages without one.
            context: Data, task and target.

        Raises:
            InputError: The stage cannot do its work on this model.
        """

    def config_after(self, config: Any) -> Any:
        """Returns the Transformers config of the model that goes out, from that of the one that comes in; reads no weights.

        Raises:
            InputError: There is no such model.
        """
        return config

    def work(self, macs: int, data: Data) -> float:
        """Returns how much there is to do, in multiply-accumulates: what the predicted time grows with.

        Args:
            macs: Multiply-accumulates of the model for one row.
            data: The data of the run.
        """
        return float(macs) * len(data.evaluation)

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Turns `parent` into the files of a new artifact.

        Args:
            parent: The artifact before this one; never written to.
            context: Data, target, teacher, progress.
            out: Existing empty folder for the output; becomes the artifact when `run` returns.

        Returns:
            Figures for the manifest: JSON types only.
        """
        raise NotImplementedError


class ModelStage(Stage):
    """A stage that makes a model of a model; several may start from the same one, so that a run has branches."""

    input: str | None = None
    """What goes in: baseline or the id of an earlier stage; absent: what the stage before made. Stages with the same input start branches
    of one run, which its report compares; goals are judged on the one that ends last."""


def input_named(stage: Stage) -> str | None:
    """Returns what the `input` of a stage names; None for the stage before."""
    return getattr(stage, "input", None)


def lines(stages: Sequence[Stage]) -> dict[str, tuple[Stage, ...]]:
    """Returns for each stage that makes a model, by id, all that it is made by, in order and with itself the last; and `baseline`."""
    found: dict[str, tuple[Stage, ...]] = {"baseline": ()}
    before: tuple[Stage, ...] = ()
    for stage in stages:
        if stage.PRODUCES == "checkpoint":
            before = (*found.get(input_named(stage) or "", before), stage)
            found[str(stage.id)] = before
            if stage.NAME in ("model", "finetune"):
                found["baseline"] = before
    return found
