"""The study: what is drawn does not depend on interruptions, nothing is drawn twice, and a log that a kill cut off is read on."""

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution

from compress.recipe import Recipe
from compress.search.space import knobs_of
from compress.search.study import JOURNAL, VALUES, WAVE, FileLock, Study
from foundation.core.errors import InputError
from tests.compress.search.tiny import tiny_search

pytestmark = pytest.mark.whole

STAGES = [{"finetune": {"epochs": 0.2}}, {"prune": {"sparsity": 0.5, "granularity": ["ffn"]}}, {"quantize": {}}]
SPACE: dict[str, Any] = {"prune.sparsity": [0.3, 0.8], "quantize.mode": ["ptq", "qat"]}


def recipe_of(trials: int = 6, wave: int = 3, space: dict[str, Any] = SPACE, **settings: Any) -> Recipe:
    return tiny_search(space, STAGES, budget={"trials": trials}, halving={"wave": wave}, **settings)


def study_of(recipe: Recipe, folder: Path | None = None) -> Study:
    return Study(folder, recipe, knobs_of(recipe), higher_is_better=True)


def finish_all(study: Study) -> None:
    for one in study.candidates():
        if one.state == "open":
            study.finish(one.number, [float(one.values["prune.sparsity"])], {})


def drawn(study: Study) -> list[tuple[int, dict[str, Any]]]:
    return [(one.wave, dict(one.values)) for one in study.candidates()]


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_study_that_is_opened_anew_for_every_step_draws_the_same(tmp_path: Path, sampler: str) -> None:
    recipe = recipe_of(sampler=sampler)
    whole = study_of(recipe)
    while whole.draw_wave() and len(drawn(whole)) < 6:
        finish_all(whole)
    for _ in range(2):
        study_of(recipe, tmp_path).draw_wave()
        finish_all(study_of(recipe, tmp_path))
    assert drawn(study_of(recipe, tmp_path)) == drawn(whole)
    assert [wave for wave, _ in drawn(whole)] == [0, 0, 0, 1, 1, 1]
    assert drawn(whole)[0][1] == {"prune.sparsity": 0.5, "quantize.mode": "ptq"}  # the recipe itself
    assert study_of(recipe, tmp_path).draw_wave() == []  # the budget is used up


def test_a_wave_that_was_drawn_in_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    whole = study_of(recipe)
    whole.draw_wave()
    asked = optuna.Study.ask

    def killed(self: optuna.Study, *given: Any, **named: Any) -> optuna.Trial:
        if len(self.get_trials()) >= 2:
            asked(self, *given, **named)  # drawn, but nothing was noted of it yet
            raise KeyboardInterrupt
        return asked(self, *given, **named)

    monkeypatch.setattr(optuna.Study, "ask", killed)
    with pytest.raises(KeyboardInterrupt):
        study_of(recipe, tmp_path).draw_wave()
    monkeypatch.undo()
    again = study_of(recipe, tmp_path)
    assert not again.is_drawn(0)
    again.draw_wave()
    assert again.is_drawn(0)
    assert drawn(again)[:2] == drawn(whole)[:2]
    assert [one.state for one in again.candidates()] == ["open"] * 3


def test_a_small_space_is_drawn_whole_and_nothing_twice() -> None:
    study = study_of(recipe_of(trials=50, wave=10, space={"quantize.mode": ["ptq", "qat"], "prune.rows": [32, 64, 128]}))
    found = study.draw_wave()
    assert len(found) == 6
    assert len({str(one.values) for one in found}) == 6
    for one in found:
        study.finish(one.number, [0.5], {})
    assert study.draw_wave() == []


GRID = {"prune.sparsity": {"low": 0.1, "high": 0.3, "step": 0.1}, "quantize.mode": ["ptq", "qat"]}


def test_a_grid_is_drawn_whole_and_nothing_twice(tmp_path: Path) -> None:
    recipe = recipe_of(trials=50, wave=4, space=GRID)
    while study_of(recipe, tmp_path).draw_wave():
        finish_all(study_of(recipe, tmp_path))
    found = [(values["prune.sparsity"], values["quantize.mode"]) for _, values in drawn(study_of(recipe, tmp_path))]
    assert sorted(found) == [(sparsity, mode) for sparsity in (0.1, 0.2, 0.3) for mode in ("ptq", "qat")]


def test_a_study_of_binary_steps_that_ended_early_goes_on(tmp_path: Path) -> None:
    recipe = recipe_of(trials=50, wave=4, space=GRID)
    study = study_of(recipe, tmp_path)
    shorter = {**{knob.path: knob.distribution for knob in knobs_of(recipe)}, "prune.sparsity": FloatDistribution(0.1, 0.2, step=0.1)}
    for sparsity in (0.1, 0.30000000000000004):  # as a version drew them that added up steps
        values = {"prune.sparsity": sparsity, "quantize.mode": "ptq"}
        params = {"prune.sparsity": min(sparsity, 0.2), "quantize.mode": '"ptq"'}
        attributes = {WAVE: 0, VALUES: values}
        study._study.add_trial(optuna.trial.create_trial(params=params, distributions=shorter, value=sparsity, user_attrs=attributes))
    while (study := study_of(recipe, tmp_path)).draw_wave():
        finish_all(study)
    found = [(values["prune.sparsity"], values["quantize.mode"]) for _, values in drawn(study)]
    assert sorted(found) == [(0.1, "ptq"), (0.1, "qat"), (0.2, "ptq"), (0.2, "qat"), (0.3, "qat"), (0.30000000000000004, "ptq")]
    [shares] = study.importances().values()
    assert shares is not None
    assert shares["prune.sparsity"] > 0.9


def test_a_line_that_a_kill_cut_off_is_removed_by_whoever_writes_next(tmp_path: Path) -> None:
    study = study_of(recipe_of(), tmp_path)
    study.draw_wave()
    before = drawn(study)
    journal = tmp_path / JOURNAL
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 5, "worker_id": "cut')
    assert drawn(study_of(recipe_of(), tmp_path)) == before
    assert journal.read_bytes().startswith(whole)
    assert journal.read_bytes().endswith(b"}\n")
    with journal.open("ab") as stream:  # another process dies while this one has the study open
        stream.write(b'{"op_code"')
    study.record(study.candidates()[0].number, "size", {"macs": 1})
    assert study_of(recipe_of(), tmp_path).candidates()[0].records == {"size": {"macs": 1}}


def test_a_log_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text("no journal\n")
    with pytest.raises(InputError, match=r"study\.journal: damaged"):
        study_of(recipe_of(), tmp_path)


def test_the_lock_ends_with_who_held_it(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"")
    gone = FileLock(tmp_path / "log")
    gone.acquire()
    assert gone._held is not None
    gone._held.close()  # as the kernel does for a process that was killed
    FileLock(tmp_path / "log").acquire()


def test_what_was_dropped_keeps_its_reason_and_teaches_the_sampler(tmp_path: Path) -> None:
    study = study_of(recipe_of(), tmp_path)
    first, second, third = study.draw_wave()
    study.drop(first.number, "size", "its weights alone take 9 MB", {"max_size_mb": 0.5})
    study.finish(second.number, [0.9], {"max_drop": -0.01})
    study.finish(third.number, [0.8], {"max_drop": 0.02})
    again = {one.number: one for one in study_of(recipe_of(), tmp_path).candidates()}
    dropped = again[first.number].dropped
    assert dropped is not None
    assert (dropped.rung, dropped.reason) == ("size", "its weights alone take 9 MB")
    assert [again[number].state for number in again] == ["dropped", "finished", "finished"]
    assert again[second.number].results == (0.9,)
    trials = {trial.number: trial for trial in study._trials()}
    assert trials[first.number].constraints == {"max_size_mb": 0.5}
    assert trials[third.number].constraints == {"max_drop": 0.02}
    assert study.losses((0.9,)) == (-0.9,)


def test_the_knob_that_matters_is_the_important_one() -> None:
    study = study_of(recipe_of(trials=12, wave=12))
    for one in study.draw_wave():
        assert study.importances() == {"metric": None} or one.number >= 4
        study.finish(one.number, [1 - float(one.values["prune.sparsity"])], {})
    [shares] = study.importances().values()
    assert shares is not None
    assert shares["prune.sparsity"] > 0.9
    assert sum(shares.values()) == pytest.approx(1)
