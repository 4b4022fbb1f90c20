"""The model card of a published folder: README.md with front matter for the Hub, from the report of the run.

    front matter   licence, base model, task, library, tags, and the metric as `model-index` where it was measured in this format
    body           what was done, figures with intervals, latency with hardware, share of int8, and lines that load the folder

A card may be public: of paths of the machine only the last part is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import yaml

from compress.report import goals, phrases
from compress.report.decision import decision_of
from compress.report.model.contents import Contents
from compress.report.model.variant import Latency, Variant
from compress.report.summary import missed_goals
from export.folders.source import PLACE, Written
from export.folders.table import Format
from foundation.artifacts.document import Figures
from foundation.artifacts.figures import Accuracy, Drop
from foundation.core.engines import ENGINES, REFERENCE
from foundation.labels.facts import Facts

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard

FILE, UNKNOWN = "README.md", "unknown"
"""Name of the card, and the licence of the Hub's list that stands for none known."""
NOT_MEASURED = "-"
RESOLVED = ("scheme", "mode", "weight_bits", "calibrator", "rows")
"""Figures of the stage `quantize` that a card names."""


@dataclass(frozen=True)
class Origin:
    """Where the model comes from."""

    licence: str
    """Id of the Hub's list of licences; `UNKNOWN` if nobody named one."""
    base: str | None
    """Id of the base model on the Hub; None where it has none."""
    source: str
    """The base model in words."""
    dataset: str | None
    """Id of the data set on the Hub; None for local data."""
    steps: tuple[tuple[str, str, Mapping[str, object]], ...]
    """The stages that led to the variant: id, kind, and settings other than the defaults."""


@dataclass(frozen=True)
class Published:
    """Everything that a card says."""

    report: Contents
    variant: Variant
    facts: Facts
    form: Format
    written: Written
    origin: Origin
    name: str = PLACE
    """What snippets load: an id of the Hub, or a placeholder."""

    @property
    def engine(self) -> str | None:
        """Where the figures that hold for the folder were measured; None if the format was not measured."""
        built = self.written.built
        return built.engine.engine if built is not None else REFERENCE if self.written.as_torch else None

    @property
    def accuracy(self) -> Accuracy:
        """The primary metric in `engine`; without a value where the format was not measured."""
        return self.variant.accuracy.get(self.engine or "", Accuracy())

    @property
    def precision(self) -> str:
        """Precision of the weights."""
        built = self.written.built
        return built.build.precision if built is not None else self.variant.precision or "unknown precision"


def card(published: Published) -> ModelCard:
    """Returns the card; the front matter is what `huggingface_hub.ModelCardData` makes of it."""
    from huggingface_hub import ModelCard, ModelCardData

    origin, written = published.origin, published.written
    results = _results(published)
    data = ModelCardData(
        license=origin.licence,
        base_model=origin.base,
        base_model_relation="quantized" if origin.base is not None and goals.is_quantized(published.variant) else None,
        datasets=origin.dataset,
        library_name=written.library or published.form.library,
        pipeline_tag=published.facts.pipeline_tag,
        tags=[*published.form.tags, published.precision],
        model_name=f"{published.report.name} {published.variant.id}" if results else None,
        eval_results=results or None,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(_body(published)).replace(PLACE, published.name) + "\n")


def _results(published: Published) -> list[EvalResult]:
    """Returns the metric for the front matter; empty where it was not measured in this format."""
    from huggingface_hub import EvalResult

    value, metric = published.accuracy.value, published.report.metric.name
    if value is None:
        return []
    dataset = published.origin.dataset
    return [
        EvalResult(
            task_type=published.facts.pipeline_tag,
            dataset_type=dataset or "custom",
            dataset_name=dataset or "the evaluation rows of the run",
            metric_type=metric,
            metric_value=value,
            metric_name=f"{metric}, {phrases.engine_name(published.engine)}",
        )
    ]


def _body(published: Published) -> Iterator[str]:
    variant, report = published.variant, published.report
    yield f"# {report.name}: {variant.id}, {published.precision}"
    yield ""
    yield f"{published.form.title} files of the variant `{variant.id}` of the run `{report.name}`, for the task {report.task}."
    yield from (f"\n{remark}" for remark in published.written.remarks)
    if variant.id == decision_of(report).variant.id:
        yield from (f"\nThe run {line}." for line in missed_goals(report))
    yield from ("", "## What was done", "")
    yield from _steps(published)
    yield from ("", "## Accuracy", "")
    yield from _accuracies(published)
    yield from ("", "## Latency", "")
    yield from _latencies(published)
    yield from ("", "## Integers and size", "")
    yield from _integers(published)
    yield from ("", "## Load it", "")
    for snippet in published.written.snippets:
        yield f"{snippet.title}:\n\n```{snippet.language}\n{snippet.code}\n```\n"
    yield from ("## Licence and origin", "")
    yield from _origin(published)


def _steps(published: Published) -> Iterator[str]:
    yield f"1. Base model: {published.origin.source}."
    for place, (name, kind, settings) in enumerate(published.origin.steps, start=2):
        said = "" if name == kind else f" ({kind})"
        own = published.variant.quantization if name == published.variant.id else None
        yield f"{place}. `{name}`{said}: {_settings(settings)}{_resolved(own or {})}"
    yield ""
    version, finished = published.report.compress or "of an unknown version", published.report.created or "at an unknown time"
    yield f"compress {version} made it, finished {finished}."
    shape = (
        f"{phrases.count(published.variant.parameters)} parameters, {phrases.count(published.variant.macs)} multiply-accumulates for a row."
    )
    yield f"It has {shape}"


def _settings(settings: Mapping[str, object]) -> str:
    if not settings:
        return "default settings."
    text = yaml.safe_dump(
        _without_paths(dict(settings)), default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True
    ).strip()
    return f"`{text}`; other settings are the defaults."


def _resolved(figures: Figures) -> str:
    """Returns what a stage that quantizes chose where its settings leave the choice, and its scheme."""
    known = {name: figures[name] for name in RESOLVED if figures.get(name) is not None}
    return f" It used `{yaml.safe_dump(known, default_flow_style=True, sort_keys=False, width=10_000).strip()}`." if known else ""


def _without_paths(value: object) -> Any:
    """Returns settings in which an absolute path is only its last part."""
    if isinstance(value, Mapping):
        return {key: _without_paths(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(one) for one in value]
    return PurePath(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _accuracies(published: Published) -> Iterator[str]:
    report, variant = published.report, published.variant
    baseline, metric = goals.baseline(report), report.metric.name
    yield f"| model | computed by | {metric} | 95 % interval | {published.facts.counts} | change from the baseline | 95 % interval |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    rows = [(baseline, REFERENCE)] if baseline.id != variant.id or published.engine != REFERENCE else []
    shown = published.engine or REFERENCE
    for one, engine in [*rows, (variant, shown)]:
        yield _row(one, engine, metric, baseline)
    others = {name: value for name, value in variant.metrics.get(shown, {}).items() if name != metric and value is not None}
    if others:
        listed = ", ".join(f"{name} {phrases.figure(value, name)}" for name, value in others.items())
        yield f"\nOther metrics of this model: {listed}."
    if published.engine is None:
        where = phrases.engine_name(REFERENCE)
        yield f"\nThe figures of `{variant.id}` are of {where}; this format was not measured."


def _row(variant: Variant, engine: str, metric: str, baseline: Variant) -> str:
    cell, drop = variant.accuracy.get(engine, Accuracy()), variant.drops.get(engine, Drop())
    changed = None if variant.id == baseline.id and engine == REFERENCE else phrases.change(drop.difference, metric)
    cells = [
        f"`{variant.id}`",
        phrases.engine_name(engine),
        phrases.figure(cell.value, metric),
        phrases.interval(cell.low, cell.high, metric) or cell.interval_reason or NOT_MEASURED,
        phrases.rows(cell),
        changed or NOT_MEASURED,
        phrases.change_interval(drop.low, drop.high, metric) or NOT_MEASURED if changed else NOT_MEASURED,
    ]
    return f"| {' | '.join(cells)} |"


def _latencies(published: Published) -> Iterator[str]:
    rows = [row for row in published.variant.latency if row.p50_ms is not None and _is_of(published, row)]
    if not rows:
        yield "Not measured in this format."
        return
    yield "| batch | tokens | threads | median, ms | 95 % interval | 90th percentile, ms | rows per second |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        spread = (
            None
            if row.interval_ms is None
            else f"{phrases.milliseconds(row.interval_ms[0])} to {phrases.milliseconds(row.interval_ms[-1])}"
        )
        trust = " (the machine was busy)" if row.busy else ""
        cells = [
            str(row.batch),
            NOT_MEASURED if row.sequence is None else str(row.sequence),
            NOT_MEASURED if row.threads is None else str(row.threads),
            f"{phrases.milliseconds(row.p50_ms)}{trust}",
            spread or NOT_MEASURED,
            phrases.milliseconds(row.p90_ms),
            phrases.rate(row.throughput_per_s),
        ]
        yield f"| {' | '.join(cells)} |"
    first = rows[0]
    yield f"\n{phrases.engine_name(first.engine)}, {first.mode} shapes, on {_machine(published, first)}."


def _is_of(published: Published, row: Latency) -> bool:
    """Whether a latency is of exactly what the folder holds."""
    built = published.written.built
    if built is None:
        return published.written.as_torch and row.engine == REFERENCE and not goals.is_quantized(published.variant)
    same = (row.engine, row.mode, row.precision) == (built.engine.engine, built.engine.mode, built.build.precision)
    return same and row.float_precision in (None, built.float_precision)


def _machine(published: Published, row: Latency) -> str:
    environment = published.report.environment
    features = f" with {', '.join(environment.cpu_features)}" if environment.cpu_features else ""
    memory = "" if environment.memory_bytes is None else f", {phrases.size(environment.memory_bytes)} of memory"
    device = f"{environment.cpu or 'an unknown processor'}{features}, {environment.cores or 'unknown'} cores{memory}"
    if row.device not in (None, "cpu"):
        device = ", ".join(environment.gpus or ("an unknown GPU",))
    engine = ENGINES.get(row.engine or "")
    library = "" if engine is None else engine.library
    version = environment.versions.get(library)
    return device if version is None else f"{device}; {library} {version}"


def _integers(published: Published) -> Iterator[str]:
    built, variant = published.written.built, published.variant
    if built is None:
        place = phrases.built_in(variant)
        if goals.is_quantized(variant) and place:
            yield f"In the run, {phrases.share(variant.int8_share)} of the multiply-accumulates of weight matrices ran in int8 ({place})."
            yield "What runs in integers here depends on the program that loads the folder."
        else:
            yield "The model is float."
        yield f"The checkpoint has {phrases.size(variant.checkpoint_bytes)}."
        return
    engine = built.engine
    name = phrases.engine_name(engine.engine)
    reason = f" ({engine.int8_share_reason})" if engine.int8_share is None and engine.int8_share_reason else ""
    yield f"- {phrases.share(engine.int8_share)} of the multiply-accumulates of weight matrices run in int8 on {name}{reason};"
    yield f"  with both products of attention {phrases.share(engine.int8_share_all)}."
    if engine.int4_share:
        yield f"- {phrases.share(engine.int4_share)} of them read int4 weights."
    size = phrases.size(engine.size_bytes)
    yield f"- {phrases.share(engine.integer_weights)} of the weights are stored as integers; the files have {size}."


def _origin(published: Published) -> Iterator[str]:
    origin = published.origin
    yield f"- Base model: {origin.source}."
    if origin.licence == UNKNOWN:
        yield "- Licence: not known to the run. Find out the licence of the base model and of the data before you share this folder."
    else:
        yield f"- Licence: {origin.licence}."
    yield f"- Data: {origin.dataset or 'local files'}."
