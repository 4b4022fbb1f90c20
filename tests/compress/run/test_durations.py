"""What `compress plan` predicts from the calibration of the machine and the steps that finished earlier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.run.durations import KEPT, Expected, history_file, others_running, predict, predicted_memory, record
from foundation.machine.environment import hardware

ONE = {"start": 1.0, "macs": 1e-10, "engines": 2.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def parts(work: float) -> dict[str, float]:
    return {"start": 1, "macs": work}


def seconds(stage: str, work: float, *, reuses: bool = False) -> float:
    return predict(stage, parts(work), ONE, reuses=reuses).seconds


def test_without_any_record_the_calibration_decides() -> None:
    found = predict("finetune", parts(2e10), ONE)
    assert found.seconds == pytest.approx(3.0)
    assert found.low < 3.0 / 1.5
    assert found.high > 3.0 * 1.5


def test_fixed_and_growing_part_are_found() -> None:
    for _ in range(4):
        for work in (1e9, 3e9, 1e10, 5e10):
            record("finetune", parts(work), 2 + 3 * work / 1e10)
    assert seconds("finetune", 2e10) == pytest.approx(8.0, rel=0.1)
    assert seconds("distill", 2e10) == pytest.approx(3.0)


def test_the_range_narrows_with_runs_that_agree_and_not_with_runs_that_do_not() -> None:
    for number in range(10):
        record("finetune", parts(1e10), 5.0)
        record("distill", parts(1e10), 2.0 if number % 2 else 8.0)
    widths = [found.high / found.low for found in (predict(stage, parts(1e10), ONE) for stage in ("finetune", "distill", "prune"))]
    assert widths[0] < 2.0 < widths[1]
    assert widths[0] < widths[2]


def test_tiny_steps_say_nothing_of_long_ones() -> None:
    for number in range(2 * KEPT):
        record("distill", parts(1e6 + number), 0.2)
    assert seconds("distill", 1e6) == pytest.approx(0.2, rel=0.3)
    assert seconds("distill", 1e13) == pytest.approx(1000, rel=0.1)


def test_lines_of_like_size_decide_however_many_small_ones_came_after() -> None:
    for _ in range(5):
        record("finetune", parts(1e12), 300.0)
    for number in range(10 * KEPT):
        record("finetune", parts(1e8 + number), 0.5)
    assert seconds("finetune", 1e12) == pytest.approx(300.0, rel=0.3)


def test_engines_count_by_themselves() -> None:
    for count in (2, 4, 8, 16):
        record("export", {"start": 1, "engines": count, "macs": 1e9}, 1 + 5.0 * count)
    assert predict("export", {"start": 1, "engines": 12, "macs": 1e9}, ONE).seconds == pytest.approx(61.0, rel=0.25)


def test_lines_of_a_busy_machine_count_only_where_there_are_no_others() -> None:
    for _ in range(5):
        record("finetune", parts(1e10), 30.0, busy=(4.0, 1.0))
    assert seconds("finetune", 1e10) > 15
    for _ in range(5):
        record("finetune", parts(1e10), 3.0, busy=(0.1, 1.05))
    assert seconds("finetune", 1e10) == pytest.approx(3.0, rel=0.2)


def test_seconds_of_a_busy_machine_are_those_of_a_quiet_one_as_far_as_its_load_tells() -> None:
    slower = others_running(2, load=2 + 2.0 * hardware()["cores"])
    assert slower[1] > 1.5
    for _ in range(10):
        record("finetune", parts(1e10), 6.0, busy=slower)
    assert seconds("finetune", 1e10) == pytest.approx(6.0 / slower[1], rel=0.1)
    assert others_running(4, load=3.0) == (0.0, 1.0)


def test_what_took_parts_from_earlier_runs_says_nothing_of_what_makes_all() -> None:
    for _ in range(5):
        record("export", parts(1e9), 10.0)
    assert seconds("export", 1e9, reuses=True) == pytest.approx(10.0, rel=0.3)  # the best that is known
    for _ in range(3 * KEPT):
        record("export", parts(1e9), 1.0, reused=True)
    assert seconds("export", 1e9) == pytest.approx(10.0, rel=0.3)
    assert seconds("export", 1e9, reuses=True) == pytest.approx(1.0, rel=0.2)


def test_older_lines_have_their_work_alone() -> None:
    record("finetune", parts(1e10), 8.0)
    line = json.loads(history_file().read_text())
    older = {name: line[name] for name in ("machine", "stage", "seconds")} | {"work": 1e10}
    history_file().write_text((json.dumps(older) + "\n") * 10)
    assert seconds("finetune", 1e10) == pytest.approx(8.0, rel=0.2)


@pytest.mark.parametrize("rest", ['{"machine": "x", "stage', '{"machine": 1, "stage": 2}', "[]", "1e999", '{"parts": 3}'])
def test_a_line_that_is_none_is_passed_over(rest: str) -> None:
    record("finetune", parts(1e10), 8.0)
    before = seconds("finetune", 1e10)
    with history_file().open("a", encoding="utf-8") as stream:
        stream.write(rest)
    assert seconds("finetune", 1e10) == before


def test_errors_of_different_steps_add_up_as_independent_ones() -> None:
    found = Expected.total([Expected(7.0, 10.0, 14.0), Expected(6.0, 10.0, 13.0)])
    assert (found.low, found.seconds, found.high) == (15.0, 20.0, 25.0)
    assert Expected.total([]) == Expected(0.0, 0.0, 0.0)


def test_memory_is_corrected_by_what_runs_of_like_size_took() -> None:
    assert predicted_memory("export", 1000) == 1000
    for taken in (1900, 2000, 2100):
        record("export", parts(1e9), 1.0, memory=(1000, taken))
    assert predicted_memory("export", 1200) == pytest.approx(2400, rel=0.01)
    assert predicted_memory("export", 10**6) == 10**6
    assert predicted_memory("finetune", 1000) == 1000
