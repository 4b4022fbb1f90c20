"""Bytes that are alive while a model without memory trains: every tensor from the operation that makes it until the last reference is gone.

The pass runs in torch's FakeTensorMode, so that its operations, casts and results are as in a training, and what they make is counted as
the allocator of a device would: what autograd keeps, what a function holds for a moment, and what a loss makes of the logits. Weights,
inputs and complete gradients are counted apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that are alive.

    Args:
        known: Tensors that do not count.
        trained: Parameters whose gradients count apart once they are complete.
    """

    def __init__(self, known: Iterable[torch.Tensor], trained: Iterable[nn.Parameter] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {_key(tensor.untyped_storage()) for tensor in known}
        self.sizes: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self.now = self.complete = 0
        self.peaks: dict[int, int] = {}
        """The most bytes that were alive, by the number of weights whose gradient was complete then."""
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._completed)  # type: ignore[no-untyped-call]
            for parameter in trained
        ]

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        self.meanwhile(0)
        return result

    def meanwhile(self, size: int) -> None:
        """Counts bytes that something else takes for a moment."""
        self.peaks[self.complete] = max(self.now + size, self.peaks.get(self.complete, 0))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = _key(storage)
        if key not in self.known and key not in self.sizes:
            self.sizes[key] = storage.nbytes(), weakref.ref(storage, lambda _: self._forget(key))
            self.now += storage.nbytes()

    def _forget(self, key: int) -> None:
        size, _ = self.sizes.pop(key, (0, None))
        self.now -= size

    def _completed(self, parameter: torch.Tensor) -> None:
        """Counts the gradient of a parameter apart."""
        assert parameter.grad is not None, "the hook runs after its gradient is there"
        self._forget(_key(parameter.grad.untyped_storage()))
        self.complete += parameter.numel()
        self.meanwhile(0)


def _key(storage: torch.UntypedStorage) -> int:
    key: int = storage._cdata
    return key
