"""Recovery: fine-tune the pruned model on the labels and a teacher.

    loss_b = loss of labels and teacher  +  w * mean over layers m and tokens t of mean_c (h_s[m, t, c] - h_t[l(m), t, k(c)])^2

l(m) is the teacher layer that layer m came from, k(c) the channel that channel c came from. A pruned model is a part of the incoming model,
so no projection has to be learned (unlike Jiao et al. 2020, https://arxiv.org/abs/1909.10351, section 3.1). Hidden states are taken between
blocks, before any final norm: the last block of the pruned model may not be the teacher's last. With the losses of the stage `distill`,
each layer, channel and head also learns from the one that it came from. If the vocabulary was cut, the teacher reads the rows in its own
tokens. Not supported: teachers from outside the run; use the stage `distill`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.machine.device import computing_device
from foundation.models.architecture.blocks import between_blocks, blocks_of
from foundation.models.architecture.origin import Origin, same_shape
from foundation.models.folder import Checkpoint
from foundation.models.inputs.padding import mask_of
from foundation.models.library import depths_of
from foundation.stage.context import Context
from foundation.training.allowed import check_training
from foundation.training.distillation.distilled import (
    Distillation,
    Distilled,
    attention_as_before,
    distillation_objective,
    on_devices,
    plan_of,
    teacher_key,
)
from foundation.training.finetune import trained_here
from foundation.training.history import History
from foundation.training.selection import judged_by, selection_metric
from foundation.training.supervised import check_label_weight, check_labelled, check_loss, supervised
from foundation.training.train import Batch, Objective, TrainConfig, Training, train
from prune.choices import Recover

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class RecoveryObjective(nn.Module):
    """The objective of recovery with a loss on hidden states.

    Args:
        answers: The objective on labels and teacher logits; holds the teacher.
        origin: Layers and channels of the teacher that the model consists of.
        weight: Weight of the hidden states in the loss.
    """

    def __init__(self, answers: Distilled, origin: Origin, weight: float) -> None:
        super().__init__()
        self.answers, self.origin, self.weight = answers, origin, weight
        self.blocks_of = cache(lambda model: tuple(blocks_of(model, "recover.hidden_weight").values()))

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the parts of the loss, float32 `[b]` each."""
        teacher = self.answers.teacher[0]
        with between_blocks(self.blocks_of(model)) as ours:
            logits_bC = model(**batch.features).logits.float()
        with torch.no_grad(), between_blocks(self.blocks_of(teacher)) as all_theirs:
            target_bC = teacher(**self.answers.features(batch)).logits.float()
        parts = self.answers.parts(logits_bC, target_bC, batch.labels)
        theirs = [all_theirs[layer] for layer in (0, *(layer + 1 for layer in self.origin.layers))]
        mask = mask_of(batch.features, ours[0].shape[1])
        return {**parts, "hidden": self.weight * hidden_loss(ours, theirs, self.origin.hidden, mask)}


def hidden_loss(ours: Sequence[Tensor], theirs: Sequence[Tensor], channels: Sequence[int], mask_bL: Tensor | None) -> Tensor:
    """Returns the mean squared difference of hidden states over layers, tokens and channels, by row, float32 `[b]`.

    Args:
        ours: Hidden states of the model, float `[b, L, c]` for each layer.
        theirs: Hidden states of the teacher, float `[b, L, D]` for each layer.
        channels: The c of the D channels that the model has.
        mask_bL: 1 for tokens, 0 for padding; None if nothing is padded.
    """
    chosen = torch.tensor(channels, device=ours[0].device)
    squares_bL = torch.stack(
        [(mine.float() - its.float().index_select(2, chosen)).square().mean(dim=2) for mine, its in zip(ours, theirs, strict=True)]
    ).mean(dim=0)
    mask_bL = torch.ones_like(squares_bL) if mask_bL is None else mask_bL.float()
    return (squares_bL * mask_bL).sum(dim=1) / mask_bL.sum(dim=1)


def part_of(context: Context, epochs: float, number: int, iterations: int, batch_size: int) -> tuple[Context, float]:
    """Returns the context of one of several iterations, with its own training rows and seed, and the passes over these rows.

    Each iteration continues where the previous one ended in a random order of the train split, then in a new order. It gets whole batches,
    so an iteration has the steps of `epochs` / `iterations` passes. An iteration of at least one full pass gets all rows.

    Args:
        context: Context of the stage.
        epochs: Passes over the train split, of all iterations together.
        number: Number of the iteration, from 1.
        iterations: Number of iterations.
        batch_size: Rows per step.
    """
    share, split, seed = epochs / iterations, context.data.train, context.seed
    context = replace(context, seed=seed + number - 1)
    if iterations == 1 or share >= 1 or not len(split):
        return context, share
    count, of_step = len(split.runs), batch_size // split.together  # rows that belong together are drawn together
    size = min(count, math.ceil(share * math.ceil(count / of_step)) * of_step)
    places = range((number - 1) * size, number * size)
    first, last = places[0] // count, places[-1] // count
    orders = {one: np.random.default_rng([seed, one]).permutation(count) for one in range(first, last + 1)}
    drawn = [int(orders[place // count][place % count]) for place in places]
    part = split.take_runs(drawn)
    return replace(context, data=replace(context.data, train=part)), 1.0


@dataclass(frozen=True)
class RecoveryJob:
    """One training of a pruned model: how, on what, and where its checkpoints go."""

    settings: Recover
    source: Path
    """Checkpoint with the tokenizer or image processor of the model."""
    origin: Origin | None
    """Layers, channels and heads of the incoming model that the model consists of; None if it has no uniform width."""
    key: str
    """Key path of the settings."""
    context: Context
    """Data, seed, progress and teacher."""
    scratch: Path
    """Folder for training checkpoints, so that a killed training resumes."""
    label: str
    """Name of the progress bar and of messages."""
    depends: Mapping[str, object]
    """Everything else that the training depends on, JSON types; a checkpoint with other values is not resumed."""


def recover(model: nn.Module, job: RecoveryJob, wrap_objective: Callable[[Objective], Objective] = lambda objective: objective) -> History:
    """Trains a pruned model in place; leaves it on the CPU in evaluation mode.

    Args:
        model: The pruned model.
        job: How to train it.
        wrap_objective: Turns the objective of labels and teacher into the one to train on.

    Raises:
        InputError: There are no training rows, the teacher does not fit, or the loss became NaN or infinite.
    """
    from foundation.models.checkpoint import load

    settings, source, context = job.settings, job.source, job.context
    assert context.teacher is not None, "the pipeline provides the teacher"
    device, folder = computing_device(), context.teacher.path
    if not context.team.shards:  # with fsdp2, `train` moves the model to the device block by block
        model.to(device)
    student_rows, teacher_rows = (context.preprocessor(of) for of in (source, folder))
    judged, objective = context, supervised(context.task, team=context.team, labels=context.data.train.labels)
    finetuned_elsewhere = not trained_here(context) and context.facts.needs_labels
    with attention_as_before(model):
        if settings.distill or finetuned_elsewhere:
            teacher = on_devices(load(folder), context, teacher_key(job.key))
            judged = judged_by(context, teacher, teacher_rows) if finetuned_elsewhere else context
            if settings.distill:
                origin = job.origin if same_shape(Checkpoint(source, "model.path").config, teacher.config) else None
                # less than an epoch does not need all of them, and hidden states come with logits
                known = context.teacher.digest if settings.epochs >= 1 and not settings.hidden_weight else None
                distillation = Distillation(settings, job.key, model, source, student_rows, teacher, teacher_rows, origin, known)
                objective = distillation_objective(distillation, replace(context, scratch=job.scratch))
                if settings.hidden_weight:
                    assert isinstance(objective, Distilled)
                    assert job.origin is not None, "checked before the first stage"
                    objective = RecoveryObjective(objective, job.origin, settings.hidden_weight)
                objective.to(device)
        training = Training.of(
            context,
            student_rows,
            TrainConfig.of(settings),
            job.label,
            scratch=job.scratch,
            select=selection_metric(judged, student_rows),
            depends=job.depends,
        )
        history = train(model, wrap_objective(objective), training)
    model.cpu()
    return history


def check_recovery(
    settings: Recover, key: str, config: PreTrainedConfig, after: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context
) -> None:
    """Checks before the first stage that the pruned model can be fine-tuned with these settings.

    Args:
        settings: Settings of the fine-tuning.
        key: Key path of the settings.
        config: Transformers config of the incoming model.
        after: Transformers config of the pruned model.
        teacher: Transformers config of the teacher.
        context: Data and task.

    Raises:
        InputError: A loss does not fit the teacher or the model.
    """
    check_hidden(settings, config, teacher, key)
    if settings.hidden_weight and (context.team.sequence or context.team.context > 1):
        shares, without = ("sequence: true", "sequence: false") if context.team.sequence else (context.team.settings, "context: 1")
        given = f"{settings.hidden_weight:g} given with parallel.{shares}, which shares the tokens of hidden states"
        raise InputError(f"{key}.hidden_weight", given, remedy=f"give {without}, or hidden_weight: 0")
    if settings.hidden_weight and context.team.pipeline > 1:
        given = f"{settings.hidden_weight:g} given with parallel.pipeline: {context.team.pipeline}, which divides the blocks"
        raise InputError(f"{key}.hidden_weight", given, remedy="give pipeline: 1, or hidden_weight: 0")
    check_training(settings, after, context, key)
    if not settings.distill:
        check_labelled(context.task, context.data, key)
    check_label_weight(settings, context.data, key)
    if not settings.distill or (not settings.named and settings.soft_weight < 1):
        check_loss(after, context, key, settings.micro_batch_size)
    if settings.named:
        plan_of(settings, key, same_shape(config, teacher)).check(after, teacher, context, settings.micro_batch_size)


def check_hidden(settings: Recover, config: PreTrainedConfig, teacher: PreTrainedConfig | None, key: str) -> None:
    """Checks that the model can learn from the teacher's hidden states.

    Raises:
        InputError: The teacher's layers or channels differ from the incoming model's.
    """
    if not settings.hidden_weight:
        return
    if len(depths_of(config) or ()) > 1:
        raise InputError(
            f"{key}.hidden_weight",
            f"{settings.hidden_weight:g} given",
            f"a {config.model_type} has two stacks of layers",
            "give losses: [{name: hidden}] instead",
        )
    shapes = [tuple(getattr(one, name, None) for name in ("num_hidden_layers", "hidden_size")) for one in (config, teacher)]
    if Origin.of_config(config) is None:
        raise InputError(
            f"{key}.hidden_weight",
            f"{settings.hidden_weight:g} given",
            f"the layers of a {config.model_type} differ in width",
            "leave it out",
        )
    if shapes[0] != shapes[1] or not settings.distill:
        raise InputError(
            f"{key}.hidden_weight",
            f"{settings.hidden_weight:g} given",
            f"it needs distill: true and a teacher with the {shapes[0][0]} layers and {shapes[0][1]} channels "
            f"of the incoming model (this one has {shapes[1][0]} and {shapes[1][1]})",
            "give teacher: input",
        )
