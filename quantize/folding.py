"""Folding: where a factor for each channel of a tensor can be taken out on one side and put in on the other without changing the model.

A producer (a norm, or a linear layer) divides its output channel j by s_j; the linear layers that read the output multiply their weights:

    norm, linear    w_j / s_j, b_j / s_j    or    W[j, :] / s_j, b_j / s_j
    consumers       W[:, j] * s_j

That is exact where nothing else reads the output, and where what lies between lets the factors through channel by channel. So the flow of
data is traced on a small batch: every function that torch calls, with the tensors that go in and come out. From the output of a producer
channel numbers are sent along the same way:

    reshaping (view, transpose, indexing, ...)    is done to the channel numbers as it was done to the tensor
    ReLU, dropout of a model that does not train   s > 0 passes through
    a product with another tensor or a number      the gate of an FFN; not with something made of the same output
    attention and P @ V, entered as V              mixes positions, not channels; V must have the same channel at every position
    a linear layer                                 is a consumer, where its input channel j is channel j of the producer
    anything else                                  blocks: a residual sum, GELU, tanh, another norm

A norm is a module without children that has one weight for each channel, perhaps a bias, and whose output scales with both (tried, not
known by name: a norm that multiplies by 1 + w does not). A layer that runs more than once has to be read in the same way each time.

A norm after the residual sum (BERT) is read by the next sum as well: the sum blocks it, rightly, since it would add channels of different
units. Left out: sums all of whose terms could be scaled alike, and grouped-query attention, where one channel of V becomes several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.models.attention import tensors_in
from compress.models.stored_linear import StoredLinear
from quantize.calibration import Observed

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
    """A producer and the linear layers whose input channels are the channels of its output."""

    producer: str
    """Module path of a norm or a linear layer."""
    consumers: tuple[str, ...]
    """Module paths, in order of execution; of a blocked fold, the linear layers that it reaches."""
    blocked: str | None
    """Why no factor can be folded; None where it can."""


@dataclass(frozen=True)
class Group:
    """Linear layers whose inputs are divided by one vector."""

    layers: tuple[str, ...]
    """Module paths, in order of execution."""
    fold: Fold | None
    """Where the division goes; None where nothing can absorb it."""
    reason: str | None
    """Why nothing can."""


def groups(layers: Collection[str], folds: Sequence[Fold], observed: Observed[Any]) -> list[Group]:
    """Divides the layers that were reached into groups: by the fold that they are consumers of, else by the tensor that they read.

    Args:
        layers: The layers that will be quantized.
        folds: What `find_folds` found.
        observed: Which layers were reached, and which read one tensor.
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
    """Divides the channels of the producer by a factor and multiplies the input channels of the consumers by it, in place.

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
    """Traces a model and returns the fold of every norm and linear layer whose output reaches a linear layer, in order of execution.

    Args:
        model: The model, in evaluation mode; left as it is.
        features: A small batch, of two rows and two positions at least.
        forward: Sends it through the model.
    """
    flow = _trace(model, features, forward)
    folds = [_follow(name, outputs, flow) for name, outputs in flow.produced.items()]
    return [fold for fold in folds if fold.consumers]


@dataclass(frozen=True)
class _Call:
    """One function that torch called."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", self.function))

    def argument(self, position: int, keyword: str) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(keyword)


@dataclass
class _Flow:
    """The traced calls. They keep every tensor alive, so that an id is one tensor."""

    linears: Mapping[int, str]
    """Module path of a linear layer by the id of its weight."""
    readers: dict[int, list[_Call]] = field(default_factory=dict)
    """By id of a tensor: the calls that take it."""
    produced: dict[str, list[Tensor]] = field(default_factory=dict)
    """By module path of a norm or linear layer: its output at each execution."""
    runs: Counter[str] = field(default_factory=Counter)
    """How often each linear layer runs."""
    answers: list[Tensor] = field(default_factory=list)
    """What the model returns."""

    def add(self, call: _Call) -> None:
        for tensor in {id(tensor): tensor for tensor in tensors_in((call.args, tuple(call.kwargs.values())))}:
            self.readers.setdefault(tensor, []).append(call)
        name = self.linear(call)
        if name is not None:
            self.produced.setdefault(name, []).append(call.result)
            self.runs[name] += 1

    def linear(self, call: _Call) -> str | None:
        """Returns the path of the linear layer that a call is, None for any other call."""
        return self.linears.get(id(call.argument(1, "weight"))) if call.name == LINEAR else None


class _Recorder(TorchFunctionMode):
    def __init__(self, flow: _Flow) -> None:
        super().__init__()
        self.flow = flow

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Questions about shape and type read no value; a call that returns nothing may have written into its argument.
        if result is None or any(True for _ in tensors_in(result)):
            self.flow.add(_Call(func, args, kwargs or {}, result))
        return result


def _trace(model: nn.Module, features: Mapping[str, Tensor], forward: Callable[[nn.Module, Mapping[str, Tensor]], object]) -> _Flow:
    owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    own = {
        name: module
        for name, module in model.named_modules()
        if all(owners[id(weight)] == 1 for weight in module.parameters(recurse=False))
    }
    flow = _Flow({id(module.weight): name for name, module in own.items() if isinstance(module, nn.Linear)})
    runs: dict[str, tuple[Any, Any, Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                flow.produced.setdefault(name, []).append(output)
                runs[name] = args, kwargs, output

        return hook

    norms = [name for name, module in own.items() if _looks_like_a_norm(module)]
    handles = [own[name].register_forward_hook(keep(name), with_kwargs=True) for name in norms]
    try:
        with torch.inference_mode(), _Recorder(flow):
            flow.answers = list(tensors_in(forward(model, features)))
    finally:
        for handle in handles:
            handle.remove()
    for name, run in runs.items():
        if not _scales(own[name], *run):
            del flow.produced[name]
    return flow


def _looks_like_a_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    vectors = all(parameter.dim() == 1 for parameter in parameters.values())
    return not any(True for _ in module.children()) and "weight" in parameters and parameters.keys() <= {"weight", "bias"} and vectors


def _scales(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> bool:
    """Whether the output of a norm is divided by a factor where its weight and bias are."""
    weights = dict(module.named_parameters(recurse=False))
    if any(weight.shape != output.shape[-1:] for weight in weights.values()):
        return False
    factor_C = torch.linspace(0.5, 2, output.shape[-1])
    with torch.inference_mode():
        divided = torch.func.functional_call(module, {name: weight / factor_C for name, weight in weights.items()}, args, kwargs)
        expected = module(*args, **kwargs) / factor_C
    return torch.allclose(divided, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def _follow(name: str, outputs: Sequence[Tensor], flow: _Flow) -> Fold:
    """Follows the output of a producer to the linear layers that read it, and to whatever else does."""
    reached: Counter[str] = Counter()
    multiplied: set[int] = set()
    blocks = []
    answers = {id(tensor) for tensor in flow.answers}
    for output in outputs:
        waiting, seen = [(output, _laid_out_as(output, torch.arange(output.shape[-1])))], set()
        while waiting:
            tensor, channel = waiting.pop(0)
            if id(tensor) in answers:
                blocks.append("it is what the model answers")
            readers = [] if id(tensor) in seen else flow.readers.get(id(tensor), [])
            seen.add(id(tensor))
            for call in readers:
                consumer = flow.linear(call)
                if consumer is None or call.argument(0, "input") is not tensor:
                    again = call.name in PRODUCT and id(call.result) in multiplied  # both factors come from the producer: s squared
                    multiplied.add(id(call.result))
                    passed = None if again else _pass(call, tensor, channel)
                    blocks += [] if passed is not None else [f"{call.name} reads it"]
                    waiting += passed or []
                    continue
                reached[consumer] += 1
                if channel.shape[-1] != output.shape[-1] or not bool((channel == torch.arange(output.shape[-1])).all()):
                    blocks.append(f"{consumer} reads its channels in another order")
    blocks += [f"{consumer} reads other tensors too" for consumer, runs in reached.items() if runs != flow.runs[consumer]]
    return Fold(name, tuple(reached), blocks[0] if blocks else None)


def _pass(call: _Call, tensor: Tensor, channel: Tensor) -> list[tuple[Tensor, Tensor]] | None:
    """Returns what a call makes of a tensor, with the channel number of each element; None where it lets no factor through.

    Args:
        call: A call that takes the tensor.
        tensor: The tensor.
        channel: int64, of its shape.
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
    """Returns channel numbers with shape and strides of a tensor, so that a view of the one is a view of the other."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.int64).copy_(channel.expand(tensor.shape))
