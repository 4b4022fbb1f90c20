"""Captures internals of student and teacher: hidden states, and queries, keys and values per block.

    hidden states      H_0 is the input of the first block, H_m the output of block m
    last state         the last of output_hidden_states: H_L in most models, H_L after the final norm in decoders
    attention scores   S = scaling * Q K^T, computed by the losses from the captured Q and K
    relations          Q, K and V as a block's attention function receives them, [b, heads, L, d]

Q, K and V are captured where every Transformers model passes them by position: at the attention function. This works for any layer names or
order, fused or not. `CAPTURING` is `scaled_dot_product_attention` plus recording of its arguments, so no model has to fall back to eager
attention; the arguments also say which tokens may attend to which. Hidden states are captured at the blocks: in a decoder, the list that
Transformers returns ends with a normalized state, which must not be compared with raw ones. If all layers share one block (ALBERT) there is
no final norm, and the list is used as it is. An encoder-decoder has two stacks of blocks, whose hidden states and masks are kept
apart.

Not supported: models whose attention bypasses this function (DeBERTa), masks that hold more than which token may attend to which (BEiT),
and terms that a model adds to Q K^T itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture.blocks import between_blocks, blocks_of, stacks_of
from foundation.models.architecture.origin import Origin
from foundation.models.inputs.padding import mask_of, read_by_decoder
from foundation.training.precision import in_float32

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CAPTURING = "capturing_sdpa"


@dataclass(frozen=True)
class Wanted:
    """The tensors to capture in a model."""

    logits: bool = False
    hidden: bool = False
    """The hidden states of all layers."""
    blocks: frozenset[int] = frozenset()
    """Blocks, counted from 0, whose queries, keys and values are captured."""

    @property
    def internals(self) -> bool:
        """Whether more than the logits is captured."""
        return self.hidden or bool(self.blocks)

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(self.logits or other.logits, self.hidden or other.hidden, self.blocks | other.blocks)

    def in_teacher(self, origin: Origin) -> Wanted:
        """Returns the same with the layer numbers of the unpruned teacher."""
        return replace(self, blocks=frozenset(origin.layers[block] for block in self.blocks))


@dataclass(frozen=True)
class Heads:
    """The inputs of one block's attention function."""

    query: Tensor
    """Float `[b, heads, L, d]`."""
    key: Tensor
    """Float `[b, heads, L, d]`; keys of grouped-query attention are repeated for each query head."""
    value: Tensor
    """Float `[b, heads, L, d]`, as `key`."""
    scaling: float
    """Scaling factor of Q K^T."""
    allowed: Tensor
    """Bool, broadcasts to `[b, 1, L, L]`: which keys (last axis) each query may attend to."""

    def scores(self) -> Tensor:
        """Returns S = scaling * Q K^T, float32 `[b, heads, L, L]`."""
        with in_float32(self.query):
            return self.scaling * self.query.float() @ self.key.float().mT

    def select(self, heads: Sequence[int]) -> Heads:
        """Returns the given heads."""
        chosen = torch.tensor(heads, device=self.query.device)
        query, key, value = (each.index_select(1, chosen) for each in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)


@dataclass(frozen=True)
class Captured:
    """The captured tensors of one model for a batch."""

    logits: Tensor
    """Float32 `[b, C]`; `[b, L, V]` for text-generation."""
    mask: Tensor | None = None
    """Bool `[b, L]`, False for padding; None if only logits were captured."""
    hidden: tuple[Tensor, ...] = ()
    """H_0 ... H_L, float `[b, L, D]` each, as the blocks return them."""
    blocks: Mapping[int, Heads] = field(default_factory=dict)
    """Keyed by block, counted from 0."""
    last: Tensor | None = None
    """The last hidden state, float `[b, L, D]`, after the final norm if Transformers applies it; None if `hidden` is empty."""
    sides: tuple[Captured, ...] = ()
    """The hidden states and masks of the encoder and of the decoder; empty for a model with one stack of blocks."""

    @property
    def stacks(self) -> tuple[Captured, ...]:
        """The hidden states and masks of each stack: of the encoder and the decoder, or of the model itself."""
        return self.sides or (self,)

    def restricted_to(self, origin: Origin) -> Captured:
        """Returns only the layers, heads and channels that a pruned student kept, in its numbering; the logits stay the teacher's."""
        if self.sides:
            return replace(self, sides=self._restricted_sides(origin))
        states = (0, *(layer + 1 for layer in origin.layers)) if self.hidden else ()
        blocks = {number: self.blocks[layer] for number, layer in enumerate(origin.layers) if layer in self.blocks}
        return replace(
            self,
            hidden=tuple(_channels(self.hidden[state], origin.hidden) for state in states),
            blocks={number: block if (heads := origin.heads[number]) is None else block.select(heads) for number, block in blocks.items()},
            last=None if self.last is None else _channels(self.last, origin.hidden),
        )

    def _restricted_sides(self, origin: Origin) -> tuple[Captured, ...]:
        first, found = 0, []
        for side in self.sides:
            depth = len(side.hidden) - 1
            states = (0, *(layer - first + 1 for layer in origin.layers if first <= layer < first + depth))
            found.append(replace(side, hidden=tuple(_channels(side.hidden[state], origin.hidden) for state in states)))
            first += depth
        return tuple(found)


def _channels(states_bLD: Tensor, chosen: Sequence[int]) -> Tensor:
    if len(chosen) == states_bLD.shape[2]:
        return states_bLD
    return states_bLD.index_select(2, torch.tensor(chosen, device=states_bLD.device))


def visible_in_both(student: Heads, teacher: Heads, mask_bL: Tensor) -> Tensor:
    """Returns which keys a query may attend to in both models, padding excluded, bool `[b, 1, queries or 1, keys]`."""
    return student.allowed & teacher.allowed & mask_bL[:, None, None, :]


class Capture:
    """Runs a model and captures its internals.

    Args:
        model: A Transformers model.
        key: Key path in the recipe, for error messages.
    """

    def __init__(self, model: nn.Module, key: str) -> None:
        self.model, self.key = model, key
        self.block_of: dict[nn.Module, int] = {}

    def __call__(self, features: Mapping[str, Tensor], wanted: Wanted) -> Captured:
        """Runs the model on a batch.

        Args:
            features: Inputs of the model.
            wanted: What to capture besides the logits.

        Raises:
            InputError: The attention inputs of a wanted block cannot be captured.
        """
        if wanted.blocks and not self.block_of:
            self._prepare()
        recorder = _Recorder(self.block_of, wanted.blocks)
        token = _RECORDER.set(recorder)
        try:
            with ExitStack() as stack:
                every = [stack.enter_context(between_blocks(blocks)) for blocks in (self.blocks if wanted.hidden else ())]
                output = self.model(**features, output_hidden_states=True) if wanted.hidden else self.model(**features)
        finally:
            _RECORDER.reset(token)
        missing = sorted(wanted.blocks - recorder.heads.keys())
        if missing:
            kind = self.model.config.model_type  # type: ignore[union-attr]
            raise InputError(
                self.key, f"the attention of this {kind} cannot be captured (layer {missing[0] + 1})", remedy="choose another loss"
            )
        if len(every) > 1:
            return Captured(output.logits.float(), sides=self._sides(features, every))
        returned = tuple(output.hidden_states) if wanted.hidden else ()
        hidden = tuple(every[0]) if every else returned
        mask = _token_mask(features, hidden, recorder.heads) if hidden or recorder.heads else None
        return Captured(output.logits.float(), mask, hidden, recorder.heads, returned[-1] if returned else None)

    def _sides(self, features: Mapping[str, Tensor], states: Sequence[Sequence[Tensor]]) -> tuple[Captured, ...]:
        """Returns the hidden states of encoder and decoder with the masks of source and target."""
        config: PreTrainedConfig = self.model.config
        source_bL = features["attention_mask"].bool()
        target_bL = read_by_decoder(features["decoder_input_ids"], config.pad_token_id) if "decoder_input_ids" in features else source_bL
        masks = (source_bL, target_bL)
        return tuple(Captured(torch.empty(0), mask, tuple(hidden)) for mask, hidden in zip(masks, states, strict=True))

    @cached_property
    def blocks(self) -> Sequence[Sequence[nn.Module]]:
        """The blocks of each stack; empty if all layers share one."""
        try:
            blocks = list(blocks_of(self.model, self.key).values())
            return tuple(blocks[stack.first : stack.numbers.stop] for stack in stacks_of(self.model, self.key))
        except InputError:
            return ()

    def _prepare(self) -> None:
        """Routes the model's attention through `_capturing`."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(CAPTURING, _capturing)
        AttentionMaskInterface.register(CAPTURING, sdpa_mask)
        blocks = blocks_of(self.model, self.key).values()
        self.block_of = {module: number for number, block in enumerate(blocks) for module in block.modules()}
        self.model.set_attn_implementation(CAPTURING)  # type: ignore[operator]


class _Recorder:
    """Records the arguments of attention during one forward pass."""

    def __init__(self, block_of: Mapping[nn.Module, int], wanted: frozenset[int]) -> None:
        self.block_of, self.wanted = block_of, wanted
        self.heads: dict[int, Heads] = {}

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> None:
        block = self.block_of.get(module)
        if block not in self.wanted or block is None:
            return
        if mask is not None and mask.dtype != torch.bool:
            return  # a float mask may include a position bias: zeros in it do not say which tokens may attend
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


_RECORDER: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def _capturing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.record(module, query, key, value, attention_mask, kwargs.get("scaling"))
    output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output


def _token_mask(features: Mapping[str, Tensor], hidden: tuple[Tensor, ...], heads: Mapping[int, Heads]) -> Tensor:
    """Returns bool `[b, L]`: the attention mask for text; all True without one, as for images, whose tokens include the class
    token."""
    length = hidden[0].shape[1] if hidden else next(iter(heads.values())).query.shape[2]
    found = mask_of(features, length)
    if found is not None:
        return found
    some = next(iter(features.values()))
    return torch.ones(len(some), length, dtype=torch.bool, device=some.device)
