"""What the pipeline injects into a stage: data, target, teacher, progress, and how to measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from compress.artifacts.artifact import Artifact
from compress.core.progress import Progress
from compress.core.target import Target
from compress.core.tasks import Task
from compress.data.splits import Data
from compress.machine.parallel import ALONE, Team
from compress.models.preprocessor import preprocessor
from compress.stage.taught import Asked, Learner, Taught
from compress.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from torch import nn

TimedPrecision = Literal["int8", "fp32"]


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
    """What torch answers on the evaluation split, by variant: a file of `compress.measure.answers.save_predictions`."""
    teachers: tuple[Artifact, ...] = ()
    """The checkpoints that the `teacher` of the stage stands for, in its order; none for stages without such a key."""
    count_macs: Callable[[], int] = lambda: 0
    """Checks the model of the recipe and returns its multiply-accumulates for one row; a run that has nothing to do never calls it."""
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

    preprocessors: dict[tuple[Path, int, Target], Preprocessor] = field(default_factory=dict, repr=False, compare=False)
    """Preprocessors that were made already; shared by all contexts of a run."""

    def preprocessor(self, checkpoint: Path) -> Preprocessor:
        """Returns how the rows of a checkpoint are prepared; read from its folder once a run.

        Raises:
            InputError: See `compress.models.preprocessor.preprocessor`.
        """
        key = checkpoint, self.max_length, self.target
        if key not in self.preprocessors:
            self.preprocessors[key] = preprocessor(checkpoint, self.task, self.max_length, self.target)
        return self.preprocessors[key]

    @property
    def teacher(self) -> Artifact | None:
        """The first of the teachers; None for stages without such a key."""
        return self.teachers[0] if self.teachers else None

    @property
    def baseline(self) -> Artifact:
        """The variant that every other one is compared with."""
        return next(iter(self.checkpoints.values()))


class Losses(Protocol):
    """The losses of the stage `distill` by name, for other stages that learn from a teacher; settings are `Taught`."""

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
