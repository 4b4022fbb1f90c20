"""The state of a run between two steps: the pipeline is a fold of steps over it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.run.implicit import Evaluate
from compress.run.prepare import teachers_of
from foundation.artifacts.artifact import Artifact
from foundation.stage.context import Context
from foundation.stage.stage import Stage, input_named


@dataclass(frozen=True)
class RunState:
    """What a run has come to; immutable, each step yields a new state."""

    context: Context
    """The context of the run, with what the finished steps made: checkpoints, predictions, engines, latencies and buckets."""
    parent: Artifact | None = None
    """Input of the next step, unless its `input` names another checkpoint."""

    def before(self, step: Stage) -> RunState:
        """Returns the state that a step starts from; if its `input` names a checkpoint, that one becomes the parent."""
        named = input_named(step)
        return self if named is None else replace(self, parent=self.context.checkpoint(named))

    def context_for(self, step: Stage) -> Context:
        """Returns the context of a step: with the teachers of the step."""
        return replace(self.context, teachers=teachers_of(step, self.parent, self.context))

    def after(self, step: Stage, artifact: Artifact, *, variant: bool) -> RunState:
        """Returns the state after a step.

        Args:
            step: The step.
            artifact: Its artifact.
            variant: Whether it is a variant of the report.
        """
        context = self.context
        if isinstance(step, Evaluate):
            assert self.parent is not None, "an evaluation is never the first step"
            predictions = {**context.predictions, self.parent.id: artifact.path / artifact.metrics["predictions"]}
            return replace(self, context=replace(context, predictions=predictions))
        if artifact.kind == "latency":
            return replace(self, context=replace(context, latency=artifact))
        if artifact.kind == "cascade":
            return replace(self, context=replace(context, cascade=artifact))
        if artifact.kind == "buckets":
            target = context.target.model_copy(update={"buckets": tuple(artifact.metrics["buckets"])})
            return replace(self, context=replace(context, target=target))
        checkpoints = {**context.checkpoints, str(step.id): artifact} if variant else context.checkpoints
        exported = artifact if artifact.kind == "engine" else context.exported
        return RunState(replace(context, checkpoints=checkpoints, exported=exported), artifact)
