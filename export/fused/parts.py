"""Finds the parts of a BERT-like encoder by structure, and proves them by computing: a checkpoint in, a plan out.

    blocks and attention     traced (`foundation.models.architecture.attention`): query, key, value, output, heads, scaling
    up and down              the two other linear layers of a block
    norms                    the two LayerNorms of a block, the second one after the feed-forward network
    embeddings               the tables outside the blocks, told apart by their rows, with one LayerNorm
    positions                what the model looks up for a row without padding
    head                     the linear layers outside the blocks, in order; the activations between them are those that fit

Neither names nor this list prove anything: a pre-norm encoder has the same modules. So the parts are computed with, written out
in torch, and a model whose logits are others is refused. The activations of the head are found in the same way.

Left out: norms before a layer (ViT, GPT-2), RMSNorm, a projection after narrower embeddings (ELECTRA small), one block for all layers
(ALBERT), relative and rotary positions, gated feed-forward networks, answers for every token, products of attention and residuals in int8.

Shape suffixes: b rows, n tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from export.fused.forward import ACTIVATIONS
from export.fused.plan import Block, FloatLinear, HeadActivation, Int8Linear, Linear, Plan
from export.kernels.activation_codes import Activation
from export.kernels.block_sparse import SIDES, Packed, SparseWeight, index, pack
from export.kernels.epilogue import Int8Weight
from export.kernels.norm import Norm
from foundation.core.errors import InputError
from foundation.models.architecture.attention import Attention, find_attentions
from foundation.models.architecture.blocks import blocks_of
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.models.library import REFUSED, one_line
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.int8 import LayerScales
from foundation.schemes.sites import load_sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "model"
TOLERANCE = 1e-3
"""Largest difference of logits, as a share of the largest: sums in another order reach about 1e-5."""
PROOF_TOKENS = 12
MOST_LEFT = 0.5
"""Share of blocks with a code other than 0 up to which a layer is stored and multiplied in blocks."""
SPELLINGS: Mapping[str, Activation] = {"gelu": "gelu", "silu": "silu", "swish": "silu"}
REFUSAL = "its {} layers differ from BERT's, the only ones that the fused kernels run: {}"


class Otherwise(Exception):
    """A model is built otherwise; the message says where."""


@dataclass(frozen=True)
class EncoderPaths:
    """The parts of an encoder, by the paths of its modules."""

    modules: Mapping[str, nn.Module]
    word: str
    kind: str | None
    position: str
    first_position: int
    norm: str
    activation: Activation
    attentions: tuple[Attention, ...]
    feed_forward: tuple[tuple[str, str], ...]
    """Products of each block: up and down."""
    norms: tuple[tuple[str, str], ...]
    """Norms of each block: after attention and after the feed-forward network."""
    head: tuple[tuple[str, HeadActivation], ...] = ()

    def states(self, ids_bn: Tensor, kinds_bn: Tensor) -> Tensor:
        """Returns the states of the first tokens, float32 [b, D], of rows without padding; written out, for the proof."""
        known: Any = self.modules
        positions_n = torch.arange(ids_bn.shape[1]) + self.first_position
        x = known[self.word].weight[ids_bn] + (0 if self.kind is None else known[self.kind].weight[kinds_bn])
        x = known[self.norm](x + known[self.position].weight[positions_n])
        for attention, (up, down), (first, second) in zip(self.attentions, self.feed_forward, self.norms, strict=True):
            query, key, value = (
                known[layer](x).unflatten(2, (-1, attention.head_dim)).transpose(1, 2) for layer, _ in attention.parts.values()
            )
            scores = (query @ key.transpose(2, 3) * attention.scaling).softmax(dim=-1)
            x = known[first](known[attention.output]((scores @ value).transpose(1, 2).flatten(2)) + x)
            x = known[second](known[down](ACTIVATIONS[self.activation](known[up](x))) + x)
        states: Tensor = x[:, 0]
        return states

    def logits(self, states: Tensor, after: Sequence[HeadActivation]) -> Tensor:
        """Returns the head's output for states, with these activations after its layers."""
        for (layer, _), name in zip(self.head, after, strict=True):
            states = ACTIVATIONS[name](self.modules[layer](states))
        return states


def plan_of(checkpoint: Checkpoint, nodes: Mapping[str, Mapping[str, str]] | None = None) -> Plan:
    """Returns the plan of a w8a8 checkpoint.

    Args:
        checkpoint: The folder.
        nodes: See `Plan.nodes`.

    Raises:
        InputError: The model is built otherwise, or computes otherwise, or something other than its linear layers is int8.
    """
    model: PreTrainedModel = load_float(checkpoint.folder)
    kind = model.config.model_type
    sites = load_sites(checkpoint.folder)
    if sites.names:
        raise InputError(
            "model",
            REFUSAL.format(kind, f"{sites.names[0]} is int8, which has no kernel"),
            remedy="quantize without attention and residuals",
        )
    try:
        found = _proved(model, _read_paths(model))
    except Otherwise as error:
        raise InputError("model", REFUSAL.format(kind, error)) from error
    scales, _ = load_quantization(checkpoint.folder)
    return _plan(found, scales, nodes or {})


def sparse_or_dense(codes_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Int8Weight | SparseWeight:
    """Returns a weight in blocks where at most `MOST_LEFT` of them have a code other than 0; in small ones where these save much."""
    packed = {side: pack(codes_OI, side) for side in sorted(SIDES, reverse=True)}
    left = {side: float(one.left().float().mean()) for side, one in packed.items()}
    large, small = packed
    side = large if left[large] <= MOST_LEFT and left[large] <= 1.25 * left[small] else small
    return _sparse(packed[side], scale_O, bias_O) if left[side] <= MOST_LEFT else Int8Weight(codes_OI, scale_O, bias_O)


def _sparse(packed: Packed, scale_O: Tensor, bias_O: Tensor | None) -> SparseWeight:
    return SparseWeight(packed, index(packed), scale_O, bias_O)


def _read_paths(model: PreTrainedModel) -> EncoderPaths:
    """Reads the parts off the structure, the activations of the head excepted.

    Raises:
        Otherwise: There are other parts.
    """
    try:
        blocks, attentions = blocks_of(model, KEY), find_attentions(model, KEY)
    except InputError as error:
        raise Otherwise("; ".join(str(problem).removeprefix(f"{KEY}: ") for problem in error.problems)) from error
    if attentions.cross:
        raise Otherwise("it reads an encoder")
    modules = dict(model.named_modules())
    inside = tuple(f"{name}." for name in blocks)
    outside = {name: module for name, module in modules.items() if not name.startswith(inside)}
    feed_forward, norms = [], []
    for number, (name, block) in enumerate(blocks.items()):
        attention = attentions.own[number]
        _check_attention(attention)
        used = {attention.output, *(layer for layer, _ in attention.parts.values())}
        layers = [layer for layer in _of(block, name, nn.Linear) if layer not in used]
        feed_forward.append(_two(layers, "linear layers next to its attention"))
        norms.append(_two(_of(block, name, nn.LayerNorm), "LayerNorms"))
    word, kind, position = _tables(model, outside)
    norm = [name for name, module in outside.items() if isinstance(module, nn.LayerNorm)]
    head = [name for name, module in outside.items() if isinstance(module, nn.Linear)]
    if len(norm) != 1:
        raise Otherwise(f"{len(norm)} LayerNorms stand outside its blocks")
    act = str(getattr(model.config, "hidden_act", None) or getattr(model.config, "activation", None))
    if act not in SPELLINGS:
        raise Otherwise(f"its activation is {act}; {' and '.join(sorted(set(SPELLINGS.values())))} are written")
    return EncoderPaths(
        modules=modules,
        word=word,
        kind=kind,
        position=position,
        first_position=_first_position(model, outside[position]),
        norm=norm[0],
        activation=SPELLINGS[act],
        attentions=tuple(attentions.own[number] for number in range(len(blocks))),
        feed_forward=tuple(feed_forward),
        norms=tuple(norms),
        head=tuple((name, "none") for name in head),
    )


def _proved(model: PreTrainedModel, paths: EncoderPaths) -> EncoderPaths:
    """Returns the parts with the activations of the head that give the logits of the model.

    Raises:
        Otherwise: None do.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = min(PROOF_TOKENS, model.get_submodule(paths.position).num_embeddings - paths.first_position)
    ids = torch.randint(model.get_submodule(paths.word).num_embeddings, (3, tokens), generator=generator)
    pad = getattr(model.config, "pad_token_id", None)
    if pad is not None:  # a model that counts positions by it would see padding
        ids[ids == pad] = 0 if pad else 1
    given = {"input_ids": ids}
    if paths.kind is not None:
        given["token_type_ids"] = torch.randint(model.get_submodule(paths.kind).num_embeddings, ids.shape, generator=generator)
    with torch.inference_mode():
        expected, apart = model(**given).logits, []
        try:
            states = paths.states(ids, given.get("token_type_ids", torch.zeros_like(ids)))
        except REFUSED as error:
            raise Otherwise(f"its layers do not fit behind each other ({one_line(error)})") from error
        for after in itertools.product(*[get_args(HeadActivation)] * max(0, len(paths.head) - 1)):
            try:
                logits = paths.logits(states, (*after, "none"))
            except REFUSED:  # the layers do not fit one after another
                continue
            if logits.shape != expected.shape:
                continue
            apart.append(float((logits - expected).abs().max() / expected.abs().max()))
            if apart[-1] <= TOLERANCE:
                named = tuple((name, which) for (name, _), which in zip(paths.head, (*after, "none"), strict=True))
                return EncoderPaths(**{**vars(paths), "head": named})
    told = f"the closest of its possible heads gives logits {min(apart):.1%} apart" if apart else "no head gives its logits"
    raise Otherwise(f"it has the modules of BERT and computes otherwise ({told})")


def _check_attention(attention: Attention) -> None:
    if attention.transformed or attention.interleaved:
        raise Otherwise("its queries, keys or values are changed before attention")
    if len({layer for layer, _ in attention.parts.values()}) < len(attention.parts):
        raise Otherwise("one layer makes its queries, keys and values")


def _of(block: nn.Module, prefix: str, kind: type[nn.Module]) -> list[str]:
    return [f"{prefix}.{name}" for name, module in block.named_modules() if isinstance(module, kind)]


def _two(names: Sequence[str], what: str) -> tuple[str, str]:
    if len(names) != 2:
        raise Otherwise(f"a block has {len(names)} {what}, where BERT has 2")
    return names[0], names[1]


def _tables(model: PreTrainedModel, outside: Mapping[str, nn.Module]) -> tuple[str, str | None, str]:
    """Returns the paths of the tables of words, of token types (None without) and of positions."""
    tables = {name: module for name, module in outside.items() if isinstance(module, nn.Embedding)}
    words = model.get_input_embeddings()
    word = next((name for name, module in tables.items() if module is words), None)
    types, most = getattr(model.config, "type_vocab_size", 0), getattr(model.config, "max_position_embeddings", 0)
    others = {name: module.num_embeddings for name, module in tables.items() if name != word}
    positions = [name for name, rows in others.items() if rows == most]
    kinds = [name for name, rows in others.items() if rows == types and name not in positions]
    if word is None or len(positions) != 1 or len(kinds) > 1 or len(others) != 1 + len(kinds):
        shown = ", ".join(f"{name} of {rows} rows" for name, rows in others.items()) or "none"
        raise Otherwise(f"besides words it has the tables {shown}; a table of positions and at most one of token types are needed")
    return word, kinds[0] if kinds else None, positions[0]


def _first_position(model: PreTrainedModel, table: nn.Module) -> int:
    """Returns the position of the first token, from what the model looks up."""
    looked_up: list[Tensor] = []
    handle = table.register_forward_pre_hook(lambda _, inputs: looked_up.append(inputs[0]))
    pad = getattr(model.config, "pad_token_id", None)
    ids = torch.full((1, 4), 1 if pad == 0 else 0)
    try:
        with torch.inference_mode():
            model(input_ids=ids)
    finally:
        handle.remove()
    first = int(looked_up[0].flatten()[0]) if looked_up else 0
    if len(looked_up) != 1 or not torch.equal(looked_up[0].flatten()[:4], torch.arange(4) + first):
        raise Otherwise("its positions are not counted from the first token")
    return first


def _plan(paths: EncoderPaths, scales: Mapping[str, Any], nodes: Mapping[str, Mapping[str, str]]) -> Plan:
    known: Any = paths.modules

    def linear(name: str) -> Linear:
        return linear_of(name, known[name], scales.get(name))

    def norm(name: str) -> Norm:
        return Norm(_float(known[name].weight), _float(known[name].bias), float(known[name].eps))

    def blocks() -> Iterator[Block]:
        for attention, (up, down), (first, second) in zip(paths.attentions, paths.feed_forward, paths.norms, strict=True):
            query, key, value = (linear(attention.parts[part][0]) for part in ("query", "key", "value"))
            yield Block(
                query, key, value, linear(attention.output), linear(up), linear(down),
                attention.head_dim, attention.scaling, norm(first), norm(second),
            )  # fmt: skip

    word = _float(known[paths.word].weight)
    return Plan(
        word=word,
        kind=torch.zeros(1, word.shape[1]) if paths.kind is None else _float(known[paths.kind].weight),
        position=_float(known[paths.position].weight),
        norm=norm(paths.norm),
        first_position=paths.first_position,
        activation=paths.activation,
        blocks=tuple(blocks()),
        head=tuple((linear(name), after) for name, after in paths.head),
        nodes={name: nodes[name] for name in nodes},
    )


def linear_of(name: str, module: nn.Linear, scales: Any) -> Linear:
    """Returns a layer of the plan.

    Args:
        name: Path of the module.
        module: The float layer, its weights on the grid where it is int8.
        scales: Its `LayerScales`; None for a layer that stayed float.

    Raises:
        InputError: The layer is of another scheme.
    """
    bias = None if module.bias is None else _float(module.bias)
    if scales is None:
        return FloatLinear(name, _float(module.weight), bias)
    if not isinstance(scales, LayerScales):
        raise InputError(KEY, f"{name} is quantized as {scales.SCHEME}", f"the fused kernels run {LayerScales.SCHEME}")
    weight = sparse_or_dense(scales.codes(_float(module.weight)), scales.weight_scale, bias)
    return Int8Linear(name, weight, float(scales.input_scale), scales.input_smooth)


def _float(parameter: Tensor) -> Tensor:
    return parameter.detach().float().contiguous()
