"""What an architecture cannot do is refused with the reason that is true of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from distill.choices import Student
from distill.student import student_config, take_layers
from foundation.core.errors import InputError
from foundation.models.architecture.blocks import with_layers
from foundation.models.config import ModelConfig, check_length, check_task
from foundation.models.folder import Checkpoint
from foundation.models.inputs.images import image_shape
from foundation.models.library import sizes_config
from tests.architectures.steps import drawn
from tests.architectures.table import ARCHITECTURES
from tests.problems import raises_problem
from tests.traced_once import really

KEY = "stages.distill.student"


def test_a_model_that_cannot_tell_padding_is_refused() -> None:
    config = ModelConfig(path="somewhere", task="text-classification", head="new")
    with raises_problem("model.path", "fnet", "no attention mask"):
        check_task(config, transformers.FNetConfig(), 2)
    check_task(config, transformers.BertConfig(), 2)


def test_relative_positions_have_no_longest_text() -> None:
    assert transformers.XLNetConfig().max_position_embeddings == -1
    check_length(transformers.XLNetConfig(), 10_000)
    with pytest.raises(InputError, match="reads at most 512 tokens"):
        check_length(transformers.BertConfig(), 10_000)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.FunnelConfig(), "the number of layers of a funnel cannot be set"),
        (transformers.PvtConfig(), "a pvt is not a stack of equal layers"),
    ],
)
def test_models_that_are_no_stack_give_no_layers(config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        student_config(Student(layers=1), config, KEY)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("squeezebert", "a squeezebert does not run its layers as modules"),
        ("swin", "only layers with equal weights can be selected: give the student by path or config"),
        ("esm", "contact_head.regression.weight of this esm depends on the number of layers"),
    ],
)
def test_layers_that_cannot_be_taken(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        take_layers(drawn(ARCHITECTURES[name]), [0], KEY)


def test_a_backbone_names_only_its_layers(tmp_path: Path) -> None:
    config = with_layers(transformers.BeitConfig(num_hidden_layers=3), [0, 2])
    config.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).stage_names == ["stem", "stage1", "stage2"]


def test_sizes_and_images_are_found_in_a_config_inside() -> None:
    config = transformers.CLIPConfig(vision_config={"num_hidden_layers": 3, "image_size": 32, "num_channels": 1})
    assert sizes_config(config) is config.vision_config
    assert image_shape(config) == (1, 32, 32)
    assert sizes_config(with_layers(config, [1])).num_hidden_layers == 1
    assert image_shape(transformers.ResNetConfig(num_channels=1)) == (1, 224, 224)


def test_what_cannot_be_traced_into_onnx_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export.graph.onnx import export_float
    from tests.export import tiny_checkpoints as tiny

    tiny.write(tmp_path / "bert", "bert")
    error = torch.onnx.OnnxExporterError("long text")
    error.__cause__ = ValueError("the shape depends on values")

    def export(*args: Any, **kwargs: Any) -> None:
        raise error

    really(monkeypatch)
    monkeypatch.setattr(torch.onnx, "export", export)
    with raises_problem("export", "bert", "ONNX (the shape depends on values)"):
        export_float(Checkpoint(tmp_path / "bert"), tiny.preprocessor("bert"), tmp_path / "model.onnx")
