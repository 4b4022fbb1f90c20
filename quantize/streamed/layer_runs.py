"""Runs the calibration rows through one decoder layer of a language model whose weights stay in their files (`stored_layer`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from foundation.models.layers.stored_linear import held
from foundation.models.streaming import HIDDEN, Batch, StreamedModel
from quantize.folding import Fold, find_folds
from quantize.rounding.autoround import Sample

TRACED = (slice(0, 2), slice(0, 8))  # rows and positions
HELD_BYTES = 64 * 2**20  # of the float32 weights of a layer that stay in memory during a pass


class LayerRuns:
    """Runs all rows through one decoder layer."""

    def __init__(self, model: StreamedModel, index: int, layer: nn.Module, batches: Sequence[Batch]) -> None:
        self._model, self._index, self.layer, self._batches = model, index, layer, batches
        self.advanced = not batches or index == len(model) - 1  # nothing reads the output of the last layer

    def feed(self) -> Iterator[dict[str, Tensor]]:
        """Yields the inputs of the layer, batch by batch."""
        return (batch.inputs for batch in self._batches)

    def forward(self, _: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the output of the layer."""
        return self._model.run(self._index, self.layer, inputs)

    def advance(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Like `forward`, but also overwrites the inputs with the output, as inputs of the next layer; for a pass over all batches."""
        hidden = self.forward(model, inputs)
        if self._index < len(self._model) - 1:
            inputs[HIDDEN].copy_(hidden)
            self.advanced = True
        return hidden

    def outputs(self, layer: nn.Module) -> list[Tensor]:
        """Returns the output of the layer for each batch: where another layer reads them, the hidden states after `finish`."""
        if self._index < len(self._model) - 1:
            self.finish(layer)
            return [batch.hidden for batch in self._batches]
        with torch.no_grad(), held(layer, HELD_BYTES):
            return [self.forward(layer, inputs) for inputs in self.feed()]

    def samples(self, targets: Sequence[Tensor]) -> list[Sample]:
        """Returns the rows as what autoround learns by, with the outputs of the float layer."""
        return [
            Sample(partial(self.forward, self.layer, batch.inputs), target, batch.features)
            for batch, target in zip(self._batches, targets, strict=True)
        ]

    def finish(self, layer: nn.Module) -> None:
        """Advances the hidden states of all rows unless an earlier pass did."""
        if not self.advanced:
            with torch.no_grad(), held(layer, HELD_BYTES):
                for inputs in self.feed():
                    self.advance(layer, inputs)

    def folds(self) -> list[Fold]:
        """Returns the folds inside the layer."""
        batch = self._batches[0]
        rows = {name: value.expand(max(2, len(value)), *value.shape[1:])[TRACED] for name, value in batch.inputs.items()}
        with torch.no_grad():
            args, kwargs = self._model.arguments(self._index, {name: value for name, value in rows.items() if name != HIDDEN})
        return find_folds(self._model.shape, rows, lambda _, inputs: self.layer(inputs[HIDDEN], *args, **kwargs))
