"""Models of vectors: pooling against loops, the files of sentence-transformers read and written, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertModel

from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.checkpoint import load, save
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.models.heads.embedding import EMBEDDING_KEY, pooled, search_prompts
from foundation.models.importing import check_model, import_model, source_digest
from foundation.standalone.preprocess import BadRow, Preprocessor
from tests import tiny_embedding
from tests.export import sentiment
from tests.problems import raises_problem

TASK = "sentence-embedding"
TEXTS = ["a fine film", "it was very dull this movie", "love"]


def named(path: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"path": str(path), "task": TASK, **changes})


def imported(path: Path, out: Path, **changes: Any) -> Path:
    out.mkdir()
    import_model(named(path, **changes), ("score",), 0, out)
    return out


def prepared(folder: Path) -> Preprocessor:
    return Checkpoint(folder).preprocessor(TASK, sentiment.LENGTH, Target(sequence_lengths=(8,)))


def features(folder: Path, texts: list[str]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in prepared(folder).encode(texts).items()}


def naive(hidden: list[list[float]], pooling: str) -> list[float]:
    """Pools the hidden states of the tokens of one text, padding left out."""
    if pooling == "cls":
        return hidden[0]
    if pooling == "last":
        return hidden[-1]
    weights = [1 + place if pooling == "weighted" else 1 for place in range(len(hidden))]
    total = sum(weights)
    return [sum(w * state[channel] for w, state in zip(weights, hidden, strict=True)) / total for channel in range(len(hidden[0]))]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "weighted"])
@pytest.mark.parametrize("form", ["plain", "additive", "none"])
def test_pooling_is_the_formula_for_every_form_of_the_mask(pooling: Any, form: str) -> None:
    hidden, lengths = torch.randn(3, 5, 4), [5, 3, 1] if form != "none" else [5, 5, 5]
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    given = {"plain": mask, "additive": (1.0 - mask[:, None, None].float()) * -30000, "none": None}[form]
    found = pooled(hidden, given, pooling)
    for row, length in enumerate(lengths):
        assert found[row].tolist() == pytest.approx(naive(hidden[row, :length].tolist(), pooling), abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "pooling"), [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last"), ("weightedmean_tokens", "weighted")]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_those_of_the_body_pooled_as_the_files_say(mode: str, pooling: str, normalize: bool, tmp_path: Path) -> None:
    source = tiny_embedding.folder(tmp_path / "source", mode=mode, normalize=normalize)
    out = imported(source, tmp_path / "out")
    with torch.no_grad():
        found = forward(load(out), features(out, TEXTS))
        body: Any = BertModel.from_pretrained(source).eval()
        for row, text in enumerate(TEXTS):
            alone = features(out, [text])
            real = int(alone["attention_mask"].sum())
            expected = naive(body(**alone).last_hidden_state[0, :real].tolist(), pooling)
            length = math.hypot(*expected) if normalize else 1.0
            assert found[row].tolist() == pytest.approx([value / length for value in expected], abs=1e-5)


def test_a_checkpoint_is_a_folder_of_transformers_and_of_sentence_transformers(tmp_path: Path) -> None:
    out = imported(tiny_embedding.folder(tmp_path / "source"), tmp_path / "out")
    assert AutoModel.from_pretrained(out).__class__ is BertModel
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertModel"]
    modules = json.loads((out / "modules.json").read_text())
    assert [(entry["path"], entry["type"].rpartition(".")[2]) for entry in modules] == [
        ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")
    ]  # fmt: skip
    pooling = json.loads((out / "1_Pooling" / "config.json").read_text())
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == sentiment.LENGTH
    again = tmp_path / "again"
    again.mkdir()
    save(load(out), out, again, "Saved again")
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        assert (again / name).read_bytes() == (out / name).read_bytes()
    for first in (out, again):
        assert forward(load(first), features(first, TEXTS)).shape == (3, tiny_embedding.WIDTH)


@pytest.mark.whole
def test_dimensions_cut_vectors_before_they_are_normalized(tmp_path: Path) -> None:
    source = tiny_embedding.folder(tmp_path / "source")
    whole, short = imported(source, tmp_path / "whole"), imported(source, tmp_path / "short", embedding={"dimensions": 8})
    vectors, cut = (forward(load(folder), features(folder, TEXTS)) for folder in (whole, short))
    torch.testing.assert_close(cut, torch.nn.functional.normalize(vectors[:, :8], dim=1))
    assert prepared(short).width == 8
    assert [entry["path"] for entry in json.loads((short / "modules.json").read_text())] == ["", "1_Pooling", "2_Dense", "3_Normalize"]
    again = imported(short, tmp_path / "again")  # its own config.json says all, whatever the modules are
    torch.testing.assert_close(forward(load(again), features(again, TEXTS)), cut)


def test_a_prompt_stands_before_each_text(tmp_path: Path) -> None:
    out = imported(tiny_embedding.folder(tmp_path / "source", prompt="this was "), tmp_path / "out")
    plain = imported(tiny_embedding.folder(tmp_path / "plain"), tmp_path / "out-plain")
    assert features(out, ["a film"])["input_ids"].tolist() == features(plain, ["this was a film"])["input_ids"].tolist()
    prepared(out).save(tmp_path)
    assert Preprocessor.load(tmp_path).encode(["a film"])["input_ids"].tolist() == features(out, ["a film"])["input_ids"].tolist()
    with pytest.raises(BadRow, match="row 0: tuple given; a single text is allowed"):
        prepared(out).encode([("a film", "a movie")])


def test_a_model_without_the_files_needs_a_pooling(tmp_path: Path) -> None:
    source = tiny_embedding.folder(tmp_path / "source")
    (source / "modules.json").unlink()
    with pytest.raises(InputError, match=r"no modules.json, .*; give model.embedding: \{pooling: mean\}"):
        check_model(named(source))
    out = imported(source, tmp_path / "out", embedding={"pooling": "cls", "normalize": False})
    assert json.loads((out / "config.json").read_text())[EMBEDDING_KEY]["pooling"] == "cls"
    assert not list(out.glob("*Normalize"))


def edited(folder: Path, name: str, change: Any) -> Path:
    file = folder / name
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        (
            "modules.json",
            lambda value: [*value, {"type": "sentence_transformers.models.Dense", "path": "3"}],
            "Normalize, Dense; Transformer",
        ),
        ("modules.json", lambda value: {"not": "a list"}, "holds no list of modules"),
        ("modules.json", lambda value: [value[0], {**value[1], "path": "../elsewhere"}], "outside of it"),
        (
            "1_Pooling/config.json",
            lambda value: {"pooling_mode_max_tokens": True},
            "has the pooling .*pooling_mode_max_tokens.*; one of mean",
        ),
        ("1_Pooling/config.json", lambda value: {**value, "pooling_mode_cls_token": True}, "has the pooling"),
        ("1_Pooling/config.json", lambda value: {"pooling_mode": "max"}, "has the pooling"),
        (
            "config_sentence_transformers.json",
            lambda value: {"default_prompt_name": "q", "prompts": {}},
            "default prompt 'q', which is none",
        ),
    ],
)
def test_files_that_need_more_are_refused_in_one_line(name: str, change: Any, line: str, tmp_path: Path) -> None:
    source = edited(tiny_embedding.folder(tmp_path / "source"), name, change)
    with pytest.raises(InputError, match=line) as caught:
        check_model(named(source))
    assert len(caught.value.lines) == 1
    assert "\n" not in str(caught.value)


def test_a_prompt_that_pooling_leaves_out_is_refused(tmp_path: Path) -> None:
    source = tiny_embedding.folder(tmp_path / "source", prompt="query: ", include_prompt=False)
    with pytest.raises(InputError, match=r"the prompt 'query: ' out of the pooling, .* not supported"):
        check_model(named(source))


def test_more_dimensions_than_there_are_and_other_tasks_are_refused(tmp_path: Path) -> None:
    source = tiny_embedding.folder(tmp_path / "source")
    with raises_problem("embedding.dimensions", "33", "32 numbers"):
        check_model(named(source, embedding={"dimensions": 33}))
    with pytest.raises(ValueError, match=r"embedding: .* text-regression; .*, retrieval or sentence-triplets: leave"):
        ModelConfig(path=str(source), task="text-regression", embedding={"pooling": "mean"})


def test_the_pooling_is_part_of_the_digest_of_the_source(tmp_path: Path) -> None:
    one, other = tiny_embedding.folder(tmp_path / "one"), tmp_path / "other"
    shutil.copytree(one, other)
    assert source_digest(named(one)) == source_digest(named(other))
    edited(other, "1_Pooling/config.json", lambda value: {"pooling_mode_cls_token": True})
    assert source_digest(named(one)) != source_digest(named(other))


def test_other_tasks_keep_their_cache_keys() -> None:
    dumped = ModelConfig(path="m", task="text-classification").model_dump(mode="json")
    assert list(dumped) == ["path", "config", "init", "task", "head", "preprocessor", "trust_remote_code"]


def test_a_folder_of_links_as_in_the_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    source = tiny_embedding.folder(tmp_path / "blobs", mode="cls_token")
    linked = tmp_path / "snapshot"
    for file in [path for path in source.rglob("*") if path.is_file()]:
        (linked / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        (linked / file.relative_to(source)).symlink_to(file)
    assert getattr(check_model(named(linked)).config, EMBEDDING_KEY)["pooling"] == "cls"


def with_prompts(source: Path, prompts: dict[str, str], default: str | None = None) -> Path:
    told = {"prompts": prompts, "default_prompt_name": default}
    (source / "config_sentence_transformers.json").write_text(json.dumps(told))
    return source


def test_prompts_with_names_go_from_file_to_file_and_stand_before_nothing(tmp_path: Path) -> None:
    prompts = {"query": "love ", "passage": "hate ", "other": ""}
    out = imported(with_prompts(tiny_embedding.folder(tmp_path / "source"), prompts), tmp_path / "out")
    plain = imported(tiny_embedding.folder(tmp_path / "plain"), tmp_path / "out-plain")
    assert features(out, ["a film"])["input_ids"].tolist() == features(plain, ["a film"])["input_ids"].tolist()
    told = json.loads((out / "config_sentence_transformers.json").read_text())
    assert told["prompts"] == {"query": "love ", "passage": "hate "}
    assert told["default_prompt_name"] is None
    assert search_prompts(out) == ("love ", "hate ")
    assert "prompts" not in json.loads((plain / "config.json").read_text())[EMBEDDING_KEY]  # configs without them keep their digest
    with_default = with_prompts(tiny_embedding.folder(tmp_path / "default"), prompts | {"all": "this "}, "all")
    made = imported(with_default, tmp_path / "out-default")
    told = json.loads((made / "config_sentence_transformers.json").read_text())
    assert told["prompts"] == {"query": "love ", "passage": "hate ", "default": "this "}
    assert told["default_prompt_name"] == "default"
    assert search_prompts(made) == ("", "")  # the default one stands before each text already


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        ({}, ("", "")),
        ({"query": "q: "}, ("q: ", "")),
        ({"query": "q: ", "passage": "p: ", "corpus": "c: "}, ("q: ", "p: ")),
        ({"corpus": "c: ", "document": "d: "}, ("", "d: ")),
    ],
)
def test_prompts_for_searching_are_those_that_sentence_transformers_takes(
    prompts: dict[str, str], found: tuple[str, str], tmp_path: Path
) -> None:
    assert search_prompts(with_prompts(tiny_embedding.folder(tmp_path / "source"), prompts)) == found


def test_prompts_for_searching_that_pooling_leaves_out_or_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    left_out = with_prompts(tiny_embedding.folder(tmp_path / "one", include_prompt=False), {"query": "q: "})
    check_model(named(left_out))  # sentence-embedding does not use it
    with pytest.raises(InputError, match=r"the prompt 'q: ' out of the pooling, .* not supported"):
        search_prompts(left_out)
    with pytest.raises(InputError, match=r"prompts \{'query': 1\}; names with texts"):
        check_model(named(with_prompts(tiny_embedding.folder(tmp_path / "two"), {"query": 1})))  # type: ignore[dict-item]


def compared_by(folder: Path, similarity: Any) -> Path:
    edited(folder, "config_sentence_transformers.json", lambda value: {**value, "similarity_fn_name": similarity})
    return folder


@pytest.mark.parametrize("similarity", ["cosine", "dot", None])
def test_dot_products_of_vectors_of_length_one_are_cosines_and_stay_what_the_files_say(similarity: str | None, tmp_path: Path) -> None:
    out = imported(compared_by(tiny_embedding.folder(tmp_path / "source"), similarity), tmp_path / "out")
    assert json.loads((out / "config_sentence_transformers.json").read_text())["similarity_fn_name"] == (similarity or "cosine")
    kept = json.loads((out / "config.json").read_text())[EMBEDDING_KEY].get("similarity")
    assert kept == ("dot" if similarity == "dot" else None)  # configs without it keep their digest
    again = imported(out, tmp_path / "again", embedding={"similarity": "cosine"})
    assert json.loads((again / "config_sentence_transformers.json").read_text())["similarity_fn_name"] == "cosine"


@pytest.mark.parametrize(
    ("similarity", "normalize", "advice"),
    [("dot", False, "normalize: true"), ("euclidean", True, "similarity: cosine"), ("manhattan", False, "similarity: cosine")],
)
def test_vectors_that_are_not_compared_by_cosine_are_refused_unless_cosines_are_asked_for(
    similarity: str, normalize: bool, advice: str, tmp_path: Path
) -> None:
    source = compared_by(tiny_embedding.folder(tmp_path / "source", normalize=normalize), similarity)
    with pytest.raises(InputError, match=f"by {similarity} .*, .* by cosine here; give .*{advice}") as caught:
        check_model(named(source))
    assert len(caught.value.lines) == 1
    check_model(named(source, embedding={"similarity": "cosine"}))
    if similarity == "dot":
        check_model(named(source, embedding={"normalize": True}))
    with pytest.raises(InputError, match=r"similarity_fn_name 'maxsim'; cosine, dot, euclidean or manhattan"):
        check_model(named(compared_by(source, "maxsim")))
