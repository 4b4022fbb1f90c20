"""Forward order: the layers of a model are changed one after another, each by what it reads once all layers before it are changed.

    for each block, for each tensor x that linear layers in it read together (queries, keys and values read one):
        sums over the tokens of the calibration rows, of x^2 or of x x^T, in the model as it is by then
        the layers that read x are changed

So a layer makes up for what was lost before it, which Frantar and Alistarh 2023 (https://arxiv.org/abs/2301.00774, section 3) do block by
block. Blocks that are done are not run again: what the last of them said is kept and put in their place, and a pass ends as soon as the
layer has its input. All of it takes about as many passes over the rows as a block has such tensors, and one. Padding does not count.

Left out: hidden states that do not fit into memory; the stage `quantize` goes through large models from file to file.

Tensor names carry their shapes: N tokens, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from compress.core.errors import InputError
from compress.models.blocks import repeated_blocks
from compress.models.padding import real_rows

Features = Mapping[str, Tensor]
Measure = Callable[[Tensor], Tensor]
"""From the tokens of a batch, float [N, I], to what is summed up over batches, float64; sums are kept on the CPU."""


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
    """Goes through the layers of a model.

    Args:
        model: In evaluation mode.
        layers: Linear layers inside of its blocks, by module name.
        batches: Features of the calibration rows.
        measure: What is summed up of the input of a layer.
        change: Gets the name of a layer and the sum, float64, which it may overwrite; changes the weight.
        key: Key path in the recipe, for messages.
        advance: Is told how many layers are done.

    Returns:
        The names of layers that no row reached; they are as they were.

    Raises:
        InputError: The model is no stack of blocks, or an input holds NaN or infinity.
    """
    prefix, blocks = repeated_blocks(model, key)
    runs = _Runs(model, blocks, batches)
    unreached: list[str] = []
    for number in range(len(blocks)):
        inside = {name: layer for name, layer in layers.items() if name.startswith(f"{prefix}.{number}.")}
        units = runs.units(inside)
        for unit in units:
            total = torch.zeros((), dtype=torch.float64)
            for x_NI in runs.inputs(inside[unit[0]]):
                measured = measure(x_NI)
                if not bool(measured.isfinite().all()):
                    raise InputError(f"{unit[0]}: the calibration rows give this layer an input that is NaN or infinite; check the model")
                total = total + measured.cpu()
            for name in unit:
                change(name, total.clone())
            advance(len(unit))
        missing = [name for name in inside if name not in {name for unit in units for name in unit}]
        unreached += missing
        advance(len(missing))
        runs.move_on()
    return unreached


class _Reached(Exception):
    """A pass has come to where it was sent."""


class _Runs:
    """Passes of all rows to the block whose turn it is."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList, batches: Sequence[Features]) -> None:
        self._model, self._blocks, self._batches = model, blocks, batches
        self._number = 0
        self._said: list[Any] = []  # by batch: what the block before gave

    def units(self, layers: Mapping[str, nn.Linear]) -> list[list[str]]:
        """Returns the layers of the block that are reached, in order of execution; those that read one tensor stand together."""
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

    def inputs(self, layer: nn.Linear) -> Iterator[Tensor]:
        """Yields what a layer reads of each batch, tokens that are no padding [N, I]; nothing of a batch that does not reach it."""
        for batch in range(len(self._batches)):
            seen: list[Tensor] = []

            def stop(_: nn.Module, args: tuple[Any, ...], seen: list[Tensor] = seen) -> None:
                seen.append(args[0])
                raise _Reached

            with _removed([layer.register_forward_pre_hook(stop)]):
                self._run(batch)
            if seen:
                yield real_rows(seen[0], self._batches[batch])

    def move_on(self) -> None:
        """Keeps what the block says now, and makes it the next one's turn."""
        if self._number + 1 < len(self._blocks):
            self._said = [self._run(batch) for batch in range(len(self._batches))]
        self._number += 1

    def _run(self, batch: int) -> Any:
        """Sends a batch through the model up to the end of the block; returns what the block says, None where a hook ended it before."""
        said: list[Any] = []

        def stop(_: nn.Module, args: Any, output: Any) -> None:
            said.append(output)
            raise _Reached

        before = list(self._blocks)[: self._number]
        with (
            torch.inference_mode(),
            _removed([self._blocks[self._number].register_forward_hook(stop)]),
            _answering(before, self._said[batch] if before else None),
            suppress(_Reached),
        ):
            self._model(**self._batches[batch])
        return said[0] if said else None


@contextmanager
def _removed(handles: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _answering(blocks: Sequence[Any], said: Any) -> Iterator[None]:
    """Lets blocks answer what is given without computing anything: a model may ask them for attributes, so they stay in their places."""
    for block in blocks:
        block.forward = lambda *args, **kwargs: said
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # that of the class shows again
