"""Types of arrays whose dtype differs from one to the next: token ids, masks, pixels, logits, codes, labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Features = Mapping[str, Array]
"""Inputs of a model by name."""
