"""Language models that are taken over as they are: linked where nothing changes, loaded where names do, refused where they look ahead.

python -m pytest tests/foundation/models/test_causal.py
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from foundation.core.errors import InputError
from foundation.models import causal
from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig
from foundation.models.forward import forward
from foundation.models.importing import import_model
from foundation.models.library import quiet
from tests import tiny_language_models as tiny

pytestmark = pytest.mark.whole

IDS = {"input_ids": torch.from_numpy(np.stack(tiny.blocks(2, 5).rows)).long()}


def imported(source: Path, out: Path) -> dict[str, object]:
    out.mkdir()
    return import_model(ModelConfig(path=str(source), task="text-generation"), (), 0, out)


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return forward(load(folder), IDS)


@pytest.mark.first(1)
@pytest.mark.parametrize("shard", ["40KB", "1GB"])
@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_files_are_linked(kind: str, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write(tmp_path / "model", kind, torch.bfloat16, shard)
    monkeypatch.setattr("foundation.models.checkpoint.load_weights", lambda *_: pytest.fail("the model was loaded"))
    figures = imported(source, tmp_path / "out")
    monkeypatch.undo()
    weights = sorted(file.name for file in source.glob("*.safetensors*"))
    assert sorted(file.name for file in (tmp_path / "out").glob("*.safetensors*")) == weights
    assert all((tmp_path / "out" / name).samefile(source / name) for name in weights)
    model = load(source)
    assert figures["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert figures["new_weights"] == []
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert config["use_cache"] is False
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"README.md", "tokenizer.json", "generation_config.json"}


def test_files_are_copied_where_they_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    source = tiny.write(tmp_path / "model", "llama")
    monkeypatch.setattr("os.link", refuse)
    imported(source, tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    assert not (tmp_path / "out" / "model-00001-of-00003.safetensors").samefile(next(source.glob("model-00001*")))


def test_a_link_of_the_hub_is_followed(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "model", "llama", shard="1GB")
    (source / "model.safetensors").rename(tmp_path / "blob")
    (source / "model.safetensors").symlink_to(tmp_path / "blob")
    imported(source, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()
    assert (tmp_path / "out" / "model.safetensors").samefile(tmp_path / "blob")


def changed(folder: Path, change: object) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})  # type: ignore[operator]
    return folder


def test_what_transformers_leaves_aside_is_dropped(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "model", "llama", torch.bfloat16, shard="1GB")
    expected = logits(source)
    changed(source, lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    imported(source, tmp_path / "out")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert kept.keys() == load_file(source / "model.safetensors").keys() - {"model.layers.0.self_attn.rotary_emb.inv_freq"}
    assert kept["lm_head.weight"].dtype == torch.bfloat16
    assert torch.equal(logits(tmp_path / "out"), expected)


def test_other_names_are_loaded_and_written_anew(tmp_path: Path) -> None:
    """GPT-2 as it was first published: without the prefix of the model inside."""
    source = tiny.write(tmp_path / "model", "gpt2", shard="1GB")
    expected = logits(source)
    changed(source, lambda tensors: {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()})
    imported(source, tmp_path / "out")
    assert "transformer.wte.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "out"), expected)


def test_a_layer_too_many_is_an_error(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "model", "llama", shard="1GB")
    changed(source, lambda tensors: {**tensors, "model.layers.3.mlp.up_proj.weight": torch.ones(48, 32)})
    with pytest.raises(InputError, match=r"has weights of layers that are not in config\.json"):
        imported(source, tmp_path / "out")


def test_a_weight_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "model", "llama", shard="1GB")
    changed(source, lambda tensors: {**tensors, "model.norm.weight": torch.full((32,), torch.inf)})
    with pytest.raises(InputError, match=r"32 of \d+ values in model\.norm\.weight are NaN or infinite"):
        imported(source, tmp_path / "out")


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    for decoder in (False, True):
        source = tiny.write(tmp_path / f"model{decoder}", "llama")
        for file in source.glob("*.safetensors*"):
            file.unlink()
        torch.manual_seed(0)
        model = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=decoder))
        with quiet():
            model.save_pretrained(source)
        if decoder:
            imported(source, tmp_path / "outTrue")
            continue
        with pytest.raises(InputError, match="this bert reads the tokens that it has to predict"):
            imported(source, tmp_path / "outFalse")


def test_the_probe_sees_a_single_token_ahead() -> None:
    config = transformers.LlamaConfig(vocab_size=9)
    attends = torch.eye(9)[:, None]

    def answer(features: dict[str, torch.Tensor]) -> torch.Tensor:
        return attends[features["input_ids"]][:, :, 0]

    causal.check_causal(config, answer)
    with pytest.raises(InputError, match="reads the tokens"):
        causal.check_causal(config, lambda features: answer({"input_ids": features["input_ids"].roll(-1, 1)}))
