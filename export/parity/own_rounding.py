"""The gate for engines that quantize tokens by themselves (dynamic int8 in OpenVINO), in groups that are smaller than the token of torch.

The codes that such an engine makes are neither shown nor those of torch. On a large model the two differ in many predictions, since both
round, and each in its own way. What can be asked is that the engine is no further from the exact answer than torch is:

    d(engine, float) <= d(torch, float)

where float is the model with its grid weights and float activations, and d the share of other predictions, and the median difference.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from compress.core.tasks import Task
from compress.measure.agreement import compare_predictions

Array = NDArray[Any]


def further_than_torch(task: Task, floating: Array, torch: Array, engine: Array, labels: Array) -> str | None:
    """Returns in one line why an engine is further from the model with float activations than torch's integers are; None if it is not.

    Args:
        task: The task.
        floating: Answers with grid weights and float activations, float32 [n, C] or [n, T, 2].
        torch: Those of torch's integers.
        engine: Those of the engine.
        labels: Labels of the rows.
    """
    own, found = (compare_predictions(task, floating, answers, labels) for answers in (torch, engine))
    if found["passed"] or (found["disagreements"] <= own["disagreements"] and found["median_abs"] <= own["median_abs"]):
        return None
    return (
        f"{found['disagreements']} of {found['n']} predictions differ from those with float activations, of torch {own['disagreements']}; "
        f"median |d{found['differs']}| {found['median_abs']:.4f} and {own['median_abs']:.4f}"
    )
