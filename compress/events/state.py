"""The state of a run, summed up from its events so far."""

from __future__ import annotations

from typing import Literal

from compress.events.model import (
    Error,
    Event,
    Figures,
    ProblemParts,
    Progress,
    Result,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Warned,
)
from foundation.artifacts.document import Document, Number
from foundation.artifacts.document import Figures as FigureMap
from foundation.core.errors import Problem

State = Literal["running", "finished", "failed", "stopped"]


class StageState(Document):
    """A stage of the run."""

    stage: str = ""
    """Id of the stage."""
    state: Literal["waiting", "running", "done", "cached"] = "waiting"
    """`cached`: an earlier run made it."""
    seconds: Number | None = None
    """Seconds that it took when it ran."""


class RunState(Document):
    """The state of a run."""

    folder: str = ""
    """The run folder, an absolute path."""
    state: State = "running"
    """`finished` has a report, whether or not goals were missed; `failed` and `stopped` have none."""
    name: str | None = None
    """`name` of the recipe; null while libraries are loaded."""
    process: int | None = None
    """Id of its process; null while libraries are loaded."""
    updated: str | None = None
    """Time of the newest event: ISO 8601, UTC."""
    stages: tuple[StageState, ...] = ()
    """The stages, in order."""
    progress: Progress | None = None
    """The newest progress of the stage that is running."""
    figures: FigureMap | None = None
    """The newest figures of the training that is running."""
    warnings: tuple[str, ...] = ()
    """Warnings so far."""
    problems: tuple[ProblemParts, ...] = ()
    """Why it failed."""
    exit_status: int | None = None
    """Exit status of `compress run`; null while it runs."""
    meaning: str | None = None
    """What the exit status says."""
    result: Result | None = None
    """The outcome of a finished run."""

    def after(self, event: Event) -> RunState:
        """Returns the state after one more event."""
        return self._changed_by(event).with_(updated=event.time)

    def _changed_by(self, event: Event) -> RunState:
        match event:
            case RunStarted():
                stages = tuple(StageState(stage=stage) for stage in event.stages)
                return self.with_(name=event.name, folder=event.folder, process=event.process, stages=stages)
            case StageStarted():
                return self._with_stage(StageState(stage=event.stage, state="running"))
            case StageFinished():
                state: Literal["cached", "done"] = "cached" if event.cached else "done"
                return self._with_stage(StageState(stage=event.stage, state=state, seconds=event.seconds))
            case Progress():
                return self.with_(progress=event)
            case Figures() if event.label is not None:
                return self.with_(figures=event.figures)
            case Warned():
                return self.with_(warnings=(*self.warnings, event.message))
            case Error():
                return self.with_(problems=(*self.problems, *event.problems), state="stopped" if event.kind == "stopped" else "failed")
            case RunFinished():
                ended: State = "finished" if event.result is not None else "failed" if self.state == "running" else self.state
                more = {"exit_status": event.exit_status, "meaning": event.meaning, "result": event.result}
                return self.with_(state=ended, progress=None, figures=None, **more)
        return self

    def killed(self) -> RunState:
        """Returns the state of a run whose process ended without a last event."""
        given, remedy = "its process ended without a last event", "run it again to continue; its stderr.log has the last lines"
        problem = ProblemParts(given=given, remedy=remedy, line=str(Problem("", given, remedy=remedy)))
        return self.with_(state="failed", progress=None, figures=None, problems=(*self.problems, problem))

    def _with_stage(self, stage: StageState) -> RunState:
        stages = tuple(stage if other.stage == stage.stage else other for other in self.stages)
        return self.with_(stages=stages, progress=None, figures=None)
