"""Activations that backward needs, kept as 8-bit integers (ActNN, Chen et al. 2021, https://arxiv.org/abs/2104.14129).

What linear layers, norms and activation functions save for their backward pass is stored as

    q = rint(x / s),  s = max |x| / 127        for each group of up to 256 neighbours in the last axis

in about a quarter of the bytes of float32 and half of those of bfloat16. The forward pass, and so the loss, stays as it is; gradients of
weights are computed from x within s / 2. What gradients are multiplied with on their way down, the weights, stays exact, and so do the
small statistics of norms. Rounding is to nearest, so that a training draws no other random numbers; the paper rounds at random, which
2 bits need.

Autograd's hooks of saved tensors do it, opened around the modules in question. A tensor that several layers read, as
the input of queries, keys and values, is packed once: it is known by its storage, which a weak reference keeps from being taken for another
one, by its place in it and by its version.

Left out: convolutions, batch norms and ReLU; attention, whose kernels compute probabilities once more from queries, keys and the logarithms
of sums, so that an error of a score is exponentiated, and whose gradients are differences that nearly cancel where one score is far above
the others; what a model's own code multiplies or drops out; and a linear layer's input that has the shape of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.pytorch_utils import Conv1D

from foundation.training.forwards import wrapped_forward

GROUPS = (256, 128, 64, 32)
"""Numbers of neighbours with one scale: the first that divides the last axis; else the whole axis is a group."""
LEAST_AXIS, LEAST_NUMBERS = 32, 4096
"""Smaller tensors stay as they are: their scales would take as much, or they are statistics."""
LEVELS = 127
ACTIVATIONS = (nn.GELU, nn.SiLU, nn.Tanh)
NORM, OF_TRANSFORMERS, RECTIFIER = "Norm", "transformers.activations", "ReLU"
"""End of the name of a class that normalizes, the file of the activation functions of Transformers, and part of the names of those that
only ask whether a value is above 0: a small one would become 0."""
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Packed:
    """A saved tensor in 8 bits."""

    codes: Tensor
    """int8 [groups, size of a group]."""
    scale: Tensor
    """float32 [groups, 1]."""
    shape: torch.Size
    dtype: torch.dtype
    source: StorageWeakRef
    """Storage of the tensor: while this reference is there, no other storage gets its address."""

    def tensor(self) -> Tensor:
        """Returns the tensor, rounded."""
        return (self.codes * self.scale).to(self.dtype).reshape(self.shape)


def packed(tensor: Tensor) -> Packed:
    """Returns a tensor in 8 bits.

    Args:
        tensor: Floating point, of any shape with at least one axis.
    """
    size = tensor.shape[-1]
    group = next((one for one in GROUPS if size % one == 0), size)
    values = tensor.detach().reshape(-1, group).float()
    scale = (values.abs().amax(dim=1, keepdim=True) / LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (values / scale).round_().to(torch.int8)
    return Packed(codes, scale, tensor.shape, tensor.dtype, StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]


@contextmanager
def saved_in_int8(model: nn.Module) -> Iterator[None]:
    """Within the block, the layers of a model save what backward needs in 8 bits; the modules are as before afterwards.

    Args:
        model: A Transformers model, sharded or not.
    """
    store = _Store()
    modules = [module for module in model.modules() if _saves_activations(module)]
    with wrapped_forward(modules, lambda module: partial(_run, store, module, module.forward)):
        yield


def _saves_activations(module: nn.Module) -> bool:
    """Whether a module is a layer that saves its input, or a feed-forward network, which may multiply what its activation gives."""
    layers = (nn.Linear, Conv1D)
    own = isinstance(module, layers) or type(module).__name__.endswith(NORM) or _activates(module)
    children = list(module.children())
    alone = not any(True for child in children for _ in child.children())  # others hold attention too
    return own or (alone and any(map(_activates, children)) and any(isinstance(one, layers) for one in children))


def _activates(module: nn.Module) -> bool:
    kind = type(module)
    return (isinstance(module, ACTIVATIONS) or kind.__module__ == OF_TRANSFORMERS) and RECTIFIER not in kind.__name__


class _Store:
    """Packs tensors, each once."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[object, ...], Packed] = WeakValueDictionary()

    def saving(self, keeps: Callable[[Tensor], bool]) -> saved_tensors_hooks:
        """Returns a context in which autograd saves tensors in 8 bits.

        Args:
            keeps: Whether a tensor stays as it is.
        """
        return saved_tensors_hooks(partial(self._pack, keeps), _unpack)

    def _pack(self, keeps: Callable[[Tensor], bool], tensor: Tensor) -> Tensor | Packed:
        if type(tensor) not in (Tensor, FakeTensor) or not tensor.is_floating_point() or _is_small(tensor) or keeps(tensor):
            return tensor
        key = (*_place(tensor), tensor._version, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = packed(tensor)
        return known


def _unpack(saved: Tensor | Packed) -> Tensor:
    return saved.tensor() if isinstance(saved, Packed) else saved


def _is_small(tensor: Tensor) -> bool:
    return tensor.dim() < 2 or tensor.shape[-1] < LEAST_AXIS or tensor.numel() < LEAST_NUMBERS


def _run(store: _Store, module: nn.Module, forward: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Runs a module, which saves its input in 8 bits; its weights, cast or transposed ones too, stay as they are."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    shapes = {tuple(weight.shape) for weight in module.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    with store.saving(lambda tensor: tuple(tensor.shape) in shapes):
        return forward(*args, **kwargs)


def _place(tensor: Tensor) -> tuple[int, int | torch.SymInt]:
    """Returns what tells where a tensor begins; one without memory has it too."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()
