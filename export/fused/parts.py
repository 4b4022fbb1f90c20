"""Finds the parts of a BERT-like encoder by structure, and proves them by computing: a checkpoint in, a plan out.

    blocks and attention     traced (`foundation.models.architecture.attention`): query, key, value, output, heads, scaling
    up and down              the two other linear layers of a block
    norms                    the two LayerNorms of a block, the second one after the feed-forward network
    embeddings               the tables outside the blocks, told apart by their rows, with one LayerNorm
    positions                what the model looks up for a row without padding
    relative positions       the table of a number for each head, and what the model looks up in it for its longest row (MPNet, as in T5)
    head                     the linear layers outside the blocks, in order; the activations between them are those that fit

Neither names nor this list prove anything: a pre-norm encoder has the same modules. So the parts are computed with, written out
in torch, and a model whose logits are others is refused. The activations of the head are found in the same way.

Models of images stand in `image_parts`. Left out: text with norms before a layer (GPT-2), RMSNorm, a projection after narrower
embeddings (ELECTRA small), one block for all layers (ALBERT), relative positions that depend on the states (DeBERTa), rotary positions,
gated feed-forward networks, answers for every token, products of attention and residuals in int8.

Shape suffixes: b rows, n tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from export.fused.blocks import KEY, TOLERANCE, BlockPaths, Otherwise, block_paths, floats, linear_of, norm_of
from export.fused.image_parts import image_plan
from export.fused.layers import ACTIVATIONS
from export.fused.plan import HeadActivation, Plan
from foundation.core.errors import InputError
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.models.library import REFUSED, one_line
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.sites import load_sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROOF_TOKENS = 12
REFUSAL = "its {} layers differ from the layers of BERT and ViT, which the fused kernels run: {}"

DECODERS = "give torch_kernels_decoder for decoders"


@dataclass(frozen=True)
class EncoderPaths:
    """The parts of an encoder, by the paths of its modules."""

    blocks: BlockPaths
    word: str
    kind: str | None
    position: str
    first_position: int
    norm: str
    head: tuple[tuple[str, HeadActivation], ...] = ()
    relative: Tensor | None = None
    """See `Plan.relative`."""

    def states(self, ids_bn: Tensor, kinds_bn: Tensor) -> Tensor:
        """Returns the states of the first tokens, float32 [b, D], of rows without padding; written out, for the proof."""
        known: Any = self.blocks.modules
        positions_n = torch.arange(ids_bn.shape[1]) + self.first_position
        x = known[self.word].weight[ids_bn] + (0 if self.kind is None else known[self.kind].weight[kinds_bn])
        x = known[self.norm](x + known[self.position].weight[positions_n])
        bias: Tensor | float = 0.0
        if self.relative is not None:
            tokens = torch.arange(ids_bn.shape[1])
            bias = self.relative[:, tokens[None, :] - tokens[:, None] + self.relative.shape[1] // 2]
        for attention, (up, down), (first, second) in self.blocks:
            x = known[first](self.blocks.attended(attention, x, bias) + x)
            x = known[second](known[down](ACTIVATIONS[self.blocks.activation](known[up](x))) + x)
        states: Tensor = x[:, 0]
        return states

    def logits(self, states: Tensor, after: Sequence[HeadActivation]) -> Tensor:
        """Returns the head's output for states, with these activations after its layers."""
        for (layer, _), name in zip(self.head, after, strict=True):
            states = ACTIVATIONS[name](self.blocks.modules[layer](states))
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
    if model.config.is_encoder_decoder:
        raise InputError("model", REFUSAL.format(kind, "its decoder reads an encoder"))
    if model.get_output_embeddings() is not None:
        raise InputError("model", REFUSAL.format(kind, "it has the head of a language model"), remedy=DECODERS)
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
        found = _proved(model, _read_paths(model))
    except Otherwise as error:
        raise InputError(KEY, REFUSAL.format(kind, error)) from error
    return _plan(found, scales, nodes or {})


def _read_paths(model: PreTrainedModel) -> EncoderPaths:
    """Reads the parts off the structure, the activations of the head excepted.

    Raises:
        Otherwise: There are other parts.
    """
    blocks = block_paths(model)
    outside = {name: blocks.modules[name] for name in blocks.outside}
    relative = next((name for name, module in outside.items() if _of_heads(module, blocks)), None)
    word, kind, position = _tables(model, {name: module for name, module in outside.items() if name != relative})
    first_position = _first_position(model, blocks.modules[position])
    longest = model.get_submodule(position).num_embeddings - first_position
    return EncoderPaths(
        blocks=blocks,
        word=word,
        kind=kind,
        position=position,
        first_position=first_position,
        norm=blocks.outer_norm(),
        head=tuple((name, "none") for name in blocks.outer(nn.Linear)),
        relative=None if relative is None else _relative(model, blocks.modules[relative], int(longest)),
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


def _tables(model: PreTrainedModel, outside: Mapping[str, nn.Module]) -> tuple[str, str | None, str]:
    """Returns the paths of the tables of words, of token types (None without) and of positions."""
    tables = {name: module for name, module in outside.items() if isinstance(module, nn.Embedding)}
    try:
        words = model.get_input_embeddings()
    except NotImplementedError as error:  # what a model raises that has several tables of words (CANINE)
        raise Otherwise("it has no one table of words") from error
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

    def table(name: str) -> Tensor:
        module: Any = known[name]
        return floats(module.weight)

    word = table(paths.word)
    return Plan(
        word=word,
        kind=torch.zeros(1, word.shape[1]) if paths.kind is None else table(paths.kind),
        position=table(paths.position),
        norm=norm_of(known[paths.norm]),
        first_position=paths.first_position,
        activation=blocks.activation,
        blocks=tuple(blocks.block(number, norms, scales) for number, norms in enumerate(blocks.norms)),
        head=tuple((linear_of(name, linears[name], scales.get(name)), after) for name, after in paths.head),
        nodes={name: nodes[name] for name in nodes},
        relative=paths.relative,
    )
