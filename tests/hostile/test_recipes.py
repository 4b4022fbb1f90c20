"""Recipes and overrides that cannot be right: refused in a few lines, each with its place or key."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cli import app
from compress.recipe import check, read
from compress.run.steps import plan_steps
from foundation.core.errors import MOST_PROBLEMS, InputError
from foundation.core.shown import reason, shown
from foundation.core.step_names import EVALUATION
from foundation.core.yaml_file import parse_yaml
from tests.hostile.lines import one_line
from tests.problems import raises_problem
from tests.tiny_recipes import tiny_vit

GOOD: dict[str, Any] = tiny_vit("tiny") | {"stages": [{"finetune": {"epochs": 1}}, {"quantize": {"mode": "ptq"}}, "export"]}


YAML: list[tuple[str, str, str]] = [
    ("undefined alias", "a: *b", "undefined alias"),
    ("python object", "a: !!python/object/apply:os.system [ls]", "tag"),
    ("own tag", "a: !own x", "tag"),
    ("int tag on a word", "a: !!int x", "not a readable recipe"),
    ("int tag on nothing", 'seed: !!int ""', "not a readable recipe"),
    ("6,000 digits", "seed: " + "9" * 6000, "not a readable recipe"),
    ("repeated key", "a: 1\na: 2", "line 2, column 1: not a readable recipe: key 'a' is given twice"),
    ("repeated key in a list", "- {a: 1, a: 2}", "'a' is given twice"),
    ("repeated merge", "{<<: {a: 1}, <<: {b: 2}}", "'<<' is given twice"),
    ("merge of a number", "{<<: 3}", "merging"),
    ("list as key", "? [a]\n: 1", "not a plain word"),
    ("null as key", "~: 1", "not a plain word"),
    ("control character", "a: \x00", "special characters"),
    ("tab as indent", "a:\n\tb: 1", "not a readable recipe"),
    ("two documents", "a: 1\n---\nb: 1", "another document"),
    ("open quote", 'a: "', "not a readable recipe"),
]


@pytest.mark.parametrize(("text", "words"), [case[1:] for case in YAML], ids=[case[0] for case in YAML])
def test_yaml_that_is_no_plain_data(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read(path)
    one_line(caught.value, str(path), words, most=1)


def test_aliases_and_merges_are_read_and_dates_stay_text() -> None:
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {<<: [*a, {x: 9, z: 4}]}\nd: *a", "r") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": 2},
        "c": {"x": 1, "y": 2, "z": 4},
        "d": {"x": 1, "y": 2},
    }
    nested = "b: &b {x: 1}\nd: {e: {f: &f {<<: *b, x: 2}}}\nc: {<<: *f}"  # c writes out f before f is built
    assert parse_yaml(nested, "r") == {"b": {"x": 1}, "d": {"e": {"f": {"x": 2}}}, "c": {"x": 2}}
    assert parse_yaml("a: 2020-01-01", "r") == {"a": "2020-01-01"}
    assert parse_yaml(f"a: {2**63 - 1}", "r") == {"a": 2**63 - 1}


BYTES = [
    b"",
    b"\xff\xfe\x00",
    b"\x80abc",
    "a: \ud800".encode("utf-8", "surrogatepass"),
    b"7",
    b"[]",
    b"text",
    b"~",
    b" \n",
]


@pytest.mark.parametrize("content", BYTES, ids=[str(number) for number in range(len(BYTES))])
def test_files_that_are_no_recipe(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(path)
    one_line(caught.value, str(path), most=1)


@pytest.mark.parametrize("path", ["~nosuchuser/r.yaml", "/" + "x" * 5000, "/" + "x/" * 3000, "r\x00.yaml", ""])
def test_paths_that_are_no_recipe(path: str) -> None:
    with pytest.raises(InputError) as caught:
        read(Path(path))
    one_line(caught.value, most=1)


@pytest.mark.parametrize("parent", [7, [], {}, "~nosuchuser", "x" * 5000, "absent.yaml", "/dev/null", ".", "recipe.yaml", "a\\0b"])
def test_bases_that_are_no_recipe(parent: Any, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"extends": parent, "name": "x"}))
    with pytest.raises(InputError) as caught:
        read(path)
    one_line(caught.value, most=1)


@pytest.mark.parametrize("recipe", [None, 7, [], "x"])
def test_a_lock_file_without_a_recipe(recipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "recipe.lock.yaml"
    path.write_text(yaml.safe_dump({"schema": 1, "recipe": recipe, "environment": {}}))
    with pytest.raises(InputError) as caught:
        read(path)
    one_line(caught.value, str(path), "recipe", most=1)


def with_value(*keys: Any, value: Any) -> dict[str, Any]:
    """Returns the good recipe with another value at a path."""
    changed: Any = parse_yaml(yaml.safe_dump(GOOD), "good")
    inner = changed
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return changed  # type: ignore[no-any-return]


NESTED: list[Any] = []
NESTED.append(NESTED)
WHOLE: dict[str, Any] = {
    "name": [7, None, [], {}, "x" * 65, "a/b", "..", "a\nb", "\ud800", "ü", True],
    "seed": [-1, 2**31, 2**62, 1.5, "x", [], {}, None, float("nan"), float("inf")],
    "model": [None, 7, [], {}, "x", {"path": "x"}, {"task": "image-classification"}, NESTED],
    "data": [None, 7, [], {}, "x", {"path": ""}, {"path": None}, {"path": []}, {"path": "x", "max_length": 10**12}],
    "goals": [7, [], "x", {"max_drop": float("nan")}, {"max_drop": -1}, {"min_speedup": float("inf")}, {"max_latency_ms": 3}, {7: 1}],
    "target": [
        7,
        [],
        {"device": "gpu"},
        {"engines": []},
        {"engines": [[]]},
        {"engines": "torch"},
        {"batch_sizes": [0]},
        {"threads": 10**9},
    ],
    "tokenizer": [7, [], {}, {"train": "x"}, {"train": "bpe", "vocab_size": -1}, {"train": "bpe", "vocab_size": float("inf")}],
    "stages": [
        None,
        7,
        [],
        {},
        "x",
        [7],
        [[]],
        [None],
        [{}],
        [{"x": 1}],
        [{"finetune": 7}],
        [{"finetune": [1]}],
        [{7: 1}],
    ],
    "parallel": [7, [], {"strategy": "x"}, {"strategy": None}],
    "unknown": [1, NESTED, "x" * 10**6],
}
VALUES = [(name, number, value) for name, values in WHOLE.items() for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, _, value in VALUES], ids=[f"{name}-{number}" for name, number, _ in VALUES]
)
def test_a_value_that_cannot_be_right(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        check(GOOD | {name: value})
    one_line(caught.value, most=12)
    assert any(name in problem for problem in caught.value.lines), caught.value.lines


@pytest.mark.parametrize("stage_id", ["model", "baseline", "latency", "input", "evaluate-finetune", "evaluate-x", "evaluate-"])
def test_ids_that_every_run_uses_itself(stage_id: str) -> None:
    with raises_problem(f"stages.{stage_id}", f"'{stage_id}'", "already used by every run itself"):
        check(with_value("stages", 1, value={"quantize": {"id": stage_id}}))


def test_no_implicit_step_can_be_a_stage() -> None:
    recipe = check(GOOD)
    implicit = {str(step.id) for step in plan_steps(recipe)} - {str(stage.id) for stage in recipe.stages}
    assert {"model", "latency", f"{EVALUATION}quantize"} <= implicit
    for taken in implicit:
        with pytest.raises(InputError, match="already used by every run itself"):
            check(with_value("stages", 1, value={"quantize": {"id": taken}}))


@pytest.mark.parametrize("stage_id", [7, [], {}, "", "A", "x" * 33, "a b", "../x", "é", None, True, 1.5])
def test_ids_that_are_none(stage_id: Any) -> None:
    changed = with_value("stages", 1, value={"quantize": {"id": stage_id}})
    if stage_id is None:
        assert check(changed).stages[1].id == "quantize"
        return
    with pytest.raises(InputError) as caught:
        check(changed)
    one_line(caught.value, "id")


SETTINGS: list[tuple[str, str]] = [
    ("", "key.path=value"),
    ("=", "key.path=value"),
    ("seed", "key.path=value"),
    (".seed=1", "key.path=value"),
    ("seed.=1", "key.path=value"),
    ("a..b=1", "key.path=value"),
    ("x" * 5000, "key.path=value"),
    ("seed.x=1", "seed is 7, which has no keys"),
    ("name.first=x", "name is 'tiny', which has no keys"),
    ("data.path.x=1", "data.path is 'sklearn:digits', which has no keys"),
    ("model.config.hidden_size.x=1", "model.config.hidden_size is 32, which has no keys"),
    ("stages.finetune.epochs.x=1", "stages.finetune.epochs is 1, which has no keys"),
    ("stages.finetune.epochs.x.y.z=1", "stages.finetune.epochs is 1, which has no keys"),
    ("target.batch_sizes.0=1", "target.batch_sizes is [1], which has no keys"),
    ("stages.exprt.x=1", "no stage has the id 'exprt'"),
    ("stages.0.x=1", "no stage has the id '0'"),
    ("stages.export.nothing=1", "stages.export.nothing: unknown key"),
    ("stages.export=7", "stages.export: 7 given"),
    ("stages=7", "stages: 7 given"),
    ("stages.finetune=[1]", "stages.finetune"),
    ("seed=[", "--set seed"),
    ("seed=!!python/object:x y", "--set seed"),
    ("seed=!x y", "--set seed"),
    ("seed={a: 1, a: 2}", "--set seed"),
    ("seed=" + "9" * 6000, "--set seed"),
    ("seed=.nan", "seed: nan given"),
    ("seed=\x00", "--set seed"),
    ("seed=2020-01-01", "seed: '2020-01-01' given"),
    ("seed=~", "seed: null given"),
    ("target=null", "target: null given; a map"),
    ("unknown.key=1", "unknown"),
    ("data.max_length=1e400", "data.max_length"),
    ("t[rget=1", "t[rget: unknown key"),
    ("Model=1", "Model: unknown key"),
    ("data.int=1", "data.int: unknown key"),
    ("model.path=" + "x" * 5000, "model"),
    ("\ud800=1", "ud800"),
]


@pytest.mark.parametrize(("setting", "words"), SETTINGS, ids=[str(number) for number in range(len(SETTINGS))])
def test_overrides_that_cannot_be_right(setting: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check(GOOD | {"seed": 7, "target": {"batch_sizes": [1]}}, [setting])
    one_line(caught.value, words)


@pytest.mark.parametrize("stages", [7, "x", {}, None, [7], [[1]], [{"export": 7}], [{"export": [1]}], [{"export": {"id": [1]}}]])
def test_an_override_of_a_stage_in_a_recipe_that_is_wrong_itself(stages: Any) -> None:
    with pytest.raises(InputError) as caught:
        check(GOOD | {"stages": stages}, ["stages.export.variants=all"])
    one_line(caught.value, "stages")


def test_a_bare_stage_can_be_overridden() -> None:
    assert check(GOOD, ["stages.export.variants=all"]).stage("export").model_dump()["variants"] == "all"
    assert check(GOOD, ["stages.quantize.smoothquant=true", "stages.quantize.smoothquant.alpha=0.5"]).stages[1].smoothquant.alpha == 0.5


def test_many_problems_are_counted_and_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr("compress.problems.nearest", lambda given, allowed: searched.append(given) or "")
    with pytest.raises(InputError, match=r"and \d+ more problems; correct these first") as caught:
        check(GOOD | {f"key{number}": 1 for number in range(5000)})
    assert len(caught.value.lines) == MOST_PROBLEMS + 1
    assert len(searched) <= 2 * MOST_PROBLEMS


class Odd:
    pass


def test_values_are_shown_with_bounded_work() -> None:
    assert shown(NESTED) == "[" * 57 + "..."
    assert shown({"a": [1, 2.5, None, True], "b": ("x",)}) == "{'a': [1, 2.5, None, True], 'b': ('x',)}"
    assert shown("x" * 10**6) == "'" + "x" * 56 + "..."
    assert shown(10**10_000).startswith("an integer of 33220 bits")
    assert shown([Odd()]) == "[<Odd>]"
    wide: Any = "x"
    for _ in range(200):
        wide = [wide] * 100
    assert len(shown(wide)) == 60
    assert reason(ValueError(f"bad {Odd()!r}")) == "bad <tests.hostile.test_recipes.Odd object>"
    assert len(InputError("x" * 10**6, "").lines[0]) < 2100
    assert InputError("", "a\x1b[31m\ud800\nb").lines == ("a\\x1b[31m\\ud800 b",)


CLI: list[tuple[str, ...]] = [
    ("plan", "~nosuchuser/r.yaml"),
    ("plan", "x" * 5000),
    ("plan", "x/" * 2500),
    ("run", "quickstart", "--out", "~nosuchuser/x"),
    ("run", "quickstart", "--out", "x" * 5000),
    ("run", "quickstart", "--out", "/dev/null"),
    ("run", "quickstart", "--set", "seed.x=1", "--set", "name.y=1"),
    ("run", "quickstart", "--from", "no-such-stage"),
    ("report", "~nosuchuser"),
    ("report", "x" * 5000),
    ("report", "/dev/null"),
    ("verify", "x/" * 2500),
    ("serve", "~nosuchuser"),
    ("bench", "x" * 5000),
    ("clean", "nowhere"),
    ("clean", "~nosuchuser"),
    ("init", "--task", "x" * 5000),
    ("init", "--task", "text-classification", "-o", "x" * 5000),
    ("init", "--task", "text-classification", "-o", "/dev/null/x"),
    ("init", "--recipe", "x" * 5000),
    ("list", "x" * 5000),
]


@pytest.mark.parametrize("arguments", CLI, ids=[f"{number}-{arguments[0]}" for number, arguments in enumerate(CLI)])
def test_the_command_line_ends_with_status_2_and_leaves_nothing(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, (result.stderr, result.exception)
    assert "internal error" not in result.stderr
    assert 1 <= len(result.stderr.strip().splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []
