"""The tables of tasks and metrics: nothing outside names a task, and a new one is a row."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from compress.commands.init import template
from compress.commands.list import catalogue, schema_text
from compress.pipeline import run
from compress.recipe import check
from docs.generate import reference
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError
from foundation.core.named import Named
from foundation.core.progress import ConsoleProgress
from foundation.data.config import Columns
from foundation.labels.classes import ClassIds
from foundation.labels.next_token import Tokens
from foundation.labels.tasks import TASKS, num_classes
from foundation.labels.value import Numbers, ValueAnswer
from foundation.measure.metrics import METRICS, Metric, primary
from tests.tiny_recipes import tiny_vit

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("compress", "foundation", "quantize", "distill", "prune", "export", "triton_repo")
TOY = "image-ageing"


def strings_of(path: Path) -> Iterator[str]:
    """Yields the strings of a module, also those inside f-strings, but no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_at_most_three_files_name_a_task() -> None:
    names = re.compile("|".join(map(re.escape, TASKS)))
    files = [ROOT / "cli.py", *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))]
    naming = [str(path.relative_to(ROOT)) for path in files if any(names.search(text) for text in strings_of(path))]
    assert "foundation/labels/tasks.py" in naming
    assert len(naming) <= 3, f"ask for a fact of foundation.labels.tasks.TASKS instead of a name: {', '.join(naming)}"


@pytest.mark.parametrize("task", TASKS)
def test_a_row_names_what_exists(task: str) -> None:
    import transformers

    row = TASKS[task]
    assert set(row.metrics) <= set(METRICS)
    assert set(row.columns) <= set(Columns.model_fields)
    assert row.columns[-1] == ("text" if row.captioned else "negative" if row.needs_negatives else "label") or not row.needs_labels
    assert hasattr(transformers, row.auto_class)


def test_the_facts_of_each_task() -> None:
    single, classes = "single_label_classification", ("accuracy", "f1", "matthews")
    expected = {
        "text-classification": ("text", ClassIds, classes, True, single, "text-classification"),
        "text-regression": ("text", Numbers, ("pearson", "spearman"), True, "regression", "text-classification"),
        "text-generation": ("text", Tokens, ("perplexity", "accuracy"), False, None, "text-generation"),
        "image-classification": ("image", ClassIds, ("accuracy",), True, single, "image-classification"),
    }
    rows = {name: TASKS[name] for name in expected}  # not all of TASKS: who adds a row writes a test of its own
    assert expected == {
        name: (row.modality, row.answer.form, row.metrics, row.needs_labels, row.problem_type, row.pipeline_tag)
        for name, row in rows.items()
    }
    assert [num_classes(task, ("a", "b")) for task in expected] == [2, None, None, 2]


def test_what_is_known_of_each_metric() -> None:
    rows = {name: METRICS[name] for name in ("accuracy", "f1", "matthews", "pearson", "spearman", "perplexity")}
    assert [name for name, row in rows.items() if not row.higher_is_better] == ["perplexity"]
    assert [name for name, row in rows.items() if row.relative] == ["perplexity"]
    assert [name for name, row in rows.items() if row.is_share] == ["accuracy", "f1"]
    assert METRICS["accuracy"].drop(0.9, 0.8) == pytest.approx(0.1)
    assert METRICS["perplexity"].drop(20.0, 21.0) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("columns", "task", "wanted"),
    [
        ({}, "text-classification", ("text", "label")),
        ({"text_pair": "b", "label": 0}, "text-regression", ("text", "b", 0)),
        ({"text": "body", "label": "unread"}, "text-generation", ("body",)),
        ({"image": "img", "text": "unread"}, "image-classification", ("img", "label")),
    ],
)
def test_a_task_reads_its_columns(columns: dict[str, Any], task: str, wanted: tuple[Any, ...]) -> None:
    assert Columns(**columns).wanted(task) == wanted


@pytest.mark.parametrize(
    ("given", "line"),
    [("gren", "Input should be 'red', 'green' or 'blue'; did you mean 'green'?"), ("x", "Input should be 'red', 'green' or 'blue'")],
)
def test_an_unknown_name_reads_like_the_error_of_a_literal(given: str, line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Annotated[str, Named(dict.fromkeys(("red", "green", "blue")))]).validate_python(given)
    [problem] = caught.value.errors()
    assert (problem["type"], problem["msg"]) == ("literal_error", line)


@pytest.mark.parametrize("given", [3, None, ["red"], {}])
def test_what_is_no_text_is_no_name(given: Any) -> None:
    with pytest.raises(ValidationError, match="Input should be 'red'"):
        TypeAdapter(Annotated[str, Named({"red": 0})]).validate_python(given)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A task that nobody knows, with a metric of its own: two rows."""
    row = replace(TASKS["image-classification"], answer=ValueAnswer(), problem_type="regression", metrics=("gap", "pearson"))
    gap = Metric(lambda values, labels: float(np.mean(np.abs(values[:, 0] - labels))), higher_is_better=False)
    monkeypatch.setitem(TASKS, TOY, row)  # type: ignore[misc]
    monkeypatch.setitem(METRICS, "gap", gap)  # type: ignore[misc]
    return TOY


def test_a_new_task_is_offered_everywhere(toy: str) -> None:
    assert toy in catalogue("tasks")
    assert f"`{toy}`" in reference()
    assert toy in json.loads(schema_text())["$defs"]["ModelConfig"]["properties"]["task"]["enum"]
    assert f"task: {toy}" in template(toy, "recipe.yaml")
    raw = tiny_vit("toy")
    raw["model"]["task"] = "image-agein"
    with pytest.raises(InputError, match=rf"model.task: 'image-agein' .* or '{toy}'; .*'{toy}'"):
        check({**raw, "stages": [{"finetune": {}}]})


def test_a_new_task_runs(toy: str, tmp_path: Path) -> None:
    raw = tiny_vit("toy")
    raw["model"]["task"] = toy
    recipe = check({**raw, "stages": [{"finetune": {"epochs": 0.2, "learning_rate": 1e-3}}, {"quantize": {"calibration": {"rows": 64}}}]})
    report = run(recipe, tmp_path / "toy", progress=ConsoleProgress("quiet")).report
    assert report["metric"] == {"name": "gap", "higher_is_better": False, "chance": report["metric"]["chance"]}
    assert list(report["variants"][-1]["metrics"]["torch"]) == ["gap", "pearson"]
    before, after = (variant["accuracy"]["torch"]["value"] for variant in report["variants"])
    assert report["variants"][-1]["drops"]["torch"]["difference"] == pytest.approx(primary(toy).drop(before, after))
    assert open_run(tmp_path / "toy").artifacts["finetune"].metrics["selection"]["metric"] == "gap"
