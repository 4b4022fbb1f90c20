"""Learned rotations: turns a rotated model further, to where rounding changes its answers least.

SpinQuant (Liu et al. 2024, https://arxiv.org/abs/2405.16406). The weights stay as they are; R1 and every R2 (`quantize.rotation.rotation`)
start as randomized Hadamard matrices H and become H R:

    min over R   mean over tokens of KL(p || p^)      p of the float model, p^ with weights and inputs rounded (`simulated`)

by Cayley SGD (`cayley`), with an angle for each step that decays to 0 linearly. Then the R are made exactly orthogonal in float64 and
folded into the weights as Hadamard matrices are. Tasks that answer with numbers or vectors take the squared distance in place of KL.

Deviations: SpinQuant minimizes the cross-entropy of the text. The distance from the float model needs no labels, and is 0 without rounding:
all of its gradient is about rounding. They differentiate straight through rounding; here only its ranges have a gradient (`simulated`). As
in `autoround` the result is the iterate with the least loss among `LOOKS` + 1 on the same rows, the first of which is the Hadamard
rotation: it is never worse than that there.

Left out: smoothing inside the loss, which comes after the rotation; several processes, each of which learns the same.

Tensor names carry their shapes: D the size of a rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.forward import device_of, forward
from foundation.models.inputs.padding import real_rows
from foundation.training.losses.divergence import divergence
from quantize.rotation.cayley import CayleySgd, nearest_orthogonal
from quantize.rotation.orthogonal import Rotation
from quantize.rotation.rotation import Rotations, apply
from quantize.rotation.simulated import Rounding, simulated

LOOKS = 4
"""Iterates whose loss over the same rows is computed, evenly spaced, the last among them; besides the first."""
LOOK_BATCHES = 8
"""Batches of these rows, at most."""
Features = Mapping[str, Tensor]


@dataclass(frozen=True)
class Learning:
    """How rotations are learned."""

    steps: int
    angle: float
    """Radians by which the first step turns each rotation, in the mean of squares over its planes."""
    seed: int
    by_kl: bool = True
    """Whether answers are logits of classes or tokens, which KL compares; else the squared distance does."""


@dataclass(frozen=True)
class Learned:
    """Rotations that were learned for a model."""

    matrices: tuple[Tensor, ...]
    """What is applied after each of its rotations, in their order, float64; empty if Hadamard matrices alone are better."""
    figures: Mapping[str, object]

    def turn(self, model: nn.Module, rotations: Rotations) -> dict[str, object]:
        """Turns a rotated model, in place; returns the figures. It may be another copy of the model that they were learned for."""
        if self.matrices:
            turn(model, rotations, dict(zip(_distinct(rotations), self.matrices, strict=True)))
        return dict(self.figures)


@dataclass
class Memory:
    """What attempts at one model, with the same rows and roundings, share."""

    learned: Learned | None = None


def learn(
    model: nn.Module,
    rotations: Rotations,
    batches: Sequence[Features],
    roundings: Mapping[str, Rounding],
    how: Learning,
    track: Callable[[Sequence[int]], Iterable[int]],
) -> Learned:
    """Learns rotations of a model, which stays as it is.

    Args:
        model: A rotated model in evaluation mode, its norms neutral.
        rotations: How it was rotated.
        batches: Features of the calibration rows; a step takes one, and all were used before one comes again.
        roundings: How linear layers will be rounded, by path.
        how: Steps, angle, seed.
        track: Shows the progress of the steps.

    Returns:
        The rotations, with the figures for the report: `steps`, `kept` (the number of steps that made the rotations; 0: the Hadamard
        matrices alone), `loss_before` and `loss` over the same rows.

    Raises:
        InputError: A loss is NaN or infinite.
    """
    learner = _Learner(model, rotations, roundings, how.by_kl)
    looked = {how.steps * look // LOOKS for look in range(LOOKS + 1)}
    few = [batches[index] for index in sorted(torch.randperm(len(batches), generator=_generator(how.seed))[:LOOK_BATCHES].tolist())]
    losses: dict[int, float] = {}
    best: dict[int, Tensor] = {}
    kept = 0
    drawn = _drawn(batches, how.seed)
    for step in track(range(how.steps + 1)):
        if step in looked:
            loss = learner.loss_over(few)
            if not losses or loss < min(losses.values()):
                best, kept = learner.matrices(), step
            losses[step] = loss
        if step < how.steps:
            learner.step(next(drawn), how.angle * (1 - step / how.steps))
    matrices = tuple(best[key] for key in _distinct(rotations)) if kept else ()
    return Learned(matrices, {"steps": how.steps, "kept": kept, "loss_before": losses[0], "loss": losses[kept]})


def turn(model: nn.Module, rotations: Rotations, matrices: Mapping[int, Tensor]) -> None:
    """Turns a rotated model further, in place.

    Args:
        model: The model; its norms are neutral.
        rotations: How it was rotated.
        matrices: What is to be applied after each of its rotations, by the `id` of that, nearly orthogonal; made so in float64.
    """
    further = {key: Rotation(torch.ones(len(given), dtype=torch.float64), (nearest_orthogonal(given),)) for key, given in matrices.items()}
    turns = {name: tuple(replace(turn, rotation=further[id(turn.rotation)]) for turn in given) for name, given in rotations.turns.items()}
    apply(model, Rotations(rotations.stream, turns))


class _Learner:
    """The rotations of a model as learned so far, and their loss."""

    def __init__(self, model: nn.Module, rotations: Rotations, roundings: Mapping[str, Rounding], by_kl: bool) -> None:
        self._model, self._turns, self._roundings, self._by_kl = model, rotations.turns, roundings, by_kl
        self._device = device_of(model)
        known = _distinct(rotations)
        self._movers = {
            key: CayleySgd(torch.eye(known[key].size, dtype=torch.float64), keeps_ones=rotations.stream.centred and _keeps_ones(known[key]))
            for key in known
        }

    def matrices(self) -> dict[int, Tensor]:
        """Returns the rotations by the `id` of what they are applied after, float64."""
        return {key: mover.matrix_DD for key, mover in self._movers.items()}

    def step(self, features: Features, angle: float) -> None:
        """Turns all rotations by a step against the gradient of the loss of a batch."""
        given = {key: matrix_DD.float().to(self._device).requires_grad_() for key, matrix_DD in self.matrices().items()}
        loss, count = self._loss(features, given)
        gradients = torch.autograd.grad(loss / count, list(given.values()), allow_unused=True)
        for key, gradient_DD in zip(given, gradients, strict=True):
            if gradient_DD is not None:
                self._movers[key].step(gradient_DD.cpu(), angle)

    def loss_over(self, batches: Iterable[Features]) -> float:
        """Returns the mean loss of a row over some batches."""
        given = {key: matrix_DD.float().to(self._device) for key, matrix_DD in self.matrices().items()}
        with torch.no_grad():
            found = [self._loss(features, given) for features in batches]
        return float(sum(loss for loss, _ in found)) / sum(count for _, count in found)

    def _loss(self, features: Features, matrices: Mapping[int, Tensor]) -> tuple[Tensor, int]:
        """Returns the sum of the loss over the rows of a batch, of real tokens where there are tokens, and their number."""
        with torch.no_grad():
            expected_NC = real_rows(forward(self._model, features), features)
        with simulated(self._model, self._turns, matrices, self._roundings) as rounded:
            found_NC = real_rows(forward(rounded, features), features)
        loss = distance(found_NC, expected_NC, by_kl=self._by_kl)
        if not bool(loss.isfinite()):
            raise InputError("model", "the loss of its rotated and rounded form is NaN or infinite", remedy="check its weights")
        return loss, len(found_NC)


def distance(found_NC: Tensor, expected_NC: Tensor, *, by_kl: bool) -> Tensor:
    """Returns the sum over rows of KL(p || p^) in nats, or of the squared distance, float32 [].

    Args:
        found_NC: Logits of p^, or numbers.
        expected_NC: Logits of p, or numbers.
        by_kl: Whether they are logits.
    """
    return divergence(found_NC, expected_NC, 1.0).sum() if by_kl else (found_NC - expected_NC).square().sum()


def _distinct(rotations: Rotations) -> dict[int, Rotation]:
    """Returns the rotations of a model by their `id`, in the order in which its weights name them."""
    return {id(turn.rotation): turn.rotation for turns in rotations.turns.values() for turn in turns}


def _keeps_ones(rotation: Rotation) -> bool:
    ones_1D = torch.ones(1, rotation.size, dtype=torch.float64)
    return torch.allclose(rotation.of(ones_1D), ones_1D)


def _drawn(batches: Sequence[Features], seed: int) -> Iterator[Features]:
    """Yields a batch for each step."""
    generator = _generator(seed)
    while True:
        yield from (batches[index] for index in torch.randperm(len(batches), generator=generator).tolist())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
