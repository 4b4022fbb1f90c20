"""Several low-rank adapters on one model; every row of a batch chooses one.

    y_b = layer(x_b) + B_a A_a x_b + c_a        a: the adapter of row b; A_a [r, I], B_a [O, r], c_a [O]

The layer itself is one for all adapters: float, or int8 with the integers that it has without them. The adapters stay in float, and all of
them are two matrices with constant weights, so that an engine multiplies a batch of several adapters as it multiplies any batch:

    A [R, I], B [O, R]: the A_a and B_a of all adapters one behind the other, R the sum of their ranks
    y_b = layer(x_b) + B (g_a * A x_b) + c_a    g [N, R]: 1 where a rank belongs to the adapter, else 0

Ranks may differ between adapters and layers; rank 0 leaves a layer as it is. The cost grows with R, not with the adapters of a batch: for
tens of adapters a product with gathered matrices (S-LoRA, https://arxiv.org/abs/2311.03285) costs less, and is left out.

Source of the adapters: LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685. Tensor names: b rows, I inputs, O outputs, N adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.standalone.preprocess import ADAPTER_IDS

ADAPTERS = "adapters"
"""Name of the child module of a layer with adapters."""


@dataclass(frozen=True)
class Change:
    """The change of one linear layer by one adapter."""

    down: Tensor
    """A, float32 `[r, I]`."""
    up: Tensor
    """B, scaled, float32 `[O, r]`."""
    bias: Tensor | None = None
    """c, float32 `[O]`; None: the bias stays."""

    @property
    def rank(self) -> int:
        """r."""
        return len(self.down)

    def weight(self) -> Tensor:
        """Returns the change of the weights, float32 `[O, I]`."""
        return self.up @ self.down


Adapter = Mapping[str, Change]
"""Changes by layer."""


class Choice:
    """The adapter of each row of the batch that a model reads now."""

    ids_b: Tensor | None = None
    """Numbers of adapters, int64 `[b]`; None between batches."""


class AdapterStack(nn.Module):
    """What all adapters add to the output of one layer.

    Args:
        name: Path of the layer, for messages.
        choice: The adapters of the present rows.
        changes: The change by each adapter; None where it leaves the layer as it is.
        shape: (O, I) of the layer.
    """

    owner: Tensor
    bias: Tensor | None

    def __init__(self, name: str, choice: Choice, changes: Sequence[Change | None], shape: tuple[int, int]) -> None:
        super().__init__()
        self.name, self._choice = name, choice
        outputs, inputs = shape
        downs = [torch.zeros(0, inputs) if change is None else change.down for change in changes]
        ranks = torch.tensor([len(down) for down in downs])
        self.rank = int(ranks.sum())
        sizes = ((inputs, self.rank), (self.rank, outputs))
        self.down, self.up = (nn.utils.skip_init(nn.Linear, *size, bias=False) for size in sizes)  # type: ignore[no-untyped-call]
        ups = [torch.zeros(outputs, 0) if change is None else change.up for change in changes]
        with torch.no_grad():
            self.down.weight.copy_(torch.cat(downs))
            self.up.weight.copy_(torch.cat(ups, dim=1))
        owners = torch.repeat_interleave(torch.arange(len(changes)), ranks)
        self.register_buffer("owner", (owners == torch.arange(len(changes))[:, None]).float())
        biases = [None if change is None else change.bias for change in changes]
        some = any(bias is not None for bias in biases)
        stacked = torch.stack([torch.zeros(outputs) if bias is None else bias for bias in biases]) if some else None
        self.register_buffer("bias", stacked)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what is added to the output of the layer, `[b, ..., O]`, for its input `[b, ..., I]`.

        Raises:
            InputError: The first axis of the input is not the rows of the batch.
        """
        ids_b = self._choice.ids_b
        assert ids_b is not None, "rows choose their adapters before a layer runs"
        if x.shape[0] != ids_b.shape[0]:
            reason = f"it reads {x.shape[0]} rows of a batch of {ids_b.shape[0]}: their adapters are not known there"
            raise InputError(f"layer {self.name}", reason, remedy="leave it out of lora.layers")
        added: Tensor | None = None
        if self.rank:
            added = self.up(self.down(x) * _of_rows(self.owner, ids_b, x.ndim))
        if self.bias is None:
            assert added is not None, "a stack adds something"
            return added
        bias = _of_rows(self.bias, ids_b, x.ndim)
        return bias if added is None else added + bias


def _of_rows(table: Tensor, ids_b: Tensor, axes: int) -> Tensor:
    """Returns the rows of a table that a batch chooses, `[b, 1, ..., C]`, with so many axes."""
    chosen = nn.functional.embedding(ids_b, table)  # a Gather in a graph
    for _ in range(axes - 2):
        chosen = chosen.unsqueeze(1)
    return chosen


def put(model: nn.Module, adapters: Sequence[Adapter]) -> None:
    """Puts adapters on a model, in place; from then on it needs the input `adapter_ids`, int64 `[b, L]`, of which it reads one column.

    Args:
        model: The model, float or quantized.
        adapters: Changes of layers by each adapter.

    Raises:
        InputError: The model has no such layer, or one of another size.
    """
    choice = Choice()
    for name in dict.fromkeys(name for adapter in adapters for name in adapter):
        layer = _layer(model, name)
        shape = layer.out_features, layer.in_features
        changes = [adapter.get(name) for adapter in adapters]
        for change in changes:
            if change is not None and (len(change.up), change.down.shape[1], change.up.shape[1]) != (*shape, change.rank):
                given = f"{list(change.up.shape)} times {list(change.down.shape)} given"
                raise InputError(f"adapter of {name}", given, f"the layer has {shape[0]} outputs and {shape[1]} inputs")
        stack = AdapterStack(name, choice, changes, shape)
        if not stack.rank and stack.bias is None:
            continue
        layer.add_module(ADAPTERS, stack.to(next(model.parameters()).device).requires_grad_(False))
        layer.register_forward_hook(_added)

    def chosen(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if named.get(ADAPTER_IDS) is None:
            raise InputError("the model", "no adapter given", f"{ADAPTER_IDS} says which of {len(adapters)} adapters answers each row")
        choice.ids_b = named[ADAPTER_IDS][:, 0]
        return given, {name: value for name, value in named.items() if name != ADAPTER_IDS}

    model.register_forward_pre_hook(chosen, with_kwargs=True)


def stacks(model: nn.Module) -> dict[str, AdapterStack]:
    """Returns the adapters of a model by layer; empty for a model without."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, AdapterStack)}
    return {name.rpartition(".")[0]: stack for name, stack in found.items()}


def added_size(model: Any, length: int) -> tuple[int, int]:
    """Returns the parameters that adapters add to a model, and their multiply-accumulates for a row of `length` tokens; (0, 0) for a model
    without. Layers of the head count as if they read every token."""
    found = stacks(model).values() if isinstance(model, nn.Module) else ()
    products = sum(stack.rank * (stack.down.in_features + stack.up.out_features) for stack in found)
    return products + sum(0 if stack.bias is None else stack.bias.numel() for stack in found), products * length


def merge(model: nn.Module, adapter: Adapter) -> None:
    """Adds the changes of one adapter to the weights of a float model, in place."""
    with torch.no_grad():
        for name, change in adapter.items():
            layer = _layer(model, name)
            layer.weight.add_(change.weight().to(layer.weight))
            if change.bias is not None:
                layer.bias.add_(change.bias.to(layer.bias))


def _layer(model: nn.Module, name: str) -> Any:
    found: Any = dict(model.named_modules()).get(name)
    if not hasattr(found, "in_features"):
        raise InputError(f"adapter of {name}", "the model has no such linear layer", remedy="give the adapters of this model")
    return found


def _added(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Forward hook of a layer with adapters: adds what they add."""
    added: Tensor = layer.get_submodule(ADAPTERS)(given[0])
    return output + added.to(output.dtype)
