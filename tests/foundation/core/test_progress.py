"""Where there is no terminal: few lines on the console, all of them in the log file."""

from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from foundation.core.progress import SECONDS_BETWEEN_LINES, ConsoleProgress


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def epochs(progress: ConsoleProgress, clock: Clock, count: int, seconds: float, steps: int = 10) -> None:
    """Trains in `count` epochs of `steps` steps; an epoch lasts `seconds`."""
    with progress.bar("train", count * steps) as advance:
        for epoch in range(1, count + 1):
            for step in range(1, steps + 1):
                clock.now += seconds / steps
                if step == steps:
                    progress.tick("train", f"epoch {epoch}")
                advance(1)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def logged(file: Path) -> list[str]:
    return [line.split(" ", 1)[1] for line in file.read_text().splitlines()]


def test_quick_epochs_give_the_first_the_last_and_one_every_ten_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress(file=tmp_path / "log.txt", clock=clock)
    epochs(progress, clock, count=60, seconds=1.0)
    lines = shown(capsys)
    assert (lines[0], lines[-1]) == ("epoch 1", "epoch 60")
    numbers = [int(line.removeprefix("epoch ")) for line in lines]  # never how far the bar is: an epoch says more
    assert len(lines) == 7
    assert all(after - before >= SECONDS_BETWEEN_LINES for before, after in pairwise(numbers[:-1]))
    assert logged(tmp_path / "log.txt") == [f"epoch {epoch}" for epoch in range(1, 61)]


def test_slow_epochs_are_all_shown_with_the_bar_between_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress(file=tmp_path / "log.txt", clock=clock)
    epochs(progress, clock, count=3, seconds=25.0)
    lines = shown(capsys)
    assert [line for line in lines if line.startswith("epoch")] == ["epoch 1", "epoch 2", "epoch 3"]
    assert lines[0] == "  train: 4/30, 0.4/s, 65 s left"
    assert len(lines) == 9  # at 10, 20 s of each epoch, and at its end
    assert logged(tmp_path / "log.txt") == lines


def test_an_epoch_is_never_shown_twice(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress(clock=clock)
    with progress.bar("train", 40) as advance:
        for second in range(1, 40):
            clock.now += 1
            if second in (4, 8):
                progress.tick("train", f"epoch {second // 4}")
            advance(1)
    assert shown(capsys) == ["epoch 1", "epoch 2", "  train: 24/40, 1.0/s, 16 s left", "  train: 34/40, 1.0/s, 6 s left"]


def test_the_last_epoch_before_a_failure_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress(clock=clock)

    def fail() -> None:
        with progress.bar("train", 3):
            for epoch in (1, 2, 3):
                progress.tick("train", f"epoch {epoch}")
            raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        fail()
    assert shown(capsys) == ["epoch 1", "epoch 3"]


def test_a_bar_that_is_opened_again_shows_its_first_tick_again(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress(clock=clock)
    epochs(progress, clock, count=2, seconds=1.0)
    epochs(progress, clock, count=2, seconds=1.0)
    assert shown(capsys) == ["epoch 1", "epoch 2", "epoch 1", "epoch 2"]


def test_a_bar_that_has_done_nothing_yet_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ConsoleProgress(clock=clock).bar("load", 4) as advance:
        clock.now += 11
        advance(0)
    assert shown(capsys) == ["  load: 0/4, 0.0/s, no step done yet"]


def test_slow_steps_say_how_long_one_takes(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ConsoleProgress(clock=clock).bar("train", 4) as advance:
        clock.now += 28
        advance(1)
    assert shown(capsys) == ["  train: 1/4, 28 s each, 84 s left"]


def test_bars_of_one_name_inside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ConsoleProgress(clock=Clock())
    with progress.bar("predict", 1):
        with progress.bar("predict", 1):
            progress.tick("predict", "inner")
        progress.tick("predict", "outer")
    assert shown(capsys) == ["inner", "outer"]


def test_quiet_shows_warnings_alone_and_the_file_gets_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress("quiet", tmp_path / "log.txt", clock)
    epochs(progress, clock, count=3, seconds=1.0)
    progress.warn("a layer saturates")
    assert shown(capsys) == ["warning: a layer saturates"]
    assert logged(tmp_path / "log.txt") == ["epoch 1", "epoch 2", "epoch 3", "warning: a layer saturates"]


def test_a_terminal_gets_every_epoch_beside_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress(clock=clock)
    progress._console = Console(stderr=True, force_terminal=True, highlight=False, soft_wrap=True)
    epochs(progress, clock, count=5, seconds=1.0)
    written = capsys.readouterr().err
    assert all(f"epoch {epoch}" in written for epoch in range(1, 6))


def test_nobody_waits_ten_seconds_without_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress(clock=clock)
    progress.log("export: running")
    silent, longest = 0.0, 0.0
    with progress.alive("export"):
        for _ in range(120):
            clock.now += 0.5
            progress.speak_if_silent()
            silent = 0.0 if capsys.readouterr().err else silent + 0.5
            longest = max(longest, silent)
    assert longest < 10


def test_what_goes_on_is_named_with_its_seconds_and_the_innermost_counts(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress(clock=clock)
    with progress.alive("run"):
        clock.now += 5
        with progress.alive("export"):
            clock.now += 10
            progress.speak_if_silent()
        progress.speak_if_silent()  # something was shown just now
        clock.now += 12
        progress.speak_if_silent()
    clock.now += 100
    progress.speak_if_silent()  # nothing goes on
    assert capsys.readouterr().err.splitlines() == ["  export: 10 s", "  run: 27 s"]


def test_a_line_of_any_kind_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress(clock=clock)
    with progress.alive("export"):
        for say in (progress.log, progress.warn):
            clock.now += 8
            say("something")
            clock.now += 8
            progress.speak_if_silent()
    assert "export" not in capsys.readouterr().err


def test_quiet_stays_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ConsoleProgress("quiet", clock=clock)
    with progress.alive("export"):
        clock.now += 60
        progress.speak_if_silent()
    assert capsys.readouterr().err == ""
