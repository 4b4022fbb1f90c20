"""Small models whose training is measured, and what measures the tensors of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, LlamaConfig, ViTConfig

from foundation.labels.tasks import Task

LAYERS = 2
SIZES = {"hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
KINDS: dict[str, tuple[Task, Any]] = {
    "bert": ("text-classification", BertConfig(**SIZES, intermediate_size=512, vocab_size=1000)),
    "llama": ("text-generation", LlamaConfig(**SIZES, intermediate_size=352, num_key_value_heads=2, vocab_size=1000)),
    "vit": ("image-classification", ViTConfig(**SIZES, intermediate_size=512, image_size=64, patch_size=8)),
}


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of storages that are alive after an operation; torch's tracker refuses models with frozen weights."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total = 0
        """Bytes of these, some of which may be freed by now."""
        self.peak = 0
        self.see(known)

    def see(self, tensors: Iterable[torch.Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            _, before = self.alive.get(storage._cdata, (None, 0))
            self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.total += storage.nbytes() - before
        if self.total > self.peak:  # else none of them can make a new peak
            self.alive = {key: (weak, size) for key, (weak, size) in self.alive.items() if not weak.expired()}
            self.total = sum(size for _, size in self.alive.values())
            self.peak = max(self.peak, self.total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(each for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        return result
