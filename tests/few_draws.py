"""Intervals of few draws: whole runs prove which figures get an interval; `test_intervals` proves the intervals, with all draws."""

from __future__ import annotations

import pytest

from compress.report import intervals
from export.generation import translations
from foundation.core import resampling

DRAWS = 100


def draw(patch: pytest.MonkeyPatch, count: int) -> None:
    """Sets how many samples an interval draws where its caller does not say."""
    for function in (resampling.interval, intervals.bootstrap, intervals.paired_bootstrap):
        patch.setitem(function.__kwdefaults__, "resamples", count)
    patch.setattr(translations, "RESAMPLES", count)
