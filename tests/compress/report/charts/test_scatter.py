"""Markers of engines in scatter charts."""

from __future__ import annotations

from typing import get_args

from compress.report.charts.scatter import marker
from foundation.core.engines import ENGINES, REFERENCE, Marker


def test_every_shape_has_an_outline_of_its_own() -> None:
    outlines = {row.marker: marker(name, 8, 8) for name, row in ENGINES.items()}
    assert outlines.keys() == set(get_args(Marker))
    assert len(set(outlines.values())) == len(outlines)


def test_no_engine_is_drawn_like_the_reference() -> None:
    drawn = {name: marker(name, 8, 8) for name in ENGINES}
    assert [name for name in drawn if drawn[name] == drawn[REFERENCE]] == [REFERENCE]
