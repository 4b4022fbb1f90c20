"""The report of a run in several processes: the first one makes it, and all of them return it."""

from __future__ import annotations

import pytest

from compress.report.model.contents import Contents
from foundation.machine.parallel import joined
from tests.ranks import in_ranks

pytestmark = pytest.mark.whole

MADE = {"name": "a", "task": "text-classification", "created": "2026-01-01T00:00:00+00:00"}


def _returns_it() -> None:
    with joined() as team:
        made = Contents.model_validate(MADE) if team.is_first else Contents()
        assert team.broadcast_object(made) == Contents.model_validate(MADE)


def test_every_process_has_the_report_of_the_first() -> None:
    in_ranks(2, _returns_it)
