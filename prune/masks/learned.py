"""Learned scores: the training of the methods that learn what to prune, joint and movement.

    1. attach gates to the model, driven by scores or probabilities (`prune.masks.joint`, `prune.masks.movement`)
    2. train weights and gates together on the objective of recovery, with the shared training loop
    3. fold the gates into the weights (`prune.masks.masks`) and pass the scores to selection

The loop saves gates, the multiplier of the constraint and the random state with the weights: a killed training resumes bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from compress.machine.device import computing_device
from compress.stage.distillation import DistillationSettings
from compress.training.train import Objective, steps_in
from prune.cost import CostModel
from prune.masks.joint import Joint, Learn, mask_rate
from prune.masks.masks import fold, masked
from prune.masks.movement import StructuredMovement
from prune.recovery import Recover, RecoveryJob, recover
from prune.selection import Incoming, Limits, Scores


@dataclass(frozen=True)
class SparsityGoal:
    """How much to prune, of what."""

    cost: CostModel
    """Cost of the model as it is."""
    incoming: Incoming
    """The incoming model, whose cost `sparsity` refers to."""
    sparsity: float
    """Share of the cost to remove."""
    limits: Limits
    """What may be pruned."""


@dataclass(frozen=True)
class LearnedScores:
    """The result of learning masks."""

    scores: Scores
    figures: Mapping[str, Any]
    """`losses`, `selection` and `steps` of the training; for joint also `sparsity`, the expected share of the cost that gates remove."""


def as_trained(settings: Learn, objective: Recover) -> Recover:
    """Returns the settings of the joint training of weights and gates.

    Args:
        settings: Epochs, batch size and learning rate.
        objective: Loss, warm-up and weight decay.
    """
    return Recover(
        **objective.model_dump(include={*DistillationSettings.model_fields, "hidden_weight", "weight_decay", "warmup"}),
        **settings.model_dump(include={"epochs", "learning_rate", "batch_size", "micro_batch_size"}),
        schedule="constant",
        keep="last",
    )


def learn(method: str, model: nn.Module, goal: SparsityGoal, settings: Learn, job: RecoveryJob, key: str) -> LearnedScores:
    """Trains a model and its gates in place; leaves it on the CPU in evaluation mode, with the gates folded into its weights.

    Args:
        method: How scores are learned.
        model: The incoming model.
        goal: What may be pruned, and how much.
        settings: Epochs, batch size and learning rates of this training.
        job: The rest of the training; of its settings only the loss, warm-up and weight decay count.
        key: Key path of the stage, for messages.

    Raises:
        InputError: There are no training rows, or the loss became NaN or infinite.
    """
    structure, made = goal.cost.structure, list[Joint | StructuredMovement]()
    steps = steps_in(settings.epochs, -(-len(job.context.data.train) // settings.batch_size))
    ratio = mask_rate(settings, steps) / settings.learning_rate

    def with_gates(loss: Objective) -> Objective:
        given = (loss, goal.cost, goal.incoming, goal.sparsity, goal.limits, ratio, settings.warmup)
        made.append(Joint(*given) if method == "joint" else StructuredMovement(*given, key))
        stack.enter_context(masked(model, structure, made[-1].gates()))
        return made[-1].to(computing_device())

    with ExitStack() as stack:
        history = recover(model, replace(job, settings=as_trained(settings, job.settings)), with_gates)
    objective = made[-1].cpu().eval()
    figures: dict[str, Any] = {"losses": history.losses, "selection": history.selection, "steps": history.steps}
    if isinstance(objective, Joint):
        figures["sparsity"] = objective.expected_sparsity()
        job.context.progress.log(f"  {job.label}: {figures['sparsity']:.1%} of the cost pruned by the gates, target {goal.sparsity:.1%}")
    else:
        objective.choose(1 - goal.sparsity)
    fold(model, structure, objective.gates())
    return LearnedScores(objective.scores(), figures)
