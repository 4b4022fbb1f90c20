"""The rows that the parity gate looks at, and how many of them.

A mode that does not agree with torch is left out, which is a choice; so it is made on selection rows. Evaluation rows are for reported
results only (`foundation.data.splits`): no engine answers them before it has passed.

A block of a language model holds over a hundred predictions, so that a thousand of them are more than most verdicts need. The gate then
looks at m rows, at 2 m, and so on, each time spread evenly over the split, and stops where more rows would hardly change the verdict. With
k of n predictions that differ, against the limits of `foundation.standalone.tolerance`:

    passes     P(X <= k / f) < 1 - 0.95 for a Poisson X with mean RATE n / f, and the upper end of the interval of the median difference is
               within its limit
    f          max(1, variance / mean of the numbers of differences of a row): tokens of one row depend on each other
    m          the rows in which no prediction differs and that is shown: ln(20) / RATE = 2,996 predictions

An engine whose rate of differences is RATE, the largest that is allowed and passes on all rows more often than not, passes early once in
twenty looks; one with three times that rate once in eight thousand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from foundation.core.arrays import Array
from foundation.data.splits import Data, Split
from foundation.standalone.tolerance import MEDIAN_LIMIT, RATE

GATE_ROWS = 1000
"""Most rows."""
GATE_PROMPTS, GATE_TOKENS = 32, 32
"""Prompts of rows that an engine has to answer as torch does, and most tokens of each answer: a wrong position, mask or cache shows in the
first tokens of most prompts."""
OWN_PROMPTS = 8
"""Most evaluation prompts that the same checkpoint answers in torch too, unless it is the baseline, which answers all of them."""
EARLY = 0.95
"""Confidence that the rate of differences is below RATE with which a look is the last."""
LEAST_PREDICTIONS = math.ceil(-math.log(1 - EARLY) / RATE)
"""Predictions among which not one may differ if their rate of differences is to be shown to be below RATE."""
DEVIATIONS = 3.3
"""Half the width of a normal interval that covers 99.9 %, of the median."""


def gate_rows(data: Data) -> Split:
    """Returns up to `GATE_ROWS` rows, evenly spread over the selection split; over the train split if that is empty."""
    split = data.selection if len(data.selection) else data.train
    return split.take(split.labels.evenly(GATE_ROWS))


def looks(rows: int, predictions: int) -> list[int]:
    """Returns how many rows the gate looks at, one number after the other: the first may be enough, the last are all.

    Args:
        rows: Rows of the gate.
        predictions: Predictions in them.
    """
    found = [math.ceil(LEAST_PREDICTIONS * rows / max(1, predictions))]
    while found[-1] < rows:
        found.append(2 * found[-1])
    return [*found[:-1], rows]


def in_order_of_looks(rows: int) -> list[int]:
    """Returns the numbers 0 to rows - 1 in an order of which every beginning is evenly spread: that of their bits reversed."""
    bits = max(1, (rows - 1).bit_length())
    return sorted(range(rows), key=lambda row: int(f"{row:0{bits}b}"[::-1], 2))


def passes_clearly(compared: Mapping[str, object], others_n: Array, distance: Array) -> bool:
    """Returns whether predictions that pass would hardly fail on more rows.

    Args:
        compared: What `foundation.standalone.tolerance.judge` says of them.
        others_n: For each row how many predictions differ, int64 [n].
        distance: Absolute differences, float64 [predictions].
    """
    factor = max(1.0, float(np.var(others_n) / np.mean(others_n))) if others_n.any() else 1.0
    count, mean = math.ceil(others_n.sum() / factor), RATE * len(distance) / factor
    few = sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1)) < 1 - EARLY
    share = min(1.0, 0.5 + DEVIATIONS / (2 * math.sqrt(len(others_n))))
    return bool(compared["passed"]) and few and float(np.quantile(distance, share)) <= MEDIAN_LIMIT
