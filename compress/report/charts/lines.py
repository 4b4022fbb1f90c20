"""Layout of line charts: several lines on linear axes, each labelled at its right end. The template draws them as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compress.report.charts.scatter import Axes, linear_ticks

WIDTH, HEIGHT = 500, 260
LEFT, RIGHT, TOP, BOTTOM = 56.0, 34.0, 12.0, 40.0
LABEL_HEIGHT = 12.0
FAINTEST = 0.35
THOUSAND = 1000


@dataclass(frozen=True)
class Series:
    """One line."""

    label: str
    title: str
    points: Sequence[tuple[float, float]]
    """(x, y) by ascending x; at least one."""


@dataclass(frozen=True)
class Line:
    """A drawn line, in pixels."""

    path: str
    points: list[tuple[float, float]]
    label: str
    title: str
    label_y: float
    opacity: float
    """Later lines are more opaque."""


@dataclass(frozen=True)
class LineChart(Axes):
    """A line chart ready to draw, in pixels."""

    lines: list[Line]
    caption: str
    name: str


def line_chart(name: str, caption: str, series: Sequence[Series], x_tick: Callable[[float], str] = "{:g}".format) -> LineChart | None:
    """Lays out a line chart whose axes both start at 0.

    Args:
        name: Label of the y axis, with its unit.
        caption: Label of the x axis.
        series: The lines.
        x_tick: Formats a tick of the x axis.

    Returns:
        The layout; None without lines.
    """
    if not series:
        return None
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    most_x = max(x for one in series for x, _ in one.points) or 1.0
    most_y = max(y for one in series for _, y in one.points) * 1.05 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return round(LEFT + (right - LEFT) * x / most_x, 1), round(bottom - (bottom - TOP) * y / most_y, 1)

    places = [[place(x, y) for x, y in one.points] for one in series]
    heights = _apart([points[-1][1] for points in places], TOP, bottom)
    lines = [
        Line(
            "M" + "L".join(f"{x} {y}" for x, y in points),
            points,
            one.label,
            one.title,
            round(height, 1),
            round(FAINTEST + (1 - FAINTEST) * (number + 1) / len(series), 2),
        )
        for number, (one, points, height) in enumerate(zip(series, places, heights, strict=True))
    ]
    return LineChart(
        WIDTH,
        HEIGHT,
        LEFT,
        right,
        TOP,
        bottom,
        [(place(tick, 0)[0], x_tick(tick)) for tick in linear_ticks(0, most_x, 5)],
        [(place(0, tick)[1], f"{tick:,.0f}" if tick >= THOUSAND else f"{tick:.3g}") for tick in linear_ticks(0, most_y, 4)],
        lines,
        caption,
        name,
    )


def _apart(heights: Sequence[float], top: float, bottom: float) -> list[float]:
    """Returns the heights of labels, shifted so that they do not overlap (as far as there is room), in the given order."""
    step = min(LABEL_HEIGHT, (bottom - top) / max(1, len(heights)))
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    moved, lowest = list(heights), top
    for number in order:
        moved[number] = lowest = max(lowest, heights[number])
        lowest += step
    highest = bottom
    for number in reversed(order):
        moved[number] = min(moved[number], highest)
        highest = moved[number] - step
    return moved
