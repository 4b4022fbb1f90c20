"""Times of several runs: every configuration with its metric, the front of each run, and the joint one.

Times of different runs were not measured in turns. No figure here divides the time of one run by the time of another: a speed-up is against
the torch reference of its own run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from compress.compare.sides import Side
from compress.report import goals
from compress.report.charts import scatter
from compress.report.model.contents import Contents
from compress.report.sections import accuracy
from foundation.core.engines import REFERENCE
from foundation.measure.fastest import NAMES
from foundation.measure.turns import ratio

NOT_IN_TURNS = (
    "The times of different runs were not measured in turns: each run was timed at another moment, perhaps next to other work. "
    "Speed-ups are against the torch reference of the same run"
)
"""Note next to every figure that compares times."""
TIMES = ("p50_ms", "p90_ms", "p99_ms", "throughput_per_s")


def shapes_of(sides: Sequence[Side]) -> list[goals.Shape]:
    """Returns the shapes that any run was timed at, from small to large."""
    return sorted({shape for side in sides for shape in accuracy.shapes_of(side.report)}, key=lambda shape: (shape[0], shape[1] or 0))


def points(sides: Sequence[Side], shape: goals.Shape) -> list[tuple[dict[str, object], scatter.Point]]:
    """Returns the configurations of all runs at one shape, and their points, whose series are the numbers of the runs from 1."""
    return [pair for number, side in enumerate(sides, 1) for pair in _of_run(side, shape, number)]


def configurations(sides: Sequence[Side]) -> list[dict[str, object]]:
    """Returns every configuration with a measured time and metric, at every shape, and whether it is on the front of its run, and on that
    of all runs. There is no joint front of runs with different metrics."""
    found: list[dict[str, object]] = []
    for shape in shapes_of(sides):
        pairs = points(sides, shape)
        joint = front([point for _, point in pairs], sides) if one_metric(sides) else []
        for entry, point in pairs:
            own = front([other for _, other in pairs if other.series == point.series], sides)
            found.append({**entry, "front": point in own, "joint_front": point in joint})
    return found


def front(shown: Sequence[scatter.Point], sides: Sequence[Side]) -> list[scatter.Point]:
    """Returns the Pareto front of points."""
    return scatter.pareto(shown, is_higher_better(sides))


def is_higher_better(sides: Sequence[Side]) -> bool:
    """Whether a higher value of the primary metric is better."""
    return sides[0].report.metric.higher_is_better is not False


def one_metric(sides: Sequence[Side]) -> bool:
    """Whether all runs have the same primary metric."""
    return len({side.metric_name for side in sides}) == 1


def _of_run(side: Side, shape: goals.Shape, number: int) -> Iterator[tuple[dict[str, object], scatter.Point]]:
    for variant, row, cell in accuracy.configurations_of(side.report, shape):
        slow = goals.reference_cells(side.report, row.device).get(shape)
        point = accuracy.point_of(side.report, variant, row, cell)
        entry = {
            "run": side.key,
            "variant": variant.id,
            **{key: getattr(row, key) for key in (*NAMES[1:], "device", "threads", "batch", "sequence", *TIMES)},
            "speedup": ratio(slow, row).value if slow else None,
            "busy": bool(row.busy or (slow is not None and slow.busy)),
            **{key: getattr(cell, key) for key in ("value", "low", "high", "n")},
            "role": point.role,
        }
        yield entry, _of_series(point, side.key, number)


def _of_series(point: scatter.Point, key: str, number: int) -> scatter.Point:
    """Returns a point with the letter of its run."""
    short = f"{key}: {point.short}" if point.short else ""
    return replace(point, series=number, label=f"{key}: {point.label}", short=short, title=f"{key}: {point.title}")


def references(report: Contents) -> dict[goals.Shape, float | None]:
    """Returns the median time of the baseline in torch, fp32, by shape, ms: what the speed-ups of a run are against."""
    devices = {row.device for row in goals.baseline(report).latency if row.engine == REFERENCE and row.p50_ms}
    return {shape: row.p50_ms for device in devices for shape, row in goals.reference_cells(report, device).items()}
