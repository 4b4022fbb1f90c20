"""Vectors as an index stores them: in a byte or a bit a number, and what that costs.

    int8      code = clip(round(v / s), -127, 127)        s = the largest |number| of the texts that are stored / 127
    binary    code = 1 where the number is positive, else 0; similarity = share of equal bits, which ranks as the cosine of -1 and 1 does

One s for all numbers: an integer product of codes then ranks like the product of the vectors they stand for, so that an index computes with
only integers. Queries are coded as documents are. Known refinements are left out: a scale for each number, and scoring the first hits
again with the float query (https://arxiv.org/abs/2106.00882), which gain accuracy for more work of the index.

Codes come as float32 here, -1 and 1 for bits, so that every metric of vectors measures codes too.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.vectors import VectorLabels

Form = Literal["int8", "binary"]
FORMS: tuple[Form, ...] = get_args(Form)
LARGEST_CODE = 127


def scale_of(vectors: Array, labels: VectorLabels) -> float:
    """Returns s of int8 for vectors `[n, D]`: of the documents where there are documents, else of all texts; 1 where all are zeros."""
    return float(np.abs(labels.indexed(vectors)).max(initial=0)) / LARGEST_CODE or 1.0


def codes(vectors: Array, form: Form, scale: float) -> Array:
    """Returns the codes of vectors, float32 `[n, D]`: whole numbers, or -1 and 1.

    Args:
        vectors: Vectors, float `[n, D]`.
        form: How they are stored.
        scale: s of int8.
    """
    if form == "binary":
        return np.where(vectors > 0, np.float32(1), np.float32(-1))
    return np.asarray(np.clip(np.rint(vectors / np.float32(scale)), -LARGEST_CODE, LARGEST_CODE).astype(np.float32))


def bytes_of(width: int, form: Form) -> int:
    """Returns the bytes of a stored vector of this many numbers."""
    return -(-width // 8) if form == "binary" else width
