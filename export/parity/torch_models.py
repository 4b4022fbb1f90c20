"""The models that torch computes an export's reference answers with: each is loaded once for all that is asked of it.

An engine is compared with the same checkpoint in torch, which computes it in one of these ways:

    integers    as the checkpoint says: quantized layers with their integers
    float       grid weights, float activations
    nudged      as integers, every embedding moved by a millionth (`export.parity.amplified`)
    a Rounding  as an engine that rounds tokens by itself (`export.parity.own_rounding`)

A scheme with float activations multiplies the same floats in its quantized layers as in the float model on its grids, which needs no
dequantizing: one model stands for both. Only one model is loaded at a time, and none is kept that takes more than `KEPT_SHARE` of the
available memory, which engines need meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

from torch import nn

from export.graph.grids import put_on_grids
from export.parity.amplified import nudged
from export.parity.own_rounding import Rounding
from foundation.models.checkpoint import load, load_float
from foundation.models.folder import Checkpoint
from foundation.models.layers.experts import with_separate_experts
from foundation.models.streaming import is_large
from foundation.schemes.table import SCHEMES
from foundation.schemes.weight_only import dequantized_once

Way = Rounding | Literal["integers", "float", "nudged"]
"""How torch computes a checkpoint."""
KEPT_SHARE = 0.1
"""Share of the available memory; a model whose float32 weights need more is loaded for each question."""


@dataclass(frozen=True)
class _Loaded:
    checkpoint: Checkpoint
    floating: bool
    model: nn.Module


class TorchModels:
    """Opens checkpoints in torch; the last one stays loaded."""

    def __init__(self) -> None:
        self._loaded: _Loaded | None = None

    @contextmanager
    def open(self, checkpoint: Checkpoint, way: Way) -> Iterator[nn.Module]:
        """Within the block the model computes in this way; it is in evaluation mode.

        Args:
            checkpoint: The checkpoint.
            way: How it computes.
        """
        floating = way == "float" or (isinstance(way, Rounding) and way.exact) or _is_float(checkpoint)
        if self._loaded is None or (self._loaded.checkpoint, self._loaded.floating) != (checkpoint, floating):
            self._loaded = None  # before the next one is loaded
            self._loaded = _Loaded(checkpoint, floating, _on_grids(checkpoint) if floating else load(checkpoint.folder))
        model = self._loaded.model
        with dequantized_once(model), _computing(way, model, checkpoint):
            yield model
        if is_large(checkpoint, KEPT_SHARE):
            self.release()

    def release(self) -> None:
        """Lets go of the loaded model."""
        self._loaded = None


def distinct(checkpoint: Checkpoint, way: Way) -> Way:
    """Returns the way itself, or the one under which the same answers are known."""
    return "integers" if way == "float" and _is_float(checkpoint) else way


def _is_float(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint computes in float, whatever its weights are stored as."""
    scheme = checkpoint.scheme
    return scheme is None or SCHEMES[scheme].activations == "float"


def _on_grids(checkpoint: Checkpoint) -> nn.Module:
    model = load_float(checkpoint.folder)
    if checkpoint.is_quantized:
        with_separate_experts(model)
        put_on_grids(model, checkpoint)
    return model


def _computing(way: Way, model: nn.Module, checkpoint: Checkpoint) -> AbstractContextManager[None]:
    if isinstance(way, Rounding):
        return way.rounds(model, checkpoint)
    return nudged(model) if way == "nudged" else nullcontext()
