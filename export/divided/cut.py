"""Splits a model into the shares of its ranks, as Megatron divides layers (https://arxiv.org/abs/1909.08053, section 3).

    column   query, key, value, the first layer of an FFN    a rank has some outputs: rows of W, their bias and their scales
    row      attention output, the last layer of an FFN      a rank has some inputs: columns of W, and what belongs to an input
    whole    embeddings, norms, routers, pooler, head        every rank has all of it

A rank has heads / N query heads with the keys and values that they read, and F / N neurons, of every expert where there are several. Where
there are fewer heads of keys than ranks, several ranks hold copies of one. Between a column layer and the row layer after it no rank needs
anything of another: one sum for each row layer is all that they exchange (`export.divided.row_linear`).

Of the numbers of a quantized layer go

    with an output   code row, scale of the weight, zero points, bias of a column layer
    with an input    code column, smoothing vector, groups of int4 (a group is never cut)
    with every rank  scale of the input, scales of int8 attention and residuals, bias of a row layer (added once, after the sum)

so that the codes of the ranks, put together, are the codes of the checkpoint.

Experts may be dealt out instead, each whole on one rank (`export.divided.dealt_experts`); attention, and FFNs of blocks without experts,
are divided as above, and what reads every token besides the experts is whole.

Not supported: encoder-decoders, numbers of heads or neurons that the ranks do not divide, division of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from foundation.models.architecture.axes import Axis
from foundation.models.architecture.structure import Sizes, Structure, head_indices, is_interleaved, unit_indices
from foundation.schemes.int4 import GRID
from foundation.schemes.scales import Scales

AnyScales = TypeVar("AnyScales", bound=Scales)


def refusal(structure: Structure, ranks: int, whole_experts: bool = False) -> str | None:
    """Returns in a few words why a model cannot be divided over so many ranks; None where it can.

    Args:
        structure: The structure of the model.
        ranks: Number of ranks.
        whole_experts: Whether experts are dealt out.
    """
    if len(structure.stacks) > 1:
        return "an encoder-decoder is not divided"
    for block, attention in enumerate(structure.attentions):
        heads, shared, neurons = attention.heads, attention.key_value_heads, structure.sizes.ffn[block]
        if heads % ranks:
            return f"block {block} has {heads} attention heads"
        copies = any(is_interleaved(attention, parts) for parts in structure.heads[block].values())
        if shared % ranks and (ranks % shared or copies):
            return f"block {block} has {shared} heads of keys and values"
        if whole_experts and structure.sizes.experts[block]:
            if structure.sizes.experts[block] % ranks:
                return f"block {block} has {structure.sizes.experts[block]} experts"
        elif neurons % ranks:
            return f"block {block} has {neurons} FFN neurons"
    return None


def cut_group(layers: Mapping[str, Scales], held: Mapping[Axis, Tensor]) -> str | None:
    """Returns in a few words which group of int4 weights a cut goes through; None where it goes through none.

    Args:
        layers: Scales by module path.
        held: The indices that a rank holds, by axis.
    """
    for name, scales in layers.items():
        group, inputs = scales.entry().get("group_size"), held.get((f"{name}.weight", 1))
        if group is not None and inputs is not None and len(inputs) % group:
            return f"{name} would have {len(inputs)} inputs on each rank, and groups of {group} of them share a scale"
    return None


def nearest(ranks: int, refused: Callable[[int], str | None]) -> int:
    """Returns the number of ranks next to `ranks` that is not refused; of two equally near ones the smaller."""
    return min((n for n in range(1, 2 * ranks) if refused(n) is None), key=lambda n: (abs(n - ranks), n), default=1)


def sizes_on_each(sizes: Sizes, ranks: int, whole_experts: bool = False) -> Sizes:
    """Returns the sizes of the model that a rank holds; experts that are dealt out keep theirs, and their number."""
    return replace(
        sizes,
        heads=tuple(heads // ranks for heads in sizes.heads),
        key_value_heads=tuple(max(1, shared // ranks) for shared in sizes.key_value_heads),
        ffn=tuple(
            neurons if whole_experts and experts else neurons // ranks for neurons, experts in zip(sizes.ffn, sizes.experts, strict=True)
        ),
    )


def held_by(structure: Structure, rank: int, ranks: int, whole_experts: bool = False) -> dict[Axis, Tensor]:
    """Returns the indices that a rank holds along each axis that is divided, int64; axes that are absent are whole."""
    held: dict[Axis, Tensor] = {}
    for block, attention in enumerate(structure.attentions):
        shared = _share(attention.key_value_heads, rank, ranks) or [rank * attention.key_value_heads // ranks]
        numbers = {"query": unit_indices(_share(attention.heads, rank, ranks), attention.head_dim)}
        numbers |= dict.fromkeys(("key", "value"), unit_indices(shared, attention.head_dim))
        held |= head_indices(attention, structure.heads[block], numbers, shared)
        if whole_experts and structure.sizes.experts[block]:
            continue
        size = structure.sizes.ffn[block]
        own = torch.tensor(_share(size, rank, ranks))
        for axis in structure.ffn[block]:
            held[axis] = torch.cat([own + part * size for part in range(structure.repeated.get(axis, 1))])
    return held


def _share(count: int, rank: int, ranks: int) -> Sequence[int]:
    """Returns the units of a rank; empty where there are fewer units than ranks."""
    each = count // ranks
    return range(rank * each, (rank + 1) * each)


def cut(tensor: Tensor, name: str, held: Mapping[Axis, Tensor]) -> Tensor:
    """Returns a rank's shard of a weight or bias; the tensor itself if it is not divided."""
    for axis in range(tensor.ndim):
        if (name, axis) in held:
            tensor = tensor.index_select(axis, held[name, axis])
    return tensor


def of_experts(held: Mapping[Axis, Tensor], stacked: Mapping[str, bool], num_experts: Mapping[str, int]) -> dict[Axis, Tensor]:
    """Returns `held` with the axes of single experts in place of the axes of the tensors that hold all experts of a layer.

    Args:
        held: The indices that a rank holds, by axis.
        stacked: Whether the tensor `[E, I, O]` of that name is transposed; `[E, O, I]` where it is not. A bias is `[E, O]`.
        num_experts: Experts by the same names.
    """
    found: dict[Axis, Tensor] = {}
    for (name, axis), indices in held.items():
        if name not in stacked:
            found[name, axis] = indices
            continue
        layer, parameter = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        place = 2 - axis if stacked[name] and parameter == "weight" else axis - 1
        found |= {(f"{layer}.{expert}.{parameter}", place): indices for expert in range(num_experts[name])}
    return found


def cut_scales(scales: AnyScales, name: str, held: Mapping[Axis, Tensor]) -> AnyScales:
    """Returns the scales of what a rank holds of a layer; see the top of this file.

    Args:
        scales: The scales of the whole layer.
        name: Module path of the layer.
        held: The indices that a rank holds, by axis; no group is cut.
    """
    outputs, inputs = (held.get((f"{name}.weight", axis)) for axis in (0, 1))
    entry = scales.entry()
    tensors = {}
    for key, tensor in scales.tensors().items():
        if key in GRID[3:] and inputs is not None:
            continue  # a rank need not have whole super-blocks
        if key in GRID:
            tensor = tensor if outputs is None else tensor.index_select(0, outputs)
            if tensor.ndim > 1 and inputs is not None:
                group = entry["group_size"]
                tensor = tensor.index_select(1, inputs[::group] // group)
        elif key == "input_smooth" and inputs is not None:
            tensor = tensor.index_select(0, inputs)
        tensors[f"{name}.{key}"] = tensor
    if inputs is not None and entry.get("group_scales") == "two_level":
        del entry["group_scales"]
    return type(scales).read(name, tensors, entry)
