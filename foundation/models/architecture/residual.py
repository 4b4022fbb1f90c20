"""The residual stream of a Transformer: the norms over it, the weights that read them, and gains folded into these weights.

Where every branch of a model begins with a norm (pre-norm), the gains of the norms can move into the layers behind them, and the model
computes the same:

    W (g * n) + b                 ->  (W diag(g)) n + b
    W (g * n + beta) + b          ->  (W diag(g)) n + (b + W beta)       where all readers of a norm have biases
    W (g * n + beta)              ->  (W diag(g)) (n + beta / g)         elsewhere: the bias stays in the norm

After that the stream may be written in any orthogonal basis that the norms allow: `prune.width` takes principal components, and
`quantize.rotation` a basis without outliers. Where norms lie on the stream (post-norm, as in BERT), or at the end of a branch (Gemma 2),
gains cannot move. Nothing here knows that: who folds compares the outputs before and after.

Which norm a layer reads is observed on a few rows: the norm whose output is the memory of the layer's input, else the last one that ran.
How a norm uses its weight is observed too: LayerNorm subtracts the mean, and the norms of Gemma multiply by 1 + w.

Folding is SliceGPT's (Ashkboos et al. 2024, https://arxiv.org/abs/2401.15024).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundation.models.architecture.attention import is_layer
from foundation.models.architecture.axes import Axis
from foundation.models.architecture.structure import Structure
from foundation.models.layers.experts import LAST, is_stacked

Read = Callable[[str], Tensor]
"""Returns a weight of the model before the change, by name; of linear layers [O, I]."""
CENTRED = 1e-3
"""Largest mean of the output of a norm that subtracts the mean, for inputs whose mean and deviation are 1."""


@dataclass(frozen=True)
class NormKind:
    """How a norm uses its weight w."""

    centred: bool
    """Whether it subtracts the mean."""
    offset: float
    """Its gain is w plus this: 0, or 1."""


@dataclass(frozen=True)
class Stream:
    """What reads and normalizes the residual stream."""

    axes: frozenset[Axis]
    """Axes over its channels."""
    norms: Mapping[str, NormKind]
    """The norms over it, by module name."""
    gains: Mapping[Axis, str]
    """The axes along which weights are multiplied by the output of a norm, and that norm."""
    biases: Mapping[str, str]
    """Biases of readers that take over the bias of their norm, with the name of the weight beside each."""

    @classmethod
    def of(cls, model: nn.Module, structure: Structure, readers: Mapping[str, str]) -> Stream:
        """Describes the stream of a model.

        Args:
            model: The model; its weights are not read and may be on the meta device.
            structure: Its structure.
            readers: The norm that each module reads (`Readers`).
        """
        norms = norms_of(model, structure)
        gains = {axis: readers[owner_of(axis[0])] for axis in reading_axes(model, structure) if owner_of(axis[0]) in readers}
        named = dict(model.named_parameters(remove_duplicate=False))
        lacking = {norm for (name, _), norm in gains.items() if _bias_beside(name) not in named}
        biases = {_bias_beside(name): name for (name, _), norm in gains.items() if f"{norm}.bias" in named and norm not in lacking}
        return cls(structure.residual, {name: kind_of(model.get_submodule(name)) for name in norms}, gains, biases)

    @property
    def centred(self) -> bool:
        """Whether a norm subtracts the mean."""
        return any(kind.centred for kind in self.norms.values())

    @property
    def unread(self) -> list[str]:
        """Norms that no weight reads, whose gains cannot move."""
        return [norm for norm in self.norms if norm not in self.gains.values()]

    def changed(self, names: Iterable[str]) -> list[str]:
        """Returns those of some weights that folding changes, in an order in which each can replace the old one: biases are computed from
        weights, and both from norms."""
        read, norms = {name for name, _ in self.gains}, {f"{norm}.{part}" for norm in self.norms for part in ("weight", "bias")}
        ranks = {name: 2 * (name in norms) + (name in read) for name in names if name in self.biases or name in read or name in norms}
        return sorted(ranks, key=lambda name: (ranks[name], name.endswith(".weight")))  # the bias of a norm is computed from its weight

    def folded(self, name: str, values: Tensor, read: Read) -> Tensor:
        """Returns a weight after folding, float64.

        Args:
            name: Its name.
            values: The weight, or a part of it that has the whole last axis.
            read: Returns other weights before the change.
        """
        owner, part = owner_of(name), name.rpartition(".")[2]
        if owner in self.norms:
            if part == "weight":
                return torch.full_like(values, 1 - self.norms[owner].offset, dtype=torch.float64)
            taken = any(self.gains[axis] == owner for axis in self.gains if axis[0] in self.biases.values())
            return torch.zeros_like(values, dtype=torch.float64) if taken else values.double() / self.gain(owner, read)
        found = values.double()
        for axis, norm in self.gains.items():
            if axis[0] == name:
                found = found * self.gain(norm, read).view([-1 if place == axis[1] else 1 for place in range(values.ndim)])
        if name in self.biases:
            weight = self.biases[name]
            norm = next(norm for axis, norm in self.gains.items() if axis[0] == weight)
            found = found + read(weight).double() @ read(f"{norm}.bias").double()
        return found

    def gain(self, norm: str, read: Read) -> Tensor:
        """Returns the gain of a norm, float64 [D]."""
        return read(f"{norm}.weight").double() + self.norms[norm].offset


class Readers:
    """Observes, while modules run, the norm whose output each of them reads.

    Args:
        model: The model; its weights are not read.
        structure: Its structure.
    """

    def __init__(self, model: nn.Module, structure: Structure) -> None:
        self._norms = frozenset(norms_of(model, structure))
        owners = {owner_of(name) for name, _ in reading_axes(model, structure)}
        self._layers = {name: is_layer(model.get_submodule(name)) for name in owners}
        self._made: dict[int, str] = {}
        self._last: list[str] = []
        self._outputs: list[Tensor] = []
        self.found: dict[str, str] = {}
        """The norm that each module reads, by name."""

    def watch(self, modules: Iterable[tuple[str, nn.Module]]) -> ExitStack:
        """Observes modules by name, until the result is closed."""
        with ExitStack() as stack:
            for name, module in modules:
                if name in self._norms:
                    hook = module.register_forward_hook(lambda module, inputs, output, name=name: self._wrote(name, output))
                    stack.callback(hook.remove)
                elif name in self._layers:
                    hook = module.register_forward_pre_hook(lambda module, inputs, name=name: self._read(name, inputs))
                    stack.callback(hook.remove)
            return stack.pop_all()

    def _wrote(self, name: str, output: Tensor) -> None:
        self._made[output.untyped_storage().data_ptr()] = name
        self._outputs.append(output)  # kept alive, so that its memory is not given to another
        self._last[:] = [name]

    def _read(self, name: str, inputs: tuple[Any, ...]) -> None:
        if not inputs or not isinstance(inputs[0], Tensor):
            return
        # what is no linear layer may own a weight that is added to the stream
        otherwise = self._last[0] if self._last and self._layers[name] else None
        norm = self._made.get(inputs[0].untyped_storage().data_ptr(), otherwise)
        if norm is not None:
            self.found[name] = norm


def stream_of(model: nn.Module, structure: Structure, run: Callable[[], object]) -> Stream:
    """Returns the stream of a model in memory; `run` runs it on a few rows."""
    readers = Readers(model, structure)
    with readers.watch(model.named_modules()), torch.no_grad():
        run()
    return Stream.of(model, structure, readers.found)


def norms_of(model: nn.Module, structure: Structure) -> tuple[str, ...]:
    """Returns the names of all norms over the residual stream, in model order."""
    vectors = {name for name, value in model.state_dict().items() if value.ndim == 1}
    norms = {owner_of(name) for name, _ in structure.residual if name in vectors and name.endswith(".weight")}
    return tuple(name for name, module in model.named_modules() if name in norms and not is_layer(module))


def reading_axes(model: nn.Module, structure: Structure) -> Iterator[Axis]:
    """Yields the axes along which weights are multiplied by what they read of the stream: inputs of linear layers, experts and routers."""
    modules = dict(model.named_modules())
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    for name, axis in sorted(structure.residual):
        owner, part = modules[owner_of(name)], name.rpartition(".")[2]
        if isinstance(owner, nn.Embedding) or len(shapes[name]) < 2:
            continue
        if is_stacked(owner):  # [E, O, I], or [E, I, O]
            if not part.startswith(LAST) and not part.endswith("_bias"):
                yield name, axis
        elif len(shapes[name]) == 2 and axis == 1:
            yield name, axis


def kind_of(norm: nn.Module) -> NormKind:
    """Observes how a norm uses its weight."""
    tried: Any = copy.deepcopy(norm)
    tried = (tried.to_empty(device="cpu") if tried.weight.is_meta else tried.cpu()).double().eval().requires_grad_(False)
    x_ND = 1 + torch.randn(4, len(tried.weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if getattr(tried, "bias", None) is not None:
        tried.bias.zero_()
    tried.weight.zero_()
    without_ND = tried(x_ND)
    tried.weight.fill_(1.0)
    normalized_ND = tried(x_ND) - without_ND
    power = float(normalized_ND.square().sum())
    offset = float((without_ND * normalized_ND).sum()) / power if power else 0.0
    return NormKind(bool(normalized_ND.mean(dim=1).abs().max() < CENTRED), float(round(offset)))


def fold(model: nn.Module, stream: Stream) -> None:
    """Folds the gains of all norms into the weights that read them, in place."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name in stream.changed(parameters):
            parameters[name].copy_(stream.folded(name, parameters[name], parameters.__getitem__))


def owner_of(weight: str) -> str:
    """Returns the name of the module that owns a weight."""
    return weight.rpartition(".")[0]


def _bias_beside(weight: str) -> str:
    """Returns the name that the bias next to a weight would have."""
    return f"{owner_of(weight)}.bias"
