"""Training in int8 end to end, on tiny models."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foundation.artifacts.artifact import Artifact
from foundation.data.splits import Split
from foundation.labels.classes import ClassIds
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward, linears
from foundation.schemes.checkpoint import apply_quantization, save_quantization
from foundation.schemes.int8 import LayerScales, levels, on_grid, weight_scale
from foundation.stage.context import Context
from foundation.training.distillation.distilled import Distilled
from foundation.training.losses.table import losses_of
from foundation.training.train import Batch, TrainConfig, Training, train
from quantize.choices import Qat
from quantize.training.linear import QatLinear
from quantize.training.qat import extract, insert, learn
from quantize.training.straight_through import Scale

pytestmark = pytest.mark.whole

HIGH = 127


def start_of(folder: Path, context: Context, bits: int = 8) -> tuple[nn.Module, dict[str, LayerScales]]:
    """A model and scales that clip nothing, from one batch."""
    model, largest = load(folder), {}
    chosen = {name: layer for name, layer in linears(model).items() if ".encoder." in name}
    for name, layer in chosen.items():
        layer.register_forward_pre_hook(lambda _, args, name=name: largest.update({name: args[0].abs().max()}))
    forward(model, features(folder, context, 32))
    for layer in chosen.values():
        layer._forward_pre_hooks.clear()
    return model, {
        name: LayerScales(weight_scale(layer.weight.detach(), levels(bits)), largest[name].detach() / HIGH, bits)
        for name, layer in chosen.items()
    }


def group_of(scales: Mapping[str, LayerScales]) -> dict[str, str]:
    """Query, key and value of a block of BERT read one tensor."""
    return {name: re.sub(r"self\.(key|value)$", "self.query", name) for name in scales}


def features(folder: Path, context: Context, num: int) -> dict[str, Tensor]:
    prepared = Checkpoint(folder).preprocessor(context.task, context.max_length, context.target)
    return {name: torch.from_numpy(value) for name, value in prepared.encode(context.data.train.rows[:num], 24).items()}


@pytest.mark.parametrize("bits", [8, 7])
def test_extracted_layers_are_a_quantized_checkpoint(bert: Artifact, context: Context, tmp_path: Path, bits: int) -> None:
    model, scales = start_of(bert.path, context, bits)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    insert(model, scales, group_of(scales), rate=10)
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, Scale):  # as if they had learned
            layer.change.data.uniform_(-0.02, 0.02, generator=generator)
    expected = forward(model.eval(), features(bert.path, context, 16))
    learned = extract(model)
    assert list(learned) == list(scales)
    assert not any(isinstance(module, QatLinear) for module in model.modules())
    assert set(model.state_dict()) == set(before)
    for name, value in model.state_dict().items():
        layer_name = name.removesuffix(".weight")
        if layer_name not in learned:
            assert torch.equal(value, before[name]), name
            continue
        assert not torch.equal(learned[layer_name].weight_scale, scales[layer_name].weight_scale)
        assert learned[layer_name].weight_bits == bits
        assert torch.equal(value, on_grid(before[name], learned[layer_name].weight_scale, levels(bits)))
    save(model, bert.path, tmp_path, "Trained")
    save_quantization(tmp_path, learned, {})
    apply_quantization(model, tmp_path)
    assert torch.equal(forward(model, features(bert.path, context, 16)), expected)
    assert torch.equal(forward(load(tmp_path), features(bert.path, context, 16)), expected)


def test_layers_that_read_one_tensor_share_what_they_learn(bert: Artifact, context: Context) -> None:
    model, scales = start_of(bert.path, context)
    insert(model, scales, group_of(scales))
    for block in range(2):
        shared = {
            id(layer.input_scale)
            for name, layer in model.named_modules()
            if f"{block}.attention.self." in name and isinstance(layer, QatLinear)
        }
        assert len(shared) == 1
    assert len({id(layer.input_scale) for layer in model.modules() if isinstance(layer, QatLinear)}) == 8


@pytest.mark.parametrize(
    ("learned", "distill"),
    [
        ("lsq", True),
        ("lsq", False),
        ("pact", True),
        ("fixed", True),
        *(pytest.param(learned, False, marks=pytest.mark.slow) for learned in ("pact", "fixed")),  # each half of it is above
    ],
)
def test_training_lowers_the_loss(bert: Artifact, context: Context, learned: Any, distill: bool) -> None:
    model, scales = start_of(bert.path, context)
    narrow = {name: LayerScales(old.weight_scale, 0.3 * old.input_scale, 8) for name, old in scales.items()}
    train_split = Split(context.data.train.rows, ClassIds(np.array(["good" in row.split() for row in context.data.train.rows], np.int64)))
    learnable = replace(context, data=replace(context.data, train=train_split))
    settings = Qat(epochs=6, learning_rate=3e-3, scale_learning_rate=10, scales=learned, distill=distill, keep="last")
    found, history = learn(model, narrow, group_of(narrow), settings, learnable, bert.path, "quantize")
    part, factor = ("teacher", 0.5) if distill else ("cross_entropy", 0.9)
    assert history.losses[-1][part] < factor * history.losses[0][part]
    assert set(history.losses[0]) == {"epoch", "cross_entropy", "loss"} | ({"teacher"} if distill else set())
    assert [look["step"] for look in history.selection] == list(range(0, 43, 7))
    assert not model.training
    inputs_moved = [not torch.equal(new.input_scale, narrow[name].input_scale) for name, new in found.items()]
    weights_moved = [not torch.equal(new.weight_scale, narrow[name].weight_scale) for name, new in found.items()]
    assert any(inputs_moved) == (learned != "fixed")
    assert all(inputs_moved) or learned != "lsq"  # pact learns from what is clipped, of what the answer depends on
    assert all(weights_moved) == any(weights_moved) == (learned == "lsq")
    query, key = (found[f"bert.encoder.layer.0.attention.self.{name}"] for name in ("query", "key"))
    assert torch.equal(query.input_scale, key.input_scale)


def test_weights_before_the_training_are_kept_where_they_are_nearest(bert: Artifact, context: Context) -> None:
    """A learning rate that ruins the model: what is left is what calibration gave."""
    model, scales = start_of(bert.path, context)
    found, history = learn(model, scales, group_of(scales), Qat(epochs=1, learning_rate=0.5), context, bert.path, "quantize")
    assert history.best_step == 0
    assert history.selection[0]["value"] < history.selection[-1]["value"]
    assert all(torch.equal(found[name].input_scale, start.input_scale) for name, start in scales.items())


@pytest.mark.parametrize("distill", [True, False])
def test_weights_are_chosen_by_distance_from_the_teacher_or_by_labels(bert: Artifact, context: Context, distill: bool) -> None:
    model, scales = start_of(bert.path, context)
    floating = copy.deepcopy(model)
    _, history = learn(
        model, scales, group_of(scales), Qat(epochs=1, distill=distill, learning_rate=1e-4, keep="last"), context, bert.path, "quantize"
    )
    prepared = Checkpoint(bert.path).preprocessor(context.task, context.max_length, context.target)
    rows, labels = context.data.selection.rows, context.data.selection.labels
    before, after = (predict(one, prepared, rows, 8) for one in (floating, model))
    if distill:
        p, q = (torch.log_softmax(torch.from_numpy(logits).double(), dim=1) for logits in (before, after))
        expected = float((p.exp() * (p - q)).sum(dim=1).mean())
        # what is written in float32 is nearly what was trained
        assert history.selection[-1]["value"] == pytest.approx(expected, rel=0.5, abs=2e-3)
        assert not history.higher_is_better
    else:
        assert history.higher_is_better
        assert history.selection[-1]["value"] == pytest.approx((after.argmax(1) == labels.array).mean(), abs=0.1)


@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_is_on_where_it_is_asked_for(bert: Artifact, context: Context, dropout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[type, bool]] = set()
    forward = QatLinear.forward

    def watching(layer: QatLinear, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.update((type(module), module.training) for module in watched.modules())
        return forward(layer, x)

    watched, scales = start_of(bert.path, context)
    monkeypatch.setattr(QatLinear, "forward", watching)
    learn(watched, scales, group_of(scales), Qat(epochs=0.1, dropout=dropout), context, bert.path, "quantize")
    assert (QatLinear, True) in seen
    assert (QatLinear, False) not in seen
    assert ((torch.nn.Dropout, True) in seen) == dropout


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_killed_training_continues_to_equal_bits(bert: Artifact, context: Context, tmp_path: Path) -> None:
    """Killed in the first epoch, where answers of the teacher are missing, and in the second one."""
    at = 0

    class Dies(Distilled):
        def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            if batch.step == at:
                raise Killed
            return super().forward(model, batch)

    def run(kind: type[Distilled], scratch: str) -> tuple[nn.Module, Distilled]:
        model, scales = start_of(bert.path, context)
        objective = kind(load(bert.path), losses_of(context.task), 48, 2, 2.0, 0.9)
        insert(model, scales, group_of(scales), rate=10)
        split = Split(context.data.train.rows[:48], context.data.train.labels[:48])
        prepared = Checkpoint(bert.path).preprocessor(context.task, context.max_length, context.target)
        config = TrainConfig(epochs=2, learning_rate=1e-3, batch_size=8, checkpoint_seconds=0, keep="last")
        train(model, objective, Training(split, prepared, config, 0, tmp_path / scratch, context.progress))
        return model, objective

    whole, expected = run(Distilled, "whole")
    assert expected.logits is not None
    assert not expected.logits.isnan().any()
    for at in (3, 9):
        with pytest.raises(Killed):
            run(Dies, f"killed at {at}")
        resumed, objective = run(Distilled, f"killed at {at}")
        assert f"resumed after step {at} of 12" in "".join(context.progress.lines)  # type: ignore[attr-defined]
        assert torch.equal(objective.logits, expected.logits)  # type: ignore[arg-type]
        for name, value in whole.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[name]), name
