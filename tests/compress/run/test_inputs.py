"""What a model reads is checked at `compress plan` and before the first stage: all problems at once, without its weights."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from compress.commands.plan import describe
from compress.pipeline import run
from compress.recipe import Recipe, check
from compress.run.inputs import mean_share
from compress.run.prepare import prepare
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.models.config import ModelConfig
from foundation.models.importing import check_model, import_model
from tests.foundation import tiny_gpt

pytestmark = pytest.mark.whole


def recipe(folder: Path, max_length: int = 16) -> Recipe:
    data = folder.parent / "data.tsv"
    data.write_text("text\tlabel\n" + "".join(f"good film {number}\tyes\nbad movie {number}\tno\n" for number in range(12)))
    settings: dict[str, Any] = {
        "name": "inputs",
        "model": {"path": str(folder), "task": "text-classification", "head": "new"},
        "data": {"path": str(data), "max_length": max_length},
        "stages": [{"finetune": {"epochs": 1}}],
        "target": {"sequence_lengths": [8, 16]},
    }
    return check(settings)


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    """A BERT whose tokenizer.json can be changed."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_plan_names_all_problems_of_a_tokenizer_at_once(folder: Path, tmp_path: Path) -> None:
    change(folder / "config.json", pad_token_id=None)
    change(folder / "tokenizer_config.json", pad_token=None, padding_side="left", model_max_length=12)
    with pytest.raises(InputError) as caught:
        describe(recipe(folder), tmp_path / "run")
    parts = ("no padding token", "only right is allowed", "data.max_length: 16 given")
    assert all(any(part in problem for problem in caught.value.lines) for part in parts)
    assert len(caught.value.lines) == len(parts)
    assert all(str(folder) in problem or folder.name in problem for problem in caught.value.lines)


def test_a_plan_says_what_is_not_as_in_the_folder_and_reads_no_weights(folder: Path, tmp_path: Path) -> None:
    assert "tokenizer:" not in describe(recipe(folder), tmp_path / "run")
    change(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", do_lower_case=False)
    weights = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(weights[:8], "little")
    (folder / "model.safetensors").write_bytes(weights[:header] + b"\xff" * (len(weights) - header))  # no finite weight is left
    (line,) = [line for line in describe(recipe(folder), tmp_path / "run").splitlines() if "tokenizer:" in line]
    assert "do_lower_case" in line


def test_a_plan_names_the_package_that_a_vocabulary_needs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "sentencepiece" else known(name, *rest))
    (folder / "tokenizer.json").rename(folder / "spm.model")
    with pytest.raises(InputError) as caught:
        describe(recipe(folder), tmp_path / "run")
    assert len(caught.value.lines) == 1
    assert "spm.model" in caught.value.lines[0]
    assert "pip install sentencepiece" in caught.value.lines[0]


def test_a_run_ends_before_its_first_stage(folder: Path, tmp_path: Path) -> None:
    change(folder / "tokenizer_config.json", padding_side="left")
    with pytest.raises(InputError, match="only right is allowed"):
        run(recipe(folder), tmp_path / "run")
    assert not list((tmp_path / "run" / "stages").glob("*/manifest.json"))


def test_a_teacher_whose_rows_cannot_be_padded_is_named_by_the_plan(folder: Path, tiny_bert: Path, tmp_path: Path) -> None:
    change(folder / "config.json", pad_token_id=None, id2label={"0": "no", "1": "yes"}, label2id={"no": 0, "yes": 1})
    change(folder / "tokenizer_config.json", padding_side="left")
    given = recipe(folder).model_dump(mode="json", exclude_unset=True)
    given["model"]["path"] = str(tiny_bert)
    given["stages"] = [{"finetune": {}}, {"distill": {"teacher": str(folder), "epochs": 1}}]
    with pytest.raises(InputError) as caught:
        describe(check(given), tmp_path / "run")
    assert all(any(part in problem for problem in caught.value.lines) for part in ("only right is allowed", "no pad_token_id"))


def test_a_plan_and_an_import_say_what_answers_leave_out_of_generation_config(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_gpt.checkpoint(), tmp_path / "model"))
    config = {"path": str(folder), "task": "text-generation"}
    data, stages = {"path": str(tiny_gpt.data_folder()), "max_length": tiny_gpt.LENGTH}, [{"finetune": {"epochs": 1}}]
    settings = {"name": "answers", "model": config, "data": data, "stages": stages, "target": {"sequence_lengths": [tiny_gpt.LENGTH]}}
    recipe = check(settings)
    assert "generation_config.json" not in describe(recipe, tmp_path / "run")
    asked = {"eos_token_id": 1, "do_sample": True, "temperature": 0.6, "no_repeat_ngram_size": 3, "max_length": 40}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    (line,) = [line for line in describe(recipe, tmp_path / "run").splitlines() if "generation_config.json" in line]
    assert "do_sample true, temperature 0.6" in line
    assert "no_repeat_ngram_size 3" in line
    assert "max_length" not in line
    told: list[str] = []
    (tmp_path / "out").mkdir()
    import_model(ModelConfig(**config), (), 0, tmp_path / "out", log=told.append)
    assert any(line in one for one in told)
    (folder / "generation_config.json").write_text('{"eos_token_id": "1"}')
    with pytest.raises(InputError, match=r'eos_token_id: "1" .* a list of them or null is allowed'):
        describe(recipe, tmp_path / "run")


def test_a_plan_counts_the_rows_of_each_split_that_are_truncated(folder: Path, tmp_path: Path) -> None:
    made = recipe(folder)
    texts = [("good film " * (1 + number % 4), "yes") for number in range(14)] + [("bad movie", "no") for _ in range(14)]
    (folder.parent / "data.tsv").write_text(
        "text\tlabel\n" + "".join(f"{text}{number}\t{label}\n" for number, (text, label) in enumerate(texts))
    )
    short = made.model_copy(update={"data": made.data.model_copy(update={"max_length": 6})})
    context = prepare(short, tmp_path / "run", ConsoleProgress("silent"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    splits = {name: getattr(context.data, name) for name in ("train", "selection", "evaluation")}
    longer = {name: sum(len(tokenizer.encode(row).ids) > 6 for row in split.rows) for name, split in splits.items()}
    assert longer["train"] > 0
    (line,) = [line for line in describe(short, tmp_path / "run").splitlines() if line.startswith("truncated")]
    assert [f"{longer[name]} of {len(split)} {name}" in line for name, split in splits.items()] == [True] * 3
    config = check_model(short.model, 2, 6).config
    lengths = [min(len(tokenizer.encode(row).ids), 6) for row in splits["evaluation"].rows]
    assert mean_share(short.model, config, None, context) <= 1
    assert mean_share(short.model, config, None, context) >= sum(lengths) / len(lengths) / 6
