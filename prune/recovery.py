"""Recovery: the pruned model is trained again, on the labels and against a teacher.

    loss_b = that of `compress.training.distilled`  +  w * mean over layers m and tokens t of mean_c (h_s[m, t, c] - h_t[l(m), t, k(c)])^2

l(m) is the layer of the teacher that the layer m came from, k(c) the channel that c came from: a pruned model is a part of the model that
came in, so no projection has to be learned (Jiao et al. 2020, https://arxiv.org/abs/1909.10351, section 3.1, has one). The states are those
between blocks, before any norm behind the last one: what is last in a pruned model may have had other blocks behind it in the teacher. Of
the losses of the stage `distill`, too, every layer, channel and head learns from the one that it was. The teacher gets the rows in its own
tokens where the vocabulary was cut. Left out: teachers from outside of the run; the stage `distill` has those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from compress.core.errors import InputError
from compress.core.tasks import TASKS
from compress.models.blocks import between_blocks, repeated_blocks
from compress.models.config import read_config
from compress.models.origin import Origin, same_shape
from compress.stage.context import Context
from compress.stage.taught import Asked, Learner, Taught
from compress.training.distilled import Distilled, attention_as_before, check_taught, taught
from compress.training.finetune import trained_here
from compress.training.selection import judged_by, selection_metric
from compress.training.supervised import supervised
from compress.training.train import Batch, History, Objective, TrainConfig, Training, train, training_device


class Recover(Taught):
    """How the pruned model is trained."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = 1
    """Passes over the train split in all, divided evenly between the iterations; 0.5 is half a pass."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-5
    """Peak learning rate, in every iteration."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 32
    """Rows per step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows in memory at once, where a whole batch does not fit."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the steps over which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls to 0 after the warm-up; constant: not at all."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""
    hidden_weight: Annotated[float, Field(ge=0)] = 0.0
    """Without `loss` and `losses`: weight of the hidden states of the teacher, which has to have the layers and channels of the incoming
    model; 0: not looked at."""
    evaluate_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between two looks at the selection split; absent: once an epoch."""
    keep: Literal["best", "last"] = "best"
    """Weights that are kept: the best on the selection split, or the last."""

    @model_validator(mode="after")
    def _hidden_by_name(self) -> Self:
        if self.hidden_weight and self.named:
            raise ValueError(f"hidden_weight: {self.hidden_weight:g} given beside loss or losses; give losses: [{{name: hidden}}]")
        return self


class Recovery(nn.Module):
    """The objective of recovery with hidden states.

    Args:
        answers: The objective of labels and answers; holds the teacher.
        origin: Where the layers and channels of the model come from.
        weight: Of the hidden states in the loss.
    """

    def __init__(self, answers: Distilled, origin: Origin, weight: float) -> None:
        super().__init__()
        self.answers, self.origin, self.weight = answers, origin, weight
        self.blocks_of = cache(lambda model: tuple(repeated_blocks(model, "recover.hidden_weight")[1]))

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the parts of the loss, float32 `[b]` each."""
        teacher = self.answers.teacher[0]
        with between_blocks(self.blocks_of(model)) as ours:
            logits_bC = model(**batch.features).logits.float()
        with torch.no_grad(), between_blocks(self.blocks_of(teacher)) as all_theirs:
            target_bC = teacher(**self.answers.features(batch)).logits.float()
        parts = self.answers.parts(logits_bC, target_bC, batch.labels)
        theirs = [all_theirs[layer] for layer in (0, *(layer + 1 for layer in self.origin.layers))]
        mask = batch.features.get("attention_mask")
        return {**parts, "hidden": self.weight * hidden_loss(ours, theirs, self.origin.hidden, mask)}


def hidden_loss(ours: Sequence[Tensor], theirs: Sequence[Tensor], channels: Sequence[int], mask_bL: Tensor | None) -> Tensor:
    """Returns the mean squared difference of hidden states of each row, over layers, tokens and channels, float32 `[b]`.

    Args:
        ours: Float `[b, L, c]` for each layer.
        theirs: Float `[b, L, D]` for each, the teacher's.
        channels: Which of the D channels are ours.
        mask_bL: 1 where there is no padding; None for no padding at all.
    """
    chosen = torch.tensor(channels, device=ours[0].device)
    squares_bL = torch.stack(
        [(mine.float() - its.float().index_select(2, chosen)).square().mean(dim=2) for mine, its in zip(ours, theirs, strict=True)]
    ).mean(dim=0)
    mask_bL = torch.ones_like(squares_bL) if mask_bL is None else mask_bL.float()
    return (squares_bL * mask_bL).sum(dim=1) / mask_bL.sum(dim=1)


def part_of(context: Context, epochs: float, number: int, iterations: int, batch_size: int) -> tuple[Context, float]:
    """Returns the context of one of several iterations, with its own rows to train on and its own seed, and the passes over them.

    Each goes on where the last one ended, in one random order of the train split, and in another one behind its end: whole batches, so
    that the steps are those of `epochs` / `iterations` passes. An iteration of at least a whole pass gets all rows.

    Args:
        context: Of the stage.
        epochs: Passes over the train split, of all iterations together.
        number: Of the iteration, from 1.
        iterations: How many there are.
        batch_size: Rows of a step.
    """
    share, split, seed = epochs / iterations, context.data.train, context.seed
    context = replace(context, seed=seed + number - 1)
    if iterations == 1 or share >= 1 or not len(split):
        return context, share
    size = min(len(split), math.ceil(share * math.ceil(len(split) / batch_size)) * batch_size)
    places = range((number - 1) * size, number * size)
    first, last = places[0] // len(split), places[-1] // len(split)
    orders = {one: np.random.default_rng([seed, one]).permutation(len(split)) for one in range(first, last + 1)}
    part = split.take([int(orders[place // len(split)][place % len(split)]) for place in places])
    return replace(context, data=replace(context.data, train=part)), 1.0


def recover(
    model: nn.Module,
    settings: Recover,
    epochs: float,
    origin: Origin | None,
    source: Path,
    asked: Asked,
    context: Context,
    scratch: Path,
    label: str,
    depends: Mapping[str, Any],
    around: Callable[[Objective], Objective] = lambda objective: objective,
) -> History:
    """Trains a pruned model in place; leaves it on the CPU in evaluation mode.

    Args:
        model: The pruned model.
        settings: How to train.
        epochs: Passes over the train split.
        origin: Where its layers, channels and heads come from in the model that came in; None of a model that has no such numbers.
        source: Checkpoint with its tokenizer or image processor.
        asked: Where the settings are, for messages.
        context: Data, seed, progress, and the teacher.
        scratch: Folder for checkpoints inside the stage.
        label: Name of the bar and of messages.
        depends: Whatever else the training depends on (JSON types).
        around: Makes what is trained on of the objective of labels and answers.

    Raises:
        InputError: There are no rows, the teacher does not fit, or the loss became NaN or infinite.
    """
    from compress.models.checkpoint import load

    assert context.teacher is not None, "the pipeline hands over the teacher"
    device, folder = training_device(), context.teacher.path
    model.to(device)
    prepared, theirs = (context.preprocessor(of) for of in (source, folder))
    judged, objective = context, supervised(context.task)
    outside = not trained_here(context) and TASKS[context.task].needs_labels
    with attention_as_before(model):
        if settings.distill or outside:
            teacher = load(folder, device).requires_grad_(False)
            judged = judged_by(context, teacher, theirs) if outside else context
            if settings.distill:
                part = origin if same_shape(read_config(source, "model.path"), teacher.config) else None
                learner = Learner(settings, asked, model, source, prepared, teacher, theirs, part)
                objective = taught(learner, replace(context, scratch=scratch))
                if settings.hidden_weight:
                    assert isinstance(objective, Distilled)
                    assert origin is not None, "checked before the first stage"
                    objective = Recovery(objective, origin, settings.hidden_weight)
                objective.to(device)
        training = Training.of(
            context,
            prepared,
            TrainConfig.of(settings, epochs=epochs),
            label,
            scratch=scratch,
            select=selection_metric(judged, prepared),
            depends=depends,
        )
        history = train(model, around(objective), training)
    model.cpu()
    return history


def check_recovery(settings: Recover, asked: Asked, config: Any, after: Any, teacher: Any, context: Context) -> None:
    """Finds out whether a pruned model can learn like that.

    Args:
        settings: How it is trained.
        asked: Where that is asked for.
        config: Transformers config of the model that came in.
        after: That of what is left of it.
        teacher: That of the teacher.
        context: Data and task.

    Raises:
        InputError: The teacher has not what is to be learned.
    """
    check_hidden(settings, config, teacher, asked.key)
    check_taught(settings, asked, after, teacher, same_shape(config, teacher), context)


def check_hidden(settings: Recover, config: Any, teacher: Any, key: str) -> None:
    """Finds out whether the teacher's hidden states can be learned.

    Raises:
        InputError: Its layers or channels are not those of the incoming model.
    """
    if not settings.hidden_weight:
        return
    shapes = [tuple(getattr(one, name, None) for name in ("num_hidden_layers", "hidden_size")) for one in (config, teacher)]
    if Origin.of_config(config) is None:
        raise InputError(
            f"{key}.hidden_weight: {settings.hidden_weight:g} given; the layers of a {config.model_type} have no one width: leave it out"
        )
    if shapes[0] != shapes[1] or not settings.distill:
        raise InputError(
            f"{key}.hidden_weight: {settings.hidden_weight:g} given; that takes distill: true and a teacher with the {shapes[0][0]} layers "
            f"and {shapes[0][1]} channels of the incoming model (this one has {shapes[1][0]} and {shapes[1][1]}): give teacher: input"
        )
