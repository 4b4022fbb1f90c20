"""What timings are worth on a machine that does something else too; the machine is simulated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foundation.machine.load import Watch
from foundation.measure.latency import measure
from foundation.measure.samples import MIN_CLEAN, Turn, figures, is_undisturbed
from foundation.measure.turns import ratio
from tests.foundation.simulated_engines import Machine, Process, Simulated
from tests.told import Told

SHAPES: dict[tuple[int, int | None], tuple[float, float]] = {(1, 32): (16.0, 2.0), (8, 128): (200.0, 40.0)}
"""Milliseconds of the reference and of the fast engine on a quiet machine."""


class Still(Watch):
    """A machine that no block is taken again for."""

    def disturbed(self) -> bool:
        return False


def turn(wall: list[float], cpu: list[float], waited: list[float]) -> Turn:
    return Turn(np.array(wall), np.array(cpu), np.array(waited))


def test_only_undisturbed_samples_count_where_there_are_enough() -> None:
    quiet, stalled = ([10.0] * MIN_CLEAN, [19.0] * MIN_CLEAN, [0.1] * MIN_CLEAN), ([400.0] * 30, [25.0] * 30, [380.0] * 30)
    found = figures([turn(*(one + other for one, other in zip(quiet, stalled, strict=True)))], threads=2)
    assert (found.p50, found.estimated, found.busy) == (10.0, False, False)
    assert found.disturbed == pytest.approx(30 / (30 + MIN_CLEAN))
    assert found.interval == (10.0, 10.0)


def test_threads_that_wait_for_each_other_disturb_nothing() -> None:
    """Calls of OpenVINO's on a quiet machine: 0.44 ms, of which two threads waited 0.14 ms for each other."""
    found = figures([turn([0.44] * 30, [0.88] * 30, [0.14] * 30)] * 3, threads=2)
    assert (found.disturbed, found.estimated, found.busy, found.p50) == (0.0, False, False, 0.44)
    assert is_undisturbed(0.44, 0.14)
    assert not is_undisturbed(0.44, 0.75), "the shortest slice of time that the kernel gives other work"
    assert is_undisturbed(100.0, 4.9)
    assert not is_undisturbed(100.0, 5.1)


def test_a_disturbed_call_is_estimated_from_its_processor_time() -> None:
    """The engine is known to keep 1.9 cores busy from other shapes; a call took 38 ms of processor time, so 20 ms on a quiet machine."""
    block = turn([35.0] * 10, [38.0] * 10, [17.0] * 10)
    assert figures([block] * 3, threads=2, elsewhere=1.9).p50 == pytest.approx(20.0)
    assert figures([block] * 3, threads=2).p50 == pytest.approx(19.0), "as if all threads had been at work"
    found = figures([block] * 3, threads=2, elsewhere=1.9)
    assert (found.estimated, found.busy, found.disturbed) == (True, False, 1.0)
    one_sample_kept_both = turn([35.0] * 9 + [19.0], [38.0] * 10, [17.0] * 10)
    assert figures([one_sample_kept_both], threads=2, elsewhere=1.2).p50 == pytest.approx(19.0), "no less parallel than it was seen to be"


def test_what_waits_for_most_of_the_time_is_given_up() -> None:
    assert figures([turn([90.0] * 9, [20.0] * 9, [19.0] * 9)] * 3, threads=2, elsewhere=1.5).busy is False
    assert figures([turn([90.0] * 9, [20.0] * 9, [21.0] * 9)] * 3, threads=2, elsewhere=1.5).busy is True
    assert figures([turn([90.0] * 9, [20.0] * 9, [19.0] * 9)] * 3, threads=1).busy is False
    assert figures([turn([90.0] * 9, [20.0] * 9, [19.0] * 9)] * 3, threads=2, elsewhere=1.5, on_cpu=False).busy is True, (
        "a GPU's time is not the processor's"
    )


def test_an_engine_of_several_threads_that_was_never_undisturbed_is_given_up() -> None:
    """How many cores it keeps busy is not known then: OpenVINO had 1.3 to 1.8 of two, and two made it a third too fast."""
    assert figures([turn([90.0] * 9, [20.0] * 9, [9.0] * 9)] * 3, threads=2).busy is True


def test_undisturbed_samples_of_one_turn_are_not_enough() -> None:
    lucky = turn([10.0] * 9, [20.0] * 9, [0.0] * 9)
    others = [turn([30.0] * 9, [30.0] * 9, [9.0] * 9)] * 4
    assert figures([lucky, *others], threads=2).estimated
    assert not figures([lucky, lucky, *others], threads=2).estimated


def test_turns_that_differ_too_much_are_given_up() -> None:
    turns = [Turn(np.full(30, value)) for value in (1.0, 1.1, 2.0)]
    found = figures(turns, threads=1)
    assert (found.busy, found.disturbed) == (True, None)
    assert found.between == pytest.approx(np.std(np.log([1.0, 1.1, 2.0]), ddof=1))
    assert figures([Turn(np.full(30, value)) for value in (1.0, 1.02, 1.01)], threads=1).busy is False


def test_one_turn_has_the_interval_of_its_order_statistics() -> None:
    samples = np.arange(1.0, 101.0)
    assert figures([Turn(samples)], threads=1).interval == (41.0, 61.0)  # 50 +- 9.8 of 100, from 0


def measured(load: float, seed: int) -> list[tuple[float, bool]]:
    """Returns for each shape the ratio of two engines, relative to the quiet one, and whether it is given up."""
    machine = Machine(load, seed=seed)
    slow = Simulated("torch", {shape: pair[0] for shape, pair in SHAPES.items()}, machine, spins=0.08)
    fast = Simulated("openvino", {shape: pair[1] for shape, pair in SHAPES.items()}, machine, dealt=0.6)
    rows = [row for _, row in measure([slow, fast], list(SHAPES), Told(), watch=Still())]  # type: ignore[list-item]
    pairs = [(rows[number], rows[number + len(SHAPES)]) for number in range(len(SHAPES))]
    quiet = [pair[0] / pair[1] for pair in SHAPES.values()]
    return [(ratio(a, b).value / true, bool(a.busy or b.busy)) for (a, b), true in zip(pairs, quiet, strict=True)]


@pytest.mark.parametrize(("load", "refused"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (4.0, 1.0)])
def test_a_ratio_under_load_is_right_or_given_up(load: float, refused: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.EngineProcess", Process)
    monkeypatch.setattr("foundation.measure.latency.MAX_SECONDS", 0.6)
    found = [cell for seed in range(10) for cell in measured(load, seed)]
    assert sum(busy for _, busy in found) <= refused * len(found)
    assert all(abs(math.log(value)) < math.log(1.15) for value, busy in found if not busy)
