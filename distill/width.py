"""Builds a narrower student from slices of the incoming model: its most important channels, neurons and heads.

    channel c of the residual stream   sum over weights W of |W[c]|^2 / |W|^2         one selection for the whole model
    neuron n of an FFN                 |W_1[n]| * |W_2[:, n]|                         one selection per block
    dimension i of a head              |W_q[i]| * |W_k[i]| for Q and K, |W_v[i]| * |W_o[:, i]| for V and the output
    head                               the sum of its dimensions' scores, with Q K and V O each divided by their total

Kept elements keep their order. With fewer dimensions per head the scores Q K^T / sqrt(d) change; multiplying W_q by sqrt(d_s / d_t) keeps
the contribution of the remaining dimensions unchanged. Nothing is matched by name. Building models on the meta device with other widths
shows which axis of a weight follows the hidden size or the FFN size; one forward pass shows which layers make Q, K, V and the output.

Weight magnitude as importance: https://arxiv.org/abs/1506.02626, section 3. Not supported: data-based importance; models that transform Q
and K after their layers (RoPE).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture.attention import Attention, find_attentions, out_axis
from foundation.models.architecture.axes import Axes, axes_of, key_of, size_of
from foundation.models.architecture.blocks import blocks_of
from foundation.models.architecture.shapes import remade
from foundation.models.architecture.structure import head_axes
from foundation.models.own_shape import SHAPE_KEY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def with_widths(config: PreTrainedConfig, hidden: int | None, ffn: int | None, heads: int | None, key: str) -> PreTrainedConfig:
    """Returns a copy of a Transformers config with other widths.

    Args:
        config: The incoming model's config.
        hidden: Channels of the residual stream; None keeps all.
        ffn: Neurons of each FFN; None keeps all.
        heads: Attention heads of each layer; None keeps all.
        key: Key path of the student, for error messages.

    Raises:
        InputError: A width is larger than before, or not divisible by the number of heads.
    """
    changed = copy.deepcopy(config)
    num_heads, width = heads or config.num_attention_heads, hidden or config.hidden_size
    name = key_of(config, "ffn")
    if getattr(config, SHAPE_KEY, None):
        raise InputError(key, "the incoming model has a shape of its own, as it was pruned", remedy="keep its widths, or give config")
    if ffn is not None and name is None:
        raise InputError(
            f"{key}.ffn", f"{ffn} given", f"the config key for the FFN size of a {config.model_type} is unknown", "give config"
        )
    neurons = size_of(config, "ffn")
    for what, given, most in (("hidden", hidden, config.hidden_size), ("ffn", ffn, neurons), ("heads", heads, config.num_attention_heads)):
        if given is not None and given > most:
            raise InputError(f"{key}.{what}", f"{given} given", f"the incoming model has {most}")
    if width % num_heads:
        raise InputError(
            f"{key}.hidden", f"{width} channels cannot be divided into {num_heads} heads", remedy="give a multiple of the heads"
        )
    if width // num_heads > config.hidden_size // config.num_attention_heads:
        raise InputError(
            f"{key}.heads",
            f"{num_heads} given",
            f"with {width} channels a head has {width // num_heads} dimensions, more than in the incoming model "
            f"({config.hidden_size // config.num_attention_heads})",
            "give fewer channels (hidden) or more heads",
        )
    changed.hidden_size, changed.num_attention_heads = width, num_heads
    if name is not None:
        setattr(changed, name, ffn or neurons)
    return changed


def narrow(model: PreTrainedModel, config: PreTrainedConfig, key: str) -> nn.Module:
    """Returns a narrower model of the same depth, made of slices of a model's weights.

    Args:
        model: A Transformers model, in evaluation mode.
        config: The narrower config, from `with_widths`.
        key: Key path of the student, for error messages.

    Raises:
        InputError: The weights of this model type cannot be sliced.
    """
    blocks = tuple(blocks_of(model, key))
    attentions, old = sliceable_attentions(model, key), model.config
    axes, weights = _axes(model, key), model.state_dict()
    inner = {axis for attention in attentions.values() for axis in head_axes(model, attention)}
    residual, ffn_axes = set(axes.hidden) - inner, set(axes.ffn)
    unexpected = [name for name, axis in residual if weights[name].shape[axis] != old.hidden_size]
    unexpected += [name for name, axis in ffn_axes if weights[name].shape[axis] != size_of(old, "ffn")]
    if unexpected:
        raise InputError(key, f"{min(unexpected)} of this {old.model_type} cannot be sliced", remedy="give config")
    channels = top(channel_scores(weights, residual), config.hidden_size)
    kept: dict[tuple[str, int], Tensor] = dict.fromkeys(residual, channels)
    for block, attention in attentions.items():
        kept |= head_dims_to_keep(model, attention, config)
        of_block = {axis for axis in ffn_axes if axis[0].startswith(f"{blocks[block]}.")}
        if of_block:
            kept |= dict.fromkeys(of_block, top(neuron_scores(weights, of_block), size_of(config, "ffn")))
    sliced = {}
    for name, weight in weights.items():
        for axis in range(weight.ndim):
            if (name, axis) in kept:
                weight = weight.index_select(axis, kept[name, axis])
        sliced[name] = weight
    _rescale_queries(sliced, model, config, attentions)
    student = remade(model, config)
    wrong = [name for name, value in student.state_dict().items() if name not in sliced or sliced[name].shape != value.shape]
    if wrong:  # such as a bias of the scores with one column for each head
        raise InputError(key, f"{wrong[0]} of this {old.model_type} does not become narrower with the model", remedy="give config")
    student.load_state_dict(sliced)
    return student.eval()


def sliceable_attentions(model: nn.Module, key: str) -> Mapping[int, Attention]:
    """Returns the attention layers (Q, K, V, output) of every block.

    Raises:
        InputError: The layers cannot be identified, or head dimensions cannot be sliced: Q or K are transformed after their layers (RoPE),
            or query heads share keys.
    """
    try:
        found = find_attentions(model, key).own
    except InputError as error:
        raise InputError.of(problem.advise("give config") for problem in error.problems) from error
    if any(attention.transformed or attention.interleaved or attention.group > 1 for attention in found.values()):
        kind = model.config.model_type  # type: ignore[union-attr]
        raise InputError(
            key,
            f"heads of this {kind} cannot be sliced: Q or K are transformed after their layers, or query heads share keys",
            remedy="give config",
        )
    return found


def head_dims_to_keep(model: nn.Module, attention: Attention, config: PreTrainedConfig) -> dict[tuple[str, int], Tensor]:
    """Returns the head dimensions to keep in one block, for every (weight, axis) that runs over them."""
    old: PreTrainedConfig = model.config
    shape = old.num_attention_heads, old.hidden_size // old.num_attention_heads
    kept_heads, kept_width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    rows = {what: _rows(model, name, part, shape[0] * shape[1]) for what, (name, part) in attention.parts.items()}
    output_ID = _oriented(model, attention.output).mT
    scores = {
        "qk": (rows["query"].norm(dim=1) * rows["key"].norm(dim=1)).view(shape),
        "vo": (rows["value"].norm(dim=1) * output_ID.norm(dim=1)).view(shape),
    }
    heads = top(torch.stack([score.sum(dim=1) / score.sum() for score in scores.values()]).sum(dim=0), kept_heads)
    chosen = {
        what: torch.cat([head * shape[1] + top(score[head], kept_width) for head in heads.tolist()]) for what, score in scores.items()
    }
    kept: dict[tuple[str, int], Tensor] = {
        (f"{attention.output}.weight", 1 - out_axis(model.get_submodule(attention.output))): chosen["vo"]
    }
    for name in {name for name, _ in attention.parts.values()}:
        parts = sorted((part, what) for what, (layer, part) in attention.parts.items() if layer == name)
        dims = torch.cat([part * shape[0] * shape[1] + chosen["vo" if what == "value" else "qk"] for part, what in parts])
        kept |= {(f"{name}.weight", out_axis(model.get_submodule(name))): dims, (f"{name}.bias", 0): dims}
    return kept


def channel_scores(weights: Mapping[str, Tensor], axes: set[tuple[str, int]]) -> Tensor:
    """Returns the score of each residual channel, float32 `[D]`: its share of the squared norm of each weight, summed over weights."""
    shares = []
    for name, axis in sorted(axes):
        squares = _other_axes_summed(weights[name].float().square(), axis)
        shares.append(squares / squares.sum().clamp(min=torch.finfo(torch.float32).tiny))
    return torch.stack(shares).sum(dim=0)


def neuron_scores(weights: Mapping[str, Tensor], axes: set[tuple[str, int]]) -> Tensor:
    """Returns the score of each neuron of one FFN, float32 `[F]`: the product of its vectors' L2 norms over all matrices."""
    norms = [_other_axes_summed(weights[name].float().square(), axis).sqrt() for name, axis in sorted(axes) if weights[name].ndim > 1]
    return torch.stack(norms).prod(dim=0)


def top(scores: Tensor, number: int) -> Tensor:
    """Returns the indices of the largest scores in ascending order, int64 `[number]`; ties go to the lower index."""
    return scores.argsort(descending=True, stable=True)[:number].sort().values


def _axes(model: nn.Module, key: str) -> Axes:
    try:
        return axes_of(model, key)
    except InputError as error:
        raise InputError.of(problem.advise("give config") for problem in error.problems) from error


def _oriented(model: nn.Module, name: str) -> Tensor:
    """Returns the weight of a layer as `[out, in]`."""
    weight: Tensor = model.get_parameter(f"{name}.weight").detach()
    return weight if out_axis(model.get_submodule(name)) == 0 else weight.mT


def _rows(model: nn.Module, name: str, part: int, size: int) -> Tensor:
    """Returns the rows of a layer's weight that make the query, key or value, `[dimensions of all heads, in]`."""
    return _oriented(model, name)[part * size : (part + 1) * size]


def _other_axes_summed(values: Tensor, axis: int) -> Tensor:
    return values.movedim(axis, 0).flatten(1).sum(dim=1) if values.ndim > 1 else values


def _rescale_queries(sliced: dict[str, Tensor], model: nn.Module, config: PreTrainedConfig, attentions: Mapping[int, Attention]) -> None:
    """Rescales the query weights in place, so that the remaining dimensions contribute the same attention scores as before."""
    old: PreTrainedConfig = model.config
    before, after = (each.hidden_size // each.num_attention_heads for each in (old, config))
    for attention in attentions.values():
        if not math.isclose(attention.scaling, before**-0.5):
            continue
        name, part = attention.parts["query"]
        for weight in (f"{name}.weight", f"{name}.bias"):
            if weight in sliced:
                axis = out_axis(model.get_submodule(name)) if weight.endswith("weight") else 0
                scaled = sliced[weight].clone()
                scaled.narrow(axis, part * config.hidden_size, config.hidden_size).mul_(math.sqrt(after / before))
                sliced[weight] = scaled
