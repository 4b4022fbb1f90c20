"""What `compress plan` predicts from the stages that finished earlier."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.run.durations import KEPT, REACH, history_file, predict, record


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_fixed_and_growing_part_are_found() -> None:
    for work in (1e9, 3e9, 1e10, 5e10):
        record("finetune", work, 2 + work / 1e10)
    assert predict("finetune", 2e10) == pytest.approx(4.0)
    assert predict("distill", 2e10) is None


def test_lines_of_one_size_give_half_of_the_time_to_each_part() -> None:
    for seconds in (8.0, 10.0, 12.0):
        record("finetune", 1e9, seconds)
    assert predict("finetune", 1e9) == pytest.approx(10.0)
    assert predict("finetune", 3e9) == pytest.approx(20.0)


def test_tiny_stages_say_nothing_of_long_ones() -> None:
    for number in range(5):
        record("distill", 1e8 + number * 1e7, 0.2)
    assert predict("distill", REACH * 2e8) is None
    assert predict("distill", 2e8) == pytest.approx(0.2, rel=0.2)


def test_lines_of_like_size_decide_however_many_small_ones_came_after() -> None:
    record("finetune", 1e12, 100.0)
    record("finetune", 4e12, 400.0)
    for number in range(10 * KEPT):
        record("finetune", 1e8 + number, 0.5)
    assert predict("finetune", 2e12) == pytest.approx(200.0, rel=0.05)


def test_what_took_parts_from_earlier_runs_says_nothing_of_what_makes_all() -> None:
    record("export", 1e9, 10.0)
    assert predict("export", 1e9, reuses=True) == pytest.approx(10.0)  # the best that is known
    for _ in range(3 * KEPT):
        record("export", 1e9, 1.0, reused=True)
    assert predict("export", 1e9) == pytest.approx(10.0)
    assert predict("export", 1e9, reuses=True) == pytest.approx(1.0)


def test_a_stage_that_always_took_parts_is_unknown_without() -> None:
    record("export", 1e9, 1.0, reused=True)
    assert predict("export", 1e9) is None


def test_lines_of_before_made_all() -> None:
    record("export", 1e9, 10.0)
    lines = history_file().read_text().replace(', "reused": false', "")
    assert "reused" not in lines
    history_file().write_text(lines)
    assert predict("export", 1e9) == pytest.approx(10.0)


def test_a_line_that_a_kill_cut_off_is_passed_over() -> None:
    record("finetune", 1e9, 5.0)
    with history_file().open("a", encoding="utf-8") as stream:
        stream.write('{"machine": "x", "stage')
    assert predict("finetune", 1e9) == pytest.approx(5.0)
