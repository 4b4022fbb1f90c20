"""The baseline of a search: the stages that all candidates share, run once, its engines timed, its metric on selection rows.

Everything that candidates are compared with comes from here: the metric before compression, torch in float32 (to which `goals.min_speedup`
refers), and the float model in every engine, to which the latency of an untrained shape is related.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from compress.pipeline import run
from compress.recipe import Recipe
from compress.search.setup import TRIALS, Setup
from export.export import Export
from foundation.artifacts.run_folder import open_run
from foundation.artifacts.store import share, waited_for
from foundation.artifacts.timed import Timing, read_latency
from foundation.core.engines import REFERENCE
from foundation.measure.fastest import reference_rows
from foundation.measure.latency import Shape

BASELINE = "baseline"


@dataclass(frozen=True)
class Baseline:
    """The baseline that candidates are compared with."""

    checkpoint: Path
    metric: float
    """On selection rows, in torch."""
    in_torch_ms: dict[Shape, float]
    """Median latency in torch, fp32, eager; empty without export."""
    shared_ms: dict[tuple[str, Shape], float]
    """Median latency of `checkpoint`, the last model of the shared stages, in the recommended float mode of each engine."""
    first_ms: dict[tuple[str, Shape], float]
    """The same for the baseline of the report, the first model: every run times it next to what it makes."""


def recipe_of_baseline(setup: Setup) -> Recipe:
    """Returns the recipe of the stages that all candidates share, with the engines of the baseline."""
    exports = [_alone(stage) for stage in setup.recipe.stages if isinstance(stage, Export)]
    return setup.recipe.model_copy(update={"stages": (*setup.shared, *exports), "search": None})


def _alone(export: Export) -> Export:
    """Returns the stage without what it takes from other stages."""
    generation = export.generation.model_copy(update={"draft": None})
    return export.model_copy(update={"generation": generation, "compressed_tensors": False, "tensor_parallel": 1})


def baseline(setup: Setup) -> Baseline:
    """Runs the baseline, or finds it finished; waits where another process is at it."""
    folder = setup.folder / TRIALS / BASELINE
    share(folder, setup.folder)
    with waited_for(folder.with_name(f".{BASELINE}.lock")):
        run(recipe_of_baseline(setup), folder, progress=setup.progress_of_run(), judge="selection")
    finished = open_run(folder)
    # the last variant: shared stages may have made the model smaller, and candidates start from there
    name, made = list(finished.variants.items())[-1]
    first = finished.baseline
    measured = finished.of_kind("latency")
    rows = read_latency(measured.path) if measured else []
    return Baseline(
        checkpoint=made.path,
        metric=setup.metric_of(finished, first),
        in_torch_ms={shape: row.median_ms for shape, row in reference_rows(rows, first).items()},
        shared_ms=float_times(row for row in rows if row.variant == name),
        first_ms=float_times(row for row in rows if row.variant == first),
    )


def float_times(rows: Iterable[Timing]) -> dict[tuple[str, Shape], float]:
    """Returns the median latency of a variant in fp32 by engine, other than torch, and shape: the median of the first row, the recommended
    mode.

    Args:
        rows: The rows of the variant.
    """
    found: dict[tuple[str, Shape], float] = {}
    for row in rows:
        if row.engine != REFERENCE and row.precision == "fp32":
            found.setdefault((str(row.engine), row.shape), row.median_ms)
    return found
