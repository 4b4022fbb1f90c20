"""What a run lacks of disk space and memory, before its first stage."""

from __future__ import annotations

import re
from collections import namedtuple
from pathlib import Path

import pytest

from compress.run.room import Room, shortage

MB = 10**6
FOLDER = Path("runs/x")


def test_a_run_that_fits_lacks_nothing() -> None:
    found = shortage(100 * MB, {"finetune": 500 * MB}, Room(200 * MB, 2000 * MB, FOLDER))
    assert not found.refused
    assert not found.warned


def test_too_little_disk_is_one_line_with_what_is_needed_what_is_free_and_what_to_do() -> None:
    found = shortage(703 * MB, {"export": 0}, Room(300 * MB, 2000 * MB, FOLDER))
    (line,) = map(str, found.refused)
    assert {"703 MB", "300 MB", "403 MB", "--out"} <= set(re.findall(r"\d+ MB|--out", line))
    assert not found.warned


def test_the_step_with_most_memory_is_named() -> None:
    found = shortage(0, {"model": 700 * MB, "finetune": 4000 * MB, "export": 900 * MB}, Room(200 * MB, 2000 * MB, FOLDER))
    (line,) = map(str, found.refused)
    assert "finetune" in line
    assert "4.00 GB" in line
    assert "2.00 GB" in line


@pytest.mark.parametrize(("share", "refused", "warned"), [(0.6, True, False), (0.8, False, True), (1.2, False, True), (1.6, False, False)])
def test_what_may_fit_is_warned_of_and_not_refused(share: float, refused: bool, warned: bool) -> None:
    for room in (Room(round(100 * MB * share), 10**12, FOLDER), Room(10**12, round(100 * MB * share), FOLDER)):
        found = shortage(100 * MB, {"export": 100 * MB}, room)
        assert (bool(found.refused), bool(found.warned)) == (refused, warned)


def test_a_folder_that_does_not_exist_yet_lies_on_the_disk_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usage(path: Path) -> object:
        asked.append(path)
        return namedtuple("Usage", "total used free")(10, 3, 7)

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert Room.here(tmp_path / "runs" / "new").disk_bytes == 7
    assert asked == [tmp_path]
