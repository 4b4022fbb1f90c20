"""Records, while a model runs, which layers a tensor comes from, and the two products of every attention.

    mark      what a tensor was computed from without another layer between: names of layers, products, or the result of an attention
    part      where in the output of its layer a tensor begins: the query of a layer that makes query, key and value at once
    product   a matrix product of two tensors that both come from layers: Q K^T

A model shows its attention by passing queries, keys and values to the attention function of Transformers. In a model that does not, the
softmax shows it: P = softmax of a product Q K^T, to which masks and positions may have been added, and the next product P V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum"})
SOFTMAX = frozenset({"softmax", "_softmax"})
FUSED = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Call:
    """One attention."""

    number: int
    module: nn.Module | None
    """The module that called the attention function; None if it was found by its softmax."""
    query: Tensor
    """Float `[..., heads, L, d]`."""
    key: Tensor
    """As `query`, or with its last two axes exchanged."""
    value: Tensor
    """Float `[..., heads, L, d]`."""
    scaling: float | None

    @property
    def mark(self) -> str:
        """The mark of its result."""
        return f"attention {self.number}"


class Trace(TorchFunctionMode):
    """Records the torch calls of a model that runs inside this mode.

    Args:
        layers: Names of the linear layers, by the id of their weight.
    """

    def __init__(self, layers: Mapping[int, str]) -> None:
        super().__init__()
        self.layers = layers
        self.clear()

    def clear(self) -> None:
        """Forgets what was recorded."""
        self.marks: dict[int, frozenset[str]] = {}
        self.begins: dict[int, int] = {}
        self.alive: list[Tensor] = []  # keeps tensors alive, so that ids stay unique
        self.outputs: dict[str, Tensor] = {}
        self.readers: dict[str, list[str]] = {}
        self.products: list[tuple[Tensor, Tensor]] = []
        self.softmaxes: list[tuple[Tensor, Tensor]] = []
        self.calls: list[Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = list(tensors_in((args, tuple((kwargs or {}).values()))))
        marks = frozenset().union(*(self.marks_of(tensor) for tensor in given))
        layer = next((self.layers[id(tensor)] for tensor in given if id(tensor) in self.layers), None)
        # a view or transpose of the weight itself is not an output of the layer
        if layer is not None and len(given) > 1:
            for mark in marks:
                self.readers.setdefault(mark, []).append(layer)
            marks = frozenset({layer})
        else:
            layer = None
            marks = self._attention_marks(getattr(func, "__name__", ""), given, marks)
        begin = self._begin(given, marks) if layer is None else None
        for tensor in tensors_in(result):
            self.mark(tensor, marks)
            if layer is not None:
                self.outputs[layer] = tensor
            elif begin is not None:
                self.begins[id(tensor)] = begin
            elif not any(id(tensor) == id(other) for other in given):
                self._note_part(tensor, marks)
        return result

    def mark(self, tensor: Tensor, marks: frozenset[str]) -> None:
        """Sets the marks of a tensor."""
        self.marks[id(tensor)] = marks
        self.alive.append(tensor)

    def marks_of(self, tensor: Tensor) -> frozenset[str]:
        """Returns the marks of a tensor."""
        return self.marks.get(id(tensor), frozenset())

    def output_of(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Returns the one layer that a tensor comes from and the output of that layer; None if there is no such one."""
        marks = self.marks_of(tensor)
        layer = next(iter(marks)) if len(marks) == 1 else None
        return None if layer is None or layer not in self.outputs else (layer, self.outputs[layer])

    def is_view_of(self, tensor: Tensor, output: Tensor) -> bool:
        """Whether a tensor is a view of (a part of) another one."""
        return base(tensor) is base(output) and tensor is not output

    def begin_of(self, tensor: Tensor) -> int | None:
        """Returns the place in its layer's output where a tensor begins; None if it is the whole output, reordered or computed."""
        return self.begins.get(id(tensor))

    def _begin(self, inputs: list[Tensor], marks: frozenset[str]) -> int | None:
        """Returns where all tensors with these marks begin, if they are parts that begin at one place."""
        found = {self.begins.get(id(tensor)) for tensor in inputs if self.marks_of(tensor) and self.marks_of(tensor) <= marks}
        return found.pop() if len(found) == 1 else None

    def _note_part(self, tensor: Tensor, marks: frozenset[str]) -> None:
        """Notes where a tensor begins that is a proper part of the output of its layer."""
        made = self.output_of(tensor)
        if made is not None and self.is_view_of(tensor, made[1]) and tensor.numel() < made[1].numel():
            self.begins[id(tensor)] = int(tensor.storage_offset())

    def _attention_marks(self, name: str, inputs: list[Tensor], marks: frozenset[str]) -> frozenset[str]:
        """Returns the marks of the result of a call, which may be a product or softmax of an attention."""
        if name == FUSED and len(inputs) >= 3:
            return self._called(*inputs[:3])
        if name in PRODUCTS and len(inputs) >= 2:
            first, second = inputs[-2:]
            softmax = next((mark for mark in self.marks_of(first) if mark.startswith("softmax ")), None)
            if softmax is not None and self.output_of(second) is not None:
                scored = self.softmaxes[int(softmax.split()[1])]
                return self._called(*scored, second)
            if self.output_of(first) is not None and self.output_of(second) is not None:
                self.products.append((first, second))
                return frozenset({f"product {len(self.products) - 1}"})
        if name in SOFTMAX:
            numbers = [int(mark.split()[1]) for mark in marks if mark.startswith("product ")]
            if numbers:
                self.softmaxes.append(self.products[min(numbers)])
                return frozenset({f"softmax {len(self.softmaxes) - 1}"})
        return marks

    def _called(self, query: Tensor, key: Tensor, value: Tensor) -> frozenset[str]:
        call = Call(len(self.calls), None, query, key, value, None)
        self.calls.append(call)
        return frozenset({call.mark})


def base(tensor: Tensor) -> Tensor:
    """Returns the tensor that a view belongs to."""
    return tensor if tensor._base is None else tensor._base


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and maps."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))


TRACE: ContextVar[Trace] = ContextVar("trace")
