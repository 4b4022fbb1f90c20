"""What a stage is: a frozen, typed config whose `run` turns one artifact into the files of the next.

A stage knows nothing of caching, locking or naming. The pipeline hands it the parent artifact, a `Context` and an empty folder; the
stage writes its files into that folder and returns the figures that go into the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from compress.artifacts.artifact import Artifact, Kind
from compress.core.config import Config
from compress.core.progress import Progress
from compress.core.target import Target
from compress.core.tasks import Task
from compress.machine.parallel import ALONE, Team

if TYPE_CHECKING:  # types only: these modules stand above this one
    from torch import nn

    from compress.data.splits import Data
    from compress.distilled import Learner, Taught


TimedPrecision = Literal["int8", "fp32"]


def is_model(teacher: str) -> bool:
    """Whether a `teacher` names a model outside of the run (Hub id with its owner, or folder) rather than a stage of it."""
    return "/" in teacher


def teachers_named(stage: Any) -> tuple[str, ...]:
    """Returns what the `teacher` of a stage names, in order; nothing for a stage without such a key."""
    named = getattr(stage, "teacher", None)
    return () if named is None else (named,) if isinstance(named, str) else tuple(named)


class MeasureLatency(Protocol):
    """How checkpoints are timed in a run: in engines of their own, in turns."""

    @property
    def settings(self) -> Any:
        """What of the recipe a time depends on, beside the target: JSON types."""

    def __call__(self, checkpoints: Sequence[Path], shape: tuple[int, int | None], precision: TimedPrecision) -> list[float]:
        """Returns the median milliseconds of float checkpoints in the first engine of the target.

        Args:
            checkpoints: The checkpoints.
            shape: (batch, sequence); the sequence is None for images.
            precision: What the engine multiplies in; for int8 they are quantized first.
        """


@dataclass(frozen=True)
class Context:
    """Everything a stage may need beside its own config and its parent; injected by the pipeline."""

    task: Task
    data: Data
    max_length: int
    """Largest number of tokens of a row: longer texts are truncated, blocks have no more. Unused for images."""
    target: Target
    seed: int
    progress: Progress
    scratch: Path
    """Folder for checkpoints inside the stage; survives a kill, is removed when the stage is finished."""
    checkpoints: Mapping[str, Artifact] = field(default_factory=dict)
    """Every variant so far by stage id, in order; the first is the baseline."""
    predictions: Mapping[str, Path] = field(default_factory=dict)
    """What torch answers on the evaluation split, by variant: a file of `compress.evaluate.save_predictions`."""
    teachers: tuple[Artifact, ...] = ()
    """The checkpoints that the `teacher` of the stage stands for, in its order; none for stages without such a key."""
    count_macs: Callable[[], int] = lambda: 0
    """Checks the model of the recipe and counts `macs`: seconds of imports, which a run that has nothing to do never spends."""
    max_drop: float | None = None
    """The goal of that name; a stage that decides by it has it in `depends`."""
    measure_latency: MeasureLatency | None = None
    """Times checkpoints; None outside of a run."""
    losses: Losses | None = None
    """Losses of distillation by name; None outside of a run."""
    team: Team = ALONE
    """The processes that run this stage."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Library versions and hardware of this machine, as they go into the manifest."""

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the incoming model for one row at the data's max_length."""
        return self.count_macs()

    @property
    def teacher(self) -> Artifact | None:
        """The first of the teachers; None for stages without such a key."""
        return self.teachers[0] if self.teachers else None

    @property
    def baseline(self) -> Artifact:
        """The variant that every other one is compared with."""
        return next(iter(self.checkpoints.values()))


@dataclass(frozen=True)
class Asked:
    """Where losses are asked for, by a stage that learns from a teacher."""

    stage: str
    """Id of the stage."""
    key: str
    """Key path of the settings."""
    teacher_key: str
    """That of the teacher."""


class Losses(Protocol):
    """The losses of the stage `distill` by name, for other stages that learn from a teacher; settings are `compress.distilled.Taught`."""

    def check(self, settings: Taught, asked: Asked, student: Any, teacher: Any, part: bool, context: Context) -> None:
        """Finds out before the first stage runs whether losses fit two models (Transformers configs) and the task.

        Raises:
            InputError: They do not, or a setting of a loss is not one.
        """

    def objective(self, learner: Learner, context: Context) -> nn.Module:
        """Returns what a model is trained on; it holds the teacher, of which only the parts of `origin` are seen where it is given.

        Raises:
            InputError: A loss does not fit the models.
        """


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
