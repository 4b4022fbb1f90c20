"""Finds the parts of a decoder and proves them by computing: a checkpoint in, a plan out.

    table of positions    GPT-2's layers, found by structure: attention traced (`foundation.models.architecture.attention`), the two other
                          linear layers and the two LayerNorms of a block, one LayerNorm behind the blocks
    none                  Llama's layers (`export.generation.decoder_parts`): RMSNorm, rotary positions, a gate

Both are written out in torch, and a model whose logits are others is refused. Layers are float, w8a8, w8a8-dynamic, w8a16 or w4a16; the
table of words is float or has int8 rows. Left out: norms of queries and keys (Qwen 3), windows shorter than the context, norms behind a
block (OLMo 2, Gemma), parallel residuals (GPT-NeoX), mixtures of experts, activations other than GELU, its tanh form and SiLU, products of
attention and residuals in int8.

Shape suffixes: b rows, n tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from export.fused.blocks import (
    KEY,
    LOW_RANK,
    SPELLINGS,
    TOLERANCE,
    Otherwise,
    activation_of,
    floats,
    linear_of,
    linears_in,
    norm_of,
    stack_of,
    two_norms,
)
from export.fused.decoder.plan import DecoderBlock, DecoderPlan, Table
from export.fused.layers import ACTIVATIONS
from export.fused.linears import Int8FloatLinear, Linear
from export.generation import decoder_parts
from export.kernels.activation_codes import Activation
from export.kernels.epilogue import Int8Weight
from export.kernels.norm import Norm
from foundation.core.errors import InputError
from foundation.models.architecture.attention import Attention
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.models.layers.low_rank_embedding import LowRankEmbedding
from foundation.models.library import REFUSED, one_line
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.int4 import Int4Scales
from foundation.schemes.int8 import DynamicScales, LayerScales
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.sites import load_sites
from foundation.schemes.tables import load_tables, table_codes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROOF_TOKENS = 12
REFUSAL = "its {} layers differ from those of GPT-2 and Llama, the decoders that the fused kernels run: {}"
READER, HEAD_UNIT = "the fused kernels", 2
SCHEMES = (LayerScales, DynamicScales, WeightScales, Int4Scales)
PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Gpt:
    """The parts of a decoder of GPT-2's layers, by the paths of its modules."""

    modules: Mapping[str, nn.Module]
    attentions: tuple[Attention, ...]
    feed_forward: tuple[tuple[str, str], ...]
    """Products of each block: up and down."""
    norms: tuple[tuple[str, str], ...]
    """Norms of each block: before attention and before the feed-forward network."""
    activation: Activation
    position: str
    norm: str

    def logits(self, model: PreTrainedModel, ids_bn: Tensor) -> Tensor:
        """Returns the logits of token ids, written out, for the proof."""
        known: Any = self.modules
        table: Any = model.get_input_embeddings()
        x = table.weight[ids_bn] + known[self.position].weight[: ids_bn.shape[1]]
        seen = torch.ones(ids_bn.shape[1], ids_bn.shape[1]).tril().bool()
        for attention, (up, down), (first, second) in zip(self.attentions, self.feed_forward, self.norms, strict=True):
            query, key, value = self._projected(attention, known[first](x))
            scores = (query @ key.transpose(2, 3) * attention.scaling).masked_fill(~seen, -torch.inf)
            attended = (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
            x = x + known[attention.output](attended)
            x = x + known[down](ACTIVATIONS[self.activation](known[up](known[second](x))))
        head: Any = model.get_output_embeddings()
        found: Tensor = head(known[self.norm](x))
        return found

    def _projected(self, attention: Attention, x: Tensor) -> tuple[Tensor, ...]:
        """Returns queries, keys and values, [b, heads, n, D], heads of keys repeated for those that share them."""
        known: Any = self.modules
        made = torch.cat([known[name](x) for name in projections_of(attention)], dim=2)
        made = made.view(*x.shape[:2], -1, attention.head_dim)
        counts = [attention.heads, attention.key_value_heads, attention.key_value_heads]
        query, key, value = torch.split(made.transpose(1, 2), counts, dim=1)
        return query, *(part.repeat_interleave(attention.group, dim=1) for part in (key, value))


def decoder_plan(checkpoint: Checkpoint, nodes: Mapping[str, Mapping[str, str]] | None = None) -> DecoderPlan:
    """Returns the plan of a decoder.

    Args:
        checkpoint: The folder.
        nodes: See `DecoderPlan.nodes`.

    Raises:
        InputError: The model is built otherwise, or computes otherwise, or something other than its layers and tables is int8.
    """
    model: Any = load_float(checkpoint.folder)
    kind, sites = model.config.model_type, load_sites(checkpoint.folder)
    if sites.names:
        why = f"{sites.names[0]} is int8, which has no kernel"
        raise InputError(KEY, REFUSAL.format(kind, why), remedy="quantize without attention and residuals")
    if isinstance(model.get_input_embeddings(), LowRankEmbedding):
        raise InputError(KEY, REFUSAL.format(kind, LOW_RANK))
    reader = _Reader(model, load_quantization(checkpoint.folder)[0], load_tables(checkpoint.folder), nodes or {})
    try:
        return reader.gpt(_proved(model)) if _positions(model) else reader.llama()
    except Otherwise as error:
        raise InputError(KEY, REFUSAL.format(kind, error)) from error


def projections_of(attention: Attention) -> tuple[str, ...]:
    """Returns the layers of queries, keys and values, in this order: three, or one.

    Raises:
        Otherwise: One layer makes two of them, or all in another order.
    """
    layers = [attention.parts[part] for part in PARTS]
    names = tuple(dict.fromkeys(name for name, _ in layers))
    if len(names) == 1 and [place for _, place in layers] == [0, 1, 2] and not attention.interleaved:
        return names
    if len(names) == len(PARTS):
        return names
    raise Otherwise("its queries, keys and values stand in another order in the layer that makes them")


def _positions(model: PreTrainedModel) -> list[str]:
    """Returns the tables besides the words outside the blocks."""
    words = model.get_input_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, nn.Embedding) and module is not words]


def _read_gpt(model: PreTrainedModel) -> Gpt:
    blocks, attentions = stack_of(model)
    inside, feed_forward, norms = tuple(f"{name}." for name in blocks), [], []
    for number, (name, block) in enumerate(blocks.items()):
        own = attentions.own[number]
        if own.transformed:
            raise Otherwise("its queries, keys or values are changed before attention")
        used = {own.output, *projections_of(own)}
        layers = [layer for layer in linears_in(block, name) if layer not in used]
        if len(layers) != 2:
            raise Otherwise(f"a block has {len(layers)} linear layers next to its attention, where GPT-2 has 2")
        feed_forward.append((layers[0], layers[1]))
        norms.append(two_norms(block, name, "GPT-2"))
    activation, positions, modules = activation_of(model), _positions(model), dict(model.named_modules())
    outer = [name for name, module in modules.items() if isinstance(module, nn.LayerNorm) and not name.startswith(inside)]
    if len(outer) != 1 or len(positions) != 1:
        raise Otherwise(
            f"{len(outer)} LayerNorms and {len(positions)} tables of positions stand outside its blocks; one of both is written"
        )
    owns = tuple(attentions.own[number] for number in range(len(blocks)))
    return Gpt(modules, owns, tuple(feed_forward), tuple(norms), activation, positions[0], outer[0])


def _proved(model: PreTrainedModel) -> Gpt:
    """Returns the parts of a decoder with a table of positions.

    Raises:
        Otherwise: It is built otherwise, or computes otherwise.
    """
    parts = _read_gpt(model)
    table: Any = parts.modules[parts.position]
    words: Any = model.get_input_embeddings()
    ids = torch.randint(words.num_embeddings, (2, min(PROOF_TOKENS, table.num_embeddings)), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        try:
            found = parts.logits(model, ids)
        except REFUSED as error:
            raise Otherwise(f"its layers do not fit behind each other ({one_line(error)})") from error
    apart = float((found - expected).abs().max() / expected.abs().max()) if found.shape == expected.shape else torch.inf
    if not apart <= TOLERANCE:
        raise Otherwise(f"it has the modules of GPT-2 and computes otherwise (logits {apart:.1%} apart)")
    return parts


@dataclass(frozen=True)
class _Reader:
    """Makes a plan of parts."""

    model: Any
    scales: Mapping[str, Any]
    tables: Mapping[str, Tensor]
    nodes: Mapping[str, Mapping[str, str]]

    def gpt(self, parts: Gpt) -> DecoderPlan:
        """Returns the plan of a decoder with a table of positions."""
        known: Any = parts.modules
        blocks = []
        for attention, (up, down), norms in zip(parts.attentions, parts.feed_forward, parts.norms, strict=True):
            first, second = (norm_of(known[name]) for name in norms)
            sizes = attention.heads, attention.key_value_heads, attention.head_dim, attention.scaling
            ends = self._linear(attention.output), None, self._linear(up), self._linear(down)
            blocks.append(DecoderBlock(tuple(map(self._linear, projections_of(attention))), *ends, *sizes, first, second))
        position = floats(known[parts.position].weight)
        norm = norm_of(known[parts.norm])
        return DecoderPlan(self._words(), position, None, parts.activation, tuple(blocks), norm, *self._head(), self.nodes)

    def llama(self) -> DecoderPlan:
        """Returns the plan of a decoder of Llama's layers."""
        parts = decoder_parts.parts_of(self.model, READER, HEAD_UNIT)
        blocks = []
        for layer in parts.layers:
            if layer.query_norm is not None:
                raise Otherwise("its queries and keys are normalized")
            if layer.window is not None and layer.window < parts.context:
                raise Otherwise(f"it looks back on {layer.window} of {parts.context} tokens")
            projections = tuple(self._linear(name) for name in (layer.query, layer.key, layer.value))
            out, gate, up, down = (self._linear(name) for name in (layer.out, layer.gate, layer.up, layer.down))
            sizes = layer.heads, layer.key_heads, parts.head_size, parts.scale
            first, second = (Norm(floats(gain), None, parts.epsilon, centred=False) for gain in (layer.input_norm, layer.output_norm))
            blocks.append(DecoderBlock(projections, out, gate, up, down, *sizes, first, second))
        rotary = floats(parts.cosine), floats(parts.sine)
        norm, activation = Norm(floats(parts.norm), None, parts.epsilon, centred=False), SPELLINGS[parts.activation]
        return DecoderPlan(self._words(), None, rotary, activation, tuple(blocks), norm, *self._head(), self.nodes)

    def _words(self) -> Table:
        table: Any = self.model.get_input_embeddings()
        scale = self.tables.get(self._path(table))
        rows = floats(table.weight)
        return Table(rows) if scale is None else Table(table_codes(rows, scale), scale)

    def _head(self) -> tuple[Linear | None, str]:
        """Returns the head, None for one that multiplies by the words without a bias, and its path."""
        head: Any = self.model.get_output_embeddings()
        name = self._path(head)
        if name not in self.scales and head.weight is self.model.get_input_embeddings().weight and head.bias is None:
            return None, name
        rows = self.tables.get(name)  # a head of its own with int8 rows
        if rows is not None:
            bias = None if head.bias is None else floats(head.bias)
            return Int8FloatLinear(name, Int8Weight(table_codes(floats(head.weight), rows), rows, bias)), name
        return self._linear(name), name

    def _path(self, wanted: nn.Module) -> str:
        return next(str(name) for name, module in self.model.named_modules() if module is wanted)

    def _linear(self, name: str) -> Linear:
        return linear_of(name, self.model.get_submodule(name), self.scales.get(name), SCHEMES)
