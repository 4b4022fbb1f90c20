"""What each rung measures and drops, and why; the loop that takes candidates up the rungs."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.recipe import Recipe
from compress.report.model.contents import Goal
from compress.search import work
from compress.search.baseline import Baseline, float_times
from compress.search.candidate import Candidate
from compress.search.price import Price, cheapest_first
from compress.search.rungs import full
from compress.search.rungs.estimate import halved
from compress.search.rungs.full import exceeds, phase_of
from compress.search.rungs.latency import UntrainedLatency
from compress.search.rungs.rung import Verdict
from compress.search.rungs.short import ShortTraining
from compress.search.rungs.size import PredictedSize
from compress.search.rungs.untrained import WithoutTraining
from compress.search.search import open_folder
from compress.search.setup import Setup
from compress.search.study import Study
from compress.search.training import shortened, training_of, untrained
from compress.search.work import Work, rungs_of
from foundation.artifacts.timed import Timing
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.measure.engine_process import EngineError
from tests.compress.search.tiny import tiny_search
from tests.plain_reports import contents

pytestmark = pytest.mark.whole

FINETUNE: dict[str, Any] = {"finetune": {"epochs": 0.2, "learning_rate": 1e-3}}
PRUNE: dict[str, Any] = {"prune": {"sparsity": 0.3, "granularity": ["ffn"], "multiple_of": 8, "recover": {"epochs": 2}}}
PRUNED: dict[str, Any] = {"prune.sparsity": [0.1, 0.4]}
BASELINE = Baseline(Path("none"), 0.9, {(1, None): 8.0}, {("openvino", (1, None)): 2.0}, {("openvino", (1, None)): 2.0})


def setup_of(tmp_path: Path, space: dict[str, Any] = PRUNED, stages: list[dict[str, Any]] | None = None, **settings: Any) -> Setup:
    stages = stages or [FINETUNE, PRUNE, {"quantize": {"mode": "qat", "qat": {"epochs": 3}}}]
    return replace(checked(json.dumps([space, stages, settings])), folder=tmp_path / "search")


@cache
def checked(given: str) -> Setup:
    """Returns the search of these settings, which takes a while."""
    space, stages, settings = json.loads(given)
    return Setup.of(tiny_search(space, stages, **settings), Path("none"), ConsoleProgress("silent"))


def candidate(number: int, own: bool = False, **records: Any) -> Candidate:
    return Candidate(number, 0, {"prune.sparsity": 0.3}, own, records)


def timed(time_ms: float, baseline_ms: float = 2.0) -> dict[str, Any]:
    return {
        "relative": time_ms / baseline_ms,
        "shapes": [{"batch": 1, "sequence": None, "engine": "openvino", "time_ms": time_ms, "baseline_ms": baseline_ms}],
    }


def test_what_trains_and_what_can_leave_it_out(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    recipe = setup.recipe_of({"prune.sparsity": 0.4})
    assert [stage.id for stage in setup.shared] == ["finetune"]
    assert [training_of(stage) for stage in recipe.stages] == ["needed", "optional", "optional"]
    bare = untrained(setup, recipe)
    assert [training_of(stage) for stage in bare.stages] == ["needed", "none", "none"]
    assert (bare.stages[0], bare.stages[1].sparsity, bare.stages[2].mode) == (recipe.stages[0], 0.4, "ptq")
    brief = shortened(setup, recipe, 0.1)
    assert brief.stages[0] == recipe.stages[0]  # all candidates share it, so that it is whole
    assert (brief.stages[1].recover.epochs, brief.stages[2].qat.epochs) == (pytest.approx(0.2), pytest.approx(0.3))


def test_a_rung_that_a_recipe_has_no_use_for_says_why(tmp_path: Path) -> None:
    def left_out(setup: Setup) -> dict[str, str | None]:
        return {rung.NAME: absent for rung, absent in rungs_of(setup).items()}

    assert left_out(setup_of(tmp_path)) == {
        "size": None,
        "latency": "neither an objective nor a goal asks for time",
        "untrained": None,
        "short": None,
        "full": None,
    }
    student = {"distill": {"student": {"layers": 1}, "epochs": 1}}
    found = left_out(setup_of(tmp_path, {"distill.learning_rate": [1e-4, 1e-3]}, [FINETUNE, student]))
    assert found["untrained"] == "distill makes its model by training"
    found = left_out(setup_of(tmp_path, {"quantize.smoothquant": [True, False]}, [FINETUNE, {"quantize": {}}]))
    assert found["untrained"] == "no stage trains, so the whole run is this rung"
    assert found["short"] == "no stage trains"
    calibrated = [FINETUNE, {"quantize": {}}, {"export": {}}]
    found = left_out(setup_of(tmp_path, {"quantize.smoothquant": [True, False]}, calibrated, objectives=["metric", "latency"]))
    assert found["latency"] == "all candidates have one shape"
    open_ = [FINETUNE, {"prune": {"measure": "latency", "sparsity": 0.3, "granularity": ["ffn"], "multiple_of": 8}}, {"export": {}}]
    found = left_out(setup_of(tmp_path, PRUNED, open_, objectives=["metric", "latency"]))
    assert found["latency"] == "the shape that prune makes is known only when it has run"
    plain = [FINETUNE, {"prune": {"sparsity": 0.3, "granularity": ["ffn"], "multiple_of": 8}}, {"export": {}}]
    assert left_out(setup_of(tmp_path, PRUNED, plain, objectives=["metric", "latency"]))["latency"] is None


def test_size_is_that_of_the_shape_and_of_the_precision(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, goals={"max_size_mb": 0.03})
    small, large = (
        PredictedSize().measure(replace(candidate(number), values={"prune.sparsity": sparsity}), setup)
        for number, sparsity in enumerate((0.4, 0.1))
    )
    assert small["macs"] < large["macs"]
    assert small["weight_bytes"] < large["weight_bytes"] < 4 * large["parameters"]
    heavy = {**large, "weight_bytes": 45_000}
    found = PredictedSize().verdicts([candidate(0, size=small), candidate(1, size=heavy)], setup)
    assert found == {1: Verdict("its weights alone take 0.04 MB; goals.max_size_mb is 0.03", {"max_size_mb": pytest.approx(0.5)})}


def test_a_shape_that_is_much_too_slow_is_dropped_by_each_goal_of_time(tmp_path: Path) -> None:
    rung = UntrainedLatency(BASELINE)

    def dropped(goals: dict[str, Any], *times: float) -> dict[int, dict[str, float]]:
        wave = [candidate(number, latency=timed(time)) for number, time in enumerate(times)]
        return {number: verdict.excess for number, verdict in rung.verdicts(wave, setup_of(tmp_path, goals=goals)).items()}

    assert dropped({"max_latency_ms": [{"value": 1.0}]}, 0.9, 1.1, 1.3) == {2: {"max_latency_ms": pytest.approx(0.3)}}
    assert dropped({"min_throughput": 1000.0}, 0.9, 1.1, 2.0) == {2: {"min_throughput": pytest.approx(1.0)}}
    # torch / float engine = 4 in the run of the baseline, so that a shape as fast as the baseline's speeds up 4 times
    assert dropped({"min_speedup": 4.0}, 2.0, 2.2, 4.0) == {2: {"min_speedup": pytest.approx(1.0)}}
    assert dropped({}, 100.0) == {}


def test_candidates_are_halved_by_all_objectives_and_the_recipe_itself_stays(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    wave = [
        candidate(number, own=number == 3, short={"metric": metric}, size={"macs": 5, "weight_bytes": 7})
        for number, metric in enumerate((0.9, 0.7, 0.8, 0.1))
    ]
    found = halved(wave, "short", setup)
    assert list(found) == [1]
    assert "2 of 4 are promoted" in found[1].reason
    assert found[1].reason.endswith("the metric 0.7 (0.8 to 0.9)")
    assert halved([], "short", setup) == {}
    plain = [FINETUNE, PRUNE, {"export": {}}]
    both = setup_of(tmp_path, PRUNED, plain, objectives=["metric", "latency"])
    fast = replace(wave[1], records={**wave[1].records, "latency": timed(0.1)})
    slow = [replace(one, records={**one.records, "latency": timed(1.0)}) for one in (wave[0], wave[2])]
    assert list(halved([fast, *slow], "short", both)) == [2]  # as fast as 0, and worse


def test_without_training_only_what_is_near_the_baseline_is_compared(tmp_path: Path) -> None:
    setup, size = setup_of(tmp_path), {"macs": 5, "weight_bytes": 7}
    near = [candidate(number, untrained={"metric": metric, "told": True}, size=size) for number, metric in enumerate((0.9, 0.8))]
    far = candidate(2, untrained={"metric": 0.1, "told": False}, size=size)
    assert list(WithoutTraining(BASELINE).verdicts([*near, far], setup)) == [1]


@pytest.mark.parametrize(
    ("goal", "excess"),
    [
        ({"goal": "max_drop", "limit": 0.01, "value": 0.03, "met": False}, 0.02),
        ({"goal": "max_drop", "limit": 0.01, "value": -0.01, "met": True}, -0.02),
        ({"goal": "min_speedup", "limit": 4.0, "value": 3.0, "met": False}, 0.25),
        ({"goal": "max_latency_ms", "limit": 2.0, "value": 3.0, "met": False}, 0.5),
        ({"goal": "max_size_mb", "limit": 2.0, "value": 1.0, "met": True}, -0.5),
        ({"goal": "min_speedup", "limit": 4.0, "value": 4.0 - 1e-12, "met": True}, 0.0),  # met within rounding
    ],
)
def test_excess_is_positive_exactly_where_a_goal_is_missed(goal: dict[str, Any], excess: float) -> None:
    judged = Goal(**goal)
    assert exceeds(judged) == pytest.approx(excess, abs=1e-6)
    assert (exceeds(judged) <= 0) == judged.met


def test_a_slow_hour_of_the_machine_is_taken_out_of_the_time() -> None:
    row = {"engine": "openvino", "precision": "fp32", "batch": 1, "sequence": None}
    rows = [
        {**row, "p50_ms": 3.0},
        {**row, "p50_ms": 9.0},
        {**row, "engine": "torch", "p50_ms": 50.0},
        {**row, "precision": "bf16", "p50_ms": 1.0},
    ]
    assert float_times([Timing(**one) for one in rows]) == {("openvino", (1, None)): 3.0}
    report = {"baseline": "baseline", "variants": [{"id": "baseline", "latency": rows}]}
    assert phase_of(contents(report), BASELINE) == pytest.approx(1.5)
    assert full.corrected({"metric": 0.9, "latency": 3.0, "throughput": 100.0, "size": 5}, 1.5) == {
        "metric": 0.9,
        "latency": pytest.approx(2.0),
        "throughput": pytest.approx(150.0),
        "size": 5,
    }
    assert phase_of(contents({"baseline": "baseline", "variants": [{"id": "baseline", "latency": []}]}), BASELINE) == 1.0


@given(st.dictionaries(st.integers(0, 9), st.tuples(st.floats(0, 100), st.floats(0, 100), st.booleans()), min_size=1))
def test_the_cheapest_comes_first(given_: dict[int, tuple[float, float, bool]]) -> None:
    prices = {number: Price(seconds, work, ("distill",) if unknown else ()) for number, (seconds, work, unknown) in given_.items()}
    order = cheapest_first(prices)
    assert sorted(order) == sorted(prices)
    known = not any(price.unknown for price in prices.values())
    costs = [prices[number].seconds if known else prices[number].work for number in order]
    assert costs == sorted(costs)


class Scripted:
    """A rung that measures nothing: a metric that is the sparsity, and a price."""

    ABOUT: ClassVar[str] = "scripted"

    def __init__(self, name: str, drops: bool = False, fails: Sequence[int] = ()) -> None:
        self.NAME, self.drops, self.fails, self.order = name, drops, fails, list[int]()  # type: ignore[misc]

    def absent(self, setup: Setup) -> None:
        return None

    def recipe(self, one: Candidate, setup: Setup) -> Recipe:
        return setup.recipe_of(one.values)

    def measure(self, one: Candidate, setup: Setup) -> dict[str, Any]:
        self.order.append(one.number)
        if one.number in self.fails:
            raise EngineError("openvino: out of\nmemory")
        metric = float(one.values["prune.sparsity"])
        return {"metric": metric, "macs": 1, "weight_bytes": 1, "results": {"metric": metric}, "excess": {}, "missed": [], "served": {}}

    def verdicts(self, wave: Sequence[Candidate], setup: Setup) -> dict[int, Verdict]:
        return halved(wave, self.NAME, setup) if self.drops else {}


def worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rungs: list[Scripted], **settings: Any) -> tuple[Study, Setup]:
    setup = setup_of(tmp_path, **{"budget": {"trials": 8}, "halving": {"wave": 4}, **settings})
    open_folder(setup)
    monkeypatch.setattr(work, "rungs_of", lambda setup, baseline=None: dict.fromkeys(rungs))
    study = Study(setup.folder, setup.recipe, setup.knobs, True)
    Work(setup, study, BASELINE).run()
    return study, setup


def test_waves_climb_the_rungs_the_cheapest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rungs = [Scripted("size"), Scripted("short", drops=True), Scripted("full")]
    monkeypatch.setattr(Work, "_price", lambda self, rung, one: Price(-float(one.values["prune.sparsity"]), 0.0))
    study, _ = worked(tmp_path, monkeypatch, rungs)
    found = {one.number: one for one in study.candidates()}
    assert [one.wave for one in found.values()] == [0] * 4 + [1] * 4
    for wave in (0, 1):
        mine = [one for one in found.values() if one.wave == wave]
        expected = sorted((one.number for one in mine), key=lambda number: -found[number].values["prune.sparsity"])
        assert [number for number in rungs[0].order if found[number].wave == wave] == expected
        best = expected[:2]
        assert {one.number for one in mine if one.state == "finished"} == {*best, *(one.number for one in mine if one.own)}
        for one in mine:
            assert (one.dropped is None) == (one.state == "finished")
            assert one.state == "finished" or "2 of 4 are promoted" in str(one.dropped)


def test_a_candidate_that_fails_is_dropped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, _ = worked(tmp_path, monkeypatch, [Scripted("size"), Scripted("full", fails=(1,))], budget={"trials": 4})
    states = {one.number: one.state for one in study.candidates()}
    assert list(states.values()).count("dropped") == 1
    [failed] = [one for one in study.candidates() if one.state == "dropped"]
    assert (failed.number, failed.dropped and failed.dropped.reason) == (1, "openvino: out of memory")


def test_a_wave_that_fails_as_a_whole_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"all 4 candidates .*: openvino: out of memory"):
        worked(tmp_path, monkeypatch, [Scripted("size", fails=range(99)), Scripted("full")])


def test_what_does_not_fit_into_the_time_left_is_set_aside_until_there_is_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "_price", lambda self, rung, one: Price(100.0 * (rung.NAME == "full") * (not one.own), 0.0))
    study, setup = worked(tmp_path, monkeypatch, [Scripted("size"), Scripted("full")], budget={"trials": 8, "hours": 0.01})
    assert len(study.candidates()) == 4  # one wave: the next one would fare alike
    Work(setup, study, BASELINE).run()  # another call tries again, and does not draw either
    assert len(study.candidates()) == 4
    finished = [one for one in study.candidates() if one.state == "finished"]
    assert [one.own for one in finished] == [True]
    for one in study.candidates():
        assert one.own or "of search.budget.hours are left; this rung takes 100 s by prediction" in str(one.dropped)
    assert math.isclose(sum(one.seconds for one in finished), 0.0, abs_tol=1.0)
    more = setup_of(tmp_path, budget={"trials": 8, "hours": 1}, halving={"wave": 4})
    later = Study(more.folder, more.recipe, more.knobs, True)
    Work(more, later, BASELINE).run()
    assert {one.state for one in later.candidates()} == {"finished"}
    assert len(later.candidates()) == 8


def test_the_short_rung_trains_for_its_share(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, halving={"short": 0.25})
    assert ShortTraining().recipe(candidate(0), setup).stages[1].recover.epochs == 0.5
