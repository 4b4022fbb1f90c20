"""Quantization-aware training with a true-int8 forward pass: training computes with the same integers as serving.

    linear            the int8 linear layer, its forward pass and its gradients     `quantize.training.linear`
    convolution       the int8 convolution                                          `quantize.training.convolution`
    straight_through  what both have in common: codes with slopes, learned scales   `quantize.training.straight_through`

    loss = (1 - a) * task loss + a * T^2 KL(softmax(t / T) || softmax(z / T))       t: logits of the model before quantization

(Hinton et al. 2015, https://arxiv.org/abs/1503.02531; regression: a * (z - t)^2; generation: means over the tokens of a block), or the
losses named in `loss` or `losses` (`foundation.training.distillation`). Not supported: PACT's L2 penalty on alpha (scales start
calibrated and move little); PACT for weights (their scales then stay fixed); gradient estimators other than straight-through.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.machine.device import computing_device
from foundation.measure.closeness import distance
from foundation.measure.predictions import compared
from foundation.models.architecture.origin import Origin, same_shape
from foundation.schemes.int8 import LayerScales
from foundation.schemes.int8_convolution import CONVOLUTIONS
from foundation.stage.context import Context
from foundation.training.distillation.distilled import Distillation, attention_as_before, distillation_objective, on_devices, teacher_key
from foundation.training.history import History
from foundation.training.selection import EVALUATION_BATCH, selection_metric
from foundation.training.supervised import supervised
from foundation.training.train import Batch, Objective, TrainConfig, Training, train
from quantize.choices import Learned, Qat
from quantize.training.convolution import QatConvolution
from quantize.training.linear import QatLinear
from quantize.training.low_rank import changed_by_low_rank
from quantize.training.straight_through import Scale

if TYPE_CHECKING:
    from foundation.standalone.preprocess import Preprocessor


TRAINED = (QatLinear, QatConvolution)


def insert(
    model: nn.Module, scales: Mapping[str, LayerScales], group: Mapping[str, str], learned: Learned = "lsq", rate: float = 1.0
) -> None:
    """Replaces layers by `QatLinear` and `QatConvolution`, in place.

    Layers that read the same tensor (query, key and value) share one learned input scale. Whether they do is observed while the model runs
    (`calibration.collect`); equal initial scales do not show it.

    Args:
        model: A float model.
        scales: Initial scales, by module path; equal within a group.
        group: The group of each layer: layers that read the same tensor.
        learned: Which scales are trained, and how.
        rate: How many times faster scales learn than weights.
    """
    shared: dict[str, Scale] = {}
    first: dict[str, Tensor] = {}
    for name, given in scales.items():
        layer: Any = model.get_submodule(name)
        start, tensor = given.on(layer.weight.device), group[name]
        if tensor not in shared:
            shared[tensor], first[tensor] = Scale(start.input_scale, rate, learned != "fixed"), given.input_scale
        input_scale, weight_scale = shared[tensor], Scale(start.weight_scale, rate, learned == "lsq")
        same = first[tensor] is given.input_scale or torch.equal(first[tensor], given.input_scale)
        assert same, f"{name} and {tensor} read one tensor with two scales"
        pact = learned == "pact"
        trained: nn.Module
        if isinstance(layer, CONVOLUTIONS):
            trained = QatConvolution(name, layer, start, input_scale, weight_scale, pact)
        else:
            assert isinstance(layer, nn.Linear), f"{name} is {type(layer).__name__}"
            trained = QatLinear(name, layer, start, input_scale, weight_scale, pact)
        model.set_submodule(name, trained.train(layer.training))


def extract(model: nn.Module) -> dict[str, LayerScales]:
    """Replaces every layer of `insert` by a float layer with weights rounded to their grid, in place.

    Returns:
        The learned scales by module path; together with the weights they make a quantized checkpoint.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TRAINED)}
    scales = {name: layer.scales() for name, layer in layers.items()}
    for name, layer in layers.items():
        floating: Any = layer.floating()
        floating.weight.data = scales[name].on_grid(layer.weight.detach())
        model.set_submodule(name, floating.train(layer.training))
    return scales


def key_of(stage: str) -> str:
    """Returns the key path of the training settings of a stage, given its id."""
    return f"stages.{stage}.qat"


def learn(
    model: nn.Module,
    scales: Mapping[str, LayerScales],
    group: Mapping[str, str],
    settings: Qat,
    context: Context,
    checkpoint: Path,
    label: str,
    teacher: Path | nn.Module | None = None,
) -> tuple[dict[str, LayerScales], History]:
    """Trains a float model in int8, in place; leaves it on the CPU in evaluation mode, with weights on the grids of the returned scales.

    Args:
        model: A loaded float checkpoint.
        scales: Initial scales by module path, from calibration.
        group: The group of each layer: layers that read the same tensor.
        settings: The training settings.
        context: Data, seed, progress, folder for training checkpoints.
        checkpoint: Folder of the model, for its tokenizer or image processor.
        label: Id of the stage, for progress bars and messages.
        teacher: Checkpoint of the teacher, or a loaded model with the same preprocessing; None for the incoming model itself.

    Returns:
        The learned scales by module path, and the history of the training.

    Raises:
        InputError: There are no rows, the input of a layer holds NaN or infinity, or the loss or a gradient became NaN or infinite.
    """
    from foundation.models.checkpoint import load

    if not context.team.shards:  # with fsdp2, `train` moves the model to the device block by block
        model.to(computing_device())
    folder = teacher if isinstance(teacher, Path) else checkpoint
    prepared, theirs = (context.preprocessor(of) for of in (checkpoint, folder))
    taught_by: nn.Module | None = None
    if settings.distill:
        given = load(teacher) if isinstance(teacher, Path) else teacher
        taught_by = on_devices(copy.deepcopy(model) if given is None else given, context, teacher_key(key_of(label)))
    selected = _selection(taught_by, context, prepared, theirs)
    with attention_as_before(model):
        objective = supervised(context.task, team=context.team, labels=context.data.train.labels)
        if taught_by is not None:
            part = Origin.of_config(model.config) if same_shape(model.config, taught_by.config) else None
            known = context.teacher.digest if isinstance(teacher, Path) and context.teacher and settings.epochs >= 1 else None
            distillation = Distillation(settings, key_of(label), model, checkpoint, prepared, taught_by, theirs, part, known)
            objective = distillation_objective(distillation, context).to(computing_device())
        insert(model, scales, group, settings.scales, settings.scale_learning_rate)
        training = Training.of(
            context,
            prepared,
            TrainConfig.of(settings, look_first=True, lora=None),  # its changes are within the rounding
            label,
            depends=settings.model_dump(mode="json"),
            **selected,
        )
        with changed_by_low_rank(model, settings.lora, context.seed, key_of(label)):
            history = train(model, objective if settings.dropout else WithoutDropout(objective), training)
    return extract(model.cpu()), history


def _selection(teacher: nn.Module | None, context: Context, prepared: Preprocessor, theirs: Preprocessor) -> dict[str, Any]:
    """Returns how a `Training` scores weights on selection rows: `select`, `higher_is_better` and `selected_by`.

    With a teacher the score is the distance to its logits (`foundation.measure.closeness`), which separates candidates on a few hundred
    rows where labels cannot. Without a teacher, and for text generation, it is the primary metric.
    """
    rows = context.data.selection.rows
    if teacher is None or context.facts.generates or not rows:
        return {"select": selection_metric(context, prepared)}
    before = compared(teacher, theirs, rows, EVALUATION_BATCH)

    def apart(now: nn.Module) -> float:
        return distance(context.task, before, compared(now, prepared, rows, EVALUATION_BATCH))

    return {"select": apart, "higher_is_better": False, "selected_by": "distance to the teacher"}


class WithoutDropout(nn.Module):
    """An objective that keeps the model in evaluation mode, except its int8 layers.

    Args:
        objective: The wrapped objective.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the loss terms by name, float32 `[b]` each."""
        for module in model.modules():
            module.training = isinstance(module, TRAINED)
        return self.objective(model, batch)
