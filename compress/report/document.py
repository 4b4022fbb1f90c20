"""`report.json` as typed values, for notebooks and scripts: `Report.load("runs/sst2-minilm")`.

Keys of `report.json` are only ever added, so every file of schema 1 can be read. `Report.data` holds all keys, including those without an
attribute here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from foundation.core.errors import InputError
from foundation.core.files import local, read_plain
from foundation.core.shown import pasted, reason, shown

if TYPE_CHECKING:  # pydantic, which the Python API is imported without
    from compress.report.decision import Decision
    from compress.report.model.contents import Contents
    from compress.report.model.variant import Variant as Entry
    from foundation.artifacts.document import Document

FILE = "report.json"


@dataclass(frozen=True)
class Accuracy:
    """The primary metric of one variant in one backend, on the whole evaluation split."""

    variant: str
    """Id of the variant."""
    backend: str
    """An engine (`compress list engines`), or a server."""
    value: float | None
    """The metric; None if it was not measured."""
    low: float | None = None
    """Lower end of the 95 % interval."""
    high: float | None = None
    """Upper end of the 95 % interval."""
    n: int | None = None
    """Number of evaluated rows (tokens for generation)."""
    reason: str | None = None
    """Why it was not measured."""
    groups: int | None = None
    """Groups of rows that the interval is drawn over."""
    interval_reason: str | None = None
    """Why there is no interval."""


@dataclass(frozen=True)
class Latency:
    """The latency of one variant in one configuration of an engine, at one shape."""

    variant: str
    """Id of the variant."""
    engine: str
    """An engine (`compress list engines`)."""
    mode: str
    """How the engine runs: eager, compiled, dynamic or static."""
    precision: str
    """fp32, bf16, fp16, or the precision of a scheme (`SCHEMES` in `foundation.schemes.table`)."""
    float_precision: str
    """Precision of the layers that are not quantized."""
    device: str
    """cpu or cuda."""
    threads: int | None
    """Threads of the engine."""
    batch: int
    """Batch size."""
    sequence: int | None
    """Sequence length in tokens; None for images."""
    p50_ms: float
    """Median in milliseconds."""
    p90_ms: float
    """90th percentile in milliseconds."""
    p99_ms: float | None
    """99th percentile in milliseconds; None below 200 samples."""
    throughput_per_s: float
    """Rows per second."""
    n: int
    """Number of samples."""


@dataclass(frozen=True)
class Goal:
    """A goal of the recipe and its measured value."""

    goal: str
    """Its key in the recipe, such as `max_drop`."""
    limit: float
    """The limit in the recipe."""
    value: float | None
    """The measured value; None if it was not measured."""
    met: bool | None
    """Whether the goal was met; None if its value was not measured, or would be met by a model that knows nothing."""
    at: str | None = None
    """Where it was measured: engine and shape."""
    low: float | None = None
    """Lower end of the 95 % interval of the value."""
    high: float | None = None
    """Upper end of the 95 % interval of the value."""
    reason: str | None = None
    """Why it was missed or could not be judged."""


@dataclass(frozen=True)
class Variant:
    """One checkpoint of the run."""

    id: str
    """Id of the stage that made it."""
    stages: tuple[str, ...]
    """The stages that led to it, its own last."""
    parameters: int
    """Number of parameters."""
    macs: int
    """Multiply-accumulates for one row of the largest shape."""
    size_bytes: int | None
    """Deployed size, the files that the first engine loads; None if it was not exported."""
    checkpoint_bytes: int
    """Size of its checkpoint."""
    precision: str | None
    """Precision of its engines; None if it was not exported."""
    int8_share: float | None
    """Share of the MACs of weight GEMMs that the first engine runs in int8, from its execution graph; None if unknown."""
    accuracy: Mapping[str, Accuracy]
    """The primary metric by backend."""
    latency: tuple[Latency, ...]
    """Measured latencies; the recommended mode of a shape comes first."""


_Row = TypeVar("_Row", Accuracy, Latency, Goal, Variant)


class Report:
    """The report of a finished run.

    Args:
        data: The contents of `report.json`.
        folder: The run folder.
    """

    def __init__(self, data: Mapping[str, Any], folder: Path) -> None:
        self.data = data
        self.folder = folder

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a report.

        Args:
            path: A run folder, or its `report.json`.

        Raises:
            InputError: There is no report, or it does not have schema 1.
        """
        from pydantic import ValidationError

        from compress.report.model.contents import SCHEMA

        file = local(path, "report")
        file = file / FILE if file.is_dir() else file
        try:
            data = json.loads(read_plain(file, 2**30).decode("utf-8"))
        except InputError:
            raise
        except OSError as error:
            raise InputError(
                f"{file}", f"no report ({error.strerror})", remedy="give a run folder that `compress run` has finished"
            ) from error
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{file}", f"damaged ({reason(error)})", remedy=f"write it again with `{pasted('compress', 'report', file.parent)}`"
            ) from error
        given = data.get("schema") if isinstance(data, dict) else None
        if given != SCHEMA:
            raise InputError(f"{file}", f"schema {shown(given)} given", f"{SCHEMA} is allowed", f"give a {FILE} written by this version")
        report = cls(data, file.parent)
        try:
            _ = report.contents
        except ValidationError as error:
            again = pasted("compress", "report", file.parent)
            raise InputError(f"{file}", f"damaged ({reason(error)})", remedy=f"write it again with `{again}`") from error
        return report

    @cached_property
    def contents(self) -> Contents:
        """All of it with attributes; `data` is the same as plain data."""
        from compress.report.model.contents import Contents

        return Contents.model_validate(self.data)

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return str(self.contents.name)

    @property
    def task(self) -> str:
        """Task of the model."""
        return str(self.contents.task)

    @property
    def metric(self) -> str:
        """Name of the primary metric, such as accuracy or perplexity."""
        return self.contents.metric.name

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the metric is better."""
        return bool(self.contents.metric.higher_is_better)

    @property
    def html(self) -> Path:
        """The HTML page."""
        return self.folder / "report.html"

    @cached_property
    def variants(self) -> Mapping[str, Variant]:
        """Every checkpoint by id, in the order of the run."""
        return {entry.id: _variant(entry) for entry in self.contents.variants}

    @property
    def baseline(self) -> Variant:
        """The variant that all others are compared with."""
        return self.variants[str(self.contents.baseline)]

    @property
    def last(self) -> Variant:
        """The last variant of the run; goals are judged on what is served, see `decision`."""
        return self.variants[self.contents.variants[-1].id]

    @property
    def latency(self) -> tuple[Latency, ...]:
        """The latencies of all variants."""
        return tuple(row for variant in self.variants.values() for row in variant.latency)

    @cached_property
    def decision(self) -> Decision:
        """The served configuration, and every figure that it is judged on."""
        from compress.report.decision import decision_of

        return decision_of(self.contents)

    @property
    def drop(self) -> float | None:
        """Loss of the metric: baseline in torch minus what is served in the last backend; relative for perplexity; None if unknown."""
        return self.decision.cost.value

    @property
    def speedup(self) -> float | None:
        """Speed-up over torch fp32 at the worst shape; None if it was not measured."""
        return self.decision.speedup.value

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The judged goals of the recipe."""
        return tuple(_known(Goal, entry) for entry in self.contents.goals)

    @property
    def missed(self) -> tuple[Goal, ...]:
        """The goals that were judged and missed."""
        return tuple(goal for goal in self.goals if goal.met is False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the run."""
        return self.contents.warnings

    def __repr__(self) -> str:
        """The summary of the run and the table of accuracies, as plain text."""
        from compress.report.summary import summary

        return "\n".join([f"{self.name}: {self.task}", *summary(self.contents, self.folder), "", *self._table()])

    def _table(self) -> Iterator[str]:
        from compress.report import phrases
        from compress.report.summary import plain_text

        yield f"{'variant':<20}{'backend':<14}{self.metric:<14}{'95 % interval':<20}n"
        for variant in self.variants.values():
            for cell in variant.accuracy.values():
                value = plain_text(phrases.figure(cell.value, self.metric))
                spread = plain_text(phrases.interval(cell.low, cell.high, self.metric) or "")
                tail = f"{spread:<20}{cell.n}" if cell.value is not None else cell.reason or phrases.NO_REASON
                yield f"{variant.id:<20}{cell.backend:<14}{value:<14}{tail}"


def _variant(entry: Entry) -> Variant:
    accuracy = {backend: _known(Accuracy, cell, variant=entry.id, backend=backend) for backend, cell in entry.accuracy.items()}
    latency = tuple(_known(Latency, row, variant=entry.id) for row in entry.latency)
    return _known(Variant, entry, accuracy=accuracy, latency=latency)


def _known(kind: type[_Row], entry: Document, **more: Any) -> _Row:
    """Returns an instance of `kind` from the fields of `entry` that it has too, and from `more`."""
    names = [field.name for field in fields(kind) if field.name not in more]
    return kind(**{name: getattr(entry, name) for name in names}, **more)
