"""Checkpoints: loaded, saved, counted, and told apart by their contents."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from foundation.core.errors import InputError
from foundation.models.checkpoint import load, save
from foundation.models.forward import linears
from foundation.models.importing import check_model, import_model, source_digest
from foundation.models.size import count
from tests.foundation.model_folders import named, rewrite

pytestmark = pytest.mark.whole


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


@pytest.mark.first(1)
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
    from foundation.core.target import Target
    from foundation.labels.classes import ClassIds
    from foundation.measure.metrics import metrics
    from foundation.measure.predictions import predict
    from foundation.models.folder import Checkpoint

    shared = Path(os.environ["COMPRESS_TEST_DATA"])
    import_model(named(shared / "models" / "minilm-sst2"), ("negative", "positive"), 0, out)
    lines = [line.rsplit("\t", 1) for line in (shared / "data" / "sst2" / "dev.tsv").read_text().splitlines()[1:]]
    labels = ClassIds(np.array([int(label) for _, label in lines]))
    prepared = Checkpoint(out).preprocessor("text-classification", 128, Target())
    logits = predict(load(out), prepared, [text for text, _ in lines], 32)
    assert metrics("text-classification", logits, labels)["accuracy"] == pytest.approx(782 / 872)
