"""The ids of the steps that a run adds to the stages of a recipe, and the names that stand for a variant."""

from __future__ import annotations

BASELINE = "baseline"
"""The variant that others are compared with; as a step, a source model that is not finetuned."""
SOURCE = "model"
"""The step that imports a source model that is finetuned next."""
LATENCY = "latency"
"""The step that measures engines."""
BUCKETS = "buckets"
"""The step that chooses the lengths to pad rows to."""
INPUT = "input"
"""As a teacher: the input of the stage."""
EVALUATION = "evaluate-"
"""Start of the id of an evaluation; the id of the evaluated variant follows."""


def is_reserved(stage_id: str) -> bool:
    """Whether a stage of a recipe may not have this id, because a run uses it itself."""
    return stage_id in (BASELINE, SOURCE, LATENCY, BUCKETS, INPUT) or stage_id.startswith(EVALUATION)
