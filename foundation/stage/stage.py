"""The base class of stages: a frozen, typed config whose `run` turns one artifact into the next.

Caching, locking and naming are up to the pipeline. It calls `run` with the parent artifact, a `Context` and an empty folder; the stage
writes its files into that folder and returns the figures for the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field

from foundation.artifacts.artifact import Artifact, Kind
from foundation.core.config import Config
from foundation.core.step_names import BASELINE
from foundation.data.splits import Data
from foundation.machine.parallel import ALONE, Team

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from foundation.models.size import Passes
    from foundation.stage.context import Context

REUSED = "reused"
"""The figure of a stage that names what it took from earlier runs."""


def is_model(teacher: str) -> bool:
    """Whether a `teacher` names a model outside the run (Hub id with owner, or folder) and not a stage."""
    return "/" in teacher


def teachers_named(stage: object) -> tuple[str, ...]:
    """Returns the names in the `teacher` key of a stage, in order; empty for a stage without that key, or with a labeller there."""
    named = getattr(stage, "teacher", None)
    return (named,) if isinstance(named, str) else named if isinstance(named, tuple) else ()


class Stage(Config):
    """One step of a recipe. A method subclasses it, sets the class variables and implements `run`."""

    VERSION: ClassVar[int] = 1
    """Incremented when a code change alters the output; part of the cache key."""
    NAME: ClassVar[str]
    """The key in the recipe."""
    PRODUCES: ClassVar[Kind] = "checkpoint"

    id: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] | None = None
    """Unique name of this stage in the run; default: its key. Required if a key occurs more than once."""

    @property
    def title(self) -> str:
        """Its id, or its key where it has none."""
        return self.id or self.NAME

    @property
    def key(self) -> str:
        """Key path of this stage in the recipe."""
        return f"stages.{self.title}"

    def team(self, processes: Team) -> Team:
        """Returns the processes that execute the stage: all of the run, which reach the same result, or only the first one, as here.

        Only the first one writes.
        """
        return ALONE

    def depends(self, context: Context) -> object:
        """Returns what the output depends on besides config, parent, data, seed, task and target: JSON types, part of the cache key."""
        return None

    def among(self, models: Mapping[str, PreTrainedConfig], config: PreTrainedConfig) -> Self:
        """Returns the stage with what `check`, `config_after` and `work` have to know of other models than its input, before anything runs.

        Args:
            models: Transformers configs of the models before it, by id.
            config: Transformers config of the input model.
        """
        return self

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks everything that can be checked before the first stage runs; reads no weights.

        Args:
            config: Transformers config of the input model.
            teacher: Transformers config of the first teacher; None for stages without one.
            context: Data, task and target.

        Raises:
            InputError: The stage does not support this model.
        """

    def config_after(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Returns the Transformers config of the output model, given the config of the input model; reads no weights.

        Raises:
            InputError: The stage cannot make such a model.
        """
        return config

    def work(self, passes: Passes, data: Data) -> float:
        """Returns the work of the stage in multiply-accumulates; the predicted time is a linear function of it.

        Args:
            passes: Multiply-accumulates of a forward pass of the input model and of the output model.
            data: The data of the run.
        """
        return float(passes.after) * len(data.evaluation)

    def reuses(self, context: Context) -> bool:
        """Returns whether parts of the output will be taken from earlier runs, as far as the present checkpoints show: the stage
        then takes less time.

        Args:
            context: The context of the stage, whose checkpoints may not all be there yet.
        """
        return False

    def run(self, parent: Artifact, context: Context, out: Path) -> Mapping[str, object]:
        """Turns `parent` into the files of a new artifact.

        Args:
            parent: The input artifact; read-only.
            context: Data, target, teachers, progress.
            out: Empty folder for the output; becomes the artifact when `run` returns.

        Returns:
            Figures for the manifest: JSON types only. Where parts were taken from earlier runs, `REUSED` names them.
        """
        raise NotImplementedError


class ModelStage(Stage):
    """A stage that turns a model into another one. Several may start from the same model: the run then has branches."""

    input: str | None = None
    """Input model: baseline or the id of an earlier stage; default: the output of the previous stage. Stages with the same input start
    branches, which the report compares; goals are judged on what is served (`target.serve`)."""


def input_named(stage: Stage) -> str | None:
    """Returns the `input` key of a stage; None stands for the previous stage."""
    return getattr(stage, "input", None)


def lines(stages: Sequence[Stage]) -> dict[str, tuple[Stage, ...]]:
    """Returns for each stage that makes a model, by id, the chain of stages that leads to it, itself last; and the chain of `baseline`."""
    found: dict[str, tuple[Stage, ...]] = {BASELINE: ()}
    before: tuple[Stage, ...] = ()
    for stage in stages:
        if stage.PRODUCES == "checkpoint":
            named = input_named(stage)
            before = (*(before if named is None else found.get(named, before)), stage)
            found[str(stage.id)] = before
            if stage.NAME in ("model", "finetune"):
                found[BASELINE] = before
    return found
