"""What is looked at inside of student and teacher: hidden states, and queries, keys and values of single blocks.

    hidden states      H_0 is what the first block gets, H_m what block m gives
    last state         the last of output_hidden_states: of most models H_L, of a decoder what its final norm makes of H_L
    attention scores   S = scaling * Q K^T, computed here from the captured Q and K for the blocks that a loss asks for
    relations          Q, K and V of a block as its attention gets them, [b, heads, L, d]

Q, K and V are taken where every Transformers model hands them over by position: at the attention function, whatever the names or the
order of its layers, fused or not. `CAPTURING` is `scaled_dot_product_attention` with a look at its arguments, so that no model has to
fall back to eager attention; the arguments say which tokens may see which, too. Hidden states are taken at the blocks: the list that
Transformers gives ends with a normed one in a decoder, which must not be compared with raw ones. Where all layers share one block
(ALBERT) there is no final norm, and the list is right. Left out: models whose attention does not go through this function (DeBERTa) or
whose mask holds more than who sees whom (BEiT), and terms that a model adds to Q K^T by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from compress.core.errors import InputError
from compress.models.blocks import between_blocks, repeated_blocks
from compress.models.origin import Origin

CAPTURING = "capturing_sdpa"


@dataclass(frozen=True)
class Wanted:
    """What a loss needs of a model."""

    logits: bool = False
    hidden: bool = False
    """The hidden states of all layers."""
    blocks: frozenset[int] = frozenset()
    """Blocks, counted from 0, whose queries, keys and values are needed."""

    @property
    def inside(self) -> bool:
        """Whether more than the answer is needed."""
        return self.hidden or bool(self.blocks)

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(self.logits or other.logits, self.hidden or other.hidden, self.blocks | other.blocks)

    def at(self, origin: Origin) -> Wanted:
        """Returns the same of the model that another one is a part of."""
        return replace(self, blocks=frozenset(origin.layers[block] for block in self.blocks))


@dataclass(frozen=True)
class Heads:
    """What the attention of one block got."""

    query: Tensor
    """Float `[b, heads, L, d]`."""
    key: Tensor
    """Float `[b, heads, L, d]`; grouped keys are repeated for each query head."""
    value: Tensor
    """Float `[b, heads, L, d]`, as `key`."""
    scaling: float
    """Factor of the scores Q K^T."""
    allowed: Tensor
    """Bool, broadcasts to `[b, 1, L, L]`: which keys (last axis) each query may see."""

    def only(self, heads: Sequence[int]) -> Heads:
        """Returns some of the heads."""
        chosen = torch.tensor(heads, device=self.query.device)
        query, key, value = (each.index_select(1, chosen) for each in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)


@dataclass(frozen=True)
class Captured:
    """What one model said about a batch."""

    logits: Tensor
    """Float32 `[b, C]`; `[b, L, V]` for text-generation."""
    mask: Tensor | None = None
    """Bool `[b, L]`: the tokens that are no padding; None where neither hidden states nor blocks were wanted."""
    hidden: tuple[Tensor, ...] = ()
    """H_0 ... H_L, float `[b, L, D]` each, as the blocks give them."""
    blocks: Mapping[int, Heads] = field(default_factory=dict)
    """By block, counted from 0."""
    last: Tensor | None = None
    """The last hidden state, float `[b, L, D]`, after the final norm where Transformers gives it so; None where `hidden` is empty."""

    def part(self, origin: Origin) -> Captured:
        """Returns what was captured of the parts that another model is made of, in its numbering; the answers are the whole's."""
        states = (0, *(layer + 1 for layer in origin.layers)) if self.hidden else ()
        blocks = {number: self.blocks[layer] for number, layer in enumerate(origin.layers) if layer in self.blocks}
        return replace(
            self,
            hidden=tuple(_channels(self.hidden[state], origin.hidden) for state in states),
            blocks={number: seen if (heads := origin.heads[number]) is None else seen.only(heads) for number, seen in blocks.items()},
            last=None if self.last is None else _channels(self.last, origin.hidden),
        )


def _channels(states_bLD: Tensor, chosen: Sequence[int]) -> Tensor:
    if len(chosen) == states_bLD.shape[2]:
        return states_bLD
    return states_bLD.index_select(2, torch.tensor(chosen, device=states_bLD.device))


def seen_by_both(student: Heads, teacher: Heads, mask_bL: Tensor) -> Tensor:
    """Returns which keys a query may see in both models, padding excluded, bool `[b, 1, queries or 1, keys]`."""
    return student.allowed & teacher.allowed & mask_bL[:, None, None, :]


class Capture:
    """Runs a model and keeps what was wanted.

    Args:
        model: A Transformers model.
        key: Key path in the recipe, for messages.
    """

    def __init__(self, model: nn.Module, key: str) -> None:
        self.model, self.key = model, key
        self.block_of: dict[nn.Module, int] = {}

    def __call__(self, features: Mapping[str, Tensor], wanted: Wanted) -> Captured:
        """Returns what the model says about a batch.

        Args:
            features: Inputs of the model.
            wanted: What to keep beside the logits.

        Raises:
            InputError: The attention of a wanted block is not to be seen.
        """
        if wanted.blocks and not self.block_of:
            self._prepare()
        seen = _Seen(self.block_of, wanted.blocks)
        token = _SEEN.set(seen)
        try:
            with between_blocks(self.blocks if wanted.hidden else ()) as states:
                output = self.model(**features, output_hidden_states=True) if wanted.hidden else self.model(**features)
        finally:
            _SEEN.reset(token)
        missing = sorted(wanted.blocks - seen.heads.keys())
        if missing:
            kind = self.model.config.model_type  # type: ignore[union-attr]
            raise InputError(f"{self.key}: the attention of this {kind} cannot be looked at (layer {missing[0] + 1}); choose another loss")
        given = tuple(output.hidden_states) if wanted.hidden else ()
        hidden = tuple(states) or given
        mask = _token_mask(features, hidden, seen.heads) if hidden or seen.heads else None
        return Captured(output.logits.float(), mask, hidden, seen.heads, given[-1] if given else None)

    @cached_property
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated blocks; none where all layers share one."""
        try:
            return tuple(repeated_blocks(self.model, self.key)[1])
        except InputError:
            return ()

    def _prepare(self) -> None:
        """Lets the attention of the model go through `_capturing`."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(CAPTURING, _capturing)
        AttentionMaskInterface.register(CAPTURING, sdpa_mask)
        blocks = repeated_blocks(self.model, self.key)[1]
        self.block_of = {module: number for number, block in enumerate(blocks) for module in block.modules()}
        self.model.set_attn_implementation(CAPTURING)  # type: ignore[operator]


class _Seen:
    """Collects the arguments of attention during one forward pass."""

    def __init__(self, block_of: Mapping[nn.Module, int], wanted: frozenset[int]) -> None:
        self.block_of, self.wanted = block_of, wanted
        self.heads: dict[int, Heads] = {}

    def take(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> None:
        block = self.block_of.get(module)
        if block not in self.wanted or block is None:
            return
        if mask is not None and mask.dtype != torch.bool:
            return  # a bias of the positions is added to it: where it is 0 says nothing about who sees whom
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        length = query.shape[2]
        if mask is not None:
            allowed = mask
        elif getattr(module, "is_causal", False):
            allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
        else:
            allowed = torch.ones(1, 1, 1, length, dtype=torch.bool, device=query.device)
        self.heads[block] = Heads(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling, allowed)


_SEEN: ContextVar[_Seen | None] = ContextVar("seen", default=None)


def _capturing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = _SEEN.get()
    if seen is not None:
        seen.take(module, query, key, value, attention_mask, kwargs.get("scaling"))
    output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output


def _token_mask(features: Mapping[str, Tensor], hidden: tuple[Tensor, ...], heads: Mapping[int, Heads]) -> Tensor:
    """Returns bool `[b, L]`: the attention mask of text; all tokens of an image, its class token included."""
    if "attention_mask" in features:
        return features["attention_mask"].bool()
    length = hidden[0].shape[1] if hidden else next(iter(heads.values())).query.shape[2]
    some = next(iter(features.values()))
    return torch.ones(len(some), length, dtype=torch.bool, device=some.device)
