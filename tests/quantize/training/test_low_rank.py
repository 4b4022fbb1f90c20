"""Low-rank changes of quantized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.models.checkpoint import load
from foundation.models.forward import forward
from foundation.stage.context import Context
from foundation.training.few_parameters.lora import Lora
from quantize.choices import Qat
from quantize.training.linear import QatLinear
from quantize.training.low_rank import changed_by_low_rank
from quantize.training.qat import extract, insert, learn
from tests.quantize.training.test_qat_training import features, group_of, start_of

pytestmark = pytest.mark.whole


def test_the_change_is_within_the_rounding(bert: Artifact, context: Context) -> None:
    model, scales = start_of(bert.path, context)
    before = {name: model.get_submodule(name).weight.detach().clone() for name in scales}
    insert(model, scales, group_of(scales))
    changes: dict[str, Tensor] = {}
    with changed_by_low_rank(model, Lora(rank=3, alpha=5, layers=("*.query", "*.dense")), 0, "qat"):
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert {name.rpartition(".")[2] for name in trainable} == {"a_rI", "b_Or", "change"}
        for name in scales:
            layer: Any = model.get_submodule(name)
            if not name.endswith(("query", "dense")):
                continue
            change = layer.parametrizations.weight[0]
            change.b_Or.data.normal_(generator=torch.Generator().manual_seed(1))
            changes[name] = torch.zeros_like(before[name])
            for component in range(3):
                changes[name] += 5 / 3 * torch.outer(change.b_Or.detach()[:, component], change.a_rI.detach()[component])
        expected = forward(model.eval(), features(bert.path, context, 16))
    assert len(changes) == 8
    for name in scales:
        torch.testing.assert_close(model.get_submodule(name).weight, before[name] + changes.get(name, 0), rtol=1e-4, atol=1e-5)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert {type(module) for name, module in model.named_modules() if name in scales} == {QatLinear}
    torch.testing.assert_close(forward(model, features(bert.path, context, 16)), expected, rtol=0, atol=0)
    assert set(extract(model)) == set(scales)


@pytest.mark.slow
def test_training_lowers_the_loss_and_leaves_all_else(bert: Artifact, context: Context) -> None:
    model, scales = start_of(bert.path, context)
    narrow = {name: start.__class__(start.weight_scale, 0.5 * start.input_scale, 8) for name, start in scales.items()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = Qat(epochs=6, learning_rate=3e-3, keep="last", lora=Lora(rank=4))
    found, history = learn(model, narrow, group_of(narrow), settings, context, bert.path, "quantize")
    assert history.losses[-1]["teacher"] < 0.7 * history.losses[0]["teacher"]
    assert set(model.state_dict()) == set(before)
    for name, value in model.state_dict().items():
        learned = name.endswith(".weight") and name.removesuffix(".weight") in found
        assert torch.equal(value, before[name]) != learned, name


def test_the_first_step_starts_at_the_model(bert: Artifact, context: Context) -> None:
    model, scales = start_of(bert.path, context)
    insert(model, scales, group_of(scales))
    x = features(bert.path, context, 16)
    expected = forward(model.eval(), x)
    with changed_by_low_rank(model, Lora(), 0, "qat"):
        torch.testing.assert_close(forward(model, x), expected, rtol=0, atol=0)


def test_a_pattern_without_a_layer_is_refused(bert: Artifact, context: Context) -> None:
    model, scales = start_of(bert.path, context)
    insert(model, scales, group_of(scales))
    said = r"stages\.quantize\.qat\.lora\.layers: '\*\.q_proj' matches no quantized linear layer; layers are named like bert"
    with (
        pytest.raises(InputError, match=said),
        changed_by_low_rank(model, Lora(layers=("*.q_proj",)), 0, "stages.quantize.qat"),
    ):
        pass


def test_dropout_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"lora\.dropout: 0\.1 given; .*, which has none"):
        Qat(lora=Lora(dropout=0.1))


def test_the_loaded_model_is_untouched_without_low_rank(bert: Artifact) -> None:
    model = load(bert.path)
    with changed_by_low_rank(model, None, 0, "qat"):
        assert all(parameter.requires_grad for parameter in model.parameters())
