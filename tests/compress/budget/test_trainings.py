"""Losses of metrics and classes, their variance, and what a study of a tiny model writes, finds again and predicts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import app
from compress.budget import budget, page, setting, trainings
from compress.budget.law import DRAWS, Trainings
from compress.budget.setting import Setting
from compress.budget.trainings import Answers, entropy_losses, loss_of, metric_losses, metric_of
from compress.recipe import check
from foundation.core.progress import ConsoleProgress
from foundation.core.resampling import each_alone
from foundation.labels.classes import ClassIds
from foundation.labels.tasks import TASKS
from foundation.measure.judged import Judged, judged_of
from foundation.measure.metrics import METRICS
from foundation.training.finetune import Finetune
from tests.problems import raises_problem
from tests.tiny_recipes import tiny_vit

ACCURACY = judged_of("text-classification", "accuracy", ("no", "yes"))


def answers(logits: Any, labels: Any, rows: int = 100) -> Answers:
    return Answers(Setting(rows, 1.0), 1000, 1.0, np.asarray(logits, np.float32), ClassIds(np.asarray(labels)), each_alone(len(labels)))


@given(st.sampled_from(sorted(METRICS)), st.floats(0.01, 0.99))
def test_a_metric_is_found_again_from_its_loss(name: str, value: float) -> None:
    metric = METRICS[name]
    value = 1 + value if metric.relative else value  # a perplexity is above 1
    judged = Judged("text-classification", name, metric)
    loss = loss_of(judged, value)
    assert loss > 0
    assert float(metric_of(judged, np.array([loss]))[0]) == pytest.approx(value)
    better = value + 0.005 if metric.higher_is_better else value - 0.005
    assert loss_of(judged, better) < loss


def test_losses_are_shares_of_wrong_rows_and_their_variance_is_of_rows_that_differ() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 900)
    hard = random.random(900) < 0.15  # rows that every model gets wrong
    made = []
    for rate in (0.05, 0.1, 0.2):
        wrong = hard | (random.random(900) < rate)
        made.append(answers(np.eye(2)[np.where(wrong, 1 - labels, labels)], labels))
    found = metric_losses(ACCURACY, made)
    wrong_IN = np.stack([one.logits.argmax(axis=1) != labels for one in made]).astype(float)
    np.testing.assert_allclose(found.loss, wrong_IN.mean(axis=1))
    assert found.chance == pytest.approx(min(np.mean(labels == 0), np.mean(labels == 1)))
    relative = wrong_IN / wrong_IN.mean(axis=1, keepdims=True)  # the derivative of the logarithm of a mean
    own = relative - relative.mean(axis=0)
    np.testing.assert_allclose(found.variance, own.var(axis=1) / 900 * 3 / 2, rtol=0.35)
    whole = relative.var(axis=1) / 900
    assert (found.variance < 0.8 * whole).all()  # what all models share is no noise between them


def test_a_model_without_errors_has_a_loss() -> None:
    labels = np.array([0, 1] * 20)
    found = metric_losses(ACCURACY, [answers(np.eye(2)[labels], labels), answers(np.eye(2)[1 - labels], labels)])
    np.testing.assert_allclose(found.loss, [0.5 / 40, 1.0])
    assert np.isfinite(found.variance).all()


def test_rows_of_one_class_have_no_loss_of_chance() -> None:
    labels = np.zeros(30, np.int64)
    made = [answers(np.eye(2)[(np.arange(30) < wrong).astype(int)], labels) for wrong in (3, 6)]
    assert metric_losses(ACCURACY, made).chance is None
    entropies = entropy_losses(made)
    assert entropies is not None
    assert entropies.chance is None


@pytest.mark.parametrize("sharpness", [0.02, 1.0, 60.0])
def test_cross_entropies_do_not_depend_on_how_sure_a_model_is(sharpness: float) -> None:
    random = np.random.default_rng(1)
    labels = random.integers(0, 3, 400)
    logits = np.eye(3)[labels] + random.normal(0, 1, (400, 3))
    found, plain = (entropy_losses([answers(scale * logits, labels)] * 2) for scale in (sharpness, 1.0))
    assert found is not None
    assert plain is not None
    np.testing.assert_allclose(found.loss, plain.loss, rtol=1e-3)
    temperatures = np.exp(np.linspace(-3, 3, 601))

    def naive(temperature: float) -> float:
        powers = np.exp(logits / temperature)
        return float(np.mean(-np.log(powers[np.arange(400), labels] / powers.sum(axis=1))))

    assert found.loss[0] == pytest.approx(min(map(naive, temperatures)), rel=1e-3)
    counts = np.bincount(labels) / 400
    assert found.chance == pytest.approx(float(-np.sum(counts * np.log(counts))))


def test_rows_without_classes_have_no_cross_entropy() -> None:
    facts = TASKS["text-regression"]
    labels = facts.answer.read(np.linspace(0, 1, 30))
    one = replace(answers(np.zeros((30, 1)), np.zeros(30)), labels=labels)
    assert entropy_losses([one, one]) is None


FEW = ((8, 1, "k"), (4, 2, "k"), (2, 1, "k"), (1, 1, "k"), (1, 2, "k"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five short trainings."""
    monkeypatch.setattr(setting, "DESIGN", FEW)
    monkeypatch.setattr(setting, "SIZES", ())


def tiny(**finetune: Any) -> dict[str, Any]:
    return {**tiny_vit("tiny"), "stages": [{"finetune": {"epochs": 3, "learning_rate": 3e-3, **finetune}}, {"quantize": {}}]}


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.usefixtures("engines_inside", "no_clocks", "few")
def test_a_budget_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder, trained = check(tiny()), tmp_path / "budget", list[float]()
    run = Finetune.run

    def counted(self: Finetune, *arguments: Any) -> Any:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(self.epochs * self.fraction)
        return run(self, *arguments)

    monkeypatch.setattr(Finetune, "run", counted)
    with pytest.raises(KeyboardInterrupt):
        budget.study(recipe, folder, ConsoleProgress("silent"))
    monkeypatch.setattr(Finetune, "run", lambda self, *arguments: (trained.append(self.epochs * self.fraction), run(self, *arguments))[1])
    found = budget.study(recipe, folder, ConsoleProgress("silent"))
    assert len(trained) == len(FEW)  # the first three were finished
    again = budget.study(check(tiny(epochs=7)), folder, ConsoleProgress("silent"))
    assert len(trained) == len(FEW)  # epochs of the recipe change no short training
    assert [one.alternative.setting.epochs for one in again.predictions if one.alternative.name == "the recipe"] == [7]
    rows = len(found.answers[0].labels)
    assert all(len(one.labels) == rows for one in found.answers)
    for one, loss in zip(found.answers, found.metric.loss, strict=True):
        assert loss == pytest.approx(np.mean(one.logits.argmax(axis=1) != one.labels.array))
    assert len(found.metric_fit.draws) == DRAWS
    _check_page(found)


def _check_page(found: budget.Budget) -> None:
    document = json.loads(page.write(found).read_text(encoding="utf-8"))
    assert [one["rows"] for one in document["trainings"]] == [one.setting.rows for one in found.answers]
    assert document["selection_rows"] == len(found.answers[0].labels)
    table = {one["alternative"]["name"]: one for one in document["alternatives"]}
    assert table["the recipe"]["gain"] == 0
    for name in ("twice the rows", "twice the epochs"):
        low, high = table[name]["gain_interval"]
        assert low <= table[name]["gain"] <= high
        assert table[name]["gain"] >= 0
        assert table[name]["seconds"] > table["the recipe"]["seconds"] > table["half the rows"]["seconds"] > 0
        assert (low > 0) == (table[name]["verdict"] == "better")
    assert table["twice the rows"]["alternative"]["missing"] > 0
    text = list(page.lines(found))
    assert sum(line.startswith(one) for line in text for one in table) == len(table)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.usefixtures("engines_inside", "no_clocks", "few")
def test_the_command_prints_the_plan_and_then_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(json.dumps(tiny()), encoding="utf-8")
    monkeypatch.setattr(trainings, "RESAMPLES", 20)
    done = CliRunner().invoke(app, ["plan", "recipe.yaml", "--budget"])
    assert done.exit_code == 0, done.output
    assert done.output.index("total:") < done.output.index("the recipe") < done.output.index("twice the epochs")
    assert Path("budgets/tiny/budget.json").is_file()


@pytest.mark.parametrize(("losses", "learned"), [([0.5, 0.49, 0.46, 0.3], False), ([0.5, 0.49, 0.4, 0.3], True)])
def test_trainings_that_learned_nothing_have_no_law(losses: list[float], learned: bool) -> None:
    settings = np.ones((4, 3))
    studied = setting.Studied.of(check(tiny()), 5000, 1)
    measured = Trainings(settings, np.array(losses), np.zeros(4), 0.5)
    if learned:
        budget.check_learned(measured, studied)
        return
    with raises_problem("--budget", "3", "4"):
        budget.check_learned(measured, studied)
    budget.check_learned(replace(measured, chance=None), studied)


@pytest.mark.whole
def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with raises_problem(str(tmp_path)):
        budget.open_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
