"""History of a training: losses, values on the selection split, steps and their time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class History:
    """The training history; plain values, saved with every checkpoint."""

    losses: list[dict[str, float]] = field(default_factory=list)
    """Per epoch: `epoch`, the mean of each loss term, and `loss`, their sum."""
    selection: list[dict[str, float]] = field(default_factory=list)
    """Per evaluation on the selection split: `step` (steps done) and `value`."""
    best_step: int | None = None
    """Steps done at the best value (the first of equal ones)."""
    steps: int = 0
    """Steps done."""
    seconds: float = 0.0
    """Training time, including interrupted runs up to their last checkpoint."""
    higher_is_better: bool = True
    """Whether a higher selection value is better."""
    autocast: str = "float32"
    """The dtype of the matrix products."""
    repeated: int = 0
    """Steps that were taken again in float32 (`foundation.training.finite`)."""

    chosen: int = 0
    """Choices of an expert by a token, where processes spread the experts of a mixture."""
    dropped: int = 0
    """Of these, how many were dropped, because the expert had no room (`foundation.models.layers.expert_parallel`)."""

    @property
    def of_experts(self) -> dict[str, float]:
        """The share of the choices of experts that was dropped, as a figure of a stage; empty where none was counted."""
        return {"dropped_expert_choices": self.dropped / self.chosen} if self.chosen else {}

    @property
    def best(self) -> float:
        """The best selection value; infinitely bad before the first evaluation."""
        values = [entry["value"] for entry in self.selection]
        return max(values, default=-math.inf) if self.higher_is_better else min(values, default=math.inf)

    def improves(self, value: float) -> bool:
        """Whether a selection value is better than all earlier ones."""
        return value > self.best if self.higher_is_better else value < self.best
