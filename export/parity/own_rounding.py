"""The gate for engines that quantize tokens by themselves (dynamic int8 in OpenVINO), in groups that are smaller than the token of torch.

The codes that such an engine makes are neither shown nor those of torch. On a large model the two differ in many predictions, since both
round, and each in its own way. What can be asked is that the engine is no further from the exact answer than torch is:

    d(engine, float) <= d(torch, float)

where float is the model with its grid weights and float activations, and d the share of other predictions, and the median difference.

Of answers there are few, and one other token ends the agreement of a whole answer. There the engine fails where it is further from float
than chance explains: of the answers that only one of the two gives as float does, too few are its own (sign test, one-sided, `ALPHA`).

Such an engine also rounds what a head with int8 rows reads, which torch multiplies in float. So that both round the same tensors, torch is
asked with this rounding, too (`rounding_head`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import comb
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from compress.core.tasks import Task
from compress.measure.agreement import compare_predictions
from compress.schemes.int8 import token_scale
from compress.schemes.tables import load_tables

Array = NDArray[Any]
ALPHA = 0.01
"""Share of the engines no further from float than torch that the sign test refuses."""


@contextmanager
def rounding_head(model: nn.Module, checkpoint: Path) -> Iterator[None]:
    """Rounds the inputs of a language model's head to int8 while it is open, with a scale for each token, if its rows are int8.

    Args:
        model: The model of a checkpoint.
        checkpoint: The checkpoint; nothing is rounded where its tables are float.
    """
    known: Any = model
    if not load_tables(checkpoint):
        yield
        return

    def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_bLD, *rest = inputs
        scale_bL1 = token_scale(hidden_bLD)
        return ((hidden_bLD / scale_bL1).round() * scale_bL1, *rest)

    handle = known.get_output_embeddings().register_forward_pre_hook(rounded)
    try:
        yield
    finally:
        handle.remove()


def fewer_than_chance(floating: Array, torch: Array, engine: Array) -> str | None:
    """Returns in one line why an engine gives fewer of the answers of float activations than torch does; None if chance explains it.

    Args:
        floating: Answers with grid weights and float activations, int32 [n, T].
        torch: Those of torch's integers.
        engine: Those of the engine.
    """
    own, found = ((answers == floating).all(axis=1) for answers in (torch, engine))
    lost, won = int((own & ~found).sum()), int((found & ~own).sum())
    if tail(lost, lost + won) >= ALPHA:
        return None
    return (
        f"{int(found.sum())} of {len(floating)} answers are those with float activations, {int(own.sum())} those of torch; {lost} are only "
        f"torch's, {won} only the engine's"
    )


def tail(heads: int, tosses: int) -> float:
    """Returns the probability of at least so many heads of a fair coin."""
    return float(sum(comb(tosses, count) for count in range(heads, tosses + 1)) / 2**tosses)


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
