from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from compress.errors import InputError
from compress.model import ModelConfig, check_model, count, forward, import_model, label_names, linears, load, save, source_digest
from compress.tokenizer import train_bpe
from tests.compress import tiny_gpt

LABELS = ("negative", "positive")


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_bert` to break."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "source"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def named(path: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"path": str(path), "task": "text-classification", **changes})


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(config: ModelConfig, out: Path, match: str, labels: tuple[str, ...] = LABELS) -> None:
    with pytest.raises(InputError, match=match) as caught:
        import_model(config, labels, 0, out)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


# importing


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


def test_generic_labels_take_the_names_of_the_data(folder: Path, out: Path) -> None:
    edit(folder, id2label={"0": "LABEL_0", "1": "LABEL_1"}, label2id={"LABEL_0": 0, "LABEL_1": 1})
    assert label_names(named(folder)) is None
    import_model(named(folder), ("bad", "good"), 0, out)
    assert load(out).config.id2label == {0: "bad", 1: "good"}  # type: ignore[union-attr]


def test_names_of_the_model_are_kept(tiny_bert: Path, out: Path) -> None:
    assert label_names(named(tiny_bert)) == LABELS
    refused(named(tiny_bert), out, "its labels are negative, positive, those of the data positive, negative; .*head: new", LABELS[::-1])


def test_half_precision_is_loaded_as_float32(folder: Path, out: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: value.half() for name, value in tensors.items()}))
    edit(folder, dtype="float16")
    import_model(named(folder), LABELS, 0, out)
    assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {torch.float32}


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


def test_a_language_model_needs_a_new_head(folder: Path, bert_config: dict[str, Any], out: Path) -> None:
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(**bert_config)).save_pretrained(folder)
    refused(named(folder), out, "is a BertForMaskedLM; text-classification needs a BertForSequenceClassification; give model.head: new")
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
    refused(named(folder, task="text-regression"), out, "has 2 outputs; text-regression needs 1; give model.head: new", ("score",))
    import_model(named(tiny_bert, task="text-regression", head="new"), ("score",), 0, out)
    model = load(out)
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")  # type: ignore[union-attr]
    refused(named(out), out, "was trained for regression; text-classification needs single_label_classification; give model.head: new")


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
        ({"hiden_size": 3}, r"model.config.hiden_size: no key of a vit .* did you mean 'hidden_size'"),
        ({"num_labels": 3}, r"model.config.num_labels: no key of a vit that can be set here"),
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


# hostile folders


def test_a_missing_config(folder: Path, out: Path) -> None:
    (folder / "config.json").unlink()
    refused(named(folder), out, "has no config.json")


@pytest.mark.parametrize(
    "text", ["{", "[1]", "\xff", "", '{"model_type": 3}', '{"model_type": "brt"}', '{"model_type": "bert", "hidden_size": "x"}']
)
def test_a_broken_config(text: str, folder: Path, out: Path) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(named(folder), out, "config.json")


def test_no_weights(folder: Path, out: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(named(folder), out, "has no weights; model.safetensors is allowed")


def test_only_pickle(folder: Path, out: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(named(folder), out, r"holds its weights as pytorch_model.bin, .* convert it first: python -c .*save_pretrained")


@pytest.mark.parametrize("size", [0, 7, 100, -5])
def test_truncated_weights(size: int, folder: Path, out: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match="is no whole safetensors file"):
        check_model(named(folder), 2)
    refused(named(folder), out, r"model.safetensors is no whole safetensors file .*; copy or download it again")


def test_a_missing_shard(folder: Path, out: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(named(folder), out, "lacks model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../x.safetensors"}}))
    refused(named(folder), out, "no usable weight_map")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number(value: float, folder: Path, out: Path) -> None:
    rewrite(folder, lambda tensors: tensors["bert.encoder.layer.1.output.dense.weight"].view(-1)[5:7].fill_(value))
    refused(named(folder), out, r"bert.encoder.layer.1.output.dense.weight holds 2 NaN or infinite values of 2048")


def test_a_missing_weight(folder: Path, out: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("bert.encoder.layer.0.output.dense.bias"))
    for head in ("keep", "new"):
        refused(named(folder, head=head), out, r"1 weights are missing .*layer.0.output.dense.bias; only the head may be new")


def test_weights_of_another_shape(folder: Path, out: Path) -> None:
    edit(folder, intermediate_size=48)
    refused(named(folder), out, "weights are missing or of another shape than config.json says")


def test_more_layers_than_the_config(folder: Path, out: Path) -> None:
    edit(folder, num_hidden_layers=1)
    refused(named(folder), out, "holds layers that config.json does not have: bert.encoder.layer.1")


def test_another_label_count(tiny_bert: Path, out: Path) -> None:
    refused(
        named(tiny_bert), out, r"has 2 outputs; text-classification needs 3 \(labels of the data\); give model.head: new", ("x", "y", "z")
    )
    with pytest.raises(InputError, match="head: new"):
        check_model(named(tiny_bert), 3)


def test_another_task(tiny_vit: Path, tiny_bert: Path, out: Path) -> None:
    refused(named(tiny_vit), out, "is a vit, which cannot do text-classification")
    refused(named(tiny_bert, task="image-classification"), out, "is a bert, which cannot do image-classification")


def test_one_label_is_no_classification(tiny_bert: Path, out: Path) -> None:
    refused(named(tiny_bert, head="new"), out, "data: 1 labels; classification needs at least 2", ("x",))


def test_a_quantized_model(folder: Path, out: Path) -> None:
    edit(folder, quantization_config={"quant_method": "bitsandbytes"})
    refused(named(folder), out, "is quantized already")


def test_code_of_its_own_is_never_run(folder: Path, out: Path) -> None:
    (folder / "modeling_x.py").write_text("raise SystemExit('ran')")
    edit(folder, model_type="x", auto_map={"AutoConfig": "modeling_x.X", "AutoModelForSequenceClassification": "modeling_x.X"})
    refused(
        named(folder), out, "model_type 'x', which this Transformers does not know; it brings Python code of its own, which is never run"
    )


def test_no_tokenizer(folder: Path, out: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    refused(named(folder), out, r"has no tokenizer \(tokenizer.json or vocab.txt, vocab.json\); save it beside the model")


def test_a_broken_tokenizer(folder: Path, out: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    refused(named(folder), out, r"tokenizer.json cannot be read")


def test_a_tokenizer_of_another_model(folder: Path, out: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"]["extra"] = 4000
    (folder / "tokenizer.json").write_text(json.dumps(values))
    refused(named(folder), out, "the tokenizer's highest id is 4000, the model has")


def test_a_file_and_nothing(tiny_bert: Path, tmp_path: Path, out: Path) -> None:
    refused(named(tiny_bert / "config.json"), out, "is a file; a folder")
    refused(named(tmp_path / "nowhere"), out, "there is no folder")
    refused(ModelConfig(path="./nowhere", task="text-classification"), out, "there is no folder ./nowhere")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise ConnectionError("Name or service not known\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    refused(ModelConfig(path="owner/name", task="text-classification"), out, r"the Hub could not be reached \(Name or service not known\)")


def test_a_name_that_is_no_hub_id(out: Path) -> None:
    refused(ModelConfig(path="no such name!", task="text-classification"), out, "no local folder and no Hub id")


def test_images_without_settings(tiny_vit: Path, tmp_path: Path, out: Path) -> None:
    folder = Path(shutil.copytree(tiny_vit, tmp_path / "vit"))
    (folder / "preprocessor_config.json").unlink()
    refused(named(folder, task="image-classification"), out, "has no preprocessor_config.json", ("a", "b", "c"))


def test_too_many_tokens(tiny_bert: Path) -> None:
    assert check_model(named(tiny_bert), 2, 40).weight_bytes == (tiny_bert / "model.safetensors").stat().st_size
    with pytest.raises(InputError, match=r"data.max_length: 41 given; this bert reads at most 40 tokens"):
        check_model(named(tiny_bert), 2, 41)


# loading, counting


def test_a_checkpoint_with_missing_weights_is_not_loaded(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("classifier.bias"))
    with pytest.raises(InputError, match=r"lacks weights: classifier.bias"):
        load(folder)


def test_saving_and_loading_keeps_the_weights(tiny_bert: Path, out: Path) -> None:
    model = load(tiny_bert)
    save(model, tiny_bert, out, "Nothing was done.")
    again = load(out)
    assert not again.training
    assert again.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert "- Nothing was done." in (out / "README.md").read_text()


def test_linears_are_named_in_order(tiny_bert: Path, tiny_vit: Path) -> None:
    names = list(linears(load(tiny_bert)))
    assert len(names) == 2 * 6 + 2
    assert names[0] == "bert.encoder.layer.0.attention.self.query"
    assert names[-2:] == ["bert.pooler.dense", "classifier"]
    assert list(linears(load(tiny_vit)))[-1] == "classifier"


def test_macs_are_those_of_the_formula(tiny_bert: Path, tiny_vit: Path) -> None:
    length, hidden, wide = 20, 32, 64
    layer = length * (4 * hidden * hidden + 2 * hidden * wide) + 2 * length * length * hidden
    found = count(load(tiny_bert), "text-classification", length)
    assert found.macs == 2 * layer + hidden * hidden + hidden * 2
    assert found.flops == 2 * found.macs
    assert found.parameters == sum(value.numel() for value in load_file(tiny_bert / "model.safetensors").values())
    tokens = 17
    layer = tokens * (4 * hidden * hidden + 2 * hidden * wide) + 2 * tokens * tokens * hidden
    assert count(load(tiny_vit), "image-classification", 0).macs == 2 * layer + 16 * 4 * hidden + hidden * 3


def test_counting_needs_the_config_alone(tiny_bert: Path) -> None:
    model = load(tiny_bert)
    assert count(check_model(named(tiny_bert), 2).config, "text-classification", 16) == count(model, "text-classification", 16)


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "electra", "albert", "deberta-v2", "mpnet", "xlm-roberta"])
def test_text_families_can_be_counted(kind: str) -> None:
    assert count(AutoConfig.for_model(kind), "text-classification", 8).macs > 10**6


@pytest.mark.parametrize("kind", ["vit", "deit", "swin", "beit", "convnext"])
def test_image_families_can_be_counted(kind: str) -> None:
    assert count(AutoConfig.for_model(kind), "image-classification", 0).macs > 10**8


def test_vit_base_has_its_published_size() -> None:
    found = count(AutoConfig.for_model("vit", num_labels=1000), "image-classification", 0)
    assert found.parameters == 86_567_656
    assert round(found.macs / 1e9, 1) == 17.6


def test_the_digest_of_a_source_follows_its_contents(folder: Path) -> None:
    before = source_digest(named(folder))
    assert source_digest(named(folder)) == before
    rewrite(folder, lambda tensors: tensors["classifier.bias"].add_(1))
    assert source_digest(named(folder)) != before


@pytest.mark.slow
def test_minilm_reaches_its_published_accuracy(out: Path) -> None:
    from compress.data import preprocessor
    from compress.evaluate import metrics, predict
    from compress.stage import Target

    shared = Path(os.environ["COMPRESS_TEST_DATA"])
    import_model(named(shared / "models" / "minilm-sst2"), ("negative", "positive"), 0, out)
    lines = [line.rsplit("\t", 1) for line in (shared / "data" / "sst2" / "dev.tsv").read_text().splitlines()[1:]]
    labels = np.array([int(label) for _, label in lines])
    prepared = preprocessor(out, "text-classification", 128, Target())
    logits = predict(load(out), prepared, [text for text, _ in lines], 32)
    assert metrics("text-classification", logits, labels)["accuracy"] == pytest.approx(782 / 872)


# causal language models


def causal(**changes: Any) -> ModelConfig:
    sizes = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16}
    return ModelConfig(config={**sizes, **changes}, init="random", task="text-generation")


def test_a_random_language_model_takes_its_sizes_from_the_tokenizer(out: Path) -> None:
    tokenizer = tiny_gpt.data().tokenizer
    checked = check_model(causal(), None, 16, tokenizer)
    assert (checked.config.vocab_size, checked.config.bos_token_id, checked.config.eos_token_id) == (300, 0, 0)
    assert checked.labels is None
    import_model(causal(), (), 0, out, tokenizer=tokenizer)
    assert (out / "tokenizer.json").read_text() == tokenizer.text  # type: ignore[union-attr]
    assert "pipeline_tag: text-generation" in (out / "README.md").read_text()
    assert source_digest(causal(), tokenizer) != source_digest(causal(), train_bpe([tiny_gpt.text(300, 1)], 300, pads=False))


def test_counts_of_a_language_model_have_its_head() -> None:
    counts = count(check_model(causal(), None, 16, tiny_gpt.data().tokenizer).config, "text-generation", 16)
    assert counts.parameters == 300 * 16 + 16 * 16 + (16 * 48 + 48 + 16 * 16 + 16 + 2 * 16 * 64 + 64 + 16 + 4 * 16) + 2 * 16
    assert counts.macs == 16 * (16 * 48 + 16 * 16 + 2 * 16 * 64 + 16 * 300) + 2 * 16 * 16 * 16


@pytest.mark.parametrize(
    ("changes", "length", "match"),
    [
        ({"model_type": "vit"}, 16, "vit cannot do text-generation"),
        ({"vocab_size": 100}, 16, "vocab_size: 100 given; the tokenizer has 300 entries"),
        ({"n_positions": 8}, 16, "data.max_length: 16 given; this gpt2 reads at most 8 tokens"),
        ({"n_head": 3}, 16, "this gpt2 cannot be run"),
    ],
)
def test_language_models_that_cannot_be(changes: dict[str, Any], length: int, match: str) -> None:
    config = causal(**changes) if "model_type" not in changes else ModelConfig(config=changes, init="random", task="text-generation")
    with pytest.raises(InputError, match=match):
        check_model(config, None, length, tiny_gpt.data().tokenizer)


def test_a_model_that_sees_what_it_has_to_predict_is_refused(bert_config: dict[str, Any], out: Path) -> None:
    sizes = {name: value for name, value in bert_config.items() if name != "vocab_size"}
    model = ModelConfig(config=sizes, init="random", task="text-generation")
    with pytest.raises(InputError, match="this bert reads the tokens that it has to predict; a causal model is allowed"):
        import_model(model, (), 0, out, tokenizer=tiny_gpt.data().tokenizer)
    decoder = ModelConfig(config={**sizes, "is_decoder": True}, init="random", task="text-generation")
    import_model(decoder, (), 0, out, tokenizer=tiny_gpt.data().tokenizer)


def test_a_classifier_is_no_language_model(tiny_bert: Path, out: Path) -> None:
    config = ModelConfig(path=str(tiny_bert), task="text-generation")
    for refuse in (lambda: check_model(config), lambda: import_model(config, (), 0, out)):
        with pytest.raises(InputError, match=r"is a BertForSequenceClassification; text-generation needs a BertLMHeadModel$"):
            refuse()


def test_a_trained_language_model_is_taken_as_it_is(out: Path) -> None:
    config = ModelConfig(path=str(tiny_gpt.checkpoint()), task="text-generation")
    figures = import_model(config, (), 0, out)
    assert figures["new_weights"] == []
    assert (out / "model.safetensors").read_bytes() == (tiny_gpt.checkpoint() / "model.safetensors").read_bytes()


def test_a_language_model_without_its_layers_is_refused(tmp_path: Path, out: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_gpt.checkpoint(), broken)
    rewrite(broken, lambda tensors: tensors.pop("transformer.h.1.attn.c_attn.weight"))
    with pytest.raises(InputError, match=r"1 weights are missing .*c_attn.weight"):
        import_model(ModelConfig(path=str(broken), task="text-generation"), (), 0, out)
