"""Model folders that cannot be taken: each is refused in one line that says what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from foundation.core.errors import InputError
from foundation.models.config import ModelConfig
from foundation.models.importing import check_model
from tests.foundation.model_folders import edit, named, refused, rewrite
from tests.problems import raises_problem


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
    refused(named(folder), out, "has no weights; model.safetensors is needed")


def test_only_pickle(folder: Path, out: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(named(folder), out, r"has its weights in pytorch_model.bin, .* convert it first: python -c .*save_pretrained")


@pytest.mark.parametrize("size", [0, 7, 100, -5])
def test_truncated_weights(size: int, folder: Path, out: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match="is not a complete safetensors file"):
        check_model(named(folder), 2)
    refused(named(folder), out, r"model.safetensors is not a complete safetensors file .*; copy or download it again")


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
    refused(named(folder), out, r"2 of 2048 values in bert.encoder.layer.1.output.dense.weight are NaN or infinite")


def test_a_missing_weight(folder: Path, out: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("bert.encoder.layer.0.output.dense.bias"))
    for head in ("keep", "new"):
        refused(named(folder, head=head), out, r"1 weights are missing .*layer.0.output.dense.bias; only the head may be new")


def test_weights_of_another_shape(folder: Path, out: Path) -> None:
    edit(folder, intermediate_size=48)
    refused(named(folder), out, "weights are missing or differ in shape")


def test_more_layers_than_the_config(folder: Path, out: Path) -> None:
    edit(folder, num_hidden_layers=1)
    refused(named(folder), out, "has weights of layers that are not in config.json: bert.encoder.layer.1")


def test_another_label_count(tiny_bert: Path, out: Path) -> None:
    refused(
        named(tiny_bert), out, r"has 2 outputs; text-classification needs 3 \(labels of the data\): give model.head: new", ("x", "y", "z")
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
    refused(named(folder), out, "is already quantized")


def test_code_of_its_own_is_never_run(folder: Path, out: Path) -> None:
    (folder / "modeling_x.py").write_text("raise SystemExit('ran')")
    edit(folder, model_type="x", auto_map={"AutoConfig": "modeling_x.X", "AutoModelForSequenceClassification": "modeling_x.X"})
    refused(
        named(folder),
        out,
        "model_type 'x', which this Transformers version does not know; it needs its own Python code, which is never run",
    )


def test_no_tokenizer(folder: Path, out: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    refused(named(folder), out, r"has no tokenizer \(tokenizer.json or vocab.txt, vocab.json\); save it next to the model")


def test_a_broken_tokenizer(folder: Path, out: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    refused(named(folder), out, r"tokenizer.json: not a tokenizer")


def test_a_tokenizer_of_another_model(folder: Path, out: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"]["extra"] = 4000
    (folder / "tokenizer.json").write_text(json.dumps(values))
    refused(named(folder), out, "the tokenizer's highest id is 4000, but the model has")


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
    refused(ModelConfig(path="no such name!", task="text-classification"), out, "not a local folder and not a Hub id")


def test_images_without_settings(tiny_vit: Path, tmp_path: Path, out: Path) -> None:
    folder = Path(shutil.copytree(tiny_vit, tmp_path / "vit"))
    (folder / "preprocessor_config.json").unlink()
    refused(named(folder, task="image-classification"), out, "has no preprocessor_config.json", ("a", "b", "c"))


def test_too_many_tokens(tiny_bert: Path) -> None:
    assert check_model(named(tiny_bert), 2, 40).weight_bytes == (tiny_bert / "model.safetensors").stat().st_size
    with raises_problem("data.max_length", "41", "bert", "at most 40 tokens"):
        check_model(named(tiny_bert), 2, 41)


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("head", ["keep", "new"])
def test_names_from_inside_a_wrapper(wrapper: str, head: str, folder: Path, out: Path) -> None:
    file = folder / "model.safetensors"
    save_file({f"{wrapper}{name}": value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    message = rf"have names with .*, such as {wrapper}.*: the model was saved inside a wrapper .*; save the model inside it"
    with pytest.raises(InputError, match=message):
        check_model(named(folder, head=head), 2)
    refused(named(folder, head=head), out, message)


def test_names_of_a_module_that_was_compiled_alone(folder: Path, out: Path) -> None:
    file = folder / "model.safetensors"
    inside = {name.replace("bert.encoder.", "bert.encoder._orig_mod."): value for name, value in load_file(file).items()}
    save_file(inside, file, metadata={"format": "pt"})
    refused(named(folder), out, r"weights have names with _orig_mod\., such as bert.encoder._orig_mod")
