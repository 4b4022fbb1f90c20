"""What is kept between test runs is made anew where anything that it is made of differs."""

import os
import time
from pathlib import Path

import pytest

from tests import cached_folder as module
from tests.cached_folder import DAYS, cached_folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ANEW", raising=False)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "package" / "room").mkdir(parents=True)
    for file in ("alone.py", "package/one.py", "package/room/two.py"):
        (tmp_path / file).write_text("", encoding="utf-8")
    return tmp_path


def test_a_folder_is_named_after_sources_and_versions(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> Path | None:
        return cached_folder("graphs", ("torch", "no-such-library"), ("alone.py", "package"), sources / "cache")

    first = folder()
    assert first is not None
    assert first.is_dir()
    found = [first]
    for file in ("alone.py", "package/one.py", "package/room/two.py"):
        (sources / file).write_text(file, encoding="utf-8")
        found.append(folder())
    (sources / "package" / "one.py").rename(sources / "package" / "three.py")
    found.append(folder())
    monkeypatch.setattr(module.importlib.metadata, "version", lambda library: "0")
    found.append(folder())
    assert len(set(found)) == len(found)
    assert folder() == found[-1]
    monkeypatch.setenv("ANEW", "1")
    assert folder() is None


def test_what_no_run_reads_is_removed(sources: Path) -> None:
    old, recent = sources / "cache" / "old", sources / "cache" / "recent"
    for other, days in ((old, DAYS + 1), (recent, DAYS - 1)):
        other.mkdir(parents=True)
        (other / "graph").write_text("", encoding="utf-8")
        os.utime(other, (0, time.time() - days * 86400))
    made = cached_folder("graphs", (), (), sources / "cache")
    assert set((sources / "cache").iterdir()) == {made, recent}
