"""The training objective: the weighted sum of all active losses, from one pass each of student and teacher.

loss_b = hard_weight * labelled_b * hard_b  +  sum_i weight_i(t) * loss_i,b

labelled_b is 0 for rows without a label (extra text, masked copies, answers of the student), else 1. The loss of a step is the mean over
all rows of the batch, unlabelled ones included, so the hard-target loss counts in proportion to the share of labelled rows. A teacher whose
logits are cached does not run at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.labels.tasks import Task
from foundation.machine.parallel import ALONE, Team
from foundation.training.distillation.capture import Captured, Wanted
from foundation.training.distillation.ensemble import run_teachers
from foundation.training.distillation.schedules import Ramp, value_at
from foundation.training.distillation.teacher import NOTHING, Pair
from foundation.training.losses.distillation.loss import Loss, LossInputs, Setting
from foundation.training.losses.table import losses_of
from foundation.training.train import Batch


class Objective(nn.Module):
    """Computes the weighted loss terms of a batch; its parameters are the losses' projections.

    Args:
        losses: The losses.
        settings: What each loss is applied to, in the same order.
        pair: Student and teacher.
        temperature: Softens the logits.
        hard_weight: Weight of the hard-target loss.
        seed: Seed for initializing projections.
        task: The task of the student.
        team: The training processes, which share the rows of a batch.

    Raises:
        InputError: A loss does not fit the two models.
    """

    def __init__(
        self,
        losses: Sequence[Loss],
        settings: Sequence[Setting],
        pair: Pair,
        temperature: float | Ramp,
        hard_weight: float | Ramp,
        seed: int,
        task: Task,
        team: Team = ALONE,
    ) -> None:
        super().__init__()
        self.losses, self.settings, self.pair = losses, settings, pair
        self.temperature, self.hard_weight, self.answer = temperature, hard_weight, losses_of(task, team=team, labels=pair.labels)
        for loss in losses:
            loss.prepare(pair)
        self.wanted = [loss.wants(setting) for loss, setting in zip(losses, settings, strict=True)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = [loss.build(setting) for loss, setting in zip(losses, settings, strict=True)]
        self.built = nn.ModuleDict({str(i): module for i, module in enumerate(built) if module is not None})

    def forward(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the weighted loss terms by name, float `[b]` each; terms of the same name are added up."""
        step, num_steps = batch.step, batch.num_steps
        active = self._active(batch)
        from_student, from_teacher = Wanted(logits=self.hard_weight != 0), Wanted()
        for i in active:
            from_student, from_teacher = from_student | self.wanted[i][0], from_teacher | self.wanted[i][1]
        pair = self.pair
        assert model is pair.student.model, "the objective belongs to another model"
        if pair.masking is not None:
            batch = replace(batch, features=pair.masking(batch.features, batch.indices, step))
        sampled = None if pair.on_policy is None else pair.on_policy(model, batch)
        batch = batch if sampled is None else sampled
        student = pair.student(batch.features, from_student) if from_student != Wanted() else NOTHING
        temperature = value_at(self.temperature, step, num_steps)
        teacher = run_teachers(pair.teachers, pair.weights, batch, from_teacher, temperature, self.answer)
        return self._weighted(active, student, teacher, batch, sampled is not None)

    def compares_rows(self) -> bool:
        """Whether losses compare rows that different micro-batches may hold."""
        compared = any(loss.ACROSS_ROWS for loss in self.losses) or (self.hard_weight != 0 and self.answer.compares_rows())
        return compared and all(loss.ANSWERS_ONLY for loss in self.losses)

    def beside(self, batch: Batch) -> Tensor:
        """Returns the answers of the teachers, float32 `[b, E]`; empty where no loss reads them."""
        wanted = Wanted()
        for i in self._active(batch):
            wanted = wanted | self.wanted[i][1]
        temperature = value_at(self.temperature, batch.step, batch.num_steps)
        return run_teachers(self.pair.teachers, self.pair.weights, batch, wanted, temperature, self.answer).logits

    def terms(self, answers_bD: Tensor, beside_bE: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the result of `forward` from the answers of student and teachers."""
        return self._weighted(self._active(batch), Captured(answers_bD), Captured(beside_bE), batch)

    def _active(self, batch: Batch) -> list[int]:
        return [i for i, loss in enumerate(self.losses) if loss.counts(batch.step, batch.num_steps)]

    def _weighted(
        self, active: Sequence[int], student: Captured, teacher: Captured, batch: Batch, sampled: bool = False
    ) -> dict[str, Tensor]:
        """Returns the weighted loss terms of what was captured; `sampled`: of answers that the student wrote."""
        step, num_steps, parts = batch.step, batch.num_steps, dict[str, Tensor]()
        temperature = value_at(self.temperature, step, num_steps)
        for i in active:
            inputs = LossInputs(self.settings[i], batch, temperature, student, teacher, self.pair)
            weight = value_at(self.losses[i].weight, step, num_steps)
            trained = self.built[str(i)] if str(i) in self.built else None  # noqa: SIM401 - a ModuleDict has no get
            for name, value in self.losses[i].parts(inputs, trained).items():
                parts[name] = parts.get(name, 0.0) + weight * value
        if self.hard_weight != 0:
            hard = self.answer.labelled(student.logits, batch.labels)
            if sampled:  # there is no label for the student's own text
                hard = torch.zeros_like(hard)
            labelled_b = self.pair.labelled(batch.indices)
            if labelled_b is not None:
                hard = torch.where(labelled_b.to(hard.device), hard, 0.0)
            parts["hard_target"] = value_at(self.hard_weight, step, num_steps) * hard
        return parts


def check_covered(losses: Sequence[Loss], hard_weight: float | Ramp, key: str) -> None:
    """Checks that at least one loss is active in every step.

    Raises:
        InputError: Some step has no loss.
    """
    if hard_weight != 0:
        return
    reached = 0.0
    for start, end in sorted(loss.steps for loss in losses):
        if start > reached:
            break
        reached = max(reached, end)
    if reached < 1:
        raise InputError(
            key, f"no loss is active from {reached:g} of the steps on", remedy="let `steps` cover the whole training, or give hard_weight"
        )
