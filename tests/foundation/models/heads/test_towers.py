"""Models with two towers against the stock models of Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, CLIPProcessor, PreTrainedTokenizerFast

from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint
from foundation.models.heads.towers import check_towers, tower_of, width_of
from foundation.models.importing import check_model, import_model
from foundation.models.library import task_of
from foundation.standalone.preprocess import BadRow, Preprocessor
from tests import tiny_towers
from tests.problems import raises_problem
from tests.tiny_towers import LENGTH, TASK

pytestmark = pytest.mark.whole

TEXTS = ["a photo of a red", "something deep blue", "a", "green " * 30]


def prepared(folder: Path, lengths: tuple[int, ...] = (8, 16)) -> Preprocessor:
    return Checkpoint(folder).preprocessor(TASK, LENGTH, Target(sequence_lengths=lengths))


def vectors(model: Any, features: dict[str, np.ndarray]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(**{name: torch.from_numpy(value) for name, value in features.items()}).logits
    return found


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_vectors_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder, random = tiny_towers.checkpoint(tmp_path, kind), np.random.default_rng(0)
    images = [tiny_towers.image(name, random, size) for name, size in (("red", 8), ("green", 19), ("deep_blue", 8))]
    ours = prepared(folder)
    model, stock = load(folder), tiny_towers.stock(kind)
    assert task_of(model.config) == TASK
    assert width_of(model.config) == ours.width == (24 if kind == "clip" else 32)
    with torch.inference_mode():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        fixed = {"padding": "max_length"} if kind == "siglip" else {"padding": True}
        given = tokenizer(TEXTS, truncation=True, max_length=LENGTH, return_tensors="pt", **fixed)
        mask = {"attention_mask": given["attention_mask"]} if kind == "clip" else {}  # SigLIP's processor makes none
        pixels = CLIPProcessor.from_pretrained(folder, backend="pil").image_processor(_opened(images), return_tensors="pt")
        expected = stock(input_ids=given["input_ids"], pixel_values=pixels["pixel_values"], **mask)
    found = {}
    for indices, features in ours.batches([*TEXTS, *images], 2):
        found |= dict(zip(indices, vectors(model, features), strict=True))
    assert sorted(found) == list(range(7))
    torch.testing.assert_close(torch.stack([found[row] for row in range(4)]), expected.text_embeds, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.stack([found[row] for row in range(4, 7)]), expected.image_embeds, atol=2e-5, rtol=1e-4)
    together = vectors(model, ours.encode(images) | ours.encode(TEXTS))
    torch.testing.assert_close(together, torch.cat([expected.image_embeds, expected.text_embeds]), atol=2e-5, rtol=1e-4)
    assert (expected.text_embeds[0] - expected.text_embeds[1]).abs().max() > 1e-2


def _opened(images: list[bytes]) -> list[Any]:
    import io

    from PIL import Image

    return [Image.open(io.BytesIO(one)).convert("RGB") for one in images]


def test_a_causal_tower_takes_any_length_and_an_additive_mask_in_place_of_its_own(tmp_path: Path) -> None:
    folder = tiny_towers.checkpoint(tmp_path)
    model, text = load(folder), prepared(folder).towers["text"]
    short, long = (text.encode(TEXTS[:3], length) for length in (0, LENGTH))
    assert short["input_ids"].shape[1] < long["input_ids"].shape[1] == LENGTH
    torch.testing.assert_close(vectors(model, short), vectors(model, long), atol=1e-6, rtol=1e-5)
    added = np.triu(np.full((1, 1, LENGTH, LENGTH), -3e4, np.float32), 1)
    torch.testing.assert_close(vectors(model, {**long, "attention_mask": added}), vectors(model, long), atol=1e-6, rtol=1e-5)
    assert (vectors(model, {**long, "attention_mask": 0 * added}) - vectors(model, long)).abs().max() > 1e-3  # it is read


def test_a_tower_that_reads_padding_has_one_length(tmp_path: Path) -> None:
    folder = tiny_towers.checkpoint(tmp_path, "siglip")
    ours = prepared(folder)
    assert ours.towers["text"].buckets == (LENGTH,)
    assert ours.encode(["a"])["input_ids"].shape == (1, LENGTH)
    model, text = load(folder), ours.towers["text"]
    apart = vectors(model, text.encode(["a"], LENGTH)) - vectors(model, text.encode(["a"], 0))
    assert apart.abs().max() > 1e-3  # padding counts: another length would be another model
    with raises_problem("data.max_length", "16", "siglip", "24 positions", "give 24"):
        Checkpoint(folder).preprocessor(TASK, 16, Target())


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_every_weight_belongs_to_one_tower(kind: str) -> None:
    names = [name for name, _ in tiny_towers.stock(kind).named_parameters() if not name.startswith("logit_")]
    for name in names:
        assert tower_of(name) == ("text" if "text" in name else "image")
    assert {tower_of(name) for name in names} == {"image", "text"}


def test_preprocessors_are_stored_with_both_towers(tmp_path: Path) -> None:
    folder = tiny_towers.checkpoint(tmp_path / "model")
    ours = prepared(folder)
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    again = Preprocessor.load(tmp_path / "saved")
    assert (again, again.towers) == (ours, ours.towers)
    assert [tower.modality for tower in again.towers.values()] == ["image", "text"]
    assert again.towers["image"].shape == (3, 8, 8)
    assert again.shape is None
    with pytest.raises(BadRow, match=r"row 1: tuple given; a text, or .* PNG or JPEG image"):
        again.members(["a", ("a", "b")])
    with pytest.raises(BadRow, match=r"row 0: .*image"):
        list(again.batches([b"no image"], 2))


def test_a_folder_of_transformers_is_imported_whole(tmp_path: Path) -> None:
    folder = tiny_towers.checkpoint(tmp_path / "model", layers=2)
    (tmp_path / "out").mkdir()
    config = ModelConfig(path=str(folder), task=TASK)
    assert check_model(config, None, LENGTH).config.model_type == "clip"
    made = import_model(config, ("a", "b"), 0, tmp_path / "out")
    assert (made["new_weights"], made["labels"]) == ([], [])
    before, after = load(folder).state_dict(), load(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "pipeline_tag: zero-shot-image-classification" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_hidden_layers": 1}, "has weights of layers that are not in config.json: text_model.encoder.layers.1"),
        ({"num_hidden_layers": 3}, r"weights are missing .*: text_model.encoder.layers.2.*give a complete model"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(change: dict[str, int], line: str, tmp_path: Path) -> None:
    folder = tiny_towers.checkpoint(tmp_path / "model", layers=2)
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= change
    (folder / "config.json").write_text(json.dumps(raw))
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=line):
        import_model(ModelConfig(path=str(folder), task=TASK), ("a", "b"), 0, tmp_path / "out")


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            {"path": None, "config": {"model_type": "clipseg"}, "init": "random"},
            "a clipseg given; clip or siglip is allowed where an image and a text get a vector each",
        ),
        ({"path": None, "config": {"model_type": "bert"}, "init": "random"}, "a bert given; clip or siglip is allowed"),
        (
            {"path": None, "config": tiny_towers.config(), "init": "random", "embedding": {"pooling": "mean"}},
            "embedding: given for image-text",
        ),
    ],
)
def test_other_models_are_refused_in_one_line(model: dict[str, Any], line: str) -> None:
    with pytest.raises((InputError, ValueError), match=line):
        check_model(ModelConfig(**model, task=TASK), None, LENGTH, tiny_towers.tokenizer())


def test_texts_that_are_too_long_for_the_model_are_refused(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_towers.checkpoint(tmp_path)), task=TASK)
    with raises_problem("data.max_length", "25", "clip", "at most 24 tokens"):
        check_model(config, None, LENGTH + 1)
    with pytest.raises(InputError, match="a siglip2 given; clip or siglip is allowed"):
        check_towers(AutoConfig.for_model("siglip2"), "model.path")
