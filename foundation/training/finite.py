"""Steps whose loss or gradient is NaN or infinite.

A step in bfloat16 that ends in NaN or infinity is taken again in float32. Some processors have kernels that rarely read uninitialized
memory (known for grouped convolutions with few channels: `foundation.training.precision`), and a training of hours should not end because
of one. It is logged, counted in `History.repeated`, and saved with every checkpoint, so that a resumed run repeats the same steps. After
`MOST_REPEATED` of them the training continues in float32: bfloat16 is then too narrow for this model.

If it is not finite in float32 either, the training ends: a row that alone causes it is named, else the learning rate is too high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from foundation.core.shown import shown
from foundation.standalone.preprocess import Row

MOST_REPEATED = 10
"""Steps that are repeated before a training continues in float32."""

Gradients = tuple[Mapping[str, float], float]
"""The sums of the loss terms of a step by name, and the norm of its gradient."""


def not_finite(gradients: Gradients) -> str | None:
    """Describes the first NaN or infinite term, such as `loss (ctc) became nan`; None if all are finite."""
    terms, norm = gradients
    for name, value in terms.items():
        if not math.isfinite(value):
            return f"loss ({name}) became {value}"
    return None if math.isfinite(norm) else f"gradient became {norm}"


def blamed(indices: NDArray[np.int64], rows: Sequence[Row], alone: Callable[[NDArray[np.int64]], Gradients]) -> str:
    """Returns which rows of a step give no number by themselves, as a part of a message; '' where none or all of them do.

    Args:
        indices: The rows of the step, `[b]`.
        rows: All training rows.
        alone: Computes loss and gradient of some of them.
    """
    guilty = [int(index) for index in indices if not_finite(alone(np.array([index]))) is not None]
    if not guilty or len(guilty) == len(indices):
        return ""
    row = rows[guilty[0]]
    named = f"a file of {len(row)} bytes" if isinstance(row, bytes) else shown(row)
    others = f", and {len(guilty) - 1} more of its {len(indices)} rows do" if len(guilty) > 1 else ""
    return f": the row {named} alone gives it{others}; leave it out of the data, or"
