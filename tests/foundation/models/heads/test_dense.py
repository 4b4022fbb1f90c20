"""The encoder of T5 with a linear layer behind its pooling: read as sentence-transformers has it, loaded, saved and written again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import T5EncoderModel

from foundation.models.checkpoint import load, save
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.models.heads.dense import THEIR_ACTIVATIONS
from foundation.models.heads.embedding import width_of
from foundation.models.importing import check_model, import_model, source_digest
from foundation.models.library import depths_of
from tests import tiny_embedding
from tests.export import sentiment
from tests.problems import raises_problem
from tests.seldom import seldom

TEXTS = ["a fine film", "it was dull", "this very bad movie"]
SETTINGS: dict[str, dict[str, Any]] = {
    "as in sentence-t5": {},
    "tanh": {"bias": True, "activation_function": THEIR_ACTIVATIONS["tanh"]},
    "relu, narrow": {"out_features": 3, "activation_function": THEIR_ACTIVATIONS["relu"]},
    "gelu": {"bias": True, "activation_function": THEIR_ACTIVATIONS["gelu"]},
}
F = {"torch.nn.modules.linear.Identity": lambda x: x, THEIR_ACTIVATIONS["tanh"]: torch.tanh, THEIR_ACTIVATIONS["relu"]: torch.relu,
     THEIR_ACTIVATIONS["gelu"]: torch.nn.functional.gelu}  # fmt: skip


def imported(source: Path, out: Path, **embedding: Any) -> Path:
    out.mkdir()
    import_model(ModelConfig(path=str(source), task="sentence-embedding", embedding=embedding or None), (), 0, out)
    return out


def features(folder: Path, texts: list[str]) -> dict[str, Tensor]:
    prepared = Checkpoint(folder).preprocessor("sentence-embedding", sentiment.LENGTH, sentiment.TARGET)
    return {name: torch.from_numpy(array) for name, array in prepared.encode(texts).items()}


def vectors(folder: Path) -> Tensor:
    with torch.no_grad():
        return forward(load(folder), features(folder, TEXTS))


def naive(source: Path, out: Path, texts: list[str], dimensions: int | None = None) -> Tensor:
    """Returns the vectors row by row, without padding: the body as Transformers has it, the mean, the layer, the length 1."""
    told = json.loads((source / "2_Dense" / "config.json").read_text())
    weights, body, found = load_file(source / "2_Dense" / "model.safetensors"), T5EncoderModel.from_pretrained(source).eval(), []
    for text in texts:
        alone = features(out, [text])
        with torch.no_grad():
            states = body(**alone).last_hidden_state[0, : int(alone["attention_mask"].sum())]
        v = weights["linear.weight"] @ states.mean(dim=0) + weights.get("linear.bias", torch.zeros(told["out_features"]))
        v = F[told["activation_function"]](v)[:dimensions]
        found.append(v / v.norm())
    return torch.stack(found)


@pytest.mark.parametrize("name", seldom(SETTINGS, ("gelu", "relu, narrow")))
@pytest.mark.parametrize("gated", seldom([False, True], (True,)))
def test_vectors_are_those_of_the_formula(name: str, gated: bool, tmp_path: Path) -> None:
    source = tiny_embedding.t5_folder(tmp_path / "source", gated=gated, dense=SETTINGS[name])
    out = imported(source, tmp_path / "out")
    torch.testing.assert_close(vectors(out), naive(source, out, TEXTS), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_is_a_folder_of_both_libraries_again(tmp_path: Path) -> None:
    source = tiny_embedding.t5_folder(tmp_path / "source", dense=SETTINGS["tanh"])
    out, again = imported(source, tmp_path / "out", dimensions=10), tmp_path / "again"
    config: Any = Checkpoint(out).config
    assert (config.architectures, config.is_encoder_decoder, depths_of(config), width_of(config)) == (["T5EncoderModel"], False, (2,), 10)
    again.mkdir()
    save(load(out), out, again, "Saved again")
    for folder in (out, again):
        modules = json.loads((folder / "modules.json").read_text())
        kinds = [(entry["path"], entry["type"].rpartition(".")[2]) for entry in modules]
        assert kinds == [
            ("", "Transformer"),
            ("1_Pooling", "Pooling"),
            ("2_Dense", "Dense"),
            ("3_Dense", "Dense"),
            ("4_Normalize", "Normalize"),
        ]
        for name in ("weight", "bias"):
            own, theirs = (load_file(one / "2_Dense" / "model.safetensors")[f"linear.{name}"] for one in (folder, source))
            assert torch.equal(own, theirs)
        assert json.loads((folder / "2_Dense" / "config.json").read_text()) == json.loads((source / "2_Dense" / "config.json").read_text())
        assert torch.equal(load_file(folder / "3_Dense" / "model.safetensors")["linear.weight"], torch.eye(10, 24))
        torch.testing.assert_close(vectors(folder), naive(source, folder, TEXTS, 10), rtol=1e-4, atol=1e-5)


def test_random_weights_are_an_encoder_alone(tmp_path: Path) -> None:
    config = {"model_type": "t5", "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2}
    recipe = ModelConfig(config=config, init="random", task="sentence-embedding", embedding={"pooling": "mean"})
    (tmp_path / "out").mkdir()
    import_model(recipe, (), 0, tmp_path / "out", str(sentiment.checkpoint()))
    model: Any = load(tmp_path / "out")
    assert not [name for name, _ in model.named_modules() if "decoder" in name]
    assert (vectors(tmp_path / "out").norm(dim=1) - 1).abs().max() < 1e-5


def test_the_weights_of_the_layer_are_part_of_the_digest(tmp_path: Path) -> None:
    source = tiny_embedding.t5_folder(tmp_path / "source")
    config = ModelConfig(path=str(source), task="sentence-embedding")
    before, file = source_digest(config), source / "2_Dense" / "model.safetensors"
    save_file({"linear.weight": load_file(file)["linear.weight"] + 1}, file)
    assert source_digest(config) != before


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"activation_function": "torch.nn.modules.activation.Mish"}, ("Mish", "give another model")),
        ({"out_features": 0}, ("0 out_features",)),
        ({"bias": "yes"}, ("the bias",)),
        ({"module_input_name": "token_embeddings"}, ("module_input_name", "token_embeddings")),
    ],
)
def test_other_layers_are_refused(change: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    source = tiny_embedding.t5_folder(tmp_path / "source")
    file = source / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with raises_problem("model.path", *parts):
        check_model(ModelConfig(path=str(source), task="sentence-embedding"))


def test_missing_and_wrong_weights_are_refused(tmp_path: Path) -> None:
    source = tiny_embedding.t5_folder(tmp_path / "source")
    save_file({"linear.weight": torch.zeros(24, 31)}, source / "2_Dense" / "model.safetensors")
    with raises_problem("model.path", "does not fit"):
        imported(source, tmp_path / "one")
    (source / "2_Dense" / "model.safetensors").unlink()
    with raises_problem("model.path", "2_Dense has no model.safetensors"):
        imported(source, tmp_path / "two")
    shutil.rmtree(source / "2_Dense")
    with raises_problem("model.path", "no config.json of its Dense module"):
        imported(source, tmp_path / "three")


def test_dimensions_are_those_behind_the_layer(tmp_path: Path) -> None:
    source = tiny_embedding.t5_folder(tmp_path / "source")
    with raises_problem("model.embedding.dimensions", "25", "24 numbers"):
        imported(source, tmp_path / "out", dimensions=25)


def test_a_model_in_bfloat16_answers_nearly_the_same(tmp_path: Path) -> None:
    """As the engine torch runs it in bf16: the pooling stays float32, the layer does not."""
    folder = imported(tiny_embedding.t5_folder(tmp_path / "source", dense={"bias": True}), tmp_path / "out")
    with torch.no_grad():
        half = forward(load(folder, dtype=torch.bfloat16), features(folder, TEXTS))
    assert float((half * vectors(folder)).sum(dim=1).min()) > 0.995
