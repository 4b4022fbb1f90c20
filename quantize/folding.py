"""Folding: finds where a per-channel factor can move from one layer to the next without changing the model.

A producer (a norm, or a linear layer) divides its output channel j by s_j; the linear layers that read the output multiply their weights:

    norm, linear    w_j / s_j, b_j / s_j    or    W[j, :] / s_j, b_j / s_j
    consumers       W[:, j] * s_j

This is exact if nothing else reads the output, and if every operation in between lets the factors through channel by channel. So the data
flow is traced on a small batch: every function that torch calls, with its input and output tensors. A tensor of channel numbers follows the
producer's output through the same operations:

    reshaping (view, transpose, indexing, ...)    applied to the channel numbers as to the tensor
    ReLU, dropout in evaluation mode              passes s > 0 through
    a product with another tensor or a number     passes s through (the gate of an FFN), unless both factors come from the same output
    attention and P @ V, for V                    mixes positions, not channels; V must have the same channel at every position
    a linear layer                                is a consumer if its input channel j is channel j of the producer
    anything else                                 blocks: a residual sum, GELU, tanh, another norm

A norm is a module without children that has one weight per channel, optionally a bias, and whose output scales with both. This is tested
numerically, not by name: a norm that multiplies by 1 + w fails the test. A layer that runs more than once must be read in the same way each
time.

The traced rows need not reach every layer: a router sends few tokens to few experts. A layer that did not run may read other rows, so it
blocks whatever it could read. It could read what the code that would call it can see, the forward pass of the nearest module around it that
did run: the arguments of that module, what its own code computes, and what the modules that it calls return. A layer that runs in other
rows but whose caller gets other tensors there is not noticed.

A norm after the residual sum (BERT) is also read by the next residual sum, which blocks it: the sum would add channels of different scales.
Not supported: sums whose terms could all be scaled alike, and grouped-query attention, where one channel of V becomes several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from foundation.models.architecture.blocks import Arguments, Keywords
from foundation.models.architecture.trace import tensors_in
from foundation.models.layers.stored_linear import StoredLinear
from quantize.calibration import Observed, S

RESHAPING = frozenset(
    {"view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "__getitem__"}
    | {"chunk", "split", "unbind"}
)
HOMOGENEOUS = frozenset({"relu", "dropout", "to", "float", "type_as"})
PRODUCT = frozenset({"mul", "__mul__", "__rmul__", "multiply"})
ATTENTION, MATMUL, LINEAR = "scaled_dot_product_attention", frozenset({"matmul", "bmm", "__matmul__"}), "linear"
UNFOLDED = "no norm or linear layer gives it channel by channel"


@dataclass(frozen=True)
class Fold:
    """A producer and its consumers: linear layers whose input channels are the producer's output channels."""

    producer: str
    """Module path of a norm or a linear layer."""
    consumers: tuple[str, ...]
    """Module paths, in execution order; for a blocked fold, the linear layers that the output reaches."""
    blocked: str | None
    """Why no factor can be folded; None if one can."""


@dataclass(frozen=True)
class Group:
    """Linear layers whose inputs are divided by the same vector."""

    layers: tuple[str, ...]
    """Module paths, in execution order."""
    fold: Fold | None
    """The fold that absorbs the division; None if none can."""
    reason: str | None
    """Why none can."""


def groups(layers: Collection[str], folds: Sequence[Fold], observed: Observed[S]) -> list[Group]:
    """Groups the layers that ran: by the fold whose consumers they are, else by the tensor they read.

    Args:
        layers: The layers to quantize.
        folds: The result of `find_folds`.
        observed: Which layers ran, and which of them read the same tensor.
    """
    reached = [name for name in observed.group if name in layers and observed.of(name).total]
    fold_of = {name: fold for fold in folds if fold.blocked is None for name in fold.consumers}
    reasons = {name: f"{fold.producer}: {fold.blocked}" for fold in folds if fold.blocked is not None for name in fold.consumers}
    members: dict[str, list[str]] = {}
    for name in reached:
        members.setdefault(fold_of[name].producer if name in fold_of else f"input of {observed.group[name]}", []).append(name)
    return [
        Group(tuple(names), fold_of.get(names[0]), None if names[0] in fold_of else reasons.get(names[0], UNFOLDED))
        for names in members.values()
    ]


def rescale(model: nn.Module, fold: Fold, factor_C: Tensor) -> None:
    """Divides the producer's output channels by a factor and multiplies the consumers' input channels by it, in place.

    Args:
        model: The model.
        fold: A fold that is not blocked.
        factor_C: float32 [C], positive.
    """
    assert fold.blocked is None, fold
    producer = model.get_submodule(fold.producer)
    if isinstance(producer, StoredLinear):
        producer.divide_outputs(factor_C)
    else:
        for parameter in producer.parameters(recurse=False):
            parameter.data = parameter.data / factor_C.reshape(-1, *[1] * (parameter.dim() - 1))
    for name in fold.consumers:
        consumer = model.get_submodule(name)
        assert isinstance(consumer, nn.Linear), name
        if isinstance(consumer, StoredLinear):
            consumer.multiply_inputs(factor_C)
        else:
            consumer.weight.data = consumer.weight.data * factor_C


def find_folds(
    model: nn.Module, features: Mapping[str, Tensor], forward: Callable[[nn.Module, Mapping[str, Tensor]], object]
) -> list[Fold]:
    """Traces a model and returns the fold of every norm and linear layer whose output reaches a linear layer, in execution order.

    Args:
        model: The model, in evaluation mode; not changed.
        features: A small batch of at least two rows and two positions.
        forward: Runs the model on the batch.
    """
    flow = _trace(model, features, forward)
    folds = [_follow(name, outputs, flow) for name, outputs in flow.produced.items()]
    return [fold for fold in folds if fold.consumers]


@dataclass(frozen=True)
class _Call:
    """One traced function call."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    result: Any
    """A tensor, or several."""

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", self.function))

    def argument(self, position: int, keyword: str) -> object:
        return self.args[position] if len(self.args) > position else self.kwargs.get(keyword)


@dataclass
class _Flow:
    """The traced calls. They keep every tensor alive, so that ids are unique."""

    linears: Mapping[int, str]
    """Module path of a linear layer by the id of its weight."""
    readers: dict[int, list[_Call]] = field(default_factory=dict)
    """The calls that read a tensor, by tensor id."""
    produced: dict[str, list[Tensor]] = field(default_factory=dict)
    """The outputs of each norm or linear layer, one per execution, by module path."""
    runs: Counter[str] = field(default_factory=Counter)
    """Number of executions of each linear layer."""
    outputs: list[Tensor] = field(default_factory=list)
    """The tensors that the model returns."""
    frames: _Frames = field(default_factory=lambda: _Frames())
    """Records which modules ran, and which tensors the code of each can see."""
    unreached: dict[str, str] = field(default_factory=dict)
    """Layers that did not run, by the module path of the code that would call them."""

    def add(self, call: _Call) -> None:
        for tensor in {id(tensor): tensor for tensor in tensors_in((call.args, tuple(call.kwargs.values())))}:
            self.readers.setdefault(tensor, []).append(call)
        name = self.linear(call)
        if name is not None:
            self.produced.setdefault(name, []).append(call.result)
            self.runs[name] += 1

    def linear(self, call: _Call) -> str | None:
        """Returns the module path if the call is a linear layer, else None."""
        return self.linears.get(id(call.argument(1, "weight"))) if call.name == LINEAR else None


class _Recorder(TorchFunctionMode):
    def __init__(self, flow: _Flow) -> None:
        super().__init__()
        self.flow = flow

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        # Calls that return only shapes or dtypes read no values; a call that returns None may have written into its argument.
        if result is None or any(True for _ in tensors_in(result)):
            self.flow.add(_Call(func, args, kwargs or {}, result))
            self.flow.frames.see(result)
        return result


OUTSIDE = "outside of all modules"


class _Frames:
    """Follows which module's forward pass is running, and which tensors it can see."""

    def __init__(self) -> None:
        self.executed: set[str] = set()
        self._seen: dict[int, set[str]] = {}
        self._alive: list[Tensor] = []  # so that ids stay unique
        self._running = [OUTSIDE]

    def see(self, value: object) -> None:
        """Records that the running forward pass can see the tensors in a value."""
        for tensor in tensors_in(value):
            self._seen.setdefault(id(tensor), set()).add(self._running[-1])
            self._alive.append(tensor)

    def sees(self, frame: str, tensors: Collection[int]) -> bool:
        """Whether the forward pass of a module can see one of the tensors, given by id."""
        return any(frame in self._seen.get(tensor, ()) for tensor in tensors)

    def around(self, name: str) -> str:
        """Returns the nearest module around a module that ran."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.executed:
                return name
        return OUTSIDE

    def follow(self, model: nn.Module) -> list[RemovableHandle]:
        """Registers hooks on all modules; returns their handles."""
        handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving))
        return handles

    def _entering(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, kwargs: object) -> None:
            self.executed.add(name)
            self._running.append(name)
            self.see((args, kwargs))

        return hook

    def _leaving(self, module: nn.Module, args: object, output: object) -> None:
        self._running.pop()
        self.see(output)


def _trace(model: nn.Module, features: Mapping[str, Tensor], forward: Callable[[nn.Module, Mapping[str, Tensor]], object]) -> _Flow:
    owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    own = {
        name: module
        for name, module in model.named_modules()
        if all(owners[id(weight)] == 1 for weight in module.parameters(recurse=False))
    }
    flow = _Flow({id(module.weight): name for name, module in own.items() if isinstance(module, nn.Linear)})
    runs: dict[str, tuple[Arguments, Keywords, Tensor]] = {}

    def record_output(name: str) -> Callable[[nn.Module, Arguments, Keywords, object], None]:
        def hook(module: nn.Module, args: Arguments, kwargs: Keywords, output: object) -> None:
            if isinstance(output, Tensor):
                flow.produced.setdefault(name, []).append(output)
                runs[name] = args, kwargs, output

        return hook

    norms = [name for name, module in own.items() if _looks_like_a_norm(module)]
    handles = [own[name].register_forward_hook(record_output(name), with_kwargs=True) for name in norms]
    handles += flow.frames.follow(model)
    try:
        with torch.no_grad(), _Recorder(flow):
            flow.outputs = list(tensors_in(forward(model, features)))
    finally:
        for handle in handles:
            handle.remove()
    for name, run in runs.items():
        if not _scales(own[name], *run):
            del flow.produced[name]
    flow.unreached = {flow.frames.around(name): name for name in reversed(_unreached(model, flow))}
    return flow


def _unreached(model: nn.Module, flow: _Flow) -> list[str]:
    """Returns the modules with weights that the traced rows did not reach, embeddings apart: those read ids."""
    return [
        name
        for name, module in model.named_modules()
        if name not in flow.frames.executed
        and not isinstance(module, nn.Embedding)
        and any(True for _ in module.parameters(recurse=False))
        and not any(id(weight) in flow.readers for weight in module.parameters(recurse=False))
    ]


def _looks_like_a_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    vectors = all(parameter.dim() == 1 for parameter in parameters.values())
    return not any(True for _ in module.children()) and "weight" in parameters and parameters.keys() <= {"weight", "bias"} and vectors


def _scales(module: nn.Module, args: Arguments, kwargs: Keywords, output: Tensor) -> bool:
    """Whether dividing a norm's weight and bias by a factor divides its output by the same factor."""
    weights = dict(module.named_parameters(recurse=False))
    if any(weight.shape != output.shape[-1:] for weight in weights.values()):
        return False
    factor_C = torch.linspace(0.5, 2, output.shape[-1], device=output.device)
    with torch.no_grad():
        divided = torch.func.functional_call(module, {name: weight / factor_C for name, weight in weights.items()}, args, kwargs)
        expected = module(*args, **kwargs) / factor_C
    return torch.allclose(divided, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def _follow(name: str, outputs: Sequence[Tensor], flow: _Flow) -> Fold:
    """Follows the output of a producer to all its readers, linear layers and others."""
    reached: Counter[str] = Counter()
    multiplied: set[int] = set()
    blocks = []
    returned = {id(tensor) for tensor in flow.outputs}
    held: set[int] = set()
    for output in outputs:
        waiting, visited = [(output, _laid_out_as(output, torch.arange(output.shape[-1], device=output.device)))], set()
        while waiting:
            tensor, channel = waiting.pop(0)
            if id(tensor) in returned:
                blocks.append("it is what the model answers")
            readers = [] if id(tensor) in visited else flow.readers.get(id(tensor), [])
            visited.add(id(tensor))
            for call in readers:
                consumer = flow.linear(call)
                if consumer is None or call.argument(0, "input") is not tensor:
                    again = call.name in PRODUCT and id(call.result) in multiplied  # both factors contain s: s squared
                    multiplied.add(id(call.result))
                    passed = None if again else _pass(call, tensor, channel)
                    blocks += [] if passed is not None else [f"{call.name} reads it"]
                    waiting += passed or []
                    continue
                reached[consumer] += 1
                in_order = torch.arange(output.shape[-1], device=output.device)
                if channel.shape[-1] != output.shape[-1] or not bool((channel == in_order).all()):
                    blocks.append(f"{consumer} reads its channels in another order")
        held |= visited
    blocks += [f"{consumer} reads other tensors too" for consumer, runs in reached.items() if runs != flow.runs[consumer]]
    blocks += [f"{layer} did not run and may read it" for frame, layer in flow.unreached.items() if flow.frames.sees(frame, held)]
    return Fold(name, tuple(reached), blocks[0] if blocks else None)


def _pass(call: _Call, tensor: Tensor, channel: Tensor) -> list[tuple[Tensor, Tensor]] | None:
    """Returns the outputs of a call with the channel number of each element; None if the call does not let a factor through.

    Args:
        call: A call that reads the tensor.
        tensor: The tensor.
        channel: The channel number of each element of the tensor, int64.
    """
    inputs = [id(given) for given in tensors_in((call.args, tuple(call.kwargs.values())))]
    if inputs.count(id(tensor)) != 1:
        return None
    if call.args and call.args[0] is tensor and call.name in HOMOGENEOUS:
        return [(call.result, _laid_out_as(call.result, channel))]
    if call.name in PRODUCT and call.result.shape == tensor.shape:
        return [(call.result, _laid_out_as(call.result, channel))]
    if call.args and call.args[0] is tensor and call.name in RESHAPING:
        return list(zip(tensors_in(call.result), tensors_in(call.function(channel, *call.args[1:], **call.kwargs)), strict=True))
    mixed = call.argument(2, "value") if call.name == ATTENTION else call.argument(1, "other") if call.name in MATMUL else None
    if mixed is not tensor or channel.dim() < 2:
        return None
    first = channel[..., :1, :]
    if not bool((channel == first).all()) or first.shape[:-2] != call.result.shape[:-2]:
        return None
    return [(call.result, _laid_out_as(call.result, first))]


def _laid_out_as(tensor: Tensor, channel: Tensor) -> Tensor:
    """Returns channel numbers with the shape, strides and device of a tensor, so that the same views and indices apply to both."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.int64, device=tensor.device).copy_(channel.expand(tensor.shape))
