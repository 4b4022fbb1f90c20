"""What an int8 engine of OpenVINO computes its float part in: fp32, or bf16 where the answers come no further from the float model.

LayerNorm, softmax, GELU, attention and what stands between two int8 layers take part of the time of an encoder in int8, the more of it the
longer and the more rows are; bf16 halves what they read and write, and multiplies faster (benchmarks/README.md, peers). Which codes int8
layers get then differs from torch in every row, so that bf16 cannot be held to parity. The same files in fp32 are, and bf16 is judged by
what int8 is allowed to cost at all: with D(r) the distance on selection rows between the answers of the float variant's engine and of the
int8 engine with the rest in r,

    bf16   where  D(bf16) - D(fp32) <= max(D(fp32) / 4, floor)

    D      mean KL divergence in nats; mean squared difference for regression, for generation of the nll of the tokens

The rule is that of int8 attention under `auto` (`compress.measure.closeness`, which has the floor). Left out: fp16, which few processors
compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.engines import ENGINES
from compress.core.tasks import TASKS, Task
from compress.measure.closeness import bound_of, floor_of, spread
from compress.measure.closeness import distance as divergence
from compress.measure.metrics import differences
from compress.stage.context import Context
from compress.standalone.preprocess import Row

FloatPrecision = Literal["fp32", "bf16"]
TRIAL_ROWS = 256
Array = NDArray[Any]


@dataclass(frozen=True)
class Judgement:
    """Which precision it is, and what decided."""

    precision: FloatPrecision
    rows: int
    fp32: float
    """D(fp32)."""
    bf16: float
    """D(bf16)."""
    bound: float
    """What bf16 may add."""


def trial_rows(context: Context) -> list[Row]:
    """Returns the rows that decide: of the selection split, of the training rows where that is empty."""
    return spread(context.data.selection.rows or context.data.train.rows, TRIAL_ROWS)


def judge(task: Task, reference: Array, fp32: Array, bf16: Array) -> Judgement:
    """Compares both with the float model.

    Args:
        task: What was predicted.
        reference: Answers of the float variant's engine in fp32: logits `[n, C]`, or for generation answers `[n, T, 2]`.
        fp32: Those of the int8 engine with the rest in fp32, of the same shape.
        bf16: With the rest in bf16.
    """
    before, after = distance(task, reference, fp32), distance(task, reference, bf16)
    bound = bound_of(before, floor_of(task, reference))
    return Judgement("bf16" if after - before <= bound else "fp32", len(reference), before, after, bound)


def distance(task: Task, reference: Array, answers: Array) -> float:
    """Returns D; the arguments are those of `judge`."""
    if TASKS[task].answer == "tokens":
        return float(np.mean(differences(task, reference, answers)[1] ** 2))
    return divergence(task, reference, answers)


def recommended_first(entries: Sequence[dict[str, Any]], precision: str) -> list[dict[str, Any]]:
    """Returns the entries of one build with those of this float precision first, of OpenVINO alone; otherwise in the same order."""
    return sorted(entries, key=lambda entry: ENGINES[entry["engine"]].bf16_float_part and entry["float_precision"] != precision)
