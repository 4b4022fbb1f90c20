"""The state of a run between two steps: the pipeline is a fold of steps over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from compress.run.implicit import Evaluate
from compress.run.prepare import checkpoint_named, teachers_of
from foundation.artifacts.artifact import Artifact
from foundation.stage.context import Context
from foundation.stage.stage import Stage, input_named


@dataclass(frozen=True)
class RunState:
    """The artifacts of the finished steps; immutable, each step yields a new state."""

    parent: Artifact | None = None
    """Input of the next step, unless its `input` names another checkpoint."""
    macs: int | None = None
    """Multiply-accumulates of `parent` for one row, from the last evaluation; None before the first."""
    checkpoints: Mapping[str, Artifact] = field(default_factory=dict)
    """Every variant by stage id, in order; the first is the baseline."""
    predictions: Mapping[str, Path] = field(default_factory=dict)
    """Predictions in torch on the evaluation split by variant: files of `foundation.measure.answers.save_predictions`."""
    exported: Artifact | None = None
    """The exported engines."""
    latency: Artifact | None = None
    """Their measured latencies."""
    buckets: tuple[int, ...] = ()
    """The lengths to pad rows to that were chosen for `target.buckets: auto`."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """Multiply-accumulates of each evaluated variant for one row."""

    def before(self, step: Stage) -> RunState:
        """Returns the state that a step starts from; if its `input` names a checkpoint, that one becomes the parent."""
        named = input_named(step)
        if named is None:
            return self
        parent = checkpoint_named(named, self.checkpoints)
        return replace(self, parent=parent, macs=self.counted.get(parent.id))

    def context_for(self, step: Stage, context: Context) -> Context:
        """Returns the context of a step: the context of the run with the variants so far and the teachers of the step."""
        context = self.context_so_far(context)
        return replace(context, teachers=teachers_of(step, self.parent, context))

    def context_so_far(self, context: Context) -> Context:
        """Returns the context of the run with the variants so far."""
        context = replace(context, checkpoints=self.checkpoints, predictions=self.predictions, exported=self.exported, latency=self.latency)
        if self.buckets:
            context = replace(context, target=context.target.model_copy(update={"buckets": self.buckets}))
        return context

    def after(self, step: Stage, made: Artifact, *, variant: bool) -> RunState:
        """Returns the state after a step.

        Args:
            step: The step.
            made: Its artifact.
            variant: Whether it is a variant of the report.
        """
        if isinstance(step, Evaluate):
            assert self.parent is not None, "an evaluation is never the first step"
            macs, predictions = int(made.metrics["macs"]), made.path / made.metrics["predictions"]
            return replace(
                self,
                macs=macs,
                counted={**self.counted, self.parent.id: macs},
                predictions={**self.predictions, self.parent.id: predictions},
            )
        if made.kind == "latency":
            return replace(self, latency=made)
        if made.kind == "buckets":
            return replace(self, buckets=tuple(made.metrics["buckets"]))
        checkpoints = {**self.checkpoints, str(step.id): made} if variant else self.checkpoints
        exported = made if made.kind == "engine" else self.exported
        return replace(self, checkpoints=checkpoints, exported=exported, parent=made)
