"""Latency budget: find the largest pruned shape whose measured latency is at most the target.

    1. choose a shape for a budget of milliseconds, as predicted by the latency table
    2. measure that shape on the engine
    3. set the budget to (1 - TOLERANCE / 2) * target * predicted / measured, and choose again

The target is an upper bound: a shape fits if measured <= target. The search ends when a shape fits and takes at least 1 - `TOLERANCE` of
the target, or after `MAX_ROUNDS`. Of the shapes that fit the slowest wins, as it keeps the most units. If none fits, the fastest wins and
the stage warns. Step 3 aims at the middle of the tolerance, so that measurement noise does not push the next shape over the target. If the
recipe asks for a share of the blocks instead of a latency, the chosen shape is only measured.

Limitations: the latency of embeddings and head counts as fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import nn

from foundation.core.errors import InputError
from foundation.models.architecture.blocks import with_layers
from foundation.models.architecture.structure import Sizes
from prune.latency.table import LatencyTable
from prune.latency.timing import LatencyTarget, Timing
from prune.surgery import KeptUnits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")
TOLERANCE = 0.03
MAX_ROUNDS = 4


class Shaped(NamedTuple):
    """The shape of a model."""

    config: PreTrainedConfig
    """Transformers config."""
    sizes: Sizes


@dataclass(frozen=True)
class LatencyBudget:
    """The latency target of one stage, and what has been measured so far."""

    timing: Timing
    table: LatencyTable
    reference_config: PreTrainedConfig
    """Transformers config of the model that a speedup refers to."""
    reference_ms: float
    """Measured latency of that model."""
    incoming_ms: float
    """Measured latency of the incoming model."""
    target_ms: float | None
    """Latency that the pruned model may take at most; None if the recipe asks for a share of the blocks."""
    relative: bool
    """Whether the target is a speedup. The reference is then timed in the same session as each pruned shape."""
    figures: dict[str, Any]
    """Figures for the manifest; each measurement adds a round."""

    @classmethod
    def of(
        cls, timing: Timing, reference: Shaped, incoming: Shaped, step: int, target: LatencyTarget | None, speedup: float | None, key: str
    ) -> LatencyBudget:
        """Measures the incoming model, and the latency table of the blocks of both.

        Args:
            timing: Measures models of the reference's architecture on the engine.
            reference: The model that a speedup refers to, which may be the incoming model.
            incoming: The incoming model.
            step: FFN neurons are kept in multiples of this.
            target: Latency that the pruned model may take at most.
            speedup: Smallest ratio of the latency of the reference to the pruned latency.
            key: Key path of the stage, for messages.
        """
        table, figures = timing.table([reference.sizes, incoming.sizes], step, key)
        itself = reference is incoming
        reference_ms, incoming_ms = timing.of([incoming.config]) * 2 if itself else timing.of([reference.config, incoming.config])
        predicted = table.predict(incoming.sizes)
        target_ms = target.value if target else reference_ms / speedup if speedup else None
        found = {**figures, "asked_ms": target_ms, "before": {"predicted_ms": predicted, "measured_ms": incoming_ms}, "rounds": []}
        timing.context.progress.log(f"  {timing.label}: {incoming_ms:.3f} ms measured, {predicted:.3f} ms predicted by the table")
        if not itself:
            found["reference_ms"] = reference_ms
        return cls(timing, table, reference.config, reference_ms, incoming_ms, target_ms, speedup is not None, found)

    def sparsity(self, default: float, blocks_ms: float, lowest: float, key: str) -> float:
        """Returns the share of the blocks' latency to remove, as predicted by the table.

        Args:
            default: The share to return if there is no latency target.
            blocks_ms: Predicted latency of all blocks of the incoming model.
            lowest: Smallest share of it that can remain.
            key: Key path of the latency target, for messages.

        Raises:
            InputError: No allowed shape is fast enough.
        """
        if self.target_ms is None:
            return default
        scale = (self.table.rest_ms + blocks_ms) / self.incoming_ms
        if self.target_ms * scale < self.table.rest_ms + lowest * blocks_ms:
            least = (self.table.rest_ms + lowest * blocks_ms) / scale
            raise InputError(
                key,
                f"the target is {self.target_ms:.4g} ms",
                f"the smallest model that granularity and protect allow takes {least:.4g} ms",
                "allow more time",
            )
        return min(1.0, max(0.0, 1 - (self.target_ms * scale - self.table.rest_ms) / blocks_ms))

    def measure(self, kept: KeptUnits, model: nn.Module, sizes: Sizes, key: str) -> float:
        """Measures a pruned shape and returns its latency in milliseconds.

        Args:
            kept: Units that stay.
            model: Model that they belong to.
            sizes: Sizes of that model.
            key: Key path of the stage, for messages.
        """
        from foundation.models.architecture.shapes import with_sizes

        small = with_sizes(with_layers(model.config, kept.layers), kept.sizes(sizes), key)
        reference, measured = self.timing.of([self.reference_config, small])
        predicted = self.table.predict(kept.sizes(sizes))
        found = self.reference_ms * measured / reference if self.relative else measured
        target = "" if self.target_ms is None else f", target {self.target_ms:.3f}"
        self.timing.context.progress.log(f"  {self.timing.label}: {found:.3f} ms measured, {predicted:.3f} predicted by the table{target}")
        self.figures["rounds"].append({"predicted_ms": predicted, "measured_ms": found, "speedup": reference / measured})
        return found

    def fit(
        self,
        choose: Callable[[float], KeptUnits],
        model: nn.Module,
        sizes: Sizes,
        budget_ms: float,
        least_ms: float,
        incoming_ms: float,
        key: str,
    ) -> tuple[KeptUnits, float]:
        """Chooses the units to keep so that the measured latency is at most the target, if there is one; warns if no shape tried fits.

        Args:
            choose: Chooses the units for a budget of the blocks in milliseconds.
            model: Model that they belong to.
            sizes: Sizes of that model.
            budget_ms: Budget of the blocks in the first round.
            least_ms: Smallest budget that `choose` accepts.
            incoming_ms: Predicted latency of the blocks of the incoming model.
            key: Key path of the stage, for messages.

        Returns:
            The units, and the share of `incoming_ms` that their blocks take by the table.
        """
        rest = self.table.rest_ms

        def predict(kept: KeptUnits) -> float:
            return self.table.predict(kept.sizes(sizes))

        def measure(kept: KeptUnits) -> float:
            return self.measure(kept, model, sizes, key)

        if self.target_ms is None:
            kept, number = choose(budget_ms), 0
            measure(kept)
        else:
            kept, number = search_budget(lambda ms: choose(max(ms - rest, least_ms)), predict, measure, self.target_ms, budget_ms + rest)
        self.figures["after"] = self.figures["rounds"][number]
        if self.target_ms is not None and self.figures["after"]["measured_ms"] > self.target_ms:
            found = f"{self.figures['after']['measured_ms']:.4g} ms measured, {self.target_ms:.4g} ms asked for"
            self.timing.context.progress.warn(
                f"{key}: none of the {len(self.figures['rounds'])} shapes that were measured is fast enough; the fastest is kept ({found})"
            )
        return kept, (predict(kept) - rest) / incoming_ms


def search_budget(
    choose: Callable[[float], T], predict: Callable[[T], float], measure: Callable[[T], float], target_ms: float, budget_ms: float
) -> tuple[T, int]:
    """Searches for the largest shape that is measured at no more than the target latency.

    Args:
        choose: Chooses a shape whose predicted latency fits a budget in milliseconds.
        predict: Predicted latency of a shape.
        measure: Measured latency of a shape.
        target_ms: Largest latency allowed.
        budget_ms: Budget of the first round.

    Returns:
        Of the shapes within the target the slowest, or the fastest of all if none is; and the round that found it, from 0.
    """
    tried: list[tuple[float, int, T]] = []
    for number in range(MAX_ROUNDS):
        kept = choose(budget_ms)
        if any(kept == earlier for *_, earlier in tried):
            break  # the remaining gap is smaller than one step of heads or neurons
        measured = measure(kept)
        tried.append((measured, number, kept))
        if (1 - TOLERANCE) * target_ms <= measured <= target_ms:
            break
        budget_ms = (1 - TOLERANCE / 2) * target_ms * predict(kept) / measured
    fitting = [entry for entry in tried if entry[0] <= target_ms]
    _, number, kept = max(fitting, key=lambda entry: entry[0]) if fitting else min(tried, key=lambda entry: entry[0])
    return kept, number
