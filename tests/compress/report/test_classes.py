"""Figures of every class against scikit-learn and seqeval's rules, and the warning of a model that knows nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from compress.report.classes import classes, no_better
from compress.report.decision import decision_of
from compress.report.evaluations import Evaluation
from compress.report.phrases import verdict
from compress.report.report import collect
from compress.report.summary import summary
from foundation.artifacts.run_folder import open_run
from foundation.labels import tags
from foundation.labels.classes import ClassIds
from foundation.labels.label_sets import LabelSets
from foundation.labels.value import Numbers
from tests.hostile.finished_runs import write_run
from tests.plain_reports import contents


def shares(counted: np.ndarray) -> np.ndarray:
    right, found, true = counted.astype(float).T
    return np.asarray(np.nan_to_num(np.stack([right / found, right / true, 2 * right / (found + true)])))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_ids_and_sets_are_counted_as_scikit_learn_does() -> None:
    draw = np.random.default_rng(0)
    labels, logits = draw.integers(0, 3, 200), draw.normal(size=(200, 4))  # no row of class 3
    expected = precision_recall_fscore_support(labels, logits.argmax(1), labels=range(4), zero_division=0)
    counted = ClassIds(labels).class_counts(logits)
    assert counted is not None
    assert shares(counted) == pytest.approx(np.array(expected[:3]))
    assert counted[:, 2].tolist() == expected[3].tolist()
    sets = draw.random((50, 4)) < 0.3
    expected = precision_recall_fscore_support(sets, logits[:50] > 0, zero_division=0)
    counted = LabelSets(sets).class_counts(logits[:50])
    assert counted is not None
    assert shares(counted) == pytest.approx(np.array(expected[:3]))


def test_entities_are_counted_by_kind_and_add_up_to_those_of_all() -> None:
    names = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O", "B-PER", "O"]]
    found = [["B-PER", "I-PER", "O", "B-PER"], ["B-LOC", "O", "O", "B-LOC"]]
    labels = tags.labels_of(true, [np.arange(4)] * 2, names)
    answers = np.array([[np.eye(5)[names.index(tag)] + 0.1 for tag in row] for row in found], np.float32)
    counted = labels.class_counts(answers)
    assert counted is not None
    assert counted.tolist() == [[1, 2, 2], [1, 2, 2]]
    assert counted.sum(0).tolist() == labels.values(answers)[0].sum(0).tolist()


def test_values_have_no_classes() -> None:
    assert Numbers(np.zeros(3, np.float32)).class_counts(np.zeros((3, 1), np.float32)) is None


def test_the_report_has_a_row_for_each_class_and_the_most_frequent_one(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    found = collect(run, []).written()["classes"]
    assert found["backend"] is None
    assert found["majority"] == {"name": "0", "share": pytest.approx(2 / 12)}
    assert [row["n"] for row in found["rows"]] == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert found["rows"][0]["baseline"]["recall"] == pytest.approx(0.5)
    assert found["rows"][0]["served"] is None
    values = Evaluation("a", "torch", "", "", np.zeros((3, 1)), Numbers(np.zeros(3, np.float32)), {})
    assert classes(run, values, None) is None


def report(value: float | None, chance: float | None, metric: str = "accuracy") -> dict[str, Any]:
    variants = [{"id": "baseline", "accuracy": {"torch": {"value": value}}}, {"id": "quantize", "accuracy": {}}]
    return {"metric": {"name": metric, "chance": chance}, "variants": variants, "classes": {"majority": {"name": "yes", "share": chance}}}


@pytest.mark.parametrize(
    ("value", "chance", "metric", "warned"),
    [
        (0.5199, 0.5271, "accuracy", True),
        (0.5271, 0.5271, "accuracy", True),
        (0.53, 0.5271, "accuracy", False),
        (900.0, 800.0, "perplexity", True),
        (700.0, 800.0, "perplexity", False),
        (0.4, 0.5, "recall:yes", True),
        (0.6, 0.5, "recall:yes", False),
        (0.4, 0.5, "metric of another version", False),
        (None, 0.5, "accuracy", False),
        (0.5, None, "accuracy", False),
    ],
)
def test_a_model_no_better_than_the_majority_class_is_warned_of(value: float, chance: float, metric: str, warned: bool) -> None:
    found = no_better(contents(report(value, chance, metric)))
    assert (found is not None) == warned
    if found and metric == "accuracy":
        assert all(part in found for part in ("baseline", f"{100 * value:.2f} %", f"{100 * chance:.2f} %", "yes"))
        assert "quantize" not in found
    if found and metric == "recall:yes":  # which a model that always answers yes has in full
        assert "always the most frequent class" not in found
        assert "its answers in another order" in found


@pytest.mark.parametrize(("value", "praised"), [(0.53, True), (0.5, False)])
def test_the_headline_does_not_praise_a_model_that_knows_nothing(value: float, praised: bool) -> None:
    given = report(value, 0.5271)
    given["baseline"] = "baseline"
    given["variants"][1] |= {"accuracy": {"torch": {"value": value}}, "drops": {"torch": {"value": 0.0}}}
    decision = decision_of(contents(given))
    bold = [words for words, emphasized in verdict(decision) if emphasized]
    assert any("unchanged" in words for words in bold) == praised
    assert any("knows nothing" in words for words in bold) != praised
    told = summary(contents(given), Path("run"))[0]
    assert ("52.71 %" in told and "knows nothing" in told) != praised


def test_the_warning_is_in_the_report_once(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    good = collect(run, ["other"]).written()
    assert good["warnings"] == ["other"]
    assert good["metric"]["chance"] < good["variants"][0]["accuracy"]["torch"]["value"]


def test_the_warning_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(write_run(tmp_path / "run"))
    monkeypatch.setattr("compress.report.report.chance", lambda *_: 1.0)
    first = collect(run, ["other"]).written()["warnings"]
    assert len(first) == 2
    assert "knows nothing" in first[1]
    assert collect(run, first).written()["warnings"] == first
