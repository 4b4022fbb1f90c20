"""Learning what to take away: the training of the methods whose scores are learned, joint and movement.

    1. gates on the model, scores or probabilities behind them (`prune.joint`, `prune.structured_movement`)
    2. weights and gates trained together on the objective of recovery, with the one loop of the project
    3. the factors of the gates folded into the weights (`prune.masks`), the scores handed to selection

The loop saves gates, the price of cost and the generator of their noise with the weights, so that a killed training goes on bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from compress.models.origin import Origin
from compress.stage.context import Context
from compress.stage.distillation import DistillationSettings, SettingKeys
from compress.training.train import Objective, steps_in, training_device
from prune.cost import Costs
from prune.joint import Joint, Learn, mask_rate
from prune.masks import fold, masked
from prune.recovery import Recover, recover
from prune.selection import Limits, Scores, Whole
from prune.structured_movement import StructuredMovement

Learned = Literal["joint", "movement"]
LEARNED: tuple[Learned, ...] = ("joint", "movement")


@dataclass(frozen=True)
class Lesson:
    """What was learned."""

    scores: Scores
    figures: Mapping[str, Any]
    """`losses`, `selection` and `steps` of the training; of joint the expected share that is gone by the gates, `sparsity`."""


def as_trained(settings: Learn, objective: Recover) -> Recover:
    """Returns how weights and gates are trained together.

    Args:
        settings: How to train.
        objective: What the loss is made of.
    """
    return Recover(
        **objective.model_dump(include={*DistillationSettings.model_fields, "hidden_weight", "weight_decay", "warmup"}),
        **settings.model_dump(include={"epochs", "learning_rate", "batch_size", "micro_batch_size"}),
        schedule="constant",
        keep="last",
    )


def learn(
    method: Learned,
    model: nn.Module,
    cost: Costs,
    whole: Whole,
    sparsity: float,
    limits: Limits,
    settings: Learn,
    objective: Recover,
    source: Path,
    asked: SettingKeys,
    context: Context,
    key: str,
    depends: Mapping[str, Any],
) -> Lesson:
    """Trains a model and its gates, in place; leaves it on the CPU in evaluation mode, the gates in its weights.

    Args:
        method: How scores are learned.
        model: The model that came in.
        cost: Of it.
        whole: What the sparsity is a share of.
        sparsity: Share of the cost that is to go.
        limits: What may be taken away.
        settings: How to train.
        objective: What the loss is made of.
        source: Checkpoint with the tokenizer or image processor.
        asked: Where the objective is asked for, for messages.
        context: Data, seed, progress, and the teacher.
        key: Key path of the stage, for messages.
        depends: Whatever else the training depends on (JSON types).

    Raises:
        InputError: There are no rows, or the loss became NaN or infinite.
    """
    structure, made = cost.structure, list[Joint | StructuredMovement]()
    steps = steps_in(settings.epochs, -(-len(context.data.train) // settings.batch_size))
    ratio = mask_rate(settings, steps) / settings.learning_rate
    how = as_trained(settings, objective)

    def around(loss: Objective) -> Objective:
        if method == "joint":
            made.append(Joint(loss, cost, whole, sparsity, limits, ratio, settings.warmup))
        else:
            made.append(StructuredMovement(loss, cost, whole, sparsity, limits, ratio, settings.warmup, key))
        stack.enter_context(masked(model, structure, made[-1].gates()))
        return made[-1].to(training_device())

    origin = Origin.whole(structure.depth, structure.sizes.hidden)
    label = f"{key.rpartition('.')[2]}: learning masks"
    with ExitStack() as stack:
        history = recover(model, how, how.epochs, origin, source, asked, context, context.scratch / "masks", label, depends, around)
    learned = made[-1].cpu().eval()
    figures: dict[str, Any] = {"losses": history.losses, "selection": history.selection, "steps": history.steps}
    if isinstance(learned, Joint):
        figures["sparsity"] = learned.expected_sparsity()
        context.progress.log(f"  {label}: {figures['sparsity']:.1%} closed, {sparsity:.1%} asked for")
    else:
        learned.choose(1 - sparsity)
    fold(model, structure, learned.gates())
    return Lesson(learned.scores(), figures)
