"""The events of `compress run --json`: each is one JSON object on one line, and its key `event` says which.

    run_started
        stage_started   progress, figures, log, warning   figures, stage_finished      for each stage, in order
    error                                                                              only if the run ends without a report
    run_finished                                                                       the last line

Every number has its unit in its key, such as `elapsed_seconds`. A key without a value is absent.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from compress.report.model.contents import Goal, Served
from foundation.artifacts.document import Document, Number
from foundation.artifacts.document import Figures as FigureMap
from foundation.artifacts.timed import VariantTiming

SCHEMA = 1
ErrorKind = Literal["input", "machine", "internal", "stopped"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Event(Document):
    """What all events have."""

    time: str = Field(default_factory=_now)
    """When it was written: ISO 8601, UTC."""

    def line(self) -> str:
        """Returns the event as a line of JSON in ASCII, without its end; NaN and infinite numbers, which JSON does not have, are null."""
        plain = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return json.dumps(_finite(plain), allow_nan=False)


class RunStarted(Event):
    """The run folder is locked; stages follow. Absent where the recipe is refused."""

    event: Literal["run_started"] = "run_started"
    """Always `run_started`."""
    schema_: int = Field(SCHEMA, alias="schema")
    """Version of this layout: 1."""
    compress: str = ""
    """Version of compress."""
    process: int = 0
    """Id of the process that writes the events: SIGTERM stops the run, and finished stages stay."""
    name: str = ""
    """`name` of the recipe."""
    folder: str = ""
    """The run folder, an absolute path."""
    stages: tuple[str, ...] = ()
    """Ids of all stages in order, those included that the recipe does not list: the source model, evaluations, latency."""


class StageStarted(Event):
    """A stage begins; it is looked up in the cache first."""

    event: Literal["stage_started"] = "stage_started"
    """Always `stage_started`."""
    stage: str = ""
    """Id of the stage."""
    number: int = 0
    """Its place, from 1."""
    count: int = 0
    """Number of all stages."""


class Progress(Event):
    """How far something is: at most once a second for each label. Something is written at least every 10 seconds."""

    event: Literal["progress"] = "progress"
    """Always `progress`."""
    stage: str | None = None
    """Id of the stage; absent before the first one and after the last one."""
    label: str = ""
    """What is under way."""
    done: int | None = None
    """Steps that are done; absent where nobody counts steps."""
    total: int | None = None
    """All steps."""
    elapsed_seconds: Number = 0.0
    """Seconds since it began."""
    steps_per_second: Number | None = None
    """Mean rate; absent before the first step."""
    remaining_seconds: Number | None = None
    """Seconds that are left at this rate."""


class Figures(Event):
    """Figures as soon as they are known: during a training those of an epoch, and at the end of a stage those of the stage."""

    event: Literal["figures"] = "figures"
    """Always `figures`."""
    stage: str | None = None
    """Id of the stage."""
    label: str | None = None
    """What they are about, such as the name of a training; absent for the figures of the whole stage."""
    figures: FigureMap = Field(default_factory=dict)
    """Of a training: `epoch`, `step`, `steps`, each loss term, `loss`, and `selection`, the metric on the selection split. Of a stage: what
    its manifest holds, which `report.json` has too."""
    latency: tuple[VariantTiming, ...] | None = None
    """Of the stage `latency`: the time of each engine at each shape, as `variants[].latency[]` of `report.json`, with the variant."""


class Log(Event):
    """A line for people."""

    event: Literal["log"] = "log"
    """Always `log`."""
    stage: str | None = None
    """Id of the stage; absent outside of stages."""
    message: str = ""
    """The line. Its wording may change."""


class Warned(Event):
    """Something that must not be overlooked; the report repeats it."""

    event: Literal["warning"] = "warning"
    """Always `warning`."""
    stage: str | None = None
    """Id of the stage; absent outside of stages."""
    message: str = ""
    """The warning. Its wording may change."""


class StageFinished(Event):
    """The artifact of a stage is there."""

    event: Literal["stage_finished"] = "stage_finished"
    """Always `stage_finished`."""
    stage: str = ""
    """Id of the stage."""
    cached: bool = False
    """Whether an earlier run made it, so that nothing ran now."""
    seconds: Number = 0.0
    """Seconds that the stage took when it ran."""
    folder: str = ""
    """Folder of its artifact, an absolute path."""


class ProblemParts(Document):
    """One fault."""

    key: str = ""
    """Path of the key, or file and line; empty where it is about no key."""
    given: str = ""
    """Present value or state; what went wrong, where `key` is empty."""
    allowed: str = ""
    """Allowed values, or the rule that is broken."""
    remedy: str = ""
    """Action that mends it."""
    line: str = ""
    """All parts in one line, as standard error has it."""


class Error(Event):
    """Why the run ends without a report."""

    event: Literal["error"] = "error"
    """Always `error`."""
    kind: ErrorKind = "internal"
    """`input`: the recipe, the model, the data or the options; `machine`: such as a full disk; `stopped`: by a signal; `internal`: our
    fault."""
    problems: tuple[ProblemParts, ...] = ()
    """Every fault; at least one."""


class Result(Document):
    """The outcome of a finished run in a few figures; `report.json` has all of them."""

    report: str = ""
    """Absolute path of report.json."""
    page: str = ""
    """Absolute path of report.html."""
    metric: str | None = None
    """The primary metric."""
    metric_before: Number | None = None
    """Its value of the baseline in torch."""
    metric_after: Number | None = None
    """Its value of what is served, in the last backend that evaluated it."""
    speedup: Number | None = None
    """How many times faster than torch fp32 the served configuration is, at the worst shape."""
    size_bytes: int | None = None
    """Bytes of the files that its engine loads."""
    baseline_size_bytes: int | None = None
    """The same of the baseline in the first engine of the target."""
    served: Served | None = None
    """The served configuration; absent if no engine was built."""
    goals: tuple[Goal, ...] = ()
    """The goals of the recipe, as `goals[]` of report.json."""
    missed: tuple[str, ...] = ()
    """Goals that were missed."""


class RunFinished(Event):
    """The last line. A stream without it belongs to a process that was killed."""

    event: Literal["run_finished"] = "run_finished"
    """Always `run_finished`."""
    exit_status: int = 0
    """Exit status of the command."""
    meaning: str = ""
    """What the exit status says."""
    seconds: Number = 0.0
    """Seconds since the command began."""
    result: Result | None = None
    """The outcome; absent if the run ended without a report."""


AnyEvent = Annotated[
    RunStarted | StageStarted | Progress | Figures | Log | Warned | StageFinished | Error | RunFinished, Field(discriminator="event")
]
EVENTS: tuple[type[Event], ...] = (RunStarted, StageStarted, Progress, Figures, Log, Warned, StageFinished, Error, RunFinished)
"""The events, in the order in which a run writes them."""
ADAPTER: TypeAdapter[Event] = TypeAdapter(AnyEvent)
"""Reads any event, and knows the JSON schema of all."""


def name_of(event: type[Event]) -> str:
    """Returns what an event is called in its key `event`."""
    return str(event.model_fields["event"].default)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list) else value
