"""Surgery: build the smaller model from the units that stay; it computes what the large model computes with the others set to 0.

    layers       blocks are removed from the stack
    heads        rows of W_q, W_k, W_v (and their biases), columns of W_o; with grouped-query attention whole groups: keys, values, queries
    cross        the same for the attention of a decoder's block to the encoder
    ffn          rows of W_up (and W_gate), columns of W_down
    experts      slices of the stacked expert weights, or experts that are modules, and rows of the router: its softmax runs over the
                 remaining experts
    hidden       channels of the residual stream: of embeddings, norms, every layer that reads or writes it, and the head
    vocabulary   rows of the embedding and of a language model's head; the tokenizer must follow (`prune.embeddings.vocabulary`)

All but `hidden` are exact: setting the columns that read the removed units to 0 in the large model gives the same outputs. For `hidden`,
norms average over the remaining channels only. Units that stay keep their order.

Of an encoder-decoder the layers of either side are removed; what only the first block has, such as T5's table of relative positions, moves
to the new first block. Heads of T5 stay: all its layers share one table with an entry for each head.

The axes come from `foundation.models.architecture.structure`, the config from `foundation.models.architecture.shapes`. Not supported:
single channels of a head, whole attentions or FFNs of a block, neurons of single experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture.axes import Axis
from foundation.models.architecture.blocks import block_of, source_of, with_layers
from foundation.models.architecture.shapes import remade, with_sizes
from foundation.models.architecture.structure import HEAD_KINDS, Sizes, Structure, head_indices, unit_indices
from foundation.models.layers.expert_names import numbered, renumbered
from prune.cost import Component
from prune.embeddings.vocabulary import with_vocabulary


@dataclass(frozen=True)
class KeptUnits:
    """The units that stay: indices from 0, ascending. Nested lists have one entry per layer of the large model."""

    layers: Sequence[int]
    heads: Sequence[Sequence[int]]
    """Key-value heads, each with the query heads that share it."""
    ffn: Sequence[Sequence[int]]
    """FFN neurons."""
    experts: Sequence[Sequence[int]]
    hidden: Sequence[int]
    """Channels of the residual stream."""
    vocabulary: Sequence[int]
    cross: Sequence[Sequence[int]] = ()
    """Heads that read the encoder; empty for a model with one stack of layers."""

    @classmethod
    def everything(cls, sizes: Sizes) -> KeptUnits:
        """Returns all units of a model with these sizes."""
        heads, ffn, experts = (tuple(map(range, counts)) for counts in (sizes.key_value_heads, sizes.ffn, sizes.experts))
        cross = tuple(map(range, sizes.cross))
        return cls(range(len(sizes.heads)), heads, ffn, experts, range(sizes.hidden), range(sizes.vocabulary), cross)

    def units(self, block: int, what: Component) -> Sequence[int]:
        """Returns the units of a component of a block that stay."""
        kept: Mapping[Component, Sequence[Sequence[int]]] = {
            "heads": self.heads,
            "cross": self.cross,
            "ffn": self.ffn,
            "experts": self.experts,
        }
        return kept[what][block] if kept[what] else ()

    def query_heads(self, before: Sizes) -> list[list[int]]:
        """Returns the query heads of the layers that stay, given the sizes of the large model."""
        groups = [before.heads[layer] // before.key_value_heads[layer] for layer in self.layers]
        return [unit_indices(self.heads[layer], group).tolist() for layer, group in zip(self.layers, groups, strict=True)]

    def sizes(self, before: Sizes) -> Sizes:
        """Returns the sizes of the small model from the sizes of the large one."""
        groups = [heads // shared for heads, shared in zip(before.heads, before.key_value_heads, strict=True)]
        return replace(
            before.of_layers(self.layers),
            hidden=len(self.hidden),
            vocabulary=len(self.vocabulary),
            heads=tuple(groups[layer] * len(self.heads[layer]) for layer in self.layers),
            key_value_heads=tuple(len(self.heads[layer]) for layer in self.layers),
            ffn=tuple(len(self.ffn[layer]) for layer in self.layers),
            experts=tuple(len(self.experts[layer]) for layer in self.layers),
            cross=tuple(len(self.cross[layer]) for layer in self.layers) if self.cross else (),
        )


def shrink(model: nn.Module, structure: Structure, kept: KeptUnits, key: str) -> nn.Module:
    """Returns the small model, in evaluation mode on the CPU; the large model is not changed.

    Args:
        model: A Transformers model from `foundation.models.checkpoint.load`.
        structure: Its structure.
        kept: Units that stay.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: The architecture does not support this shape.
    """
    chosen = indices(structure, kept)
    config = with_layers(model.config, kept.layers)
    if len(kept.vocabulary) < structure.sizes.vocabulary:
        config = with_vocabulary(config, kept.vocabulary)
    config = with_sizes(config, kept.sizes(structure.sizes), key)
    small = remade(model, config)
    weights = model.state_dict()
    check_shapes(structure, kept, weights, small.state_dict(), config.model_type, key)
    sliced = {}
    for target in small.state_dict():
        source = _source_of(target, structure, kept, weights)
        weight = weights[source].cpu()
        for axis in range(weight.ndim):
            if (source, axis) in chosen:
                weight = weight.index_select(axis, chosen[source, axis])
        sliced[target] = weight
    small.load_state_dict(sliced)
    return small.eval()


def _source_of(target: str, structure: Structure, kept: KeptUnits, weights: Mapping[str, Tensor]) -> str:
    """Returns the weight of the large model that becomes a weight of the small one: of another layer, and of another of listed experts."""
    source = source_of(target, structure.stacks, kept.layers, weights)
    found, block = numbered(source), block_of(source, list(structure.blocks))
    return source if found is None or block is None else renumbered(source, kept.experts[block][found[1]])


def check_shapes(
    structure: Structure, kept: KeptUnits, large: Mapping[str, Tensor], small: Mapping[str, Tensor], model_type: str, key: str
) -> None:
    """Checks that every sliced weight has the shape that the small model expects; reads shapes only, no values.

    Args:
        structure: Structure of the large model.
        kept: Units that stay.
        large: Weights of the large model by name; may be on the meta device.
        small: Weights of the small model by name; may be on the meta device.
        model_type: Model type of both, for messages.
        key: Key path of the stage, for messages.

    Raises:
        InputError: A weight has another shape, or does not exist in the large model.
    """
    chosen = indices(structure, kept)
    for target, wanted in small.items():
        source = _source_of(target, structure, kept, large)
        shape = large[source].shape if source in large else ()
        left = [len(chosen[source, axis]) if (source, axis) in chosen else length for axis, length in enumerate(shape)]
        if left != list(wanted.shape):
            raise InputError(key, f"{source} of this {model_type} does not shrink with the pruned units", "it cannot be pruned like that")


def indices(structure: Structure, kept: KeptUnits) -> dict[Axis, Tensor]:
    """Returns the indices that stay along each pruned axis of each weight, int64; axes that are absent stay whole."""
    chosen = dict.fromkeys(structure.residual, torch.tensor(kept.hidden))
    chosen |= dict.fromkeys(structure.vocabulary, torch.tensor(kept.vocabulary))
    for block in range(structure.depth):
        for kind in HEAD_KINDS:
            found = structure.of_heads(block, kind)
            if found is not None:
                shared, attention = kept.units(block, kind), found[0]
                chosen |= head_indices(*found, head_numbers(shared, attention.group, attention.head_dim), shared)
        for axes, of_block, size in (
            (structure.ffn[block], kept.ffn[block], structure.sizes.ffn[block]),
            (structure.experts[block], kept.experts[block], structure.sizes.experts[block]),
        ):
            for axis in axes:
                times = structure.repeated.get(axis, 1)
                chosen[axis] = torch.cat([torch.tensor(of_block) + part * size for part in range(times)])
    return chosen


def head_numbers(kept: Sequence[int], group: int, head_dim: int) -> Mapping[str, Tensor]:
    """Returns the rows of the query, key and value projections that stay, int64.

    Args:
        kept: Key-value heads that stay.
        group: Query heads per key-value head.
        head_dim: Channels per head.
    """
    shared = unit_indices(kept, head_dim)
    return {"query": unit_indices(kept, group * head_dim), "key": shared, "value": shared}
