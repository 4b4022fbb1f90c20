"""Models from outside: a clean checkpoint of the same model comes in, with the labels of the data, or one of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, ViTConfig

from foundation.core.errors import InputError
from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig, label_names
from foundation.models.forward import forward
from foundation.models.importing import check_model, import_model
from foundation.models.size import count
from tests.architectures.steps import trained
from tests.architectures.table import ENCODERS
from tests.foundation.model_folders import LABELS, edit, named, refused, rewrite
from tests.foundation.sizes import sizes_of


def test_an_import_is_the_same_model(tiny_bert: Path, out: Path, told: Any) -> None:
    figures = import_model(named(tiny_bert), LABELS, 0, out, log=told.log)
    assert figures["new_weights"] == []
    assert figures["labels"] == list(LABELS)
    ids = torch.tensor([[2, 7, 9, 11, 3]])
    with torch.inference_mode():
        expected = AutoModelForSequenceClassification.from_pretrained(tiny_bert)(ids).logits
        assert torch.equal(forward(load(out), {"input_ids": ids}), expected)
    assert (out / "tokenizer.json").read_bytes() == (tiny_bert / "tokenizer.json").read_bytes()
    assert "negative" in (out / "README.md").read_text()
    assert isinstance(AutoModel.from_pretrained(out), torch.nn.Module)


def test_a_model_that_sees_padding_is_told_of(tmp_path: Path) -> None:
    for name, sees in (("bert", False), ("yoso", True)):
        (tmp_path / f"{name}-out").mkdir()
        source, warned = trained(ENCODERS[name], tmp_path / name), list[str]()
        figures = import_model(
            ModelConfig(path=str(source), task="text-classification"), ("a", "b"), 0, tmp_path / f"{name}-out", warn=warned.append
        )
        assert (figures["padding_effect"] > 1e-3) == sees
        assert [name in line for line in warned] == [True] * sees


def test_generic_labels_take_the_names_of_the_data(folder: Path, out: Path) -> None:
    edit(folder, id2label={"0": "LABEL_0", "1": "LABEL_1"}, label2id={"LABEL_0": 0, "LABEL_1": 1})
    assert label_names(named(folder)) is None
    import_model(named(folder), ("bad", "good"), 0, out)
    assert load(out).config.id2label == {0: "bad", 1: "good"}  # type: ignore[union-attr]


def test_names_of_the_model_are_kept(tiny_bert: Path, out: Path) -> None:
    assert label_names(named(tiny_bert)) == LABELS
    refused(named(tiny_bert), out, "the model's labels are negative, positive, the data's positive, negative; .*head: new", LABELS[::-1])


def test_half_precision_is_loaded_as_float32(folder: Path, out: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: value.half() for name, value in tensors.items()}))
    edit(folder, dtype="float16")
    import_model(named(folder), LABELS, 0, out)
    assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {torch.float32}


def test_a_body_is_checked_as_the_model_that_gets_the_new_head(tiny_bert: Path, folder: Path) -> None:
    """Its class stands for vectors of texts among our tasks; stages look into the model of the task."""
    edit(folder, architectures=["BertModel"])
    checked = check_model(ModelConfig(path=str(folder), task="text-classification", head="new"), 2).config
    assert checked.architectures == ["BertForSequenceClassification"]
    assert sizes_of(checked, "model") == sizes_of(check_model(named(tiny_bert), 2).config, "model")


def test_a_new_head_is_drawn_from_the_seed(tiny_bert: Path, tmp_path: Path) -> None:
    heads = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(heads))
        (tmp_path / name).mkdir()
        figures = import_model(named(tiny_bert, head="new"), ("x", "y", "z"), seed, tmp_path / name)
        assert figures["new_weights"] == ["classifier.bias", "classifier.weight"]
        heads.append(load(tmp_path / name))
    assert heads[0].config.id2label == {0: "x", 1: "y", 2: "z"}  # type: ignore[union-attr]
    weights = [model.get_parameter("classifier.weight") for model in heads]
    assert weights[0].shape == (3, 32)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    source = load_file(tiny_bert / "model.safetensors")
    for name, value in heads[2].state_dict().items():
        assert name.startswith("classifier") or torch.equal(value, source[name]), name


def test_a_new_head_differs_from_one_of_the_same_size(tiny_bert: Path, out: Path) -> None:
    import_model(named(tiny_bert, head="new"), LABELS, 7, out)
    old, new = load_file(tiny_bert / "model.safetensors"), load_file(out / "model.safetensors")
    assert not torch.equal(old["classifier.weight"], new["classifier.weight"])
    assert torch.equal(old["bert.pooler.dense.weight"], new["bert.pooler.dense.weight"])


@pytest.mark.parametrize("task", ["sentence-embedding", "retrieval"])
def test_a_model_of_vectors_has_no_head_to_draw(task: str, tiny_bert: Path, out: Path) -> None:
    """The body of a classifier is kept as it is; it used to be drawn anew, since none of its names begins as those of a body do."""
    figures = import_model(named(tiny_bert, task=task, head="new", embedding={"pooling": "mean"}), (), 0, out)
    assert figures["new_weights"] == []
    source, made = load_file(tiny_bert / "model.safetensors"), load_file(out / "model.safetensors")
    body = {name.removeprefix("bert.") for name in source if name.startswith("bert.")}
    assert made.keys() == {name for name in body if not name.startswith("pooler.")}, "such vectors need no pooler"
    assert all(torch.equal(value, source[f"bert.{name}"]) for name, value in made.items())


def test_a_model_of_vectors_without_weights_is_no_model_with_a_new_head(tiny_bert: Path, folder: Path, out: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("bert.embeddings.word_embeddings.weight"))
    with pytest.raises(InputError, match="1 weights are missing"):
        import_model(named(folder, task="sentence-embedding", head="new", embedding={"pooling": "mean"}), (), 0, out)


def test_a_language_model_needs_a_new_head(folder: Path, bert_config: dict[str, Any], out: Path) -> None:
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(**bert_config)).save_pretrained(folder)
    refused(named(folder), out, "is a BertForMaskedLM; text-classification needs a BertForSequenceClassification: give model.head: new")
    edit(folder, architectures=["BertForSequenceClassification"])
    refused(named(folder), out, "has no trained head .*; give model.head: new")
    figures = import_model(named(folder, head="new"), LABELS, 0, out)
    assert figures["new_weights"] == ["bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"]


def test_a_vocabulary_file_becomes_a_fast_tokenizer(folder: Path, out: Path, words: list[str]) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    import_model(named(folder), LABELS, 0, out)
    assert AutoTokenizer.from_pretrained(out)("good film").input_ids == [2, 5 + words.index("good"), 5 + words.index("film"), 3]
    assert (out / "tokenizer.json").is_file()


def test_regression_has_one_output(folder: Path, tiny_bert: Path, out: Path) -> None:
    refused(named(folder, task="text-regression"), out, "has 2 outputs; text-regression needs 1: give model.head: new", ("score",))
    import_model(named(tiny_bert, task="text-regression", head="new"), ("score",), 0, out)
    model = load(out)
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")  # type: ignore[union-attr]
    refused(named(out), out, "was trained for regression; text-classification needs single_label_classification: give model.head: new")


# random weights


def random_image(vit_config: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig(config={**vit_config, **changes}, init="random", task="image-classification")


def test_random_weights_come_from_the_seed(vit_config: dict[str, Any], tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        import_model(random_image(vit_config), ("x", "y"), seed, tmp_path / name)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]
    settings = json.loads((tmp_path / "a" / "preprocessor_config.json").read_text())
    assert settings["size"] == {"height": 8, "width": 8}
    assert settings["image_mean"] == [0.5]
    assert settings["do_convert_rgb"] is False


def test_a_config_names_its_class_however_often_it_was_checked_and_counted(vit_config: dict[str, Any]) -> None:
    config, named = random_image(vit_config), ["ViTForImageClassification"]
    assert [check_model(config, 2).config.architectures for _ in range(2)] == [named, named]
    for _ in range(2):
        bare = ViTConfig(**{name: value for name, value in vit_config.items() if name != "model_type"})
        count(bare, "image-classification", 8)
        assert bare.architectures == named


def test_a_config_file_is_read(vit_config: dict[str, Any], tmp_path: Path, out: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**vit_config, "transformers_version": "5.0", "id2label": {"0": "x"}}))
    config = ModelConfig(config=str(tmp_path / "config.json"), init="random", task="image-classification")
    import_model(config, ("x", "y"), 0, out)
    assert load(out).config.id2label == {0: "x", 1: "y"}  # type: ignore[union-attr]


def test_random_text_takes_the_tokenizer(bert_config: dict[str, Any], tiny_bert: Path, out: Path) -> None:
    sizes = {key: value for key, value in bert_config.items() if key != "vocab_size"}
    config = ModelConfig(config=sizes, init="random", task="text-classification")
    with pytest.raises(InputError, match=r"tokenizer: missing; .* Hub id or folder"):
        check_model(config, 2)
    import_model(config, LABELS, 0, out, tokenizer=str(tiny_bert))
    assert load(out).config.vocab_size == bert_config["vocab_size"]  # type: ignore[union-attr]
    small = ModelConfig(config={**sizes, "vocab_size": 9}, init="random", task="text-classification")
    with pytest.raises(InputError, match="vocab_size: 9 given; the tokenizer has"):
        check_model(small, 2, tokenizer=str(tiny_bert))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "vti"}, "'vti' given; .* did you mean 'vit'"),
        ({"model_type": None}, "None given"),
        ({"hiden_size": 3}, r"model.config.hiden_size: not a key of vit .* did you mean 'hidden_size'"),
        ({"num_labels": 3}, r"model.config.num_labels: not a key of vit that can be set here"),
        ({"hidden_size": "wide"}, "not a usable vit .*hidden_size"),
        ({"patch_size": 16}, "this vit cannot be run"),
        ({"hidden_act": "gulu"}, "this vit cannot be run"),
    ],
)
def test_wrong_sizes_say_what_is_wrong(changes: dict[str, Any], match: str, vit_config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=match):
        check_model(random_image(vit_config, **changes), 2)


def test_a_type_that_cannot_do_the_task(bert_config: dict[str, Any]) -> None:
    config = ModelConfig(config=bert_config, init="random", task="image-classification")
    with pytest.raises(InputError, match="a bert cannot do image-classification"):
        check_model(config, 2)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"path": "x", "config": {}, "init": "random"},
        {"config": {}},
        {"path": "x", "init": "random"},
        {"path": "x", "trust_remote_code": True},
    ],
)
def test_one_source_is_needed(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ModelConfig(task="text-classification", **values)
