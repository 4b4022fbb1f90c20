"""What quantization-aware training holds: counted from the config, against the tensors of a real step, and by hand."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compress.devices.activations import numel
from compress.devices.trained import Needed, Training, needed
from foundation.labels.tasks import TASKS, Task
from foundation.models.architecture.shapes import auto_class
from foundation.models.library import with_class
from foundation.models.size import inputs_of
from foundation.training.distillation.distilled import Distilled
from foundation.training.few_parameters.lora import Lora
from foundation.training.losses.table import losses_of
from foundation.training.train import Batch
from quantize.choices import Qat
from quantize.training.planned import int8_layers
from quantize.training.qat import WithoutDropout
from tests.training_memory import KINDS, LAYERS, Alive

pytestmark = pytest.mark.whole

LENGTH, ROWS = 96, 8


def planned(kind: str, settings: Qat, half: bool) -> Needed:
    task, config = KINDS[kind]
    training = Training(config, task, ROWS, None, LENGTH, teacher=config, soft_weight=settings.soft_weight, keeps_best=False, half=half)
    return needed(dataclasses.replace(training, changes=int8_layers(settings, ())), 1)


def model_of(task: Task, config: Any) -> nn.Module:
    config = with_class(copy.deepcopy(config), task)
    config.use_cache = False
    model: nn.Module = auto_class(task, config).from_config(config)
    return model


def measured(kind: str, settings: Qat, half: bool) -> int:
    """The most bytes of tensors in the second step of a training with a teacher."""
    task, config = KINDS[kind]
    model, teacher = model_of(task, config), model_of(task, config)
    int8_layers(settings, ())(model)
    features = {name: value.repeat(ROWS, *[1] * (value.ndim - 1)) for name, value in inputs_of(config, task, LENGTH).items()}
    labels = torch.zeros((ROWS, LENGTH - 1), dtype=torch.int32) if TASKS[task].generates else torch.zeros(ROWS, dtype=torch.int64)
    batch = Batch(features, labels, np.arange(ROWS), 0, 2)
    objective = WithoutDropout(Distilled(teacher, losses_of(task), ROWS, 0, 2.0, settings.soft_weight))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    with Alive([*model.parameters(), *model.buffers(), *teacher.parameters(), *teacher.buffers()]) as alive:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                parts = objective(model, batch)
            loss = torch.stack([part.sum() for part in parts.values()]).sum()
            del parts
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return alive.peak


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "given", "half"),
    [
        ("bert", {}, True),
        ("llama", {}, False),
        ("llama", {"soft_weight": 0.5}, False),
        ("llama", {"lora": {"rank": 4}}, True),
    ],
)
def test_int8_layers_and_a_teacher_take_what_is_measured(kind: str, given: dict[str, Any], half: bool) -> None:
    settings = Qat(**given)
    assert planned(kind, settings, half).peak == pytest.approx(measured(kind, settings, half), rel=0.08)


@pytest.mark.slow
def test_scales_are_trained_too() -> None:
    """Of each layer one scale for its input and one for each output."""
    task, config = KINDS["llama"]
    own, found = numel(model_of(task, config)), planned("llama", Qat(), half=True)
    scales = LAYERS * (7 + 128 + 64 + 64 + 128 + 2 * 352 + 128)
    assert (found.weights, found.gradients, found.optimizer) == (4 * (2 * own + scales), 4 * (own + scales), 8 * (own + scales))
    assert planned("llama", Qat(scales="fixed"), half=True).gradients == 4 * own
    few = planned("llama", Qat(lora=Lora(rank=4), scales="fixed"), half=True)
    assert few.gradients == 4 * LAYERS * 4 * (4 * 2 * 128 - 2 * 64 + 3 * (128 + 352))


class Chain(nn.Module):
    """Two blocks of one linear layer that read one after another what the other has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("half", "bytes_each"), [(False, 4), (True, 2)])
def test_what_autograd_saves_by_hand(half: bool, bytes_each: int) -> None:
    """32 inputs of 64 numbers for each layer, the first as given, the second in the dtype of the products; weights are no copies."""
    model, x, saved = Chain(), torch.randn(32, 64), dict[int, int]()
    int8_layers(Qat(), ())(model)
    own = {each.untyped_storage().data_ptr() for each in (x, *model.parameters(), *model.buffers())}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.ndim == 2 and storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=half):
        y = model(x)
    assert sum(saved.values()) == bytes_each * 32 * 64
    y.float().sum().backward()
