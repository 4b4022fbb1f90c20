"""Causal language models from outside, and of random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from foundation.core.errors import InputError
from foundation.models.config import ModelConfig
from foundation.models.importing import check_model, import_model, source_digest
from foundation.models.inputs.tokenizer import train_bpe
from foundation.models.size import count
from tests.foundation import tiny_gpt
from tests.foundation.model_folders import rewrite


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
    with pytest.raises(InputError, match=r"this bert reads .*; a causal model is needed"):
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
