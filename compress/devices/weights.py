"""The weights of a model by what can be done with them: counted on the meta device, from the config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from compress.models.architecture.blocks import blocks_of
from compress.models.architecture.shapes import on_meta
from compress.models.layers.experts import is_stacked


@dataclass(frozen=True)
class Weights:
    """Numbers of weights."""

    matrices: int
    """Of the linear layers of the blocks: divided by tensor parallelism, and what a scheme packs."""
    rows: int
    """Outputs of these layers: each has a scale where weights are packed."""
    experts: int
    """Of the experts of mixtures: divided like the matrices, or expert by expert."""
    expert_rows: int
    vocabulary: int
    """Of embeddings and the head of a language model: 16 bits."""
    rest: int
    """Norms, biases, routers, poolers, classifiers: every device has them, in 16 bits."""

    @property
    def total(self) -> int:
        """All weights."""
        return self.matrices + self.experts + self.vocabulary + self.rest


def weights_of(config: Any) -> Weights:
    """Returns the weights of the model that a Transformers config describes; shared ones count once."""
    model: Any = on_meta(config)
    model.tie_weights()  # which is left out where weights are not initialized
    blocks = tuple(f"{name}." for name in blocks_of(model, "model"))
    experts = tuple(f"{name}." for name, module in model.named_modules() if is_stacked(module))
    outside = {id(parameter) for module in model.modules() if isinstance(module, nn.Embedding) for parameter in module.parameters()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outside |= {id(head.weight)} if head is not None else set()
    counts = dict.fromkeys(("matrices", "rows", "experts", "expert_rows", "vocabulary", "rest"), 0)
    for name, parameter in model.named_parameters():
        if name.startswith(experts) and experts:
            counts["experts"] += parameter.numel()
            counts["expert_rows"] += parameter.numel() // parameter.shape[-1]
        elif id(parameter) in outside:
            counts["vocabulary"] += parameter.numel()
        elif name.startswith(blocks) and parameter.ndim >= 2 and not _routes(name):
            counts["matrices"] += parameter.numel()
            counts["rows"] += parameter.numel() // parameter.shape[-1]
        else:
            counts["rest"] += parameter.numel()
    return Weights(**counts)


def _routes(name: str) -> bool:
    """Whether a weight chooses experts: it is small, and every device needs all of it."""
    return name.endswith((".gate.weight", ".router.weight", ".router.classifier.weight"))
