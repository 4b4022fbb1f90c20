import textwrap
from pathlib import Path

import pytest
import yaml

from compress.recipe import STAGES, Recipe, check, dump, read, schema
from compress.recipe_file import apply, read_file
from foundation.core.errors import InputError
from foundation.stage.stage import lines
from tests.problems import raises_problem

GOOD = """
name: tiny
model: {config: {model_type: vit}, init: random, task: image-classification, head: new}
data: {path: "sklearn:digits"}
stages:
  - finetune: {epochs: 1}
  - quantize: {mode: ptq}
  - export: {}
  - triton_repo: {}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def problems(path: Path, *settings: str) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        read(path, settings)
    assert all("\n" not in problem for problem in caught.value.lines)
    return caught.value.lines


def test_good_recipe_has_typed_stages_with_ids(tmp_path: Path) -> None:
    recipe = read(write(tmp_path, GOOD))
    assert [stage.id for stage in recipe.stages] == ["finetune", "quantize", "export", "triton_repo"]
    assert recipe.goals.int8_faster is None


def test_dump_reads_back_to_the_same_recipe(tmp_path: Path) -> None:
    recipe = read(write(tmp_path, GOOD))
    assert check(yaml.safe_load(yaml.safe_dump(dump(recipe)))) == recipe


# (what is wrong, text to replace, replacement, words the one line must hold)
MALFORMED = [
    ("unknown key", "name: tiny", "name: tiny\nnmae: x", ["nmae", "unknown key", "did you mean 'name'"]),
    ("missing name", "name: tiny", "", ["name", "missing"]),
    ("name that escapes the run folder", "name: tiny", "name: ../../etc", ["name", "'../../etc'"]),
    ("absolute name", "name: tiny", "name: /tmp/x", ["name", "'/tmp/x'"]),
    ("empty name", "name: tiny", "name: ''", ["name"]),
    ("wrong type of seed", "name: tiny", "name: tiny\nseed: many", ["seed", "'many'"]),
    ("negative seed", "name: tiny", "name: tiny\nseed: -1", ["seed", "-1"]),
    ("duplicate key", "name: tiny", "name: tiny\nname: other", ["'name'", "twice", "line 3"]),
    ("duplicate key inside", "{mode: ptq}", "{mode: ptq, mode: ptq}", ["'mode'", "twice"]),
    (
        "unknown key of one of several losses",
        "- quantize:",
        "- distill: {losses: [{name: minilm, wieght: 2}]}\n  - quantize:",
        ["stages.distill.losses.0.wieght", "allowed: weight, steps, name", "did you mean 'weight'"],
    ),
    (
        "unknown loss of a stage that learns from a teacher",
        "{mode: ptq}",
        "{mode: qat, qat: {losses: [{name: hiden}]}}",
        ["stages.quantize.qat.losses.0", "'hiden'", "'hidden'"],
    ),
    (
        "unknown key of a loss of such a stage",
        "{mode: ptq}",
        "{mode: qat, qat: {losses: [{name: minilm, layer: 2}]}}",
        ["stages.quantize.qat.losses.0.layer", "unknown key"],
    ),
    ("unknown task", "image-classification", "image-clasification", ["task", "'image-clasification'"]),
    ("unknown stage", "- quantize:", "- quantise:", ["stages[1]", "'quantise'", "did you mean 'quantize'"]),
    ("two keys in a stage", "- export: {}", "- {export: {}, quantize: {}}", ["stages[2]", "one key"]),
    ("stage of a wrong type", "- export: {}", "- 7", ["stages[2]", "7"]),
    ("stage config of a wrong type", "- export: {}", "- export: all", ["stages.export", "'all'"]),
    ("unknown key in a stage", "{mode: ptq}", "{mode: ptq, calibraton: {}}", ["stages.quantize.calibraton", "did you mean 'calibration'"]),
    ("wrong choice", "{mode: ptq}", "{mode: magic}", ["stages.quantize.mode", "'magic'", "ptq"]),
    ("stages missing", "stages:\n", "steps:\n", ["stages: nothing given"]),
    ("stages not a list", GOOD[GOOD.index("stages") :], "stages: {export: {}}\n", ["stages", "list"]),
    ("repeated stage", "  - export: {}\n", "  - export: {}\n  - export: {}\n", ["export", "id"]),
    ("wrong order", "  - quantize: {mode: ptq}\n  - export: {}\n", "  - export: {}\n  - quantize: {mode: ptq}\n", ["cannot follow"]),
    (
        "input that nothing made",
        "{mode: ptq}",
        "{mode: ptq, input: prnue}\n  - prune: {id: later}",
        ["stages.quantize.input: 'prnue' given; baseline, finetune (an earlier stage that makes a model) is allowed"],
    ),
    ("input that comes later", "{mode: ptq}", "{mode: ptq, input: quantize}", ["stages.quantize.input: 'quantize' given"]),
    ("input of the export", "- export: {}", "- export: {input: baseline}", ["stages.export.input: unknown key"]),
    ("input that is no model", "- triton_repo: {}", "- quantize: {id: q, input: export}", ["stages.q.input: 'export' given; baseline"]),
    ("branch after the engines", "- triton_repo: {}", "- prune: {input: baseline}", ["stages.prune: prune cannot follow export"]),
    (
        "branch of what is quantized",
        "- export: {}",
        "- prune: {input: quantize}\n  - export: {}",
        ["stages.prune: prune cannot follow quantize"],
    ),
    (
        "quantized twice",
        "- export: {}",
        "- prune: {input: finetune}\n  - quantize: {id: q, input: quantize}\n  - export: {}",
        ["stages.q: its input is already quantized by quantize"],
    ),
    ("engines missing before the repository", "  - export: {}\n", "", ["triton_repo given without export"]),
    ("new head without training", "  - finetune: {epochs: 1}\n", "", ["trained first"]),
    ("goals of a wrong type", "name: tiny", "name: tiny\ngoals: {max_drop: little}", ["goals.max_drop", "'little'"]),
    ("goal out of range", "name: tiny", "name: tiny\ngoals: {max_drop: 2}", ["goals.max_drop", "2"]),
    ("unknown goal", "name: tiny", "name: tiny\ngoals: {max_dorp: 0.1}", ["goals.max_dorp", "did you mean 'max_drop'"]),
    ("latency goal without a value", "name: tiny", "name: tiny\ngoals: {max_latency_ms: [{percentile: 50}]}", ["value", "missing"]),
    ("unknown engine", "name: tiny", "name: tiny\ntarget: {engines: [openvinno]}", ["target.engines", "'openvinno'"]),
    ("no engine", "name: tiny", "name: tiny\ntarget: {engines: []}", ["target.engines"]),
    ("batch size zero", "name: tiny", "name: tiny\ntarget: {batch_sizes: [0]}", ["target.batch_sizes", "0"]),
    ("code in YAML", "name: tiny", "name: !!python/object/apply:os.system ['echo owned']", ["line 2", "python/object/apply"]),
    ("broken YAML", "stages:", "stages: [", ["line"]),
    ("tab as indentation", "  - export: {}", "\t- export: {}", ["line"]),
    ("list instead of a map", GOOD, "- a\n- b\n", ["map"]),
    ("empty file", GOOD, "", ["map"]),
    ("key that is no word", "name: tiny", "? [a, b]\n: 1\nname: tiny", ["plain word"]),
    ("id that is no name", "- export: {}", "- export: {id: '../x'}", ["stages.", "'../x'"]),
    ("id taken by the baseline", "- export: {}", "- export: {id: baseline}", ["baseline", "already used"]),
]


GENERATION = """
name: tiny
model: {config: {model_type: gpt2}, init: random, task: text-generation}
tokenizer: {train: bpe, vocab_size: 300}
data: {path: text.txt}
stages:
  - finetune: {}
  - export: {}
"""
MALFORMED_GENERATION = [
    (
        "engines to serve",
        "  - export: {}",
        "  - export: {}\n  - triton_repo: {}",
        ["on the CPU triton_repo serves text-generation with openvino_genai or onnxruntime_decoder", "add one, or leave triton_repo out"],
    ),
    (
        "vocabulary below the bytes",
        "vocab_size: 300",
        "vocab_size: 200",
        ["tokenizer.vocab_size: 200 given", "greater than or equal to 258"],
    ),
    ("vocabulary that is no number", "vocab_size: 300", "vocab_size: many", ["tokenizer.vocab_size: 'many' given", "integer"]),
    ("unknown way of training", "train: bpe", "train: unigram", ["tokenizer.train: 'unigram' given", "'bpe'"]),
    ("unknown key of the tokenizer", "vocab_size", "vocabsize", ["tokenizer.vocabsize: unknown key", "did you mean 'vocab_size'"]),
    ("tokenizer of a wrong type", "{train: bpe, vocab_size: 300}", "7", ["tokenizer: 7 given", "string"]),
    ("new head", "init: random", "init: random, head: new", ["model.head: new given", "keeps the head"]),
    (
        "tokenizer trained for a trained model",
        "config: {model_type: gpt2}, init: random",
        "path: owner/name",
        ["tokenizer: train: bpe given", "keeps its tokenizer"],
    ),
    ("tokenizer trained for images", "text-generation", "image-classification", ["tokenizer: train: bpe given", "images need none"]),
    ("no training of random weights", "  - finetune: {}\n", "", ["trained first"]),
]


@pytest.mark.parametrize(
    ("old", "new", "words"), [case[1:] for case in MALFORMED_GENERATION], ids=[case[0] for case in MALFORMED_GENERATION]
)
def test_malformed_recipe_for_generation_gets_one_clear_line(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert old in GENERATION
    recipe = read(write(tmp_path, GENERATION))
    assert check(yaml.safe_load(yaml.safe_dump(dump(recipe)))) == recipe
    [line] = problems(write(tmp_path, GENERATION.replace(old, new, 1)))
    assert all(word in line for word in words), line


@pytest.mark.parametrize(("old", "new", "words"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_malformed_recipe_gets_one_clear_line(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert old in GOOD
    lines = problems(write(tmp_path, GOOD.replace(old, new, 1)))
    assert any(all(word in line for word in words) for line in lines), lines


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("name: tiny", "nmae: tiny\nseed: x").replace("{mode: ptq}", "{mode: magic}").replace("epochs: 1", "epohcs: 1")
    lines = problems(write(tmp_path, text))
    assert {line.split(":")[0] for line in lines} >= {"nmae", "name", "seed", "stages.quantize.mode", "stages.finetune.epohcs"}


def test_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    assert "cannot be read" in problems(tmp_path / "absent.yaml")[0]
    assert "a folder" in problems(tmp_path)[0]
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert "not UTF-8" in problems(tmp_path / "latin.yaml")[0]


def test_branches_start_where_their_input_says(tmp_path: Path) -> None:
    branches = "- prune: {id: half, input: baseline}\n  - quantize: {id: small}\n  - quantize: {id: whole, input: finetune}\n  - export: {}"
    recipe = read(write(tmp_path, GOOD.replace("- export: {}", branches)))
    line = lines(recipe.stages)
    assert [stage.id for stage in line["small"]] == ["finetune", "half", "small"]
    assert [stage.id for stage in line["whole"]] == ["finetune", "whole"]
    assert line["baseline"] == line["finetune"]
    assert check(yaml.safe_load(yaml.safe_dump(dump(recipe)))) == recipe


def test_set_overrides_values_and_stages_by_id(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("- export: {}", "- export: {id: engines}"))
    recipe = read(path, ["seed=7", "stages.finetune.epochs=3", "stages.engines.variants=all", "target.batch_sizes=[4]"])
    assert (recipe.seed, recipe.stage("finetune").epochs, recipe.stage("engines").variants) == (7, 3, "all")  # type: ignore[attr-defined]
    assert recipe.target.batch_sizes == (4,)
    assert "no stage has the id 'prune'" in problems(path, "stages.prune.x=1")[0]
    assert "key.path=value" in problems(path, "seed")[0]


def test_extends_merges_maps_and_replaces_stages(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    recipe = read(write(tmp_path, "extends: base.yaml\nname: other\ndata: {max_length: 32}\nstages: [{finetune: {epochs: 2}}]\n"))
    assert (recipe.name, recipe.data.path, recipe.data.max_length, len(recipe.stages)) == ("other", "sklearn:digits", 32, 1)


def test_extends_that_leads_back_to_itself(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml", "a.yaml")
    write(tmp_path, "extends: a.yaml", "b.yaml")
    assert "leads back" in problems(tmp_path / "a.yaml")[0]


def test_paths_resolve_against_the_file_that_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "rows").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    write(tmp_path / "deep", GOOD.replace('"sklearn:digits"', "rows"), "base.yaml")
    path = write(tmp_path, "extends: deep/base.yaml")
    assert read(path).data.path == str(tmp_path / "deep" / "rows")
    monkeypatch.chdir(tmp_path / "here")
    assert read(path, ["data.path=../here"]).data.path == str(tmp_path / "here")
    assert read(path, ["data.path=nyu-mll/glue"]).data.path == "nyu-mll/glue"


def test_a_teacher_that_is_a_stage_is_no_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("distill", "half-2x", "baseline", "elsewhere"):
        (tmp_path / name).mkdir()
    folder = str(tmp_path / "elsewhere")
    base = write(tmp_path, "stages: [{distill: {}}, {prune: {sparsity: 0.5}}]", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nsearch: {space: {stages.prune.teacher: [distill, baseline, elsewhere]}}\n")
    assert read_file(path)["search"] == {"space": {"stages.prune.teacher": ["distill", "baseline", folder]}}
    for given, resolved in [("distill", "distill"), ("baseline", "baseline"), ("elsewhere", folder)]:
        raw = read_file(base)
        apply(raw, f"stages.prune.teacher={given}")
        assert raw == {"stages": [{"distill": {}}, {"prune": {"sparsity": 0.5, "teacher": resolved}}]}
    family = "{prune: {id: half, family: [2]}}"
    raw = {}
    apply(raw, f"stages=[{family}, {{distill: {{teacher: [half-2x, half-x, elsewhere]}}}}]")
    assert raw == {"stages": [{"prune": {"id": "half", "family": [2]}}, {"distill": {"teacher": ["half-2x", "half-x", folder]}}]}


@pytest.mark.parametrize("stages", [None, []])
def test_stages_have_to_be_given_as_the_reference_says(stages: object) -> None:
    raw = yaml.safe_load(GOOD)
    with pytest.raises(InputError, match="stages: nothing given; a list of one-key maps is allowed"):
        check({**raw, "stages": stages})
    assert Recipe.model_fields["stages"].is_required()


def test_schema_names_every_stage_and_key() -> None:
    document = schema()
    assert set(document["properties"]) >= {"name", "model", "data", "goals", "target", "stages", "extends"}
    entries = document["properties"]["stages"]["items"]["anyOf"]
    assert [next(iter(entry["properties"])) for entry in entries] == [stage.NAME for stage in STAGES]
    assert not any(entry["additionalProperties"] for entry in entries)


@pytest.mark.parametrize(
    ("task", "stages", "words"),
    [
        ("text-generation", [{"quantize": {"attention": True}}], "stages.quantize.attention: true given with the engine openvino_genai"),
        ("text-generation", [{"quantize": {"residual": "auto"}}], "stages.quantize.residual: auto given with the engine openvino_genai"),
        ("text-classification", [{"quantize": {}}], "openvino_genai given for the task text-classification; it answers prompts of"),
    ],
)
def test_engines_that_answer_prompts_say_what_they_cannot_have(task: str, stages: list[dict[str, object]], words: str) -> None:
    raw = {"name": "a", "model": {"path": "x/y", "task": task}, "data": {"path": "x/z"}, "target": {"engines": ["openvino_genai"]}}
    with pytest.raises(InputError) as raised:
        check({**raw, "stages": [*stages, {"export": {}}]})
    assert any(words in problem for problem in raised.value.lines)


def test_a_language_model_is_served_by_one_process() -> None:
    raw = {
        "name": "a",
        "model": {"path": "x/y", "task": "text-generation"},
        "data": {"path": "x/z"},
        "target": {"engines": ["openvino_genai"]},
    }
    recipe = check({**raw, "stages": [{"export": {}}, {"triton_repo": {}}]})
    assert check(dump(recipe)) == recipe  # the resolved recipe holds the defaults
    with raises_problem("stages.triton_repo.instances", "2", "one process"):
        check({**raw, "stages": [{"export": {}}, {"triton_repo": {"instances": 2}}]})
    with raises_problem("stages.triton_repo.gpu", "given", "TensorRT"):
        check({**raw, "stages": [{"export": {}}, {"triton_repo": {"gpu": {"refit": True}}}]})
    with pytest.raises(InputError, match="triton_repo serves text-generation with openvino_genai"):
        check({**raw, "target": {"engines": ["onnxruntime"]}, "stages": [{"export": {}}, {"triton_repo": {}}]})
