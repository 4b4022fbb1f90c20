"""Values of a parametrized test of which some are for the slow tests alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def seldom(values: Iterable[Any], rare: Collection[Any]) -> list[Any]:
    """Returns the values for `pytest.mark.parametrize`; those in `rare` are `slow`."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (value in rare)) for value in values]
