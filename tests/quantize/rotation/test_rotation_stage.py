"""The stage with a rotation: in memory and from file to file alike, and what else it goes with.

python -m pytest tests/quantize/rotation/test_rotation_stage.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from foundation.artifacts.artifact import Artifact
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.models.size import Passes
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.tables import load_tables
from foundation.stage.context import Context
from quantize.quantize import Quantize
from quantize.rotation.stored import rotate_folder
from tests import tiny_language_models as tiny
from tests.architectures.table import ARCHITECTURES
from tests.problems import raises_problem
from tests.quantize.test_streaming import quantized as streamed
from tests.quantize.test_streaming import written

pytestmark = pytest.mark.whole
IDS = torch.arange(24).view(2, 12)


def quantized(folder: Path, context: Context, **settings: Any) -> tuple[Path, dict[str, Any]]:
    return streamed(folder, context, rotation="hadamard", **settings)


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return forward(load(folder), {"input_ids": IDS})


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        ("llama", torch.float32, {"scheme": "w8a8"}),
        ("llama", torch.bfloat16, {"scheme": "w8a8-dynamic", "smoothquant": False}),
        ("gpt2", torch.bfloat16, {"scheme": "w4a16", "group_size": 16, "symmetric": False, "rounding": "gptq"}),
        ("qwen2", torch.float32, {"scheme": "w4a8-block", "group_size": 16, "awq": True, "embeddings": True}),
    ],
    ids=lambda value: value["scheme"] if isinstance(value, dict) else str(value),
)
def test_from_file_to_file_as_in_memory(
    kind: str, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path, blocks_context: Context
) -> None:
    folder = written(tmp_path, kind, dtype, tie_word_embeddings=True)
    whole, expected = quantized(folder, blocks_context, stream=False, **settings)
    streamed, found = quantized(folder, blocks_context, stream=True, **settings)
    assert load_quantization(whole)[0].keys() == load_quantization(streamed)[0].keys()
    torch.testing.assert_close(logits(streamed), logits(whole), rtol=2e-2, atol=2e-2 * float(logits(whole).abs().max()))
    for figures, out in ((expected, whole), (found, streamed)):
        rotation = figures["rotation"]
        assert rotation["difference"] < 1e-4
        assert {key: rotation[key] for key in ("method", "size", "values")} == {"method": "hadamard", "size": 32, "values": True}
        assert rotation["untied_weights"] == 64 * 32
        assert Checkpoint(out).config.tie_word_embeddings is False
        assert json.loads(json.dumps(figures, allow_nan=False)) == figures
        stock = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert stock.get_output_embeddings().weight is not stock.get_input_embeddings().weight
    assert not (blocks_context.scratch / "rotated").exists()
    if settings.get("embeddings"):
        assert load_tables(whole).keys() == load_tables(streamed).keys()
        assert len(load_tables(whole)) == 2


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)])
def test_a_rotated_folder_is_a_stock_checkpoint_that_answers_as_before(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = written(tmp_path, kind, dtype, tie_word_embeddings=True)
    figures = rotate_folder(folder, tmp_path / "rotated", 3, "stages.quantize.rotation")
    expected = logits(folder)
    with torch.inference_mode():
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rotated", dtype=torch.float32)(IDS).logits
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
    assert figures["untied_weights"] == 64 * 32
    assert Checkpoint(tmp_path / "rotated").config.tie_word_embeddings is False
    again = rotate_folder(folder, tmp_path / "again", 3, "stages.quantize.rotation")
    assert again == figures
    tensors, others = (
        {name: value for file in (tmp_path / out).glob("model*.safetensors") for name, value in load_file(file).items()}
        for out in ("rotated", "again")
    )
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert {value.dtype for name, value in tensors.items() if name.endswith("weight")} == {torch.float32}


def test_training_in_integers_starts_from_the_rotated_model(tmp_path: Path, blocks_context: Context) -> None:
    folder = written(tmp_path, "llama", tie_word_embeddings=True)
    _, figures = quantized(folder, blocks_context, mode="qat", qat={"epochs": 0.1, "micro_batch_size": 4})
    assert figures["rotation"]["untied_weights"] == 64 * 32
    assert figures["qat"]["steps"] > 0


@pytest.mark.first(1)
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_learned_rotations_make_a_stock_checkpoint(scheme: str, tmp_path: Path, blocks_context: Context) -> None:
    folder = written(tmp_path, "llama", tie_word_embeddings=True)
    settings = {"scheme": scheme, "rotation": "learned", "learned_rotation": {"steps": 4, "batch_size": 4}}
    out, figures = streamed(folder, blocks_context, **settings)
    again, repeated = streamed(folder, blocks_context, **settings)
    assert repeated["rotation"] == figures["rotation"]
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    rotation = figures["rotation"]
    assert {key: rotation[key] for key in ("method", "size", "values", "steps")} == {
        "method": "learned",
        "size": 32,
        "values": True,
        "steps": 4,
    }
    assert rotation["loss"] <= rotation["loss_before"]
    assert rotation["difference"] < 1e-4
    assert transformers.AutoModelForCausalLM.from_pretrained(out).config.tie_word_embeddings is False
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_learned_rotations_of_an_image_classifier(tiny_vit: Path, image_context: Context, tmp_path: Path) -> None:
    """Its norms subtract the mean, and it answers with classes."""
    (tmp_path / "out").mkdir()
    stage = Quantize(rotation="learned", learned_rotation={"steps": 4, "batch_size": 16})
    figures = stage.run(Artifact(tiny_vit, {}), image_context, tmp_path / "out")
    assert figures["rotation"]["loss"] <= figures["rotation"]["loss_before"]
    assert figures["rotation"]["difference"] < 1e-4


def test_the_plan_counts_a_head_of_its_own() -> None:
    config = tiny.CONFIGS["llama"](tie_word_embeddings=True)
    assert Quantize(rotation="hadamard").config_after(config).tie_word_embeddings is False
    assert config.tie_word_embeddings is True
    assert Quantize().config_after(config) is config


def test_a_model_that_cannot_be_rotated_is_refused_before_the_run(blocks_context: Context) -> None:
    config = transformers.Gemma2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48, vocab_size=64
    )
    for rotation in ("hadamard", "learned"):
        with raises_problem("stages.quantize.rotation", rotation, "give none"):
            Quantize(rotation=rotation, scheme="w8a8").check(config, None, blocks_context)


def test_what_learned_rotations_do_not_go_with(blocks_context: Context) -> None:
    row = ARCHITECTURES["mixtral"]
    keys = dict(row.config)
    mixture = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    with raises_problem("stages.quantize.rotation", "experts", "give hadamard"):
        Quantize(rotation="learned").check(mixture, None, blocks_context)
    with raises_problem("stages.quantize.stream: true", "rotation: learned", "give stream: false"):
        Quantize(rotation="learned", stream=True).check(tiny.CONFIGS["llama"](), None, blocks_context)


def test_the_plan_counts_the_steps(blocks_context: Context) -> None:
    passes = Passes(layers=2, before=1.0, after=1.0)
    works = [Quantize(**settings).work(passes, blocks_context.data) for settings in ({"rotation": "hadamard"}, {"rotation": "learned"})]
    assert works[1] > works[0] + 100 * 8
