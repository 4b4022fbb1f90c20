"""Runs on one page: what is paired and what is not, fronts, recipe differences, machines, refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import app
from compress.compare import recipes
from compress.compare.document import collect, compare
from compress.compare.model import Comparison
from compress.compare.pairs import pairs
from compress.compare.sides import read_sides
from foundation.artifacts.run_folder import LOCK_FILE
from foundation.core.errors import InputError
from foundation.core.yaml_file import parse_yaml
from tests.compress.compare.written_runs import TIMES, Written, classes, write_run
from tests.compress.report.test_page import Page
from tests.html_tree import tree
from tests.report_keys import undocumented, unwritten
from tests.tiny_recipes import tiny_vit

pytestmark = pytest.mark.whole

LABELS, FLOAT = classes(60, 1)
INT8 = classes(60, 2, 0.7)[1]
OTHER = classes(60, 3, 0.6)[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: A, B with another int8 model on a machine twice as fast, and one of an earlier version without engines."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a", Written(LABELS, {"finetune": FLOAT, "quantize": INT8}, recipe={"goals": {"max_drop": 0.5}}))
    write_run(folder / "b", Written(LABELS, {"finetune": FLOAT, "quantize": OTHER}, recipe={"seed": 3}, speed=2.0))
    write_run(folder / "old", Written(LABELS, {"finetune": OTHER}, rows=None, engines=False))
    return folder


def pair_of(folder: Path, first: Written, second: Written) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    written = [write_run(folder / name, one) for name, one in (("first", first), ("second", second))]
    (found,) = [pair for pair in pairs(read_sides(written)) if pair["kind"] == "served"]
    return found


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(8, 80), seed=st.integers(0, 99), size=st.integers(1, 3))
def test_runs_are_paired_as_the_report_of_one_run_pairs_its_variants(tmp_path: Path, n: int, seed: int, size: int) -> None:
    labels, before = classes(n, seed)
    after = classes(n, seed + 100, 0.5)[1]
    groups = None if size == 1 else np.arange(n) // size
    alone = Written(labels, {"finetune": before}, groups, engines=False)
    found = pair_of(tmp_path / "runs", alone, replace(alone, models={"finetune": after}))
    whole = write_run(tmp_path / "runs" / "whole", replace(alone, models={"finetune": before, "quantize": after}))
    report = json.loads((whole / "report.json").read_text())
    expected = report["variants"][1]["drops"]["torch"]
    assert {key: found[key] for key in expected} == expected
    assert found["first_value"] - found["second_value"] == pytest.approx(found["difference"])
    assert found["reason"] is None


def test_served_models_are_paired_where_they_run_and_others_by_their_names(runs: Path) -> None:
    found = pairs(read_sides([runs / "a", runs / "b"]))
    served, *same = found
    assert served["first"] == {"run": "A", "variant": "quantize", "backend": "openvino"}
    assert served["second"] == {"run": "B", "variant": "quantize", "backend": "openvino"}
    own = [np.mean(logits.argmax(axis=1) == LABELS) for logits in (INT8, OTHER)]
    assert served["difference"] == pytest.approx(own[0] - own[1])
    names = {(pair["second"]["variant"], pair["second"]["backend"]): pair["changed"] for pair in same}
    changed = int(np.sum(INT8.argmax(axis=1) != OTHER.argmax(axis=1)))
    assert names == {
        ("finetune", "torch"): 0,
        ("finetune", "openvino"): 0,
        ("quantize", "torch"): changed,
        ("quantize", "openvino"): changed,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": "others"}, "60 in both runs, with other contents"),
        ({"rows": "others", "labels": LABELS[:50], "models": {"finetune": FLOAT[:50]}}, "A has 60, B has 50"),
        ({"rows": None, "data": "other data", "labels": np.roll(LABELS, 1)}, "60 in both runs, with other contents"),
        ({"rows": None, "data": "other data"}, "run B does not say which rows"),
        ({"rows": None, "data": "data"}, None),
    ],
)
def test_other_rows_are_not_paired_and_one_reason_says_why(change: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    usual = Written(LABELS, {"finetune": FLOAT}, data="data", engines=False)
    found = pair_of(tmp_path, usual, replace(usual, **change))
    assert (found["reason"] is None) == (words is None)
    assert words is None or words in found["reason"]
    assert ("low" in found) == (words is None)


def test_rows_of_two_splits_of_the_same_data_are_not_the_same(tmp_path: Path) -> None:
    """A candidate of a search is judged on selection rows; the digest of its data is that of the recipe's."""
    old = Written(LABELS, {"finetune": FLOAT}, rows=None, data="data", engines=False)
    folders = [write_run(tmp_path / "a", old), write_run(tmp_path / "b", old)]
    (folders[1] / ".judge").write_text("selection")
    (found,) = [pair for pair in pairs(read_sides(folders)) if pair["kind"] == "served"]
    assert "does not say which rows" in found["reason"]


def test_another_metric_is_not_paired_and_has_no_joint_front(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "b", tmp_path / "b")
    told = json.loads((tmp_path / "b" / "report.json").read_text())
    told["metric"]["name"] = "f1"
    (tmp_path / "b" / "report.json").write_text(json.dumps(told))
    contents = collect(read_sides([runs / "a", tmp_path / "b"]))
    (pair,) = contents["pairs"]
    assert "A is judged by accuracy, B by f1" in pair["reason"]
    assert not any(one["joint_front"] for one in contents["configurations"])
    assert any(one["front"] for one in contents["configurations"])
    out, _ = compare([runs / "a", tmp_path / "b"], tmp_path / "out")
    text = Page((out / "compare.html").read_text()).text
    assert text.count("f1, ") >= 1, "the metric is next to the figure of a run that is judged by another one than A"
    assert "(f1)" in text
    assert "so the comparison is paired" not in text


def test_times_are_held_against_the_own_torch_alone_and_fronts_are_of_each_run_and_of_all(runs: Path) -> None:
    contents = collect(read_sides([runs / "a", runs / "b"]))
    found = {(one["run"], one["engine"], one["precision"]): one for one in contents["configurations"]}
    assert len(found) == len(contents["configurations"]) == 6
    for run, speed in (("A", 1.0), ("B", 2.0)):
        int8 = found[run, "openvino", "int8"]
        assert int8["p50_ms"] == TIMES["int8"] / speed
        assert int8["speedup"] == TIMES["torch"] / TIMES["int8"]
    best = {key for key, one in found.items() if one["joint_front"]}
    assert best == {("B", "openvino", "int8"), ("B", "openvino", "fp32")}  # the float models are equally good
    assert {key[1:] for key, one in found.items() if one["front"]} == {("openvino", "int8"), ("openvino", "fp32")}


def test_the_page_and_the_json_hold_the_comparison_wherever_the_runs_lie(runs: Path, tmp_path: Path) -> None:
    moved = [Path(shutil.copytree(runs / name, tmp_path / f"moved {name}")) for name in ("a", "b", "old")]
    out, found = compare(moved, tmp_path / "out")
    contents = found.written()
    assert json.loads((out / "compare.json").read_text()) == json.loads(json.dumps(contents))
    assert undocumented(contents, Comparison) == []
    optional = {"pairs[].interval_reason", "runs[].defaulted[]", "runs[].warnings[]", "machine[].name", "machine[].values.RUN"}
    assert {row for row in unwritten([contents], Comparison) if not row.startswith("runs[].goals[].")} <= optional
    text = (out / "compare.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert "http" not in text.replace("http-equiv", "")
    drawn = text.count('class="front series-1"'), text.count('class="front series-2"'), text.count('class="front joint"')
    assert drawn == (2, 2, 2), "each front once for wide and once for narrow screens"
    assert page.text.count("not measured in turns") >= 2
    whole = tree(text)
    heads = [head for head in whole.all("th") if "number" in head.classes]
    assert heads
    assert all(list(head.all("button", klass="term")) for head in heads)
    cells = [cell for table in whole.all("table") for body in table.all("tbody") for cell in body.all("td") if cell.text]
    assert all("colspan" in cell.attributes or any("column" in part.classes for part in cell.children) for cell in cells)
    for words in ("run C does not say which rows", "seed", "stages.export", "moved a", "absent"):
        assert words in page.text, words


def test_machines_that_differ_are_named(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "b", tmp_path / "b")
    told = json.loads((tmp_path / "b" / "report.json").read_text())
    told["environment"]["cpu"] = "Another CPU"
    del told["environment"]["versions"]["torch"]
    for variant in told["variants"]:
        for row in variant["latency"]:
            row |= {"threads": 4, "busy": True}
    (tmp_path / "b" / "report.json").write_text(json.dumps(told))
    out, found = compare([runs / "a", tmp_path / "b"], tmp_path / "out")
    contents = found.written()
    found = {row["name"]: row["values"]["B"] for row in contents["machine"]}
    assert found == {"cpu": "Another CPU", "threads": [4], "versions.torch": None}
    text = Page((out / "compare.html").read_text()).text
    assert "spoiled times of B." in text
    assert [run["speedup"]["busy"] for run in contents["runs"]] == [False, True]
    assert "the runs also differ in CPU, threads, the version of one library" in text


def test_only_what_differs_in_recipes_by_path() -> None:
    base = {**tiny_vit("one"), "stages": [{"finetune": {"epochs": 1}}, {"quantize": {"calibration": {"rows": 64}}}, {"export": {}}]}
    other = {
        **tiny_vit("one", layers=2),
        "goals": {"max_latency_ms": [{"percentile": 50, "batch": 1, "value": 2.0}]},
        "stages": [{"finetune": {"epochs": 1}}, {"quantize": {"calibration": {"rows": 32}, "smoothquant": True}}],
    }
    found = {row["path"]: row["values"] for row in recipes.differences({"A": base, "B": other})}
    assert found.pop("stages") == {"A": ["finetune", "quantize", "export"], "B": ["finetune", "quantize"]}
    assert found.pop("stages.export") == {"A": {"export": {}}}
    assert found.pop("goals.max_latency_ms")["A"] == []
    assert found.pop("model.config.num_hidden_layers") == {"A": 1, "B": 2}
    assert found.pop("stages.quantize.calibration.rows") == {"A": 64, "B": 32}
    assert set(found) <= {"stages.quantize.smoothquant"}
    assert recipes.differences({"A": base, "B": base}) == []


def test_a_recipe_without_keys_of_this_version_is_compared_by_their_defaults(runs: Path) -> None:
    stored = dict(parse_yaml((runs / "a" / LOCK_FILE).read_text(), "lock")["recipe"])
    older = {**stored, "data": {key: value for key, value in stored["data"].items() if key != "stride"}}
    older["stages"] = [{**stored["stages"][0]}, {"quantize": {**stored["stages"][1]["quantize"]}}, *stored["stages"][2:]]
    del older["stages"][1]["quantize"]["awq"]
    assert recipes.differences({"A": stored, "B": older}) == []
    assert (recipes.defaulted(stored), recipes.defaulted(older)) == ([], ["data.stride", "stages.quantize.awq"])


def refused(*arguments: Path | str) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


def test_what_cannot_be_compared_is_refused_in_one_line(runs: Path, tmp_path: Path) -> None:
    assert "1 run folder(s) given" in refused(runs / "a")
    assert "not a finished run" in refused(runs / "a", tmp_path)
    (tmp_path / "link").symlink_to(runs / "a")
    assert "given twice" in refused(runs / "a", tmp_path / "link")
    shutil.copytree(runs / "a", tmp_path / "copy")
    assert "a copy of" in refused(runs / "a", tmp_path / "copy")
    assert "lies within the run" in refused(runs / "a", runs / "b", "--out", runs / "a" / "stages")
    lock = tmp_path / "copy" / LOCK_FILE
    lock.write_text(lock.read_text().replace("task: image-classification", "task: text-classification"))
    with pytest.raises(InputError, match="different tasks") as caught:
        read_sides([runs / "b", tmp_path / "copy"])
    assert len(caught.value.lines) == 1
    assert not (runs / "a" / "stages" / "compare.html").exists()


def test_damaged_predictions_are_named(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "b", tmp_path / "b")
    for file in (tmp_path / "b" / "stages").glob("*/*.safetensors"):
        file.write_bytes(b"damaged")
    assert "compress run" in refused_any(runs / "a", tmp_path / "b", "--out", tmp_path / "out")


def refused_any(*arguments: Path | str) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_the_command_says_what_differs(runs: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", str(runs / "a"), str(runs / "b"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "B against A: accuracy" in result.stdout
    assert "not measured in turns" in result.stdout
    assert result.stdout.isascii()
    assert (tmp_path / "out" / "compare.html").is_file()
