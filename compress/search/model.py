"""The contents of search.json: what the search looked at, and what came of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from compress.report.model.contents import Environment, Goal
from foundation.artifacts.document import Document, Figures, Number
from foundation.artifacts.figures import Interval

SCHEMA = 1
Objectives = dict[Annotated[str, "OBJECTIVE"], Number | None]
Knobs = dict[Annotated[str, "KNOB"], Any]


class Metric(Document):
    """The primary metric."""

    name: str = ""
    """Primary metric."""
    higher_is_better: bool = True
    """False for perplexity and error rates."""


class Budget(Document):
    """`search.budget` of the recipe."""

    trials: int | None = None
    """`search.budget.trials`."""
    hours: Number | None = None
    """`search.budget.hours`; null: no limit."""


class Halving(Document):
    """`search.halving` of the recipe."""

    wave: int | None = None
    """`search.halving.wave`."""
    keep: Number | None = None
    """`search.halving.keep`."""
    short: Number | None = None
    """`search.halving.short`."""


class Rows(Document):
    """Numbers of rows."""

    selection: int = 0
    """Rows that candidates are judged on."""
    evaluation: int = 0
    """Rows that only the front is judged on, once."""


class Knob(Document):
    """A setting that is searched."""

    path: str = ""
    """A knob: the path of the setting in the recipe."""
    kind: str = ""
    """range or choices."""
    choices: tuple[Any, ...] = ()
    """Its values, of choices."""
    low: Number | None = None
    """Smallest value, of a range."""
    high: Number | None = None
    """Largest value, of a range."""
    step: Number | None = None
    """Step between the values, of a range that has one."""
    log: bool | None = None
    """Whether the values of a range are drawn by their logarithm."""


class Rung(Document):
    """A step that candidates are judged in."""

    name: str = ""
    """A step that candidates are judged in, cheapest first: size, latency, untrained, short or full."""
    about: str = ""
    """Its action, in words."""
    left_out: str | None = None
    """Why it does not apply to this recipe; null where it does."""


class Served(Document):
    """The served configuration."""

    variant: str | None = None
    """Id of the variant that is served; all keys are null where no engine was built."""
    precision: str | None = None
    """Its precision."""
    float_precision: str | None = None
    """Precision of its layers that are not quantized."""
    engine: str | None = None
    """Its engine."""
    mode: str | None = None
    """The mode of its engine."""


class Timed(Document):
    """The time of a candidate at a shape of the target."""

    batch: int | None = None
    """Batch of a shape of the target."""
    sequence: int | None = None
    """Tokens of the shape; null for images."""
    engine: str | None = None
    """The engine with the least time."""
    time_ms: Number | None = None
    """Its time, ms."""
    baseline_ms: Number | None = None
    """Least time of the baseline's shape, ms, measured in turns with it."""


class Record(Document):
    """The record of a rung for a candidate; each rung has keys of its own."""

    macs: int | None = None
    """Rung size: predicted multiply-accumulates of the last model."""
    parameters: int | None = None
    """Rung size: predicted parameters of the last model."""
    weight_bytes: int | None = None
    """Rung size: predicted bytes of its weights."""
    predicted_seconds: Number | None = None
    """Rung size: predicted seconds of its whole run; null where they cannot be."""
    relative: Number | None = None
    """Rung latency: geometric mean over the shapes of its time / the time of the baseline's shape."""
    shapes: tuple[Timed, ...] = ()
    """Rung latency: the shapes of the target."""
    metric: Number | None = None
    """Rungs untrained and short: the primary metric without training, or after short training, on selection rows, in torch."""
    told: bool | None = None
    """Rung untrained: whether this metric is near enough to the baseline to rank candidates by it."""
    results: Objectives = Field(default_factory=dict)
    """Rung full: the figures of `candidates[].results`, including figures that are not objectives."""
    phase: Number | None = None
    """Rung full: how many times slower the machine was than when the baseline ran."""
    excess: dict[Annotated[str, "GOAL"], Number] = Field(default_factory=dict)
    """Rung full: by how much it exceeds the limit of each goal; at most 0 if the goal is met."""
    missed: tuple[str, ...] = ()
    """Rung full: goals that it misses, `int8_faster` left out."""
    served: Served | None = None
    """Rung full: the configuration that it serves."""
    failed: str | None = None
    """Why the step failed; the candidate is dropped. Its other keys are then absent."""
    seconds: Number | None = None
    """Seconds that the step took."""


class Dropped(Document):
    """Where a candidate was dropped."""

    rung: str = ""
    """The step in which it was dropped."""
    reason: str = ""
    """Why, in words."""


class Candidate(Document):
    """A combination of values that was looked at."""

    number: int = 0
    """Number of a candidate, from 0."""
    name: str = ""
    """Name of its folder in `trials`."""
    wave: int | None = None
    """Its wave: candidates of one are drawn together and compared with each other."""
    own: bool = False
    """Whether it has the values of the recipe itself."""
    values: Knobs = Field(default_factory=dict)
    """Value of each knob by its path."""
    state: str = ""
    """finished; dropped; or open, where the budget was used up before it was decided."""
    front: bool = False
    """Whether it is on the front."""
    dropped: Dropped | None = None
    """Where it was dropped; null if it was not."""
    rungs: dict[Annotated[str, "RUNG"], Record] = Field(default_factory=dict)
    """Records of the rungs that it reached."""
    results: Objectives | None = None
    """`metric`, `latency` (ms), `size` (bytes) and `throughput` (rows per second) of what it would serve, on selection rows, at the speed
    of the machine when the baseline ran; null where it has not finished."""
    missed: tuple[str, ...] = ()
    """Goals that it misses; empty where it has not finished."""
    feasible: bool | None = None
    """Whether it has finished and meets the goals on selection rows."""
    seconds: Number | None = None
    """Seconds that it took in all."""
    run: str | None = None
    """Its full run, relative to the search folder; null where it has not finished."""


class MetricInterval(Interval):
    """The primary metric of what is served, on the evaluation split."""

    n: int | None = None
    """Rows that it was computed from."""


class Evaluated(Document):
    """A point of the front on the evaluation split."""

    latency: Number | None = None
    """Time that the served one was chosen by, ms: see `target.serve`; null where no engine ran."""
    size: int | None = None
    """Bytes that the engine of what is served loads; null where none was built."""
    throughput: Number | None = None
    """Rows per second of what is served, at its best shape; null where no engine ran."""
    metric: MetricInterval = MetricInterval()
    """The primary metric of what is served."""
    drop: Interval = Interval()
    """Its loss of the primary metric."""
    speedup: Number | None = None
    """Speed-up over torch, as `min_speedup` is judged by; null where it was not measured."""


class Point(Document):
    """A point of the front."""

    number: int = 0
    """Number of its candidate."""
    name: str = ""
    """Its name, of recipe and run."""
    values: Knobs = Field(default_factory=dict)
    """Value of each knob by its path."""
    recipe: str = ""
    """Its recipe, relative to the search folder: `compress run` takes it."""
    run: str = ""
    """Its run on the evaluation split, relative to the search folder."""
    selection: Objectives = Field(default_factory=dict)
    """Its objectives on selection rows, as in `candidates[].results`."""
    evaluation: Evaluated = Evaluated()
    """Its figures on the evaluation split."""
    served: Served = Served()
    """Its served configuration."""
    goals: tuple[Goal, ...] = ()
    """The judged goals, as `goals[]` of `report.json`."""
    missed: tuple[str, ...] = ()
    """Goals that it misses on the evaluation split, `int8_faster` left out."""


class Recommended(Point):
    """The recommended point of the front."""

    reason: str = ""
    """Why this point of the front is recommended."""


class Baseline(Document):
    """The baseline."""

    metric: Number | None = None
    """The primary metric of the baseline on selection rows, in torch."""


class Search(Document):
    """The contents of search.json."""

    schema_: int = Field(SCHEMA, alias="schema")
    """Version of this layout: 1."""
    name: str = ""
    """`name` of the recipe."""
    task: str = ""
    """`model.task` of the recipe."""
    environment: Environment = Environment()
    """The machine and its libraries, as in `report.json`."""
    metric: Metric = Metric()
    """The primary metric."""
    objectives: tuple[str, ...] = ()
    """`search.objectives`: what the front is made of."""
    goals: Figures = Field(default_factory=dict)
    """`goals` of the recipe, those that are set or have a default."""
    budget: Budget = Budget()
    """`search.budget`."""
    halving: Halving = Halving()
    """`search.halving`."""
    rows: Rows = Rows()
    """Numbers of rows."""
    space: tuple[Knob, ...] = ()
    """The knobs."""
    combinations: int | None = None
    """Number of combinations of all knobs; null where a range has any number."""
    rungs: tuple[Rung, ...] = ()
    """The steps, cheapest first."""
    seconds: Number | None = None
    """Seconds of work on the baseline and on candidates, of all processes and starts together."""
    baseline: Baseline = Baseline()
    """The baseline."""
    candidates: tuple[Candidate, ...] = ()
    """Every candidate, and why it was dropped."""
    importances: dict[Annotated[str, "OBJECTIVE"], Figures | None] = Field(default_factory=dict)
    """By knob: the share of the variance of an objective that it explains (fANOVA); null for fewer than four finished candidates."""
    meets_goals: bool = False
    """Whether the points of the front meet the goals on selection rows; else they are those that come nearest."""
    front: tuple[Point, ...] = ()
    """The points that no other one beats."""
    recommended: Recommended | None = None
    """The recommended point of the front; null where nothing has finished."""
