"""Micro-batches of a loss that compares the rows of a batch: GradCache (Gao et al. 2021, https://arxiv.org/abs/2101.06983, section 3).

A row's loss depends on the vectors of all others, so that no micro-batch has a loss by itself. But the vectors are all that the loss reads,
and the gradient of a weight goes through them:

    d loss / d w  =  sum_i (d loss / d v_i) (d v_i / d w)

    1. vectors      each micro-batch runs without a graph; its vectors stay, and the random state that it began with
    2. loss         of all vectors, and its gradient d loss / d v_i; several processes gather them once
                    (`foundation.training.processes.gathered`)
    3. gradients    each micro-batch runs again from its random state, so that dropout is the same, now with a graph; its backward begins
                    with the gradients of its vectors

One micro-batch has a graph at a time. The last one of step 1 keeps its graph and is not run again: with k micro-batches a step takes
4 - 1/k times the work of a forward pass, against 3 for a batch in one piece. Gradients equal the gradients of that batch but for rounding,
and for dropout, which micro-batches draw one after the other. sentence-transformers calls it CachedMultipleNegativesRankingLoss.

The last backward sums gradients over processes, as the backward of other micro-batches does (`foundation.training.processes.engine`).
Running means of batch norms move only in the first run.

Left out: losses that read more of the model than its vectors, such as hidden states or weights of two towers; they are refused before the
training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.machine.random_state import generator_state, set_generator_state
from foundation.models.forward import device_of, forward
from foundation.training.processes.engine import Engine
from foundation.training.recompute import norms_at_rest

Batch = Any
"""A `foundation.training.train.Batch`; that file imports this one."""
ANSWERS = "answers"
MOST_APART = 0.05
"""How far vectors of the second run may be from vectors of the first, as a share of the largest number: bfloat16 rounds to 0.004."""


@runtime_checkable
class ComparesRows(Protocol):
    """An objective that may compare the rows of a batch, only by the answers of the model."""

    def compares_rows(self) -> bool:
        """Whether it compares rows that a micro-batch may part."""

    def beside(self, batch: Batch) -> Tensor:
        """Returns further values of each row, such as the answers of a teacher, `[b, E]`; empty without any."""

    def terms(self, answers_bD: Tensor, beside_bE: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the weighted loss terms by name, float `[b]` each; reads no features of the batch."""


class GradCache:
    """Computes the gradient of a batch that is run in micro-batches but compared as a whole.

    Args:
        objective: Compares rows.
        model: The model that is trained.
        label: Name of the training, for the message.
    """

    def __init__(self, objective: ComparesRows, model: nn.Module, label: str) -> None:
        self.objective, self.model, self.label = objective, model, label
        self.checked = False

    @classmethod
    def of(cls, objective: Any, model: nn.Module, micro_batch_size: int | None, label: str) -> GradCache | None:
        """Returns the gradient cache of a training whose objective compares rows across micro-batches; else None."""
        if micro_batch_size is None or not isinstance(objective, ComparesRows) or not objective.compares_rows():
            return None
        return cls(objective, model, label)

    @staticmethod
    def answers(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the vectors of a micro-batch, float32 `[b, D]`; called by the engine."""
        return {ANSWERS: forward(model, batch.features)}

    def backward(
        self, engine: Engine, batches: Sequence[Batch], num_rows: int, autocast: Callable[[], AbstractContextManager[object]]
    ) -> dict[str, float]:
        """Accumulates the gradient of the micro-batches of a step; returns the sums of the loss terms of this process.

        Args:
            engine: Runs `answers`.
            batches: The micro-batches of this process; rows of those that do not count have a gradient of 0.
            num_rows: Rows of the step, of all processes.
            autocast: Returns the context of a forward pass.

        Raises:
            InputError: The model does not answer the same in the second run.
        """
        *first, last = batches
        device, states, found = device_of(self.model), [], []
        for batch in first:
            states.append(_random_state(device))
            with torch.no_grad(), autocast():
                found.append(self.answers(self.model, batch)[ANSWERS])
        with engine.micro_batch(last=not first):
            with autocast():
                answers_bD = engine(last)[ANSWERS]
            sums, gradients = self._compared([*found, answers_bD.detach()], batches, num_rows, autocast)
            answers_bD.backward(gradients[-1])  # type: ignore[no-untyped-call]
        del answers_bD
        after = _random_state(device)
        for number, (batch, state, before_bD) in enumerate(zip(first, states, found, strict=True)):
            _set_random_state(device, state)
            with engine.micro_batch(last=number == len(first) - 1):
                with autocast(), norms_at_rest(self.model):
                    answers_bD = engine(batch)[ANSWERS]
                self._check_same(before_bD, answers_bD)
                answers_bD.backward(gradients[number])  # type: ignore[no-untyped-call]
        _set_random_state(device, after)
        return sums

    def _compared(
        self, answers: Sequence[Tensor], batches: Sequence[Batch], num_rows: int, autocast: Callable[[], AbstractContextManager[object]]
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Returns the sums of the loss terms, and their gradients by the vectors of each micro-batch."""
        with torch.no_grad(), autocast():
            beside = [self.objective.beside(batch) for batch in batches]  # a divided teacher needs all processes for each
        counted = [number for number, batch in enumerate(batches) if batch.counts] or [0]
        whole_nD = torch.cat([answers[number] for number in counted]).requires_grad_()
        with autocast():
            batch = _whole([batches[number] for number in counted])
            terms = self.objective.terms(whole_nD, torch.cat([beside[number] for number in counted]), batch)
        assert all(term.shape == (len(batch.indices),) for term in terms.values()), {name: term.shape for name, term in terms.items()}
        sums = torch.stack([term.float().sum() for term in terms.values()])
        sums = sums if batch.counts else 0.0 * sums
        (sums.sum() / num_rows).backward()  # type: ignore[no-untyped-call]
        assert whole_nD.grad is not None
        gradients = [torch.zeros_like(part) for part in answers]
        parts = torch.split(whole_nD.grad, [len(answers[number]) for number in counted])
        for number, part in zip(counted, parts, strict=True):
            gradients[number] = part
        return dict(zip(terms, sums.tolist(), strict=True)), gradients

    @torch.no_grad()
    def _check_same(self, before_bD: Tensor, again_bD: Tensor) -> None:
        """Raises if a micro-batch gave other vectors in the second run; looks at one of a training, because a look waits for a GPU."""
        if self.checked:
            return
        self.checked = True
        apart, size = float((again_bD - before_bD).abs().max()), float(before_bD.abs().max())
        if apart > MOST_APART * size:  # not of NaN, which is reported elsewhere
            raise InputError(
                f"{self.label}.micro_batch_size",
                "given",
                f"this {type(self.model).__name__} does not answer the same twice from one random state, so that rows "
                "of several micro-batches cannot be compared",
                "leave it out",
            )


def _whole(batches: Sequence[Batch]) -> Batch:
    """Returns micro-batches as one, without features."""
    labels, indices = torch.cat([batch.labels for batch in batches]), np.concatenate([batch.indices for batch in batches])
    return replace(batches[0], features={}, labels=labels, indices=indices)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the states of the generators of the CPU, which drops whole layers, and of the device."""
    return torch.get_rng_state(), generator_state(device)


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor]) -> None:
    torch.set_rng_state(state[0])
    set_generator_state(device, state[1])
