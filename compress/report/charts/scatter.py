"""Layout of the scatter plot: positions of points, whiskers, ticks and labels in pixels. The template draws them as SVG.

The latency axis is logarithmic, because ratios matter. A label takes the one of 32 places around its point that overlaps least with
markers, whiskers and the labels placed before it. A point whose name has no room gets a number, and its name is in the key below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from foundation.core.engines import ENGINES, Marker

RADIUS = 5.5
SMALLEST_STEP = 1e-300  # of an axis; rounding fails below it
NARROW = 500
"""Pixels of width below which labels leave out what the shape of the marker says."""
FREE = 30.0
"""Square pixels of other labels and markers that a name may cover."""
CHARACTER, BOLD, LINE = 7.0, 8.0, 15.0  # pixels: letter width (regular, bold) and line height of 12 px text in a wide system font
DIRECTIONS = ((1, 0), (-1, 0), (0.75, -0.75), (0.75, 0.75), (-0.75, -0.75), (-0.75, 0.75), (0, -1), (0, 1))


@dataclass(frozen=True)
class Point:
    """One measured configuration."""

    x: float
    """Latency in milliseconds, positive."""
    y: float
    """The metric."""
    low: float | None
    high: float | None
    label: str
    title: str
    engine: str
    role: str
    """`served`, `reference` or `other`; sets the colour."""
    series: int = 0
    """Number of the run that it is of, from 1, where a plot shows several; 0 elsewhere. It sets the colour, and each run has a front."""
    short: str = ""
    """The label on a narrow plot; empty: the same one."""


@dataclass(frozen=True)
class Label:
    """Text next to a point, in pixels."""

    x: float
    y: float
    text: str
    leader: str | None
    """SVG path of the line to the point, if the label is not next to it."""


@dataclass(frozen=True)
class Mark:
    """A drawn point, in pixels."""

    x: float
    y: float
    low: float | None
    high: float | None
    outline: str
    """SVG path of the marker."""
    point: Point
    label: Label | None


@dataclass(frozen=True)
class Axes:
    """Position of the axes of a chart and their tick labels, in pixels."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


@dataclass(frozen=True)
class Plot(Axes):
    """A scatter plot ready to draw, in pixels."""

    marks: list[Mark]
    front: str | None
    """SVG path of the Pareto front; None for fewer than two points."""
    fronts: list[tuple[int, str]]
    """The front of each series, where there are several."""
    key: list[tuple[int, str]]
    """The points that have a number as their label: the number and the title of the point."""


Box = tuple[float, float, float, float]


@dataclass
class _Occupied:
    """Boxes already taken on the plot: left, top, right, bottom."""

    bounds: Box
    markers: list[Box] = field(default_factory=list)
    whiskers: list[Box] = field(default_factory=list)
    labels: list[Box] = field(default_factory=list)


def scatter(
    points: Sequence[Point], width: int, height: int, tick: Callable[[float], str], *, all_labels: bool, higher_is_better: bool = True
) -> Plot | None:
    """Lays out accuracy against latency.

    Args:
        points: The measured configurations.
        width: Pixels.
        height: Pixels.
        tick: Formats a tick of the metric axis.
        all_labels: Name every point that has room for its name, or only the Pareto front, the served model and the reference. All others
            get numbers.
        higher_is_better: Direction of the metric; the better value is drawn higher either way.

    Returns:
        The layout; None without points.
    """
    if not points:
        return None
    frame, best = _Frame.of(points, width, height, higher_is_better), pareto(points, higher_is_better)
    labels, numbered = _labels(points, best, frame, all_labels, narrow=width < NARROW)
    marks = [
        Mark(
            frame.x(p.x),
            frame.y(p.y),
            None if p.low is None else frame.y(p.low),
            None if p.high is None else frame.y(p.high),
            marker(p.engine, frame.x(p.x), frame.y(p.y)),
            p,
            labels.get(id(p)),
        )
        for p in sorted(points, key=lambda p: p.role == "served")
    ]
    front = _stairs(best, frame) if len(points) > 1 else None
    return Plot(
        width,
        height,
        frame.left,
        frame.right,
        frame.top,
        frame.bottom,
        [(frame.x(value), f"{value:g}") for value in log_ticks(frame.x_low, frame.x_high, 5 if width < NARROW else 8)],
        [(frame.y(value), tick(value)) for value in linear_ticks(frame.low, frame.high, 6)],
        marks,
        front,
        [(number, _stairs(pareto(own, higher_is_better), frame)) for number, own in _by_series(points).items()],
        [(number, point.title) for number, point in enumerate(numbered, 1)],
    )


def _by_series(points: Sequence[Point]) -> dict[int, list[Point]]:
    """Returns the points of each series, where there are several."""
    numbers = sorted({point.series for point in points})
    return {number: [point for point in points if point.series == number] for number in numbers} if len(numbers) > 1 else {}


@dataclass(frozen=True)
class _Frame:
    """The rectangle of the axes in pixels, and the ranges that they show."""

    left: float
    right: float
    top: float
    bottom: float
    x_low: float
    x_high: float
    low: float
    high: float
    higher_is_better: bool

    @classmethod
    def of(cls, points: Sequence[Point], width: int, height: int, higher_is_better: bool) -> _Frame:
        """Returns the axes that show all points with their intervals, and some room around them."""
        x_low, x_high = min(p.x for p in points) / 1.35, max(p.x for p in points) * 1.35
        low, high = min(_low(p) for p in points), max(_high(p) for p in points)
        pad = max((high - low) * 0.08, 1e-4)
        return cls(52.0, width - 14.0, 14.0, height - 42.0, x_low, x_high, low - pad, high + pad, higher_is_better)

    def x(self, value: float) -> float:
        """Returns the position of a latency, in pixels from the left; the axis is logarithmic."""
        return self.left + (self.right - self.left) * math.log(value / self.x_low) / math.log(self.x_high / self.x_low)

    def y(self, value: float) -> float:
        """Returns the position of a metric value, in pixels from the top; better is higher."""
        share = (value - self.low) / (self.high - self.low)
        return self.bottom - (self.bottom - self.top) * (share if self.higher_is_better else 1 - share)


def _labels(
    points: Sequence[Point], best: Sequence[Point], frame: _Frame, all_labels: bool, *, narrow: bool
) -> tuple[dict[int, Label], list[Point]]:
    """Returns the labels by the id of their point, placed so that they cover as little as possible, and the points that have a number, in
    the order of these."""
    occupied = _Occupied((frame.left + 2, frame.top, frame.right, frame.bottom))
    occupied.markers = [_around(frame.x(p.x), frame.y(p.y), RADIUS + 1) for p in points]
    ends = [sorted((frame.y(_high(p)), frame.y(_low(p)))) for p in points]
    occupied.whiskers = [(frame.x(p.x) - 1, upper, frame.x(p.x) + 1, lower) for p, (upper, lower) in zip(points, ends, strict=True)]
    labels: dict[int, Label] = {}
    numbered = []
    for p in sorted(points, key=lambda p: (p.role == "other", p not in best, p.x)):
        text, letter = (p.short or p.label) if narrow else p.label, CHARACTER if p.role == "other" else BOLD
        label, box, covered = _label(text, letter, frame.x(p.x), frame.y(p.y), occupied)
        if p.role == "other" and (covered > FREE or not (all_labels or p in best)):
            numbered.append(p)
        else:
            labels[id(p)] = label
            occupied.labels.append(box)
    numbered.sort(key=lambda p: (p.x, -p.y))
    for number, p in enumerate(numbered, 1):
        labels[id(p)], box, _ = _label(str(number), CHARACTER, frame.x(p.x), frame.y(p.y), occupied)
        occupied.labels.append(box)
    return labels, numbered


def pareto(points: Sequence[Point], higher_is_better: bool = True) -> list[Point]:
    """Returns the Pareto front by rising latency: the points for which no other is both faster and at least as good."""
    front: list[Point] = []
    sign = 1 if higher_is_better else -1
    for point in sorted(points, key=lambda p: (p.x, -sign * p.y)):
        if not front or sign * point.y > sign * front[-1].y:
            front.append(point)
    return front


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns round values of a logarithmic axis between `low` and `high` (both positive), at most about `most`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{step * 10.0**power:.6g}") for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns round values of a linear axis between `low` and `high`, at most about `most`; `[low]` for an axis of no length."""
    raw = (high - low) / most
    if raw < SMALLEST_STEP:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw)
    return [float(f"{index * step:.10g}") for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def marker(engine: str, x: float, y: float, radius: float = RADIUS) -> str:
    """Returns the SVG path of the marker of an engine; engines differ by shape, not by colour."""
    r: float = radius
    shape: Marker = ENGINES[engine].marker if engine in ENGINES else "circle"
    match shape:
        case "circle":
            return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"
        case "square":
            s = r * 0.88
            return f"M{x - s:.1f} {y - s:.1f}h{2 * s:.1f}v{2 * s:.1f}h{-2 * s:.1f}z"
        case "diamond":
            d = r * 1.25
            return f"M{x:.1f} {y - d:.1f}l{d:.1f} {d:.1f}l{-d:.1f} {d:.1f}l{-d:.1f} {-d:.1f}z"
        case "triangle":
            t = r * 1.15
            return f"M{x:.1f} {y - t:.1f}l{t:.1f} {1.8 * t:.1f}h{-2 * t:.1f}z"
        case "inverted":
            t = r * 1.15
            return f"M{x:.1f} {y + t:.1f}l{t:.1f} {-1.8 * t:.1f}h{-2 * t:.1f}z"
    assert_never(shape)


def position(value: float, low: float, high: float) -> float:
    """Returns the position of `value` between `low` and `high`, in percent, clipped to 0..100."""
    return 50.0 if high <= low else round(min(100.0, max(0.0, 100 * (value - low) / (high - low))), 2)


def _low(point: Point) -> float:
    return point.y if point.low is None else min(point.low, point.y)


def _high(point: Point) -> float:
    return point.y if point.high is None else max(point.high, point.y)


def _around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _label(text: str, letter: float, x: float, y: float, occupied: _Occupied) -> tuple[Label, Box, float]:
    """Returns the label of a point where it covers least, its box, and how much it covers."""
    width, choices = len(text) * letter, []
    for ring, distance in enumerate((11.0, 24.0, 40.0, 58.0)):
        for turn, (dx, dy) in enumerate(DIRECTIONS):
            near_x, near_y = x + dx * distance, y + dy * (distance + LINE / 3)
            left = near_x if dx > 0 else near_x - width if dx < 0 else near_x - width / 2
            box = (left, near_y - LINE / 2, left + width, near_y + LINE / 2)
            covered = _cost(box, occupied)
            choices.append((covered + 40 * ring + turn, ring, box, (near_x, near_y), covered))
    _, ring, box, near, covered = min(choices, key=lambda choice: choice[:2])
    leader = f"M{x:.1f} {y:.1f}L{near[0]:.1f} {near[1]:.1f}" if ring else None
    return Label(box[0], (box[1] + box[3]) / 2 + 4, text, leader), box, covered


def _cost(box: Box, occupied: _Occupied) -> float:
    outside = max(0, occupied.bounds[0] - box[0]) + max(0, box[2] - occupied.bounds[2])
    outside += max(0, occupied.bounds[1] - box[1]) + max(0, box[3] - occupied.bounds[3])
    crowd = sum(_overlap(box, other) for other in occupied.labels) * 3 + sum(_overlap(box, other) for other in occupied.markers) * 2
    return 50 * outside + crowd + 2 * sum(_overlap(box, other) for other in occupied.whiskers)


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _stairs(best: Sequence[Point], frame: _Frame) -> str:
    """Returns the SVG path of a front."""
    corners = [(frame.x(point.x), frame.y(point.y)) for point in best]
    path = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}"
    for x, y in corners[1:]:
        path += f"H{x:.1f}V{y:.1f}"
    return f"{path}H{frame.right:.1f}"
