"""Learned scores: the training of the methods that learn what to prune, joint and movement.

    1. attach gates to the model, driven by scores or probabilities (`prune.masks.joint`, `prune.masks.movement`)
    2. train weights and gates together on the objective of recovery, with the shared training loop
    3. fold the gates into the weights (`prune.masks.masks`) and pass the scores to selection

The loop saves gates and the multiplier of the constraint with the weights: a killed training resumes bit for bit. Several processes learn
the same gates, under each plan that divides rows, weights or layers among them: gradients of gates are summed like the gradients of
weights. Processes that share each layer (`parallel.tensor`) gate the heads and neurons that they have:

    heads and neurons   the reader of process p has the inputs [p n / P, (p + 1) n / P), and gates these; the gradients of all processes
                        add up to the gradients of all gates (`LayerShare.read`)
    channels, blocks    whole in each process
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.machine.device import computing_device
from foundation.machine.parallel import Team
from foundation.training.distillation.settings import DistillationSettings
from foundation.training.processes.layer_share import LayerShare
from foundation.training.schedule import steps_in
from foundation.training.settings import Passes
from foundation.training.train import Objective
from prune.choices import Learn, Recover
from prune.cost import CostModel
from prune.masks.joint import Joint, Shared, mask_rate
from prune.masks.masks import fold, masked
from prune.masks.movement import StructuredMovement
from prune.recovery import RecoveryJob, recover
from prune.selection import Incoming, Limits, Scores


def check_learned(team: Team, key: str) -> None:
    """Checks before the first stage that these processes can learn masks together.

    Raises:
        InputError: They cannot.
    """
    if team.pipeline > 1:
        raise InputError(
            f"{key}.method",
            f"learns masks of all blocks at once, given with parallel.pipeline: {team.pipeline}, which divides the blocks",
            remedy="give pipeline: 1, or another method",
        )
    if team.experts > 1:
        raise InputError(
            f"{key}.method",
            f"learns masks of whole layers, given with parallel.experts: {team.experts}, which spreads experts",
            remedy="give experts: 1, or another method",
        )
    if team.sequence or team.context > 1:
        shares, without = ("sequence: true", "sequence: false") if team.sequence else (team.settings, "context: 1")
        raise InputError(
            f"{key}.method",
            f"learns masks, given with parallel.{shares}, which divides the tokens that they scale",
            remedy=f"give {without}, or another method",
        )


def own_part(team: Team) -> Callable[[Tensor], Tensor]:
    """Returns a function that takes the gates of all heads or neurons of a block `[n]` and returns this process's share `[n / P]`."""
    if team.tensor == 1:
        return lambda gates_n: gates_n
    share = LayerShare(team.mesh()["tensor"], columns=False)
    return lambda gates_n: share.read(gates_n).tensor_split(team.tensor)[team.tensor_rank]


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
    """Units that may be pruned."""


@dataclass(frozen=True)
class LearnedScores:
    """The result of learning masks."""

    scores: Scores
    figures: Mapping[str, object]
    """`losses`, `selection` and `steps` of the training; for joint also `sparsity`, the expected share of the cost that gates remove."""


def as_trained(settings: Learn, objective: Recover) -> Recover:
    """Returns the settings of the joint training of weights and gates.

    Args:
        settings: Epochs, batch size and learning rate.
        objective: Loss, warm-up and weight decay.
    """
    return Recover(
        **objective.model_dump(include={*DistillationSettings.model_fields, "hidden_weight", "weight_decay", "warmup"}),
        **settings.model_dump(include=set(Passes.model_fields)),
        schedule="constant",
        keep="last",
    )


def learn(method: str, model: nn.Module, goal: SparsityGoal, settings: Learn, job: RecoveryJob, key: str) -> LearnedScores:
    """Trains a model and its gates in place; leaves it on the CPU in evaluation mode, with the gates folded into its weights.

    All processes of the team must call it, with the same model and goal.

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
        team = job.context.team
        made.append(Joint(*given, Shared(job.context.seed, team)) if method == "joint" else StructuredMovement(*given, key))
        stack.enter_context(masked(model, structure, made[-1].gates(), own_part(team)))
        return made[-1].to(computing_device())

    with ExitStack() as stack:
        history = recover(model, replace(job, settings=as_trained(settings, job.settings)), with_gates)
    objective = made[-1].cpu().eval()
    figures: dict[str, object] = {"losses": history.losses, "selection": history.selection, "steps": history.steps}
    if isinstance(objective, Joint):
        figures["sparsity"] = objective.expected_sparsity()
        job.context.progress.log(f"  {job.label}: {figures['sparsity']:.1%} of the cost pruned by the gates, target {goal.sparsity:.1%}")
    else:
        objective.choose(1 - goal.sparsity)
    fold(model, structure, objective.gates())
    return LearnedScores(objective.scores(), figures)
