"""Finds the parts of an encoder of text by structure, and proves them by computing: a checkpoint in, a plan out.

    blocks and attention     traced (`foundation.models.architecture.attention`): query, key, value, output, heads, scaling
    up and down              the two other linear layers of a block; of three, gate and up are the first two, in the order that fits
    norms                    the two norms of a block; behind the layers (BERT) or before them (T5), whichever fits
    embeddings               the tables outside the blocks, told apart by their rows
    outer norm               the one norm outside the blocks: behind the embeddings (BERT), or behind the last block (T5)
    positions                what the model looks up for a row without padding
    relative positions       the table of a number for each head, and what the model looks up in it for its longest row (MPNet, T5)
    head                     the linear layers outside the blocks, in order; the activations between them are those that fit
    vectors                  pooled and normalized as the settings of the checkpoint say (`foundation.models.heads.embedding`)

Neither names nor this list prove anything: models of the same modules compute otherwise. So the parts are computed with, written out
in torch, and a model whose logits are others is refused.

Models of images stand in `image_parts`. Left out: a projection after narrower embeddings (ELECTRA small), one block for all layers
(ALBERT), a norm before the first layer behind the norm of the embeddings (RoBERTa-PreLayerNorm), relative positions of each block (UMT5)
or that depend on the states (DeBERTa), rotary positions, learned keys and values, answers for every token, products of attention and
residuals in int8.

Shape suffixes: b rows, n tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from export.fused.blocks import KEY, LOW_RANK, TOLERANCE, BlockPaths, Otherwise, block_paths, floats, linear_of
from export.fused.image_parts import image_plan
from export.fused.layers import ACTIVATIONS
from export.fused.plan import Head, HeadActivation, Plan, Pooling
from foundation.core.errors import InputError
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.models.heads.dense import LAYER
from foundation.models.heads.embedding import EMBEDDING_KEY, EmbeddingSettings
from foundation.models.layers.low_rank_embedding import LowRankEmbedding
from foundation.models.library import REFUSED, one_line
from foundation.models.own_shape import prefix_of
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.sites import load_sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROOF_TOKENS = 12
UNLIMITED = 512
"""Tokens of a row of a model whose positions have no end, unless the caller says otherwise."""
REFUSAL = "its {} layers differ from the layers of BERT, T5 and ViT, which the fused kernels run: {}"
POOLINGS: Mapping[str, Pooling] = {"cls": "first", "mean": "mean", "last": "last", "weighted": "weighted"}
"""Poolings by their names in the settings of a checkpoint."""
DECODERS = "give torch_kernels_decoder for decoders"


@dataclass(frozen=True)
class HeadPaths:
    """The head: pooling, layers with their activations, and what becomes of the last one's output (`export.fused.plan.Head`)."""

    layers: tuple[tuple[str, HeadActivation], ...]
    pooling: Pooling = "first"
    dimensions: int | None = None
    normalize: bool = False
    settled: bool = False
    """Whether the activations are known."""

    @property
    def candidates(self) -> Iterator[HeadPaths]:
        """Yields the head with every choice of activations between its layers; as it is where they are known."""
        if self.settled:
            yield self
            return
        for after in itertools.product(*[get_args(HeadActivation)] * max(0, len(self.layers) - 1)):
            yield replace(self, layers=tuple((name, which) for (name, _), which in zip(self.layers, (*after, "none"), strict=False)))

    def logits(self, states_bnI: Tensor, modules: Any) -> Tensor:
        """Returns logits or vectors of rows without padding, written out, for the proof."""
        places = torch.arange(1, states_bnI.shape[1] + 1, dtype=states_bnI.dtype)
        weights_n = places if self.pooling == "weighted" else torch.ones_like(places)
        pooled = {"first": states_bnI[:, 0], "last": states_bnI[:, -1]}
        x = pooled.get(self.pooling, (states_bnI * weights_n[:, None]).sum(dim=1) / weights_n.sum())
        for layer, name in self.layers:
            x = ACTIVATIONS[name](modules[layer](x))
        x = x[:, : self.dimensions]
        return x / x.norm(dim=1, keepdim=True) if self.normalize else x


@dataclass(frozen=True)
class EncoderPaths:
    """The parts of an encoder, by the paths of its modules."""

    blocks: BlockPaths
    word: str
    kind: str | None
    position: str | None
    first_position: int
    longest: int
    norm: str
    head: HeadPaths
    relative: Tensor | None = field(default=None, repr=False)
    """See `Plan.relative`."""
    pre_norm: bool = False

    @property
    def candidates(self) -> Iterator[EncoderPaths]:
        """Yields the parts with norms behind and before the layers, and with either gate."""
        for pre_norm, blocks in itertools.product((False, True), self.blocks.gates):
            yield replace(self, pre_norm=pre_norm, blocks=blocks)

    def states(self, ids_bn: Tensor, kinds_bn: Tensor) -> Tensor:
        """Returns the states of all tokens, float32 [b, n, I], of rows without padding; written out, for the proof."""
        known: Any = self.blocks.modules
        tokens = torch.arange(ids_bn.shape[1])
        x = known[self.word].weight[ids_bn] + (0 if self.kind is None else known[self.kind].weight[kinds_bn])
        if self.position is not None:
            x = x + known[self.position].weight[tokens + self.first_position]
        if not self.pre_norm:
            x = self.blocks.normalized(self.norm, x)
        bias: Tensor | float = 0.0
        if self.relative is not None:
            bias = self.relative[:, tokens[None, :] - tokens[:, None] + self.relative.shape[1] // 2]
        x = self.blocks.through(x, self.pre_norm, bias)
        return self.blocks.normalized(self.norm, x) if self.pre_norm else x


def plan_of(checkpoint: Checkpoint, nodes: Mapping[str, Mapping[str, str]] | None = None, longest: int = UNLIMITED) -> Plan:
    """Returns the plan of a w8a8 checkpoint.

    Args:
        checkpoint: The folder.
        nodes: See `Plan.nodes`.
        longest: Most tokens of a row, for a model whose positions have no end (T5).

    Raises:
        InputError: The model is built otherwise, or computes otherwise, or something other than its linear layers is int8.
    """
    model: PreTrainedModel = load_float(checkpoint.folder)
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        raise InputError("model", REFUSAL.format(kind, "its decoder reads an encoder"))
    if model.get_output_embeddings() is not None:
        raise InputError("model", REFUSAL.format(kind, "it has the head of a language model"), remedy=DECODERS)
    if prefix_of(model.config):
        raise InputError("model", REFUSAL.format(kind, "its attention reads a learned prefix too"))
    sites = load_sites(checkpoint.folder)
    if sites.names:
        raise InputError(
            "model",
            REFUSAL.format(kind, f"{sites.names[0]} is int8, which has no kernel"),
            remedy="quantize without attention and residuals",
        )
    scales, _ = load_quantization(checkpoint.folder)
    try:
        if model.main_input_name == "pixel_values":
            return image_plan(model, scales, nodes or {})
        found = _proved(model, _read_paths(model, longest))
    except Otherwise as error:
        raise InputError(KEY, REFUSAL.format(kind, error)) from error
    return _plan(found, scales, nodes or {})


def _read_paths(model: PreTrainedModel, longest: int) -> EncoderPaths:
    """Reads the parts off the structure, but for what has candidates.

    Raises:
        Otherwise: There are other parts.
    """
    blocks = block_paths(model)
    relative = [name for name, module in blocks.modules.items() if _of_heads(module, blocks)]
    if len(relative) > 1:
        raise Otherwise(f"it has {len(relative)} tables of relative positions; one for all blocks is written")
    outside = {name: blocks.modules[name] for name in blocks.outside if name not in relative}
    word, kind, position = _tables(model, outside, bool(relative))
    first_position = 0 if position is None else _first_position(model, blocks.modules[position])
    if position is not None:
        table: Any = blocks.modules[position]
        longest = table.num_embeddings - first_position
    return EncoderPaths(
        blocks=blocks,
        word=word,
        kind=kind,
        position=position,
        first_position=first_position,
        longest=longest,
        norm=blocks.outer_norm(),
        head=_head(model, blocks),
        relative=_relative(model, blocks.modules[relative[0]], longest) if relative else None,
    )


def _head(model: PreTrainedModel, blocks: BlockPaths) -> HeadPaths:
    settings: EmbeddingSettings | None = getattr(model.config, EMBEDDING_KEY, None)
    if settings is None:
        return HeadPaths(tuple((name, "none") for name in blocks.outer(nn.Linear)))
    activation: Any = settings["dense"]["activation"] if "dense" in settings else None
    layers = () if activation is None else ((LAYER, activation),)
    return HeadPaths(layers, POOLINGS[str(settings["pooling"])], settings["dimensions"], settings["normalize"], settled=True)


def _proved(model: PreTrainedModel, paths: EncoderPaths) -> EncoderPaths:
    """Returns the parts among their candidates that give the logits or vectors of the model.

    Raises:
        Otherwise: None do.
    """
    given, apart, fits = _proof(model, paths), [], False
    kinds = given.get("token_type_ids", torch.zeros_like(given["input_ids"]))
    problem = ""
    with torch.inference_mode():
        expected = model(**given).logits
        for parts in paths.candidates:
            try:
                states = parts.states(given["input_ids"], kinds)
            except REFUSED as error:
                problem = one_line(error)
                continue
            fits = True
            for head in parts.head.candidates:
                try:
                    logits = head.logits(states, parts.blocks.modules)
                except REFUSED:  # the layers do not fit one after another
                    continue
                if logits.shape == expected.shape:
                    apart.append(float((logits - expected).abs().max() / expected.abs().max()))
                    if apart[-1] <= TOLERANCE:
                        return replace(parts, head=head)
    if not fits:
        raise Otherwise(f"its layers do not fit behind each other ({problem})")
    closest = f"the closest of its possible heads gives logits {min(apart):.1%} apart" if apart else "no head gives its logits"
    raise Otherwise(f"it has the modules of BERT or T5 and computes otherwise ({closest})")


def _proof(model: PreTrainedModel, paths: EncoderPaths) -> dict[str, Tensor]:
    """Returns rows without padding."""
    generator = torch.Generator().manual_seed(0)
    known: Any = paths.blocks.modules
    ids = torch.randint(known[paths.word].num_embeddings, (3, min(PROOF_TOKENS, paths.longest)), generator=generator)
    pad = getattr(model.config, "pad_token_id", None)
    if pad is not None:  # a model that counts positions by it would see padding
        ids[ids == pad] = 0 if pad else 1
    given = {"input_ids": ids}
    if paths.kind is not None:
        given["token_type_ids"] = torch.randint(known[paths.kind].num_embeddings, ids.shape, generator=generator)
    return given


def _tables(model: PreTrainedModel, outside: Mapping[str, nn.Module], relative: bool) -> tuple[str, str | None, str | None]:
    """Returns the paths of the tables of words, of token types and of positions; None for one that is not there.

    Args:
        model: The model.
        outside: The modules outside its blocks, without tables of relative positions.
        relative: Whether it has such a table, and needs no other positions.
    """
    try:
        words: Any = model.get_input_embeddings()
    except NotImplementedError as error:  # what a model raises that has several tables of words (CANINE)
        raise Otherwise("it has no one table of words") from error
    if isinstance(words, LowRankEmbedding):
        raise Otherwise(LOW_RANK)
    embeddings = {name: module for name, module in outside.items() if isinstance(module, nn.Embedding)}
    tables = {
        name: module for name, module in embeddings.items() if module is words or module.weight is not words.weight
    }  # T5 has it twice
    word = next((name for name, module in tables.items() if module is words), None)
    types, most = getattr(model.config, "type_vocab_size", 0), getattr(model.config, "max_position_embeddings", 0)
    others = {name: module.num_embeddings for name, module in tables.items() if name != word}
    positions = [name for name, rows in others.items() if rows == most]
    kinds = [name for name, rows in others.items() if rows == types and name not in positions]
    placed = len(positions) == 1 or (relative and not positions)
    if word is None or not placed or len(kinds) > 1 or len(others) != len(positions) + len(kinds):
        shown = ", ".join(f"{name} of {rows} rows" for name, rows in others.items()) or "none"
        raise Otherwise(f"besides words it has the tables {shown}; a table of positions and at most one of token types are needed")
    return word, kinds[0] if kinds else None, positions[0] if positions else None


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


def _of_heads(module: nn.Module, blocks: BlockPaths) -> bool:
    """Whether a module is a table of a number for every head, which all blocks have as many of."""
    return isinstance(module, nn.Embedding) and {attention.heads for attention in blocks.attentions} == {module.embedding_dim}


def _relative(model: PreTrainedModel, table: nn.Module, longest: int) -> Tensor:
    """Returns the numbers of all distances, [H, 2 N - 1], from what the model looks up for its longest row.

    Raises:
        Otherwise: It looks up more than one number for a distance.
    """
    looked_up: list[Tensor] = []
    handle = table.register_forward_pre_hook(lambda _, inputs: looked_up.append(inputs[0]))
    pad = getattr(model.config, "pad_token_id", None)
    try:
        with torch.inference_mode():
            model(input_ids=torch.full((1, longest), 1 if pad == 0 else 0))
    finally:
        handle.remove()
    rows = [one.reshape(longest, longest) for one in looked_up if one.numel() == longest**2]
    if not rows:
        raise Otherwise("its table of relative positions is not looked up for every pair of tokens")
    distances = torch.cat([rows[0][1:, 0].flip(0), rows[0][0]])  # of key 0 from the last row on, then of row 0
    tokens = torch.arange(longest)
    every = distances[tokens[None, :] - tokens[:, None] + longest - 1]
    if len(rows) != len(looked_up) or any(not torch.equal(one, every) for one in rows):
        raise Otherwise("its relative positions are not the same for the same distance of two tokens")
    values: Any = table
    return floats(values.weight.detach()[distances].T)


def _plan(paths: EncoderPaths, scales: Mapping[str, Any], nodes: Mapping[str, Mapping[str, str]]) -> Plan:
    blocks, known, linears = paths.blocks, paths.blocks.modules, paths.blocks.linears
    norm, planned = blocks.planned(paths.norm, paths.pre_norm, scales)
    tables: dict[str, Any] = {"word": paths.word, "kind": paths.kind, "position": paths.position}
    tables = {name: None if path is None else floats(known[path].get_parameter("weight")) for name, path in tables.items()}
    layers = tuple((linear_of(name, linears[name], scales.get(name)), after) for name, after in paths.head.layers)
    return Plan(
        **tables,
        norm=norm,
        longest=paths.longest,
        activation=blocks.activation,
        blocks=planned,
        head=Head(layers, paths.head.pooling, paths.head.dimensions, paths.head.normalize),
        nodes={name: nodes[name] for name in nodes},
        first_position=paths.first_position,
        pre_norm=paths.pre_norm,
        relative=paths.relative,
    )
