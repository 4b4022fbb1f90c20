"""The gate of predictions: does an engine predict what torch predicts, or is it at least no further from float?

Torch's answers are computed once for each checkpoint and way of computing it (`export.parity.torch_models`), for all engines, modes and
builds of an export; and only for as many rows as the engines are asked (`export.parity.rows`).

    held to torch            the predictions differ within the limits of `foundation.standalone.tolerance`
    rounds tokens by itself  or the engine is no further from float than torch is (`export.parity.own_rounding`)
    amplifies rounding       or the same, row by row (`export.parity.amplified`)

The last two are sign tests over what only one of the two has as in float. They take `DECIDING` of those, or all rows: which of the two it
is does not count for when they are enough, so that a test that is made once keeps its level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from export.builds import Build
from export.parity.amplified import NOISE, further_in_more_rows, rows_that_differ
from export.parity.own_rounding import Rounding, further_than_torch, only_one_as_in_float
from export.parity.rows import gate_rows, in_order_of_looks, looks, passes_clearly
from export.parity.torch_models import TorchModels, Way, distinct
from foundation.core.arrays import Array
from foundation.core.engines import REFERENCE
from foundation.data.splits import Split
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS
from foundation.measure.agreement import compare_predictions, shortfall
from foundation.measure.predictions import predict, predict_streamed, predicts_streamed
from foundation.models.folder import Checkpoint
from foundation.schemes.table import is_static_int8
from foundation.schemes.tables import load_tables
from foundation.stage.context import Context
from foundation.standalone.preprocess import Row

BATCH_SIZE = 32
DECIDING = 540
"""Of so many an engine that loses 60 % is refused 99 times of 100."""


@dataclass(frozen=True)
class Compared:
    """An engine's predictions beside torch's."""

    figures: dict[str, object]
    """What `foundation.measure.agreement.compare_predictions` returns, with `passed` as the gate judges, and `amplified`."""
    short: str | None
    """In one line why the engine does not agree; None if it does."""
    settled: bool
    """Whether more rows would hardly change that, or there are none."""
    notes: tuple[str, ...] = ()
    """Lines for the log."""


class Gate:
    """The rows of the gate, and torch's answers to them.

    Args:
        context: The context of the stage.
        models: Opens checkpoints in torch.
    """

    def __init__(self, context: Context, models: TorchModels) -> None:
        self._context, self._models = context, models
        rows = gate_rows(context.data)
        self.looks = looks(len(rows), rows.labels.count()) if TASKS[context.task].generates else [len(rows)]
        """Numbers of rows that an engine is asked, one after the other."""
        self.split: Split = rows if len(self.looks) == 1 else rows.take(in_order_of_looks(len(rows)))
        self._known: dict[tuple[Checkpoint, Way], Array] = {}

    def labels(self, count: int) -> Labels:
        """Returns the labels of the first rows."""
        return self.split.labels if count == len(self.split) else self.split.labels[np.arange(count)]

    def in_torch(self, checkpoint: Checkpoint, way: Way, count: int) -> Array:
        """Returns torch's answers to the first rows, float32 [count, C], or [count, T, 2] for generation."""
        way = distinct(checkpoint, way)
        known = self._known.get((checkpoint, way))
        done = 0 if known is None else len(known)
        if done < count:
            more = self.predicted(checkpoint, way, self.split.rows[done:count])
            known = self._known[checkpoint, way] = more if known is None else np.concatenate([known, more])
        assert known is not None
        return known[:count]

    def predicted(self, checkpoint: Checkpoint, way: Way, rows: Sequence[Row]) -> Array:
        """Returns torch's answers to any rows, which are not kept."""
        context, prepared = self._context, self._context.preprocessor(checkpoint.folder)
        if way == "integers" and predicts_streamed(checkpoint.folder, context.task):
            return predict_streamed(checkpoint.folder, prepared, rows, BATCH_SIZE, context.scratch, context.progress)
        with self._models.open(checkpoint, way) as model:
            return predict(model, prepared, rows, BATCH_SIZE, context.progress)

    def compare(self, build: Build, answers: Array, rounding: Rounding | None, *, held: bool) -> Compared:
        """Compares an engine with torch on the rows that it was asked.

        Args:
            build: What it was built from.
            answers: Its answers to the first rows.
            rounding: How it quantizes tokens by itself, if it does.
            held: Whether it has to pass; what computes in halves need not.
        """
        context, count, checkpoint = self._context, len(answers), build.checkpoint
        expected = self.in_torch(checkpoint, rounding if rounding is not None and rounding.exact else "integers", count)
        figures = compare_predictions(context.task, expected, answers, self.labels(count))
        short = shortfall(figures, REFERENCE) if held else None
        whole = count == len(self.split)
        if short is None:
            return Compared(figures, None, whole or not held or self._is_clear(figures, expected, answers))
        plain = Compared(figures, short, whole or figures["disagreements"] > figures["limit"])
        if rounding is not None:
            return self._by_itself(plain, checkpoint, self._rounded(checkpoint, rounding, count), answers)
        return self._amplified(plain, build, expected, answers) if plain.settled else plain

    def _is_clear(self, figures: dict[str, object], expected: Array, answers: Array) -> bool:
        answer = TASKS[self._context.task].answer
        rows = [answer.differences(expected[row : row + 1], answers[row : row + 1]) for row in range(len(answers))]
        return passes_clearly(figures, np.array([int(others.sum()) for others, _ in rows]), np.concatenate([apart for _, apart in rows]))

    def _by_itself(self, plain: Compared, checkpoint: Checkpoint, own: Array, answers: Array) -> Compared:
        """Judges an engine that rounds tokens by itself and does not agree.

        Args:
            plain: Its comparison with torch.
            checkpoint: The checkpoint.
            own: Answers of torch with that rounding, or with its own.
            answers: Answers of the engine.
        """
        task, count = self._context.task, len(answers)
        floating = self.in_torch(checkpoint, "float", count)
        if count < len(self.split) and sum(only_one_as_in_float(task, floating, own, answers)) < DECIDING:
            return replace(plain, settled=False)
        short = further_than_torch(task, floating, own, answers, self.labels(count))
        note = f"it rounds tokens by itself, {'no' if short is None else 'and is'} further from float than torch"
        return Compared({**plain.figures, "passed": short is None}, short, True, (note,))

    def _rounded(self, checkpoint: Checkpoint, rounding: Rounding, count: int) -> Array:
        """Returns torch's answers with the rounding of an engine that has its own scales of tokens, where it can be computed."""
        streamed = predicts_streamed(checkpoint.folder, self._context.task)
        alike = not streamed and (rounding.exact or load_tables(checkpoint.folder))
        return self.in_torch(checkpoint, rounding if alike else "integers", count)

    def _amplified(self, plain: Compared, build: Build, expected: Array, answers: Array) -> Compared:
        """Judges an engine that does not agree with a model that may amplify rounding."""
        task, count, checkpoint = self._context.task, len(answers), build.checkpoint
        streamed = predicts_streamed(checkpoint.folder, task)
        if not TASKS[task].generates or not is_static_int8(build.precision) or streamed:
            return plain
        moved = compare_predictions(task, expected, self.in_torch(checkpoint, "nudged", count), self.labels(count))
        if moved["passed"]:
            return plain
        floating = self.in_torch(checkpoint, "float", count)
        if count < len(self.split) and rows_that_differ(task, floating, expected, answers) < DECIDING:
            return replace(plain, settled=False)
        short = further_in_more_rows(task, floating, expected, answers)
        note = (
            f"the model amplifies rounding: moved by {NOISE:g}, torch itself predicts {moved['disagreements']} of {moved['n']} otherwise; "
            f"the engine is {'no ' if short is None else ''}further from float than torch"
        )
        return Compared({**plain.figures, "passed": short is None, "amplified": moved["disagreements"]}, short, True, (note,))
