"""Multiply-accumulates of every GEMM of a text model that generates, counted in torch: for engines that read no ONNX graph.

The model is built from its config, without weights, and run once on the meta device. What it multiplies has the names of the ONNX graph
(`export.graph.onnx`), so that engines report under the same ones, and the same sizes (`export.graph.macs`), without the minutes that a
trace into ONNX takes.

    x W^T, W a parameter      node `<module>/MatMul`; the second of a module ends with .2
    Q K^T, P V                nodes `<module>/qk` and, where the first factor comes from a softmax, `<module>/pv`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.graph.experts import make_exportable
from export.graph.macs import Gemm
from foundation.labels.tasks import Task
from foundation.models.architecture.shapes import auto_class
from foundation.models.folder import Checkpoint
from foundation.models.layers.experts import with_separate_experts
from foundation.models.library import on_meta_else_cpu, quiet, uninitialized
from foundation.models.meta import on_meta_device
from foundation.models.size import inputs_of

aten = torch.ops.aten
PRODUCTS: Mapping[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    aten.mm.default: lambda first, second: (first, second),
    aten.bmm.default: lambda first, second: (first, second),
    aten.addmm.default: lambda _, first, second: (first, second),
    aten.baddbmm.default: lambda _, first, second: (first, second),
}
"""Factors of the operators that multiply matrices, by the operator."""
SOFTMAX = aten._softmax.default


def traced_macs(checkpoint: Checkpoint, task: Task, batch: int, sequence: int) -> list[Gemm]:
    """Counts the multiply-accumulates of every GEMM.

    Args:
        checkpoint: A decoder or an encoder-decoder, float or quantized; its weights are not read.
        task: The task.
        batch: Rows.
        sequence: Tokens of a row, of the target too.

    Returns:
        The GEMMs in the order in which the model computes them: those with a weight, the head last, and both products of every attention.
    """
    return on_meta_else_cpu(lambda meta: _traced(checkpoint, task, (batch, sequence), meta))


def _traced(checkpoint: Checkpoint, task: Task, shape: tuple[int, int], on_meta: bool) -> list[Gemm]:
    config = checkpoint.config
    with on_meta_device() if on_meta else uninitialized(), quiet():
        model: Any = auto_class(task, config).from_config(config, attn_implementation="eager").eval()
        model.tie_weights()  # which is left out where weights are not initialized
        if checkpoint.is_quantized:  # each expert has integers of its own
            with_separate_experts(model)
        make_exportable(model)
        batch, sequence = shape
        inputs = {name: one.expand(batch, *one.shape[1:]) for name, one in inputs_of(config, task, sequence, masked=not on_meta).items()}
        with torch.no_grad(), _watched(model) as counted:
            model(**inputs)
    return counted.gemms


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the products of a model that runs."""

    def __init__(self, model: nn.Module, within: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gemms: list[Gemm] = []
        self._within = within
        self._seen: Counter[str] = Counter()
        self._weights = {_memory(weight) for weight in model.parameters()}
        self._shares: list[Tensor] = []  # kept, so that no other tensor gets the memory of one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator; see `TorchDispatchMode`."""
        output = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._note(*PRODUCTS[func](*args), output)
        elif func is SOFTMAX:
            self._shares.append(output)
        return output

    def _note(self, first: Tensor, second: Tensor, output: Tensor) -> None:
        is_weight, module = _memory(second) in self._weights, self._within[-1]
        of_softmax = any(_memory(first) == _memory(share) for share in self._shares[-1:])
        node = f"{module}/{'MatMul' if is_weight else 'pv' if of_softmax else 'qk'}"
        self._seen[node] += 1
        node += f".{self._seen[node]}" if self._seen[node] > 1 else ""
        macs = prod(output.shape) * first.shape[-1]
        self.gemms.append(Gemm(module if is_weight else node, "weight" if is_weight else "attention", macs, node))


def _memory(tensor: Tensor) -> int:
    """Returns what tells whether two tensors are views of the same memory; on the meta device, too."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Products]:
    """Notes the products of a model while it is open."""
    within: list[str] = []

    def entered(name: str) -> Callable[..., None]:
        return lambda *_: within.append(name)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(entered(name)).remove)
            stack.callback(module.register_forward_hook(lambda *_: within.pop() and None, always_call=True).remove)
        with _Products(model, within) as counted:
            yield counted
