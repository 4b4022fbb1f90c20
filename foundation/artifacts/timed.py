"""`latency.json` and `generation.json`: results of the step `latency`. report.json holds the same rows, by variant."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from foundation.artifacts.artifact import DamagedArtifact, read_json, write_json
from foundation.artifacts.document import Document, Number, OfVariant, read
from foundation.artifacts.figures import Percentiles
from foundation.core.shown import reason

LATENCY, GENERATION = "latency.json", "generation.json"


class Timing(Document):
    """The latency of one configuration of an engine, at one shape."""

    engine: str | None = None
    """Engine that was timed."""
    mode: str | None = None
    """`static` or `dynamic` shapes; `eager` or `compiled` for torch."""
    precision: str | None = None
    """Precision of the build."""
    device: str | None = None
    """`cpu` or `cuda`, as the engine reports it."""
    provider: str | None = None
    """What ran the graph there, such as `CPUExecutionProvider`, as the engine reports it."""
    float_precision: str | None = None
    """Precision of the float layers of an int8 build."""
    threads: int | None = None
    """Threads of the engine."""
    batch: int | None = None
    """Batch size."""
    sequence: int | None = None
    """Sequence length in tokens; null for images."""
    p50_ms: Number | None = None
    """Median of the samples, milliseconds."""
    p90_ms: Number | None = None
    """90th percentile, milliseconds."""
    p99_ms: Number | None = None
    """99th percentile; null below 200 samples."""
    throughput_per_s: Number | None = None
    """Rows per second: batch * n / sum of the samples."""
    n: int | None = None
    """Number of samples."""
    quantiles_ms: tuple[Number | None, ...] = ()
    """Quantiles of the samples at 0, 5, ... 100 %, milliseconds."""
    peak_memory_bytes: int | None = None
    """Peak memory of the engine's process."""
    turns_ms: tuple[Number | None, ...] = ()
    """Median of each turn; null for a turn without one. Ratios are formed within a turn."""
    interval_ms: tuple[Number, ...] | None = None
    """95 % interval of the median, by Student's t over the turns; of the one turn's order statistics where there is only one."""
    between_turns: Number | None = None
    """Standard deviation of the turns' medians, relative; null for one turn."""
    within_turns: Number | None = None
    """Interquartile range within turns, relative to their medians."""
    disturbed: Number | None = None
    """Share of the samples taken during which threads waited for a core; null if the kernel does not report it."""
    estimated: bool | None = None
    """Whether times follow from processor time, as too few samples were undisturbed."""
    busy: bool | None = None
    """Whether other work spoiled the figure: goals that depend on it are not judged."""
    reason: str | None = None
    """Only where there is no time: why."""

    @property
    def shape(self) -> tuple[int, int | None]:
        """Batch and sequence length."""
        return self.batch or 1, self.sequence

    @property
    def median_ms(self) -> float:
        """The median of an engine that was timed."""
        assert self.p50_ms is not None, f"{self.engine} was not timed"
        return float(self.p50_ms)

    def percentile_ms(self, percentile: int) -> float | None:
        """Returns the 50th, 90th or 99th percentile; None where it was not measured."""
        return {50: self.p50_ms, 90: self.p90_ms, 99: self.p99_ms}[percentile]


class VariantTiming(Timing, OfVariant):
    """A row of latency.json."""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The configuration: variant, precision, float_precision, engine and mode."""
        return self.variant, str(self.precision), str(self.float_precision), str(self.engine), str(self.mode)


def read_latency(folder: Path) -> list[VariantTiming]:
    """Returns the rows of latency.json in a folder.

    Raises:
        DamagedArtifact: The file is missing, or is no such document.
    """
    rows = read_json(folder / LATENCY)
    try:
        return [VariantTiming.model_validate(row) for row in rows]
    except (TypeError, ValidationError) as error:
        raise DamagedArtifact(f"{folder / LATENCY}", f"damaged ({reason(error)})") from error


def write_latency(folder: Path, rows: Iterable[VariantTiming]) -> None:
    """Writes latency.json."""
    write_json(folder / LATENCY, [row.written() for row in rows])


class Speed(Document):
    """The speed of an engine under one load."""

    threads: int | None = None
    """Threads of the engine."""
    prompt_tokens: int = 0
    """Tokens of each prompt of this load."""
    streams: int = 1
    """Prompts that were asked at once."""
    tokens: int | None = None
    """Tokens of each answer."""
    first_token_ms: Percentiles = Percentiles()
    """Time to the first token."""
    token_ms: Percentiles = Percentiles()
    """Time between two tokens of a stream."""
    tokens_per_s: Number = 0.0
    """Tokens per second of all streams together."""
    n: int | None = None
    """Number of times between tokens."""
    bandwidth_share: Number | None = None
    """Share of the read bandwidth that one stream uses; null for several."""
    weight_bytes: int | None = None
    """Bytes of the weights that are read for each token."""
    cache_bytes_per_token: Number | None = None
    """Bytes of the keys and values of one token."""
    peak_memory_bytes: int | None = None
    """Peak memory of the engine's process."""


class ProposedSpeed(Document):
    """The speed with proposed tokens under one load."""

    prompt_tokens: int | None = None
    """Tokens of each prompt, from evaluation rows."""
    streams: int = 1
    """Prompts that were asked at once."""
    tokens: int | None = None
    """Tokens of each answer."""
    tokens_per_s: Number = 0.0
    """Tokens per second of all streams, with proposals."""
    tokens_per_s_alone: Number = 0.0
    """The same for the same prompts, without proposals."""
    proposed: int = 0
    """Tokens that were proposed in this measurement."""
    accepted: int = 0
    """Proposed tokens that were accepted."""
    tokens_per_step: Number = 0.0
    """Tokens / passes of the model."""
    n: int | None = None
    """Number of answers."""
    peak_memory_bytes: int | None = None
    """Peak memory of the process, with proposals."""


class Answering(OfVariant):
    """The engine of a row of generation.json."""

    cache_precision: str | None = None
    """Precision of keys and values in the cache."""
    engine: str = ""
    """An engine that answers prompts."""
    mode: str = ""
    """Its mode."""
    precision: str = ""
    """Precision of its build."""
    float_precision: str = ""
    """Precision of the layers that are not quantized."""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The configuration: variant, precision, float_precision, engine and mode."""
        return self.variant, self.precision, self.float_precision, self.engine, self.mode


class VariantSpeed(Speed, Answering):
    """The speed of an engine under one load."""

    @property
    def speed(self) -> Speed:
        """The row without its engine, as report.json lists it below the engine."""
        return Speed.model_validate(_without_engine(self))


class VariantProposedSpeed(ProposedSpeed, Answering):
    """The speed of an engine under one load, with proposed tokens."""

    device: str | None = None
    """Where the engine ran."""

    @property
    def speed(self) -> ProposedSpeed:
        """The row without its engine, as report.json lists it below the engine."""
        return ProposedSpeed.model_validate(_without_engine(self))


def _without_engine(row: Document) -> dict[str, object]:
    return {key: value for key, value in row.written().items() if key not in Answering.model_fields and key != "device"}


class Generated(Document):
    """The contents of generation.json."""

    bandwidth_bytes_per_s: Number | None = None
    """Bytes per second that the machine reads from memory."""
    rows: tuple[VariantSpeed, ...] = ()
    """The speed of each engine under each load."""
    proposals: tuple[VariantProposedSpeed, ...] = ()
    """The same with proposed tokens, for engines that take them."""


def read_generated(folder: Path) -> Generated:
    """Returns the contents of generation.json in a folder; empty where no engine answers prompts.

    Raises:
        DamagedArtifact: The file is no such document.
    """
    return read(Generated, folder / GENERATION) if (folder / GENERATION).exists() else Generated()


def write_generated(folder: Path, generated: Generated) -> None:
    """Writes generation.json."""
    write_json(folder / GENERATION, generated.written())
