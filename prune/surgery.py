"""Surgery: from a model and what is kept of it to a smaller model that answers the same as the large one with the rest silenced.

    layers       blocks are taken out of the stack; what the block before gives is what the next one reads
    heads        rows of W_q, W_k, W_v (and their biases), columns of W_o; of grouped heads a whole group: keys, values and their queries
    ffn          rows of W_up (and W_gate), columns of W_down
    experts      slices of the weights of all experts, rows of the router: the softmax runs over those that are left
    hidden       channels of the residual stream: of embeddings, norms, every layer that reads or writes it, and the head
    vocabulary   rows of the embedding, and of the head of a language model; the tokenizer has to follow (`prune.vocabulary`)

All but `hidden` are exact: the small model computes what the large one does with zeros in the columns that read what is gone. Norms average
over the channels that are left, so a narrower model is that of norms which do so too. What is kept stays in its order.

The axes come from `compress.models.structure`, the config from `compress.models.shapes`. Left out: single numbers of heads, whole
attentions or FFNs of a block, neurons of single experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compress.core.errors import InputError
from compress.models.axes import Axis
from compress.models.blocks import with_layers
from compress.models.shapes import remade, with_sizes
from compress.models.structure import Sizes, Structure
from prune.vocabulary import with_vocabulary


@dataclass(frozen=True)
class Kept:
    """What is kept of a model: indices from 0, ascending. Lists of lists have one entry for every layer of the large model."""

    layers: Sequence[int]
    heads: Sequence[Sequence[int]]
    """Heads of keys and values, each with the query heads that share it."""
    ffn: Sequence[Sequence[int]]
    """Neurons."""
    experts: Sequence[Sequence[int]]
    hidden: Sequence[int]
    """Channels of the residual stream."""
    vocabulary: Sequence[int]

    @classmethod
    def everything(cls, sizes: Sizes) -> Kept:
        """Returns what keeps the whole of a model."""
        heads, ffn, experts = (tuple(map(range, counts)) for counts in (sizes.key_value_heads, sizes.ffn, sizes.experts))
        return cls(range(len(sizes.heads)), heads, ffn, experts, range(sizes.hidden), range(sizes.vocabulary))

    def query_heads(self, before: Sizes) -> list[list[int]]:
        """Returns the query heads of the layers that are kept, from the sizes of the large model."""
        groups = [before.heads[layer] // before.key_value_heads[layer] for layer in self.layers]
        return [_numbers(self.heads[layer], group).tolist() for layer, group in zip(self.layers, groups, strict=True)]

    def sizes(self, before: Sizes) -> Sizes:
        """Returns the sizes of the small model, from those of the large one."""
        groups = [heads // shared for heads, shared in zip(before.heads, before.key_value_heads, strict=True)]
        return replace(
            before.of_layers(self.layers),
            hidden=len(self.hidden),
            vocabulary=len(self.vocabulary),
            heads=tuple(groups[layer] * len(self.heads[layer]) for layer in self.layers),
            key_value_heads=tuple(len(self.heads[layer]) for layer in self.layers),
            ffn=tuple(len(self.ffn[layer]) for layer in self.layers),
            experts=tuple(len(self.experts[layer]) for layer in self.layers),
        )


def shrink(model: nn.Module, structure: Structure, kept: Kept, key: str) -> nn.Module:
    """Returns the small model, in evaluation mode on the CPU; the large one is left as it is.

    Args:
        model: A Transformers model as `compress.models.checkpoint.load` gives it.
        structure: Its structure.
        kept: What is kept of it.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: No model of such a shape can be made.
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
        source = _source(target, structure.prefix, kept.layers)
        weight = weights[source].cpu()
        for axis in range(weight.ndim):
            if (source, axis) in chosen:
                weight = weight.index_select(axis, chosen[source, axis])
        sliced[target] = weight
    small.load_state_dict(sliced)
    return small.eval()


def check_shapes(
    structure: Structure, kept: Kept, large: Mapping[str, Tensor], small: Mapping[str, Tensor], model_type: str, key: str
) -> None:
    """Sees to it that what is left of every weight has the shape that the small model wants; no value is looked at.

    Args:
        structure: Of the large model.
        kept: What is kept of it.
        large: Its weights by name; may lie on the meta device.
        small: Those of a small model.
        model_type: Of both, for the message.
        key: Key path of the stage, for the message.

    Raises:
        InputError: Some weight has another shape, or is not in the large model.
    """
    chosen = indices(structure, kept)
    for target, wanted in small.items():
        source = _source(target, structure.prefix, kept.layers)
        shape = large[source].shape if source in large else ()
        left = [len(chosen[source, axis]) if (source, axis) in chosen else length for axis, length in enumerate(shape)]
        if left != list(wanted.shape):
            raise InputError(f"{key}: {source} of this {model_type} does not follow what is taken away; it cannot be pruned like that")


def indices(structure: Structure, kept: Kept) -> dict[Axis, Tensor]:
    """Returns what is kept along every axis of every weight, int64; axes that are absent are kept whole."""
    chosen = dict.fromkeys(structure.residual, torch.tensor(kept.hidden))
    chosen |= dict.fromkeys(structure.vocabulary, torch.tensor(kept.vocabulary))
    for block, attention in enumerate(structure.attentions):
        numbers = head_numbers(kept.heads[block], attention.group, attention.head_dim)
        for axis, parts in structure.heads[block].items():
            starts, start = [], 0
            for what, _ in parts:
                starts.append(numbers[what] + start)
                start += attention.size(what)
            chosen[axis] = torch.cat(starts)
        for axes, of_block, size in (
            (structure.ffn[block], kept.ffn[block], structure.sizes.ffn[block]),
            (structure.experts[block], kept.experts[block], structure.sizes.experts[block]),
        ):
            for axis in axes:
                times = structure.repeated.get(axis, 1)
                chosen[axis] = torch.cat([torch.tensor(of_block) + part * size for part in range(times)])
    return chosen


def head_numbers(kept: Sequence[int], group: int, head_dim: int) -> Mapping[str, Tensor]:
    """Returns the numbers of the heads that are kept, int64, for query, key and value.

    Args:
        kept: Heads of keys and values.
        group: Query heads that share one of them.
        head_dim: Numbers of a head.
    """
    shared = _numbers(kept, head_dim)
    return {"query": _numbers(kept, group * head_dim), "key": shared, "value": shared}


def _numbers(kept: Sequence[int], size: int) -> Tensor:
    """Returns the numbers of pieces of `size` numbers each."""
    return (torch.tensor(kept)[:, None] * size + torch.arange(size)).flatten()


def _source(target: str, prefix: str, layers: Sequence[int]) -> str:
    """Returns the name that a weight of the small model has in the large one."""
    if not target.startswith(f"{prefix}."):
        return target
    block, _, rest = target.removeprefix(f"{prefix}.").partition(".")
    return f"{prefix}.{layers[int(block)]}.{rest}"
