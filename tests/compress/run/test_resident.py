"""Memory of a process and its descendants, read from planted files of the kernel."""

from __future__ import annotations

from pathlib import Path

from compress.run.resident import Resident, resident_bytes


def plant(root: Path, name: str, rss: int, anonymous: int, children: str = "") -> None:
    task = root / name / "task" / "1"
    task.mkdir(parents=True)
    (root / name / "status").write_text(f"Name:\tpython\nVmRSS:\t{rss} kB\nRssAnon:\t{anonymous} kB\nRssShmem:\t1 kB\n")
    (task / "children").write_text(children)


def test_descendants_count_with_what_is_theirs_alone(tmp_path: Path) -> None:
    plant(tmp_path, "self", 1000, 600, "11 12 ")
    plant(tmp_path, "11", 500, 200, "13")
    plant(tmp_path, "12", 400, 100)
    plant(tmp_path, "13", 300, 50)
    plant(tmp_path, "14", 10**6, 10**6)  # of another program
    assert resident_bytes(tmp_path) == (1000 + 201 + 101 + 51) * 1024


def test_a_process_that_ends_meanwhile_is_passed_over(tmp_path: Path) -> None:
    plant(tmp_path, "self", 1000, 600, "11 ")
    assert resident_bytes(tmp_path) == 1000 * 1024
    assert resident_bytes(tmp_path / "absent") == 0


def test_the_peak_is_kept() -> None:
    with Resident(seconds=60) as resident:
        pass
    assert resident.peak_bytes > 10_000_000
