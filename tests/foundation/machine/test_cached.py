"""Files of the cache folder: whole or none, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.machine.cached import read_cached, write_cached


def test_what_is_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.json"
    assert read_cached(file) is None
    write_cached(file, {"a": [1, 2.5, None]})
    write_cached(file, {"a": [3]})
    assert read_cached(file) == {"a": [3]}
    assert list(file.parent.iterdir()) == [file]


def test_a_damaged_file_reads_as_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": [1')
    assert read_cached(tmp_path / "a.json") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_cached(tmp_path / "file" / "a.json", 1)
    assert read_cached(tmp_path / "file" / "a.json") is None
    (tmp_path / "taken.json").mkdir()
    write_cached(tmp_path / "taken.json", 1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["file", "taken.json"]
    with pytest.raises(ValueError, match="JSON"):
        write_cached(tmp_path / "b.json", float("nan"))
