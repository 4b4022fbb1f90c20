from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report.charts.lines import LABEL_HEIGHT, Series, line_chart

POINTS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e6)), min_size=1, max_size=5).map(lambda points: sorted(points))


@given(st.lists(POINTS, min_size=1, max_size=14))
def test_lines_stay_inside_and_their_labels_apart(lines: list[list[tuple[float, float]]]) -> None:
    chart = line_chart("ms", "neurons", [Series(str(number), "", points) for number, points in enumerate(lines)])
    assert chart is not None
    for line in chart.lines:
        assert all(chart.left <= x <= chart.right + 0.1 and chart.top - 0.1 <= y <= chart.bottom + 0.1 for x, y in line.points)
        assert line.path.count("L") == len(line.points) - 1
    heights = sorted(line.label_y for line in chart.lines)
    assert all(later - earlier >= LABEL_HEIGHT - 0.2 for earlier, later in itertools.pairwise(heights))
    assert chart.top - 0.1 <= heights[0]
    assert heights[-1] <= chart.bottom + 0.1


def test_places_are_those_of_the_axes() -> None:
    chart = line_chart("ms", "neurons", [Series("0", "", [(0, 0), (50, 1.0), (100, 2.0)])])
    assert chart is not None
    (line,) = chart.lines
    assert line.points[0] == (chart.left, chart.bottom)
    assert line.points[1][0] == pytest.approx((chart.left + chart.right) / 2)
    assert line.points[2][0] == chart.right
    assert {text: x for x, text in chart.x_ticks}["100"] == chart.right
    at = {text: y for y, text in chart.y_ticks}
    assert line.points[2][1] == pytest.approx(at["2"], abs=0.11)


def test_no_lines_are_no_chart() -> None:
    assert line_chart("ms", "neurons", []) is None
