"""The contents of report.json: what was run, what is served, and every figure of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from compress.report.model.variant import Variant
from foundation.artifacts.cascade import Cascade
from foundation.artifacts.document import Document, Figures, Number
from foundation.artifacts.figures import Accuracy, Backend, Drop, Metrics
from foundation.artifacts.triton import Triton

SCHEMA = 1
Package = Annotated[str, "PACKAGE"]


class Environment(Document):
    """The machine and its libraries."""

    cpu: str | None = None
    """Processor."""
    cpu_features: tuple[str, ...] | None = None
    """Instruction sets that matter for int8 and bf16, such as `avx512_vnni`."""
    cores: int | None = None
    """Physical cores that the run may use."""
    memory_bytes: int | None = None
    """Memory of the machine, bytes."""
    gpus: tuple[str, ...] | None = None
    """NVIDIA GPUs."""
    kernel: str | None = None
    """Linux kernel."""
    versions: dict[Package, str] = Field(default_factory=dict)
    """Version of a library that affects the figures."""


class JudgedMetric(Document):
    """The primary metric."""

    name: str = "the metric"
    """Primary metric, to which `goals.max_drop` refers."""
    higher_is_better: bool | None = None
    """False for perplexity and error rates."""
    chance: Number | None = None
    """Score of a model that ignores its input: limits that it meets are not judged (`foundation.measure.chance`)."""


class Target(Document):
    """The target of the recipe."""

    device: str | None = None
    """`target.device` of the recipe."""
    engines: tuple[str, ...] = ()
    """`target.engines`, in order of preference."""
    serve: str | None = None
    """`target.serve`: fastest or first."""
    batch_sizes: tuple[int, ...] | None = None
    """`target.batch_sizes`."""
    sequence_lengths: tuple[int, ...] | None = None
    """`target.sequence_lengths`, tokens."""
    threads: int | None = None
    """`target.threads`; null: the physical cores."""


class Stage(Document):
    """A step of the run."""

    id: str = "unnamed"
    """Id of a step of the run, including implicit ones (evaluation, latency)."""
    stage: str | None = None
    """Kind of the step."""
    seconds: Number | None = None
    """Duration of the run that made it."""
    cached: bool | None = None
    """Whether this run took it from the cache."""
    peak_memory_bytes: int | None = None
    """Peak memory of the process up to its end."""
    profiles: tuple[Figures, ...] = ()
    """With `profile: true` the figures of each of its trainings (`foundation.training.profile`)."""
    dropped_expert_choices: Number | None = None
    """Share of the choices of experts that `parallel.expert_capacity` dropped in its training, the largest of several; null where processes
    spread no experts."""


class File(Document):
    """A file of the run folder."""

    path: str | None = None
    """A file of the run folder: recipe, golden rows, changed predictions, manifest of each artifact."""
    sha256: str | None = None
    """Its sha256; a manifest holds the digests of the files of its artifact."""


class Integrity(Document):
    """Digests of the files of the run."""

    anchor: str | None = None
    """Digest of the list below: one value that stands for all files of the run."""
    files: tuple[File, ...] = ()
    """The files of the run."""
    model_repository: str | None = None
    """Target of the link `model_repository`; null without one."""
    page_sha256: str | None = None
    """sha256 of the `report.html` written with this file."""


class EvaluationRows(Document):
    """The rows that train and evaluation had in common."""

    left_out_of_train: int | None = None
    """Train rows that were left out since they have the content of an evaluation row."""
    in_train: int | None = None
    """Evaluation rows that are trained on: `data.keep_evaluation_rows`."""
    sha256: str | None = None
    """Digest of the contents and labels of the evaluation rows, in order: runs with the same digest are compared row by row."""


class Split(Document):
    """The rows of a split."""

    split: str | None = None
    """`train`, `selection` or `evaluation`."""
    rows: int | None = None
    """Rows of the split."""
    longest: int | None = None
    """Tokens of its longest text, before anything is cut; null where rows are not texts of their own."""
    truncated: int | None = None
    """Rows that are longer than `data.max_length`; null where nothing is cut, or it was cut before."""


class Machine(Document):
    """How busy the machine was during the latency step."""

    seconds: Number | None = None
    """Length of the latency step."""
    cores: int | None = None
    """Logical cores of the machine."""
    load_average: tuple[Number, ...] = ()
    """Mean length of the run queue over 1, 5 and 15 minutes, at the end."""
    other_cores: Number | None = None
    """Cores that other processes kept busy, in the mean."""
    stolen: Number | None = None
    """Share of the time that the host gave to other guests."""
    throttled_s: Number | None = None
    """Seconds that the limit of the container stopped its processes; null without one."""
    pressure: Number | None = None
    """Share of the time in which a process waited for a core."""
    clock_mhz: tuple[Number, ...] | None = None
    """Lowest and highest clock of the cores, at the end."""
    calibration_ms: Number | None = None
    """Processor time of a fixed kernel that is timed between engines, median."""
    calibration_spread: Number | None = None
    """Its p90 / p10 - 1."""
    repeated: int | None = None
    """Blocks of samples that were taken again as a whole."""
    came_first: bool | None = None
    """Whether engines came before other work while they were timed, as the system allows it to root."""


class Timings(Document):
    """How reliable the latencies are."""

    rows: int = 0
    """Latencies of the run."""
    estimated: int = 0
    """Latencies that follow from processor time."""
    busy: int = 0
    """Latencies that goals are not judged on."""
    machine: Machine = Machine()
    """How busy the machine was."""


class Windows(Document):
    """The windows of long texts."""

    rows: int | None = None
    """Evaluation rows."""
    windows: int | None = None
    """The windows that they were read in."""
    max_length: int | None = None
    """`data.max_length`: most tokens of a window."""
    stride: int | None = None
    """`data.windows.stride`: tokens that two windows share."""
    aggregate: str | None = None
    """`data.windows.aggregate`: how window logits are pooled: mean or max."""


class Configuration(Document):
    """A variant in an engine."""

    variant: str = ""
    """Id of the variant."""
    precision: str = ""
    """Its precision."""
    float_precision: str = ""
    """Precision of its layers that are not quantized."""
    engine: str = ""
    """Its engine."""
    mode: str = ""
    """The mode of its engine."""

    @property
    def names(self) -> dict[str, str]:
        """What it is called by."""
        return {name: str(getattr(self, name)) for name in Configuration.model_fields}


class Ranked(Configuration):
    """A configuration that competed."""

    metric: Number | None = None
    """The primary metric in its engine."""
    size_bytes: int | None = None
    """Bytes of the files that the engine loads."""
    time_ms: Number | None = None
    """Time that it was ranked by, ms: see `target.serve`; null if it was not measured."""
    missed: tuple[str, ...] = ()
    """Goals that it misses."""


class Served(Configuration):
    """The configuration that is served."""

    size_bytes: int | None = None
    """Bytes of the files that the engine loads; null if it was not built."""
    accuracy: dict[Backend, Accuracy] | None = None
    """The primary metric of exactly this configuration."""
    drops: dict[Backend, Drop] = Field(default_factory=dict)
    """Loss against the baseline in torch."""
    metrics: dict[Backend, Metrics] = Field(default_factory=dict)
    """Every metric of exactly this configuration."""
    reason: str | None = None
    """Why it is served."""
    ranking: tuple[Ranked, ...] = ()
    """The configurations that competed; the served one is the first."""


class Majority(Document):
    """The most frequent class."""

    name: str = ""
    """The most frequent class."""
    share: Number | None = None
    """Its share of the evaluation rows: accuracy of a model that always answers it."""


class ClassFigures(Document):
    """Figures of a class."""

    precision: Number | None = None
    """Right / found; null where the class is never found."""
    recall: Number | None = None
    """Right / n; null where no row has it."""
    f1: Number | None = None
    """Harmonic mean of the two."""


class ClassRow(Document):
    """A class, or a kind of entities."""

    name: str | None = None
    """A class, or a kind of entities."""
    n: int | None = None
    """Evaluation rows (entities) that have it."""
    baseline: ClassFigures | None = None
    """Value of the baseline in torch."""
    served: ClassFigures | None = None
    """Value of the served configuration in that backend."""


class Classes(Document):
    """Figures of every class."""

    backend: str | None = None
    """Backend in which the served configuration answered; null if nothing is served."""
    majority: Majority | None = None
    """The most frequent class; null for sets of labels and for entities."""
    rows: tuple[ClassRow, ...] = ()
    """A row for each class."""


class Flip(Document):
    """A row whose answer changed."""

    row: int | None = None
    """Row of a line of `flips.jsonl`: up to 60 of them, of the served variant first."""
    variant: str | None = None
    """The variant whose answer it is."""
    from_: str | None = Field(None, alias="from")
    """The backend before."""
    to: str | None = None
    """The backend that answers otherwise."""
    of: Any = None
    """The word or label that it is about; absent where it is about the row."""
    position: int | None = None
    """Place of a word or token in the row, from 1."""
    before: Any = None
    """The answer before."""
    after: Any = None
    """The answer after."""
    label: Any = None
    """The true answer; null where there is none of this form."""
    right_before: bool | None = None
    """Whether the answer before was right, for captions and images."""
    right_after: bool | None = None
    """Whether the answer after is."""
    input: Any = None
    """Input of the model: a text, or a list of two; for images and sounds their size. Cut at 2,000 characters."""


class Goal(Document):
    """A goal of the recipe and its measured value."""

    goal: str | None = None
    """Its key in the recipe, such as `max_drop`."""
    variant: str | None = None
    """The variant that it limits (`goals.variants`); absent: what is served."""
    over: str | None = None
    """For min_speedup of a variant: the variant that it refers to; absent: the baseline in torch."""
    limit: Number | None = None
    """The limit in the recipe."""
    value: Number | None = None
    """The measured value; null if it was not measured."""
    met: bool | None = None
    """The verdict; null if the value was not measured, or if a model that knows nothing would meet the goal too."""
    at: str | None = None
    """Backend, engine, percentile and shape of the value."""
    low: Number | None = None
    """Lower end of the 95 % interval: of paired rows for max_drop, over turns for ratios and medians of time."""
    high: Number | None = None
    """Its upper end."""
    reason: str | None = None
    """Why a goal was missed or not judged."""
    busy: bool | None = None
    """Only where it is true: not judged, because the machine was busy (exit status 4)."""
    judged_at: str | None = None
    """For max_latency_ms: engine or server, whose figure is `value`."""
    engine_ms: Number | None = None
    """For max_latency_ms: the percentile in the engine, ms; null if it was not measured."""
    server_ms: Number | None = None
    """For max_latency_ms: the percentile of requests to the Triton server, ms; null if it was not measured."""


class Contents(Document):
    """The contents of report.json."""

    schema_: int = Field(SCHEMA, alias="schema")
    """Version of this layout: 1."""
    name: str | None = None
    """`name` of the recipe."""
    task: str | None = None
    """`model.task` of the recipe."""
    created: str | None = None
    """When the run finished: ISO 8601, UTC. Like `compress` absent in runs of a version that did not write it."""
    compress: str | None = None
    """Version of compress that finished the run: `compress --version`."""
    environment: Environment = Environment()
    """The machine and its libraries."""
    metric: JudgedMetric = JudgedMetric()
    """The primary metric."""
    baseline: str | None = None
    """Id of the variant that all others are compared with."""
    target: Target = Target()
    """`target` of the recipe."""
    variants: tuple[Variant, ...] = ()
    """Every checkpoint, in the order of the run."""
    bandwidth_bytes_per_s: Number | None = None
    """Bytes per second that the machine reads from memory; null without engines that answer."""
    stages: tuple[Stage, ...] = ()
    """The steps of the run."""
    triton: Triton = Triton()
    """Models that Triton serves."""
    flips: int | None = None
    """Lines of `flips.jsonl`: predictions that changed between two backends; null without that file."""
    warnings: tuple[str, ...] = ()
    """Warnings of the run."""
    integrity: Integrity = Integrity()
    """Digests of the files of the run."""
    recipe: str | None = None
    """The resolved recipe, YAML."""
    commands: tuple[str, ...] = ()
    """Commands that repeat, verify, time and serve this run."""
    evaluation_rows: EvaluationRows = EvaluationRows()
    """Rows that train and evaluation had in common; absent in runs of a version that did not write it."""
    data: tuple[Split, ...] = ()
    """Rows of each split; absent in the same cases."""
    timings: Timings | None = None
    """How reliable the latencies are. Only if the machine was watched."""
    windows: Windows | None = None
    """Only where long texts are read in windows."""
    served: Served | None = None
    """The served configuration, by which goals are judged; null if no engine was built."""
    cascade: Cascade | None = None
    """The cascade and its certificate, as cascade.json holds them; absent without the stage."""
    classes: Classes | None = None
    """Figures of every class; absent without classes."""
    flipped_rows: tuple[Flip, ...] = ()
    """Rows whose answer changed, up to 60."""
    goals: tuple[Goal, ...] = ()
    """The goals of the recipe."""
    findings: tuple[Goal, ...] = ()
    """Judgements without a goal in the recipe: `int8_faster`. They count as no missed goal."""
