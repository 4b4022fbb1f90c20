"""Forward order: change the layers of a model one after another, each given its inputs in the already changed model.

    for each block, for each tensor x that some linear layers in it read (queries, keys and values share one):
        sum x^2 or x x^T over the tokens of the calibration rows, in the model as changed so far
        change the layers that read x

Each layer thus compensates for the errors of the layers before it, which Frantar and Alistarh 2023 (https://arxiv.org/abs/2301.00774,
section 3) do block by block. Finished blocks are not run again: the last one's output is stored and replayed, and a pass stops as soon as
the layer has its input. The total is about one pass over the rows per such tensor of a block, plus one. Padding is not counted: of the
source for an encoder and for what its decoder reads of it, of the target for the rest of the decoder.

Not supported: hidden states that do not fit into memory; the stage `quantize` streams large models from file to file.

Tensor names carry their shapes: N tokens, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from foundation.core.errors import InputError
from foundation.models.architecture.attention import find_attentions
from foundation.models.architecture.blocks import Stack, blocks_of, stacks_of
from foundation.models.inputs.padding import read_by_decoder, real_rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Features = Mapping[str, Tensor]
Measure = Callable[[Tensor], Tensor]
"""From the tokens of a batch, float [N, I], to a statistic that is summed over batches, float64; the sums stay on the CPU."""


def squares(x_NI: Tensor) -> Tensor:
    """Returns the sum of the squares of each input, float64 [I]."""
    return x_NI.double().square().sum(dim=0)


def products(x_NI: Tensor) -> Tensor:
    """Returns the sum of x x^T, float64 [I, I]."""
    return (x_NI.T @ x_NI).double()


def in_forward_order(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Sequence[Features],
    measure: Measure,
    change: Callable[[str, Tensor], None],
    key: str,
    advance: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Changes the layers of a model in forward order.

    Args:
        model: In evaluation mode.
        layers: Linear layers inside its blocks, by module name.
        batches: Features of the calibration rows.
        measure: Statistic of a layer's input, summed over batches.
        change: Called with the name of a layer and its sum, float64, which it may overwrite; changes the layer's weight.
        key: Key path in the recipe, for messages.
        advance: Called with the number of layers finished.

    Returns:
        Names of the layers that no row reached; they are unchanged.

    Raises:
        InputError: The model is not made of stacks of blocks, or an input holds NaN or infinity.
    """
    blocks = blocks_of(model, key)
    runs = _BlockRunner(model, key, batches)
    unreached: list[str] = []
    for block in blocks:
        inside = {name: layer for name, layer in layers.items() if name.startswith(f"{block}.")}
        units = runs.units(inside)
        for unit in units:
            total = torch.zeros((), dtype=torch.float64)
            for x_NI in runs.inputs(unit[0], inside[unit[0]]):
                measured = measure(x_NI)
                if not bool(measured.isfinite().all()):
                    raise InputError(
                        unit[0], "the calibration rows give this layer an input that is NaN or infinite", remedy="check the model"
                    )
                total = total + measured.cpu()
            for name in unit:
                change(name, total.clone())
            advance(len(unit))
        missing = [name for name in inside if name not in {name for unit in units for name in unit}]
        unreached += missing
        advance(len(missing))
        runs.move_on()
    return unreached


class _StopForward(Exception):
    """Raised by a hook to stop a forward pass early."""


class _BlockRunner:
    """Runs all batches up to the current block."""

    def __init__(self, model: nn.Module, key: str, batches: Sequence[Features]) -> None:
        self._model, self._batches, self._stacks = model, batches, stacks_of(model, key)
        self._blocks = list(blocks_of(model, key).values())
        self._number = 0
        self._outputs: dict[Stack, list[object]] = {}  # of each stack that has run, by batch: output of its last finished block
        attentions = find_attentions(model, key).cross.values() if len(self._stacks) > 1 else ()
        self._reads_source = {attention.parts[what][0] for attention in attentions for what in ("key", "value")}

    def units(self, layers: Mapping[str, nn.Linear]) -> list[list[str]]:
        """Returns the layers of the block that are reached, in order of execution, grouped by the tensor that they read."""
        units: list[list[str]] = []
        for batch in range(len(self._batches)):
            last: list[Tensor] = []

            def see(name: str, x: Tensor, last: list[Tensor] = last) -> None:
                if any(name in unit for unit in units):
                    return
                if last and last[0] is x:
                    units[-1].append(name)
                else:
                    units.append([name])
                last[:] = [x]

            handles = [
                layer.register_forward_pre_hook(lambda _, args, name=name, see=see: see(name, args[0])) for name, layer in layers.items()
            ]
            with _removed(handles):
                self._run(batch)
            if sum(map(len, units)) == len(layers):
                break
        return units

    def inputs(self, name: str, layer: nn.Linear) -> Iterator[Tensor]:
        """Yields the inputs of a layer by batch, without padding [N, I]; skips batches that do not reach it."""
        for batch in range(len(self._batches)):
            seen: list[Tensor] = []

            def stop(_: nn.Module, args: tuple[Tensor, ...], seen: list[Tensor] = seen) -> None:
                seen.append(args[0])
                raise _StopForward

            with _removed([layer.register_forward_pre_hook(stop)]):
                self._run(batch)
            if seen:
                yield real_rows(seen[0], self._features(name, batch))

    def move_on(self) -> None:
        """Stores the outputs of the current block and moves on to the next one."""
        if self._number + 1 < len(self._blocks):
            self._outputs[self._stack] = [self._run(batch) for batch in range(len(self._batches))]
        self._number += 1

    @property
    def _stack(self) -> Stack:
        """The stack of the current block."""
        return next(stack for stack in self._stacks if self._number in stack.numbers)

    def _features(self, name: str, batch: int) -> Features:
        """Returns the features of a batch with the mask of what a layer reads."""
        features: Features = self._batches[batch]
        config: PreTrainedConfig = self._model.config
        if self._stack is self._stacks[0] or name in self._reads_source or "decoder_input_ids" not in features:
            return features
        return {**features, "attention_mask": read_by_decoder(features["decoder_input_ids"], config.pad_token_id)}

    def _run(self, batch: int) -> object:
        """Runs a batch up to the end of the current block; returns the block's output, or None if a hook stopped the pass earlier."""
        outputs: list[object] = []

        def stop(_: nn.Module, args: object, output: object) -> None:
            outputs.append(output)
            raise _StopForward

        with ExitStack() as replays:
            for stack, finished in self._outputs.items():
                replays.enter_context(_replayed(self._blocks[stack.first : min(self._number, stack.numbers.stop)], finished[batch]))
            with (
                torch.no_grad(),
                _removed([self._blocks[self._number].register_forward_hook(stop)]),
                suppress(_StopForward),
            ):
                self._model(**self._batches[batch])
        return outputs[0] if outputs else None


@contextmanager
def _removed(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replayed(blocks: Sequence[nn.Module], output: object) -> Iterator[None]:
    """Makes blocks return `output` without computing. They stay in place, since a model may read their attributes."""
    for block in blocks:
        block.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # restores the method of the class
