"""A run that the machine has no room for ends before its first stage, and `plan` says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.commands.plan import plan
from compress.pipeline import run
from compress.recipe import check
from compress.run.room import Room
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests.test_pipeline import RAW

pytestmark = pytest.mark.whole


def test_nothing_runs_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for here, word in ((Room(1000, 10**13, tmp_path), "disk:"), (Room(10**13, 1000, tmp_path), "memory:")):
        monkeypatch.setattr(Room, "here", lambda folder, here=here: here)
        with pytest.raises(InputError, match=word) as caught:
            run(check(RAW), tmp_path / "run", progress=ConsoleProgress("quiet"))
        assert len(caught.value.lines) == 1
        assert not [made for made in (tmp_path / "run" / "stages").glob("*") if made.is_dir()]
        found = plan(check(RAW), tmp_path / "run")
        assert [str(problem).startswith(word) for problem in found.refused] == [True]
        assert "total:" in found.text


def test_every_step_has_a_time_with_a_range_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing was recorded
    lines = plan(check(RAW), tmp_path / "run").text.splitlines()
    total = next(line for line in lines if line.startswith("total:"))
    assert "not counting" not in total
    steps = lines[lines.index(next(line for line in lines if line.startswith("step "))) + 1 : lines.index(total)]
    timed = [line for line in steps if " to " in line]
    assert len(timed) == 7  # every step of the recipe, those that the pipeline adds among them
    assert all("MB" in line or "GB" in line for line in timed)
