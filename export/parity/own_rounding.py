"""The gate for engines that quantize tokens by themselves (dynamic int8 in OpenVINO), in groups that are smaller than the token of torch.

The codes that such an engine makes are neither shown nor those of torch. On a large model the two differ in many predictions, since both
round, and each in its own way. What can be asked is that the engine is no further from the exact answer than torch is:

    d(engine, float) <= d(torch, float)

where float is the model with its grid weights and float activations, and d the share of other predictions, and the median difference.

Such an engine also rounds what a head with int8 rows reads, which torch multiplies in float. So that both round the same tensors, torch is
asked with this rounding, too (`rounding_head`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from compress.core.tasks import Task
from compress.measure.agreement import compare_predictions
from compress.schemes.int8 import token_scale

Array = NDArray[Any]


@contextmanager
def rounding_head(model: nn.Module) -> Iterator[None]:
    """Rounds the inputs of a language model's head to int8 while it is open, with a scale for each token.

    Args:
        model: A model with output embeddings.
    """
    known: Any = model

    def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_bLD, *rest = inputs
        scale_bL1 = token_scale(hidden_bLD)
        return ((hidden_bLD / scale_bL1).round() * scale_bL1, *rest)

    handle = known.get_output_embeddings().register_forward_pre_hook(rounded)
    try:
        yield
    finally:
        handle.remove()


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
