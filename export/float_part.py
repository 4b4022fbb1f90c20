"""Chooses the precision of an engine's float part: fp32, or fp16 or bf16 if the answers stay as close to the float model.

LayerNorm, softmax, GELU, attention and the operations between two int8 layers take part of the time of an encoder in int8, the more of it
the longer and the more rows are; halves halve what they read and write, and multiply faster (benchmarks/README.md, peers). Which codes int8
layers get then differs from torch in every row, so that a half cannot be held to parity. The same graph in fp32 is, and the half is judged
by what int8 is allowed to cost at all: with D(r) the distance on selection rows between the answers of the float variant's engine and of
the int8 engine with the rest in r,

    half   where  D(half) - D(fp32) <= max(D(fp32) / 4, floor)

    D      mean KL divergence in nats; mean squared difference for regression, for generation of the nll of the tokens

A float build in fp16 or bf16 is judged in the same way, with D(fp32) = 0. The rule is the same as for int8 attention under `auto`
(`foundation.measure.closeness`, which has the floor). OpenVINO on a CPU has bf16; TensorRT has fp16 and bf16, and `export.half_graphs` says
which of them is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from export.choices import FloatPrecision
from foundation.artifacts.exported import Engine
from foundation.core.arrays import Array
from foundation.labels.tasks import TASKS, Task
from foundation.measure.closeness import bound_of, floor_of
from foundation.measure.closeness import distance as divergence
from foundation.stage.context import Context
from foundation.standalone.preprocess import Row

TRIAL_ROWS = 256


@dataclass(frozen=True)
class Judgement:
    """The chosen precision, and what decided."""

    precision: FloatPrecision
    rows: int
    fp32: float
    """D(fp32)."""
    half: float
    """D(half)."""
    bound: float
    """Distance that 16 bits may add."""


def trial_rows(context: Context) -> list[Row]:
    """Returns the rows that decide: of the selection split, of the training rows where that is empty."""
    split = context.data.selection if context.data.selection.rows else context.data.train
    return [split.rows[row] for row in split.labels.evenly(TRIAL_ROWS)]


def judge(task: Task, reference: Array, fp32: Array, half: Array, name: FloatPrecision = "bf16") -> Judgement:
    """Compares both with the float model.

    Args:
        task: What was predicted.
        reference: Answers of the float variant's engine in fp32: logits `[n, C]`, or for generation answers `[n, T, 2]`.
        fp32: Answers of the int8 engine with the rest in fp32, of the same shape.
        half: With the rest in a half.
        name: That half.
    """
    before, after = distance(task, reference, fp32), distance(task, reference, half)
    bound = bound_of(before, floor_of(task, reference))
    return Judgement(name if after - before <= bound else "fp32", len(reference), before, after, bound)


def distance(task: Task, reference: Array, answers: Array) -> float:
    """Returns D; the arguments are as for `judge`."""
    facts = TASKS[task]
    if facts.generates:
        return float(np.mean(facts.answer.differences(reference, answers)[1] ** 2))
    return divergence(task, reference, answers)


def recommended_first(entries: Sequence[Engine], preferred: Mapping[str, str]) -> list[Engine]:
    """Returns the entries of one build, of each engine in `preferred` that float precision first; otherwise in the same order."""
    return sorted(entries, key=lambda entry: entry.float_precision != preferred.get(entry.engine, entry.float_precision))
