"""The contents of compare.json: the comparison of several runs by `compress compare`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from compress.report.model.contents import Configuration, Goal
from foundation.artifacts.document import Document, Figures, Number
from foundation.artifacts.figures import Drop, Interval

SCHEMA = 1
ByRun = dict[Annotated[str, "RUN"], Any]


class Metric(Document):
    """The primary metric."""

    name: str = ""
    """Primary metric of the first run."""
    higher_is_better: bool = True
    """False for perplexity and error rates."""


class Baseline(Document):
    """The baseline of a run."""

    variant: str = ""
    """Id of its baseline."""
    checkpoint: str | None = None
    """Digest of the checkpoint of the baseline: equal ones are the same model."""


class Rows(Document):
    """The evaluated rows of a run."""

    n: int | None = None
    """Evaluated rows (tokens where text is generated)."""
    sha256: str | None = None
    """`evaluation_rows.sha256` of its report.json; null in runs of earlier versions."""


class Judged(Document):
    """The primary metric of a run's served configuration."""

    backend: str | None = None
    """The last backend that evaluated the served configuration: a server, else its engine, else torch."""
    value: Number | None = None
    """The primary metric there."""
    low: Number | None = None
    """Lower end of its 95 % interval."""
    high: Number | None = None
    """Upper end of its 95 % interval."""
    n: int | None = None
    """Rows that it was computed from."""
    in_train: int | None = None
    """How many of these rows are trained on; null: none."""


class Lost(Interval):
    """What a run lost against its own baseline in torch, as `max_drop` is judged by."""

    reason: str | None = None
    """Why it was not measured."""


class Speedup(Interval):
    """The speed-up of a run over torch of its own run, as `min_speedup` is judged by."""

    at: str | None = None
    """Where it was measured: engine and shape."""
    busy: bool = False
    """Whether other work on the machine spoiled it."""
    reason: str | None = None
    """Why it was not measured."""


class Compared(Document):
    """A run."""

    key: str = ""
    """Letter of the run: A, B, ... in the order of the command."""
    name: str | None = None
    """`name` of its recipe."""
    folder: str = ""
    """Its folder, as it was given."""
    created: str | None = None
    """When it finished; null in runs that do not say."""
    anchor: str | None = None
    """Digest of all its files, as in its report.json; null in runs of earlier versions."""
    metric: str = ""
    """Its primary metric."""
    baseline: Baseline = Baseline()
    """Its baseline."""
    rows: Rows = Rows()
    """Its evaluated rows."""
    served: Configuration | None = None
    """Its served configuration; null if no engine was built."""
    accuracy: Judged = Judged()
    """The primary metric of what it serves."""
    drop: Lost = Lost()
    """Loss of the served configuration."""
    speedup: Speedup = Speedup()
    """How much faster it is."""
    size_bytes: int | None = None
    """Bytes that the served engine loads; null if none was built."""
    goals: tuple[Goal, ...] = ()
    """Its judged goals, as `goals[]` of report.json."""
    machine: Figures = Field(default_factory=dict)
    """Environment that its times depend on: `environment` of report.json, `device`, `threads`, `compress`, `versions.PACKAGE`."""
    defaulted: tuple[str, ...] = ()
    """Keys that its stored recipe does not have: defaults of this version stand for them in `recipe`."""
    warnings: tuple[str, ...] = ()
    """`warnings` of its report.json."""


class Model(Document):
    """A model of a pair."""

    run: str = ""
    """Letter of the run of the model."""
    variant: str = ""
    """Id of its variant."""
    backend: str = ""
    """Its backend."""


class Models(Document):
    """Two models that are compared."""

    kind: str = ""
    """`served`: the served models of two runs, for every two runs; `same name`: a variant in a backend, and the one with the same name in
    the first run."""
    first: Model | None = None
    """The first model; null where nothing was evaluated."""
    second: Model | None = None
    """The second model; null where nothing was evaluated."""
    reason: str | None = None
    """Why the two cannot be compared row by row: other rows, or another metric. Null: the keys below are there."""
    first_value: Number | None = None
    """The primary metric of the first model, on the rows of both."""
    second_value: Number | None = None
    """The primary metric of the second model."""


class Pair(Drop, Models):
    """Two models, compared row by row: the first takes the place of the baseline, the second of the backend."""

    difference: Number | None = None
    """First minus second: positive is a loss of the second; for perplexity the relative increase."""
    right_to_wrong: int | None = None
    """Rows that are right in the first and wrong in the second; null unless labels are classes."""


class TimedConfiguration(Document):
    """A configuration with a measured time and metric, at one shape."""

    run: str = ""
    """Letter of its run. Times of different runs were not measured in turns."""
    variant: str | None = None
    """Id of its variant."""
    precision: str | None = None
    """Its precision."""
    float_precision: str | None = None
    """Precision of its layers that are not quantized."""
    engine: str | None = None
    """Its engine."""
    mode: str | None = None
    """The mode of its engine."""
    device: str | None = None
    """`cpu` or `cuda`."""
    threads: int | None = None
    """Threads of the engine."""
    batch: int | None = None
    """Batch size."""
    sequence: int | None = None
    """Sequence length, tokens; null for rows of one size."""
    p50_ms: Number | None = None
    """Median latency, ms."""
    p90_ms: Number | None = None
    """90th percentile, ms."""
    p99_ms: Number | None = None
    """99th percentile, ms; null below 200 samples."""
    throughput_per_s: Number | None = None
    """Rows per second."""
    speedup: Number | None = None
    """Speed-up over the baseline in torch (fp32, eager) of the same run; null where that was not timed."""
    busy: bool = False
    """Whether other work on the machine spoiled its time, or the time of that reference."""
    value: Number | None = None
    """The primary metric of exactly this configuration."""
    low: Number | None = None
    """Lower end of its 95 % interval; null where only the value is known."""
    high: Number | None = None
    """Upper end of its 95 % interval."""
    n: int | None = None
    """Rows that it was computed from."""
    role: str = ""
    """`served`, `reference` (the baseline in torch) or `other`."""
    front: bool = False
    """Whether it is on the Pareto front of its run at this shape."""
    joint_front: bool = False
    """Whether it is on the front of all runs; always false where their metrics differ."""


class Cell(Document):
    """A variant in a backend."""

    run: str = ""
    """Letter of a run."""
    variant: str | None = None
    """Id of a variant of it."""
    backend: str = ""
    """torch, an engine, or a server."""
    value: Number | None = None
    """Primary metric in this backend; null if it was not measured."""
    low: Number | None = None
    """Lower end of its 95 % interval."""
    high: Number | None = None
    """Upper end of its 95 % interval."""
    n: int | None = None
    """Number of evaluated rows."""
    groups: int | None = None
    """Groups of rows that the interval is drawn over."""
    in_train: int | None = None
    """How many of the rows are trained on; null: none."""
    interval_reason: str | None = None
    """Why there is no interval."""
    reason: str | None = None
    """Why it was not measured."""


class Setting(Document):
    """A key of the recipe that differs."""

    path: str = ""
    """A key of the recipe whose value is not the same in all runs; a stage is named by its id."""
    values: ByRun = Field(default_factory=dict)
    """Its value by the letter of the run, defaults filled in; a run without the key is not listed."""


class Fact(Document):
    """Differences between the machines."""

    name: str = ""
    """Name of the difference, such as `cpu`, `threads` or `versions.torch`."""
    values: ByRun = Field(default_factory=dict)
    """Its value by the letter of the run; null where a run does not say."""


class Comparison(Document):
    """The contents of compare.json."""

    schema_: int = Field(SCHEMA, alias="schema")
    """Version of this layout: 1."""
    task: str = ""
    """`model.task` of all recipes."""
    metric: Metric = Metric()
    """The primary metric."""
    runs: tuple[Compared, ...] = ()
    """The runs."""
    pairs: tuple[Pair, ...] = ()
    """The models that are compared row by row."""
    configurations: tuple[TimedConfiguration, ...] = ()
    """Every configuration with a measured time and metric."""
    ledger: tuple[Cell, ...] = ()
    """The primary metric of every variant in every backend of every run."""
    recipe: tuple[Setting, ...] = ()
    """Differences between the recipes."""
    machine: tuple[Fact, ...] = ()
    """Differences between the machines."""
    timing: str = ""
    """Why times of different runs are not divided by each other."""
