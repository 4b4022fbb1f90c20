"""The gate for static int8 in deep language models, which amplify rounding: equal integers cannot be seen in equal answers there.

A float sum in another order differs in its last bits. Where such a value lies next to the boundary of two codes, the code turns, by a whole
step; that step moves everything after it over further boundaries. In a decoder of 30 layers with outliers hardly a prediction stays what
it was: SmolLM2-135M in static int8, its embeddings moved by one part in a million, predicts 6 % other tokens in torch itself (n = 2,540).

So a model is first asked whether it is such a one: torch predicts the rows once more with every embedding moved by `NOISE`. If those
predictions pass the gate, the engine has to, as well. If not, the engine is held to what can be held: that it is no further from the model
with float activations than torch is. Row by row the one or the other is nearer; the engine fails if it is further in more rows than chance
explains (sign test over rows, since the tokens of a row depend on each other).

The codes themselves are compared in `tests/export/generation/test_codes.py`, for small models, to the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.parity.own_rounding import ALPHA, tail
from foundation.core.arrays import Array
from foundation.labels.tasks import TASKS, Task

NOISE = 1e-6
"""Standard deviation of the relative error; what float32 sums of a thousand terms differ by from one order to another."""


@contextmanager
def nudged(model: nn.Module) -> Iterator[None]:
    """Multiplies every embedding by 1 + `NOISE` n, n normal, while it is open; the same numbers every time."""
    known: Any = model
    generator = torch.Generator().manual_seed(0)

    def moved(_: nn.Module, __: tuple[Tensor, ...], output_bLD: Tensor) -> Tensor:
        noise = torch.randn(output_bLD.shape, generator=generator).to(output_bLD)
        return output_bLD * (1 + NOISE * noise)

    handle = known.get_input_embeddings().register_forward_hook(moved)
    try:
        yield
    finally:
        handle.remove()


def further_in_more_rows(task: Task, floating: Array, torch_answers: Array, engine: Array) -> str | None:
    """Returns in one line why an engine is further from the model with float activations than torch is; None if chance explains it.

    Args:
        task: A task whose predictions are tokens.
        floating: Answers with grid weights and float activations, float32 [n, T, 2].
        torch_answers: Answers of torch's integers.
        engine: Answers of the engine.
    """
    for what, own, found in zip(("predictions", "nll"), *(_distances(task, floating, one) for one in (torch_answers, engine)), strict=True):
        further, nearer = int((found > own).sum()), int((found < own).sum())
        if tail(further, further + nearer) < ALPHA:
            return (
                f"its {what} are further from those with float activations than torch's in {further} of {further + nearer} rows that differ"
            )
    return None


def rows_that_differ(task: Task, floating: Array, torch_answers: Array, engine: Array) -> int:
    """Returns in how many rows torch and an engine predict differently many tokens otherwise than in float; arguments as above."""
    own, found = (_distances(task, floating, answers)[0] for answers in (torch_answers, engine))
    return int((own != found).sum())


def _distances(task: Task, floating: Array, answers: Array) -> tuple[Array, Array]:
    """Returns for each row how many predictions are others, and the mean difference of the nll: [n] each."""
    rows = [TASKS[task].answer.differences(floating[row : row + 1], answers[row : row + 1]) for row in range(len(floating))]
    return np.array([changed.sum() for changed, _ in rows]), np.array([moved.mean() for _, moved in rows])
