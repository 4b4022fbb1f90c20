"""A narrower student that starts from slices of the incoming model: its most important channels, neurons and heads.

    channel c of the residual stream   sum over weights W of |W[c]|^2 / |W|^2         one choice for the whole model
    neuron n of an FFN                 |W_1[n]| * |W_2[:, n]|                         a choice for each block
    number i of a head                 |W_q[i]| * |W_k[i]| for Q and K, |W_v[i]| * |W_o[:, i]| for V and the output
    head                               the sum of its numbers' scores, Q K and V O each divided by their total

What is kept stays in its order. Fewer numbers a head make smaller scores Q K^T / sqrt(d); W_q is multiplied by sqrt(d_s / d_t), which
keeps those of the numbers that are left. Nothing is found by name: which axis of a weight follows the width or the FFN is seen from the
shapes of models on the meta device whose config differs there, and which layers make Q, K, V and the output from one forward pass.

Magnitudes of weights as importance: https://arxiv.org/abs/1506.02626, section 3. Left out: importance from data; models whose Q and K
are turned after their layers (RoPE).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import InputError
from compress.model_config import REFUSED, one_line, quiet
from distill.blocks import repeated_blocks
from distill.capture import Capture, Heads, Wanted

FFN_KEYS = ("intermediate_size", "hidden_dim", "n_inner")
"""Under these names configs keep the width of the FFN; unlike depth and width it has none that all of them know."""


@dataclass(frozen=True)
class Attention:
    """The layers around the attention of one block."""

    parts: dict[str, tuple[str, int]]
    """For query, key and value: name of the layer, and which of its equal parts makes it (0 where it makes nothing else)."""
    output: str
    """Name of the layer that takes what attention gives."""
    scaling: float
    """Factor of the scores Q K^T."""


def with_widths(config: Any, hidden: int | None, ffn: int | None, heads: int | None, key: str) -> Any:
    """Returns a copy of a Transformers config with other widths.

    Args:
        config: That of the incoming model.
        hidden: Channels of the residual stream; None keeps them.
        ffn: Neurons of each FFN; None keeps them.
        heads: Heads of each attention; None keeps them.
        key: Key path of the student, for messages.

    Raises:
        InputError: A width is larger than before, or not to be divided into the heads.
    """
    changed = copy.deepcopy(config)
    num_heads, width = heads or config.num_attention_heads, hidden or config.hidden_size
    name = next((name for name in FFN_KEYS if hasattr(config, name)), None)
    if ffn is not None and name is None:
        raise InputError(f"{key}.ffn: {ffn} given; where a {config.model_type} keeps the width of its FFN is not known: give config")
    neurons = (getattr(config, name) or 4 * config.hidden_size) if name else 0
    for what, given, most in (("hidden", hidden, config.hidden_size), ("ffn", ffn, neurons), ("heads", heads, config.num_attention_heads)):
        if given is not None and given > most:
            raise InputError(f"{key}.{what}: {given} given; the incoming model has {most}")
    if width % num_heads:
        raise InputError(f"{key}.hidden: {width} channels are not to be divided into {num_heads} heads; give a multiple of the heads")
    if width // num_heads > config.hidden_size // config.num_attention_heads:
        raise InputError(
            f"{key}.heads: {num_heads} given; {width} channels then make heads of {width // num_heads}, larger than those of the incoming "
            f"model ({config.hidden_size // config.num_attention_heads}): give fewer channels (hidden) or more heads"
        )
    changed.hidden_size, changed.num_attention_heads = width, num_heads
    if name is not None:
        setattr(changed, name, ffn or neurons)
    return changed


def narrow(model: Any, config: Any, key: str) -> nn.Module:
    """Returns a model of a narrower config made of slices of another of the same depth.

    Args:
        model: A Transformers model, in evaluation mode.
        config: What `with_widths` gave.
        key: Key path of the student, for messages.

    Raises:
        InputError: The weights of this kind of model cannot be sliced.
    """
    prefix = repeated_blocks(model, key)[0]
    hidden_axes, ffn_axes = axes_of(model, key)
    attentions = find_attentions(model, key)
    weights, inner = model.state_dict(), inner_axes(model, attentions)
    residual, old = hidden_axes - inner, model.config
    odd = [name for name, axis in residual if weights[name].shape[axis] != old.hidden_size]
    odd += [name for name, axis in ffn_axes if weights[name].shape[axis] != _ffn(old)]
    if odd:
        raise InputError(f"{key}: {min(odd)} of this {old.model_type} cannot be sliced; give config")
    channels = top(channel_scores(weights, residual), config.hidden_size)
    kept: dict[tuple[str, int], Tensor] = dict.fromkeys(residual, channels)
    for block, attention in attentions.items():
        kept |= kept_numbers(model, attention, config)
        axes = {axis for axis in ffn_axes if axis[0].startswith(f"{prefix}.{block}.")}
        if axes:
            kept |= dict.fromkeys(axes, top(neuron_scores(weights, axes), _ffn(config)))
    sliced = {}
    for name, weight in weights.items():
        for axis in range(weight.ndim):
            if (name, axis) in kept:
                weight = weight.index_select(axis, kept[name, axis])
        sliced[name] = weight
    _rescale_queries(sliced, model, config, attentions)
    student: nn.Module = type(model)(config)
    student.load_state_dict(sliced)
    return student.eval()


def axes_of(model: nn.Module, key: str) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Returns the axes (name of the weight, number of the axis) that follow the width, and those that follow the FFN."""
    config: Any = model.config
    wide, long = copy.deepcopy(config), copy.deepcopy(config)
    name = next((name for name in FFN_KEYS if hasattr(config, name)), None)
    wide.hidden_size = 2 * config.hidden_size
    if name is not None:
        setattr(wide, name, _ffn(config))
        setattr(long, name, _ffn(config) + 1)
    shapes = {weight: value.shape for weight, value in model.state_dict().items()}
    found = []
    for changed in (wide, long):
        try:
            with torch.device("meta"), quiet():
                others = type(model)(changed).state_dict()
        except REFUSED as error:
            raise InputError(f"{key}: a {config.model_type} of another width cannot be made ({one_line(error)}); give config") from error
        found.append(
            {(weight, axis) for weight, shape in shapes.items() for axis in range(len(shape)) if others[weight].shape[axis] != shape[axis]}
        )
    return found[0], found[1]


def find_attentions(model: nn.Module, key: str) -> dict[int, Attention]:
    """Returns the layers around the attention of every block, found by what goes through them in one forward pass.

    Raises:
        InputError: They cannot be told: something is done to Q or K after the layer, or keys are shared by queries.
    """
    prefix, blocks = repeated_blocks(model, key)
    passed: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs, output: passed.update({name: (inputs[0], output)})

    layers = {name: module for name, module in model.named_modules() if _is_layer(module)}
    hooks = [module.register_forward_hook(keep(name)) for name, module in layers.items() if name.startswith(f"{prefix}.")]
    capture = Capture(model, key)
    with torch.no_grad():
        captured = capture(_probe(model.config), Wanted(blocks=frozenset(range(len(blocks)))))
    for hook in hooks:
        hook.remove()
    found = {}
    for block, heads in captured.blocks.items():
        within = {name: entry for name, entry in passed.items() if name.startswith(f"{prefix}.{block}.")}
        parts = {what: _maker(_joined(getattr(heads, what)), within) for what in ("query", "key", "value")}
        output = _taker(heads, within)
        missing = [what for what, made in {**parts, "output": output}.items() if made is None]
        if missing:
            kind = model.config.model_type  # type: ignore[union-attr]
            raise InputError(f"{key}: the layer that makes the {missing[0]} of attention in this {kind} cannot be told; give config")
        found[block] = Attention({what: made for what, made in parts.items() if made is not None}, str(output), heads.scaling)
    return found


def inner_axes(model: nn.Module, attentions: Mapping[int, Attention]) -> set[tuple[str, int]]:
    """Returns the axes that run over the numbers of all heads."""
    found = set()
    for attention in attentions.values():
        for name, _ in attention.parts.values():
            found |= {(f"{name}.weight", _out_axis(model.get_submodule(name))), (f"{name}.bias", 0)}
        found.add((f"{attention.output}.weight", 1 - _out_axis(model.get_submodule(attention.output))))
    return found


def kept_numbers(model: nn.Module, attention: Attention, config: Any) -> dict[tuple[str, int], Tensor]:
    """Returns which numbers of the heads of one block are kept, for every axis that runs over them."""
    old: Any = model.config
    shape = old.num_attention_heads, old.hidden_size // old.num_attention_heads
    kept_heads, kept_width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    made = {what: _rows(model, name, part, shape[0] * shape[1]) for what, (name, part) in attention.parts.items()}
    taken_ID = _oriented(model, attention.output).mT
    scores = {
        "qk": (made["query"].norm(dim=1) * made["key"].norm(dim=1)).view(shape),
        "vo": (made["value"].norm(dim=1) * taken_ID.norm(dim=1)).view(shape),
    }
    heads = top(torch.stack([score.sum(dim=1) / score.sum() for score in scores.values()]).sum(dim=0), kept_heads)
    chosen = {
        what: torch.cat([head * shape[1] + top(score[head], kept_width) for head in heads.tolist()]) for what, score in scores.items()
    }
    kept: dict[tuple[str, int], Tensor] = {
        (f"{attention.output}.weight", 1 - _out_axis(model.get_submodule(attention.output))): chosen["vo"]
    }
    for name in {name for name, _ in attention.parts.values()}:
        parts = sorted((part, what) for what, (layer, part) in attention.parts.items() if layer == name)
        numbers = torch.cat([part * shape[0] * shape[1] + chosen["vo" if what == "value" else "qk"] for part, what in parts])
        kept |= {(f"{name}.weight", _out_axis(model.get_submodule(name))): numbers, (f"{name}.bias", 0): numbers}
    return kept


def channel_scores(weights: Mapping[str, Tensor], axes: set[tuple[str, int]]) -> Tensor:
    """Returns the score of each channel of the residual stream, float32 `[D]`: its share of every weight that has it, added up."""
    shares = []
    for name, axis in sorted(axes):
        squares = _other_axes_summed(weights[name].float().square(), axis)
        shares.append(squares / squares.sum().clamp(min=torch.finfo(torch.float32).tiny))
    return torch.stack(shares).sum(dim=0)


def neuron_scores(weights: Mapping[str, Tensor], axes: set[tuple[str, int]]) -> Tensor:
    """Returns the score of each neuron of one FFN, float32 `[F]`: the product of the lengths of its vectors in all matrices."""
    lengths = [_other_axes_summed(weights[name].float().square(), axis).sqrt() for name, axis in sorted(axes) if weights[name].ndim > 1]
    return torch.stack(lengths).prod(dim=0)


def top(scores: Tensor, number: int) -> Tensor:
    """Returns the indices of the largest scores, ascending, int64 `[number]`; of equal ones the first."""
    return scores.argsort(descending=True, stable=True)[:number].sort().values


def _ffn(config: Any) -> int:
    name = next((name for name in FFN_KEYS if hasattr(config, name)), None)
    return (getattr(config, name) or 4 * config.hidden_size) if name else 0


def _probe(config: Any) -> dict[str, Tensor]:
    """Returns random inputs of one row."""
    generator = torch.Generator().manual_seed(0)
    if hasattr(config, "vocab_size"):
        return {"input_ids": torch.randint(config.vocab_size, (1, 8), generator=generator)}
    size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size, config.image_size)
    return {"pixel_values": torch.randn(1, config.num_channels, *size, generator=generator)}


def _is_layer(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _out_axis(layer: nn.Module) -> int:
    return 0 if isinstance(layer, nn.Linear) else 1  # Conv1D of GPT-2 keeps its weight as [in, out]


def _oriented(model: nn.Module, name: str) -> Tensor:
    """Returns the weight of a layer as `[out, in]`."""
    weight: Tensor = model.get_parameter(f"{name}.weight").detach()
    return weight if _out_axis(model.get_submodule(name)) == 0 else weight.mT


def _rows(model: nn.Module, name: str, part: int, size: int) -> Tensor:
    """Returns the rows of a layer that make one of query, key and value, `[numbers of all heads, in]`."""
    return _oriented(model, name)[part * size : (part + 1) * size]


def _joined(x_bhLd: Tensor) -> Tensor:
    return x_bhLd.transpose(1, 2).flatten(2)


def _maker(made_bLI: Tensor, passed: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[str, int] | None:
    """Returns the layer, and its part, whose output is `made_bLI`."""
    size = made_bLI.shape[-1]
    for name, (_, output) in passed.items():
        if output.shape[:-1] == made_bLI.shape[:-1] and output.shape[-1] % size == 0:
            for part, piece in enumerate(torch.split(output, size, dim=-1)):
                if torch.equal(piece, made_bLI):
                    return name, part
    return None


def _taker(heads: Heads, passed: Mapping[str, tuple[Tensor, Tensor]]) -> str | None:
    """Returns the layer whose input is what attention gives."""
    given = nn.functional.scaled_dot_product_attention(
        heads.query, heads.key, heads.value, attn_mask=heads.allowed.expand(-1, -1, heads.query.shape[2], -1), scale=heads.scaling
    )
    joined = _joined(given)
    for name, (taken, _) in passed.items():
        if taken.shape == joined.shape and torch.allclose(taken, joined, rtol=1e-3, atol=1e-4):
            return name
    return None


def _other_axes_summed(values: Tensor, axis: int) -> Tensor:
    return values.movedim(axis, 0).flatten(1).sum(dim=1) if values.ndim > 1 else values


def _rescale_queries(sliced: dict[str, Tensor], model: nn.Module, config: Any, attentions: Mapping[int, Attention]) -> None:
    """Multiplies the queries so that the scores of the numbers that are left stay as they were, in place."""
    old: Any = model.config
    before, after = (each.hidden_size // each.num_attention_heads for each in (old, config))
    for attention in attentions.values():
        if not math.isclose(attention.scaling, before**-0.5):
            continue
        name, part = attention.parts["query"]
        for weight in (f"{name}.weight", f"{name}.bias"):
            if weight in sliced:
                axis = _out_axis(model.get_submodule(name)) if weight.endswith("weight") else 0
                scaled = sliced[weight].clone()
                scaled.narrow(axis, part * config.hidden_size, config.hidden_size).mul_(math.sqrt(after / before))
                sliced[weight] = scaled
