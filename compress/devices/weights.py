"""The weights of a model by what can be done with them: counted on the meta device, from the config alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from torch import nn

from foundation.models.architecture.blocks import block_of, blocks_of
from foundation.models.architecture.shapes import on_meta
from foundation.models.layers.experts import is_stacked

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Block:
    """Numbers of weights of one block, or of several."""

    matrices: int = 0
    """Bytes of its linear layers: tensor parallelism divides them, and a scheme packs them."""
    rows: int = 0
    """Outputs of these layers: each has a scale where weights are packed."""
    experts: int = 0
    """Bytes of the experts of mixtures: divided like the linear layers, or expert by expert."""
    expert_rows: int = 0
    rest: int = 0
    """Norms, biases, routers: every device that has the block has them, in 16 bits."""

    def __add__(self, other: Block) -> Block:
        return Block(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class Weights:
    """Numbers of weights. Of tables a step reads rows; all else it reads whole."""

    blocks: tuple[Block, ...]
    words: int = 0
    """Bytes of the word embeddings, on the first device of a pipeline; 16 bits, divided by tensor parallelism."""
    head: int = 0
    """Bytes of the output layer of a language model, on the last device of a pipeline; 16 bits, divided too."""
    tied: bool = False
    """Whether that is the table of words."""
    tables: int = 0
    """Bytes of other tables, such as positions: on the first device of a pipeline, replicated under tensor parallelism."""
    entries: int = 0
    """Numbers in a row of every table, which is what a token reads."""
    before: int = 0
    """Norms and patches before the blocks."""
    behind: int = 0
    """Norms, poolers, classifiers after the blocks."""

    @property
    def whole(self) -> Block:
        """All blocks together."""
        return sum(self.blocks, Block())

    @property
    def total(self) -> int:
        """All weights; shared ones count once."""
        blocks = self.whole
        shared = self.head if self.tied else 0
        return blocks.matrices + blocks.experts + blocks.rest + self.words + self.head - shared + self.tables + self.before + self.behind


def weights_of(config: PreTrainedConfig) -> Weights:
    """Returns the weights of the model that a Transformers config describes."""
    model: PreTrainedModel = on_meta(config)
    model.tie_weights()  # which is left out where weights are not initialized
    named = blocks_of(model, "model")
    experts = tuple(f"{name}." for name, module in model.named_modules() if is_stacked(module))
    tables = {id(module.weight): module for module in model.modules() if isinstance(module, nn.Embedding)}
    words, head = model.get_input_embeddings(), getattr(model, "get_output_embeddings", lambda: None)()
    first, last = (id(getattr(module, "weight", None)) for module in (words, head))
    blocks = [Counter[str]() for _ in named]
    outside: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        number, size = block_of(name, tuple(named)), parameter.numel()
        if id(parameter) in tables or id(parameter) == last:
            outside["words" if id(parameter) == first else "head" if id(parameter) == last else "tables"] += size
        elif number is None:
            outside["behind" if any(block.total() for block in blocks) else "before"] += size
        elif name.startswith(experts) and experts:
            blocks[number].update(experts=size, expert_rows=size // parameter.shape[-1])
        elif parameter.ndim >= 2 and not _routes(name):
            blocks[number].update(matrices=size, rows=size // parameter.shape[-1])
        else:
            blocks[number].update(rest=size)
    tied = head is not None and first == last
    outside["head"] = outside["words"] if tied else outside["head"]
    entries = sum(module.embedding_dim for module in tables.values())
    return Weights(tuple(Block(**block) for block in blocks), tied=tied, entries=entries, **outside)


def _routes(name: str) -> bool:
    """Whether a weight chooses experts: it is small, and every device needs all of it."""
    return name.endswith((".gate.weight", ".router.weight", ".router.classifier.weight"))
