"""The context of a stage: data, target, teachers, progress and services, injected by the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from foundation.artifacts.artifact import Artifact
from foundation.core.goals import Goals
from foundation.core.progress import Progress
from foundation.core.step_names import BASELINE
from foundation.core.target import Parallel, Target
from foundation.data.splits import Data
from foundation.labels.facts import Facts
from foundation.labels.tasks import TASKS, Task
from foundation.machine.parallel import ALONE, Team
from foundation.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from foundation.artifacts.exported import Build, Engine

TimedPrecision = Literal["int8", "fp32"]


class MeasureLatency(Protocol):
    """Times checkpoints, each in an engine process of its own; the processes take turns."""

    @property
    def settings(self) -> object:
        """The recipe settings that affect the latency, apart from the target; JSON types."""

    def __call__(
        self, checkpoints: Sequence[Path], shape: tuple[int, int | None], precision: TimedPrecision | Sequence[TimedPrecision]
    ) -> list[float]:
        """Returns the latency in ms of float checkpoints in the first engine of the target.

        The first latency is a median. Each other latency is the first divided by the speed-up over it, averaged over the turns.

        Args:
            checkpoints: The checkpoints.
            shape: (batch, sequence); the sequence is None for images.
            precision: Precision of the GEMMs; for int8 the checkpoints are quantized first. A list has one for each checkpoint.
        """

    def turns(
        self, checkpoints: Sequence[Path], shapes: Sequence[tuple[int, int | None]], precision: TimedPrecision | Sequence[TimedPrecision]
    ) -> list[list[float]]:
        """Returns for each shape the latency in ms of each checkpoint, which is built once; see above."""

    def at(self, checkpoint: Path, shapes: Sequence[tuple[int, int | None]], precision: TimedPrecision) -> list[float]:
        """Returns the median latency in ms of one float checkpoint at several shapes; see above."""


class Job(Protocol):
    """Arguments to start the process of an engine."""

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its latency rows and messages: `engine`, `mode`, `precision`, `float_precision`, `device`."""

    @property
    def threads(self) -> int:
        """Number of CPU threads."""

    @property
    def command(self) -> list[str]:
        """Command line of its process."""

    def message(self) -> dict[str, object]:
        """Returns the map that opens the engine; JSON types."""


class EngineJob(Protocol):
    """Function that returns how an exported engine is opened."""

    def __call__(self, root: Path, build: Build, engine: Engine, proposals: bool) -> Job:
        """Returns how an engine is opened.

        Args:
            root: Folder of export.json.
            build: Its `precision`, `folder` and `float_precision`, which an engine without one takes.
            engine: The entry of the engine in the build.
            proposals: Whether tokens are proposed to it, where the export has measured that.
        """


@dataclass(frozen=True)
class Context:
    """Everything that a stage may need besides its config and its parent artifact."""

    task: Task
    data: Data
    max_length: int
    """Maximum number of tokens of a row; longer texts are truncated. Unused for images."""
    target: Target
    seed: int
    progress: Progress
    scratch: Path
    """Folder for checkpoints within the stage; survives a kill, and is removed when the stage finishes."""
    checkpoints: Mapping[str, Artifact] = field(default_factory=dict)
    """Every variant so far by stage id, in order; the first is the baseline."""
    predictions: Mapping[str, Path] = field(default_factory=dict)
    """Predictions in torch on the evaluation split by variant: files of `foundation.measure.answers.save_predictions`."""
    teachers: tuple[Artifact, ...] = ()
    """The checkpoints that the `teacher` key of the stage names, in its order; empty for stages without that key."""
    count_macs: Callable[[], int] = lambda: 0
    """Checks the model of the recipe and returns its multiply-accumulates for one row; not called if every step is cached."""
    goals: Goals = field(default_factory=Goals)
    """The goals of the recipe; a stage that uses them lists them in `depends`."""
    exported: Artifact | None = None
    """The exported engines; None before that stage."""
    latency: Artifact | None = None
    """Their measured latencies; None before that step."""
    cascade: Artifact | None = None
    """The cascade of these engines; None before that stage, and in runs without it."""
    measure_latency: MeasureLatency | None = None
    """Times checkpoints; None outside a run."""
    engine_job: EngineJob | None = None
    """Function that returns how an exported engine is opened in a separate process; None outside a run."""
    team: Team = ALONE
    """The processes that run this stage."""
    shared: Path | None = None
    """Folder `stages` of the run, for what several stages, and all runs that share the store, compute alike; None outside a run."""
    forced: bool = False
    """Whether the stage runs although it was finished before: what earlier runs of it kept does not count."""
    parallel: Parallel = field(default_factory=Parallel)
    """How trainings use devices and their memory."""
    profiles: Path | None = None
    """Folder for profiles of trainings, of the whole run or of this stage; None: none are made."""
    fingerprint: Mapping[str, object] = field(default_factory=dict)
    """Library versions and hardware of this machine, as written to the manifest."""

    stride: int = 0
    """Tokens that two windows of a long context or text share; 0 where texts are truncated."""
    aggregate: str = ""
    """How window logits are pooled: mean or max; empty where texts are truncated."""

    def preprocessor(self, checkpoint: Path) -> Preprocessor:
        """Returns how the rows of a checkpoint are prepared.

        Raises:
            InputError: See `foundation.models.folder.Checkpoint.preprocessor`.
        """
        from foundation.models.folder import Checkpoint

        return Checkpoint(checkpoint).preprocessor(self.task, self.max_length, self.target, self.stride, self.aggregate)

    @property
    def facts(self) -> Facts:
        """What sets the task apart."""
        return TASKS[self.task]

    @property
    def teacher(self) -> Artifact | None:
        """The first teacher; None for stages without a `teacher` key."""
        return self.teachers[0] if self.teachers else None

    @property
    def baseline(self) -> Artifact:
        """The variant that all others are compared with."""
        return next(iter(self.checkpoints.values()))

    def checkpoint(self, name: str) -> Artifact:
        """Returns the variant with this stage id; `baseline` is the first one, whatever its id."""
        return self.baseline if name == BASELINE else self.checkpoints[name]
