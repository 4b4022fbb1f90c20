"""Tokens that leave a model on its way: behind a block only the most significant ones stay, for a head that reads the first token alone.

Word vectors of an encoder grow alike from layer to layer, so that later layers can do without most of them (Goyal et al. 2020, PoWER-BERT,
https://arxiv.org/abs/2001.08950, section 3). A token is as significant as the first token finds it in the block it leaves (Liang et al.
2022, EViT, https://arxiv.org/abs/2202.07800, section 3.2), since the head reads what the first token has gathered:

    significance_j = mean over heads of softmax_j(q_0 k_j * scaling)        of tokens j = 1 ... n - 1; n without padding

Of a row with n tokens, 1 + ceil(share (n - 1)) stay: the first one and the most significant others, in falling order. A row thus keeps the
same tokens in whatever length it is padded to; of S places 1 + ceil(share (S - 1)) stay, and those that a shorter row does not fill are
padding. `share` counts from the tokens that came in, so that shares fall from block to block.

Blocks have to treat tokens alike wherever they stand: positions are added in front of the first one, and none are inside (no rotary ones,
no distances). `prune.tokens` proves that and that the head reads nothing else.

Hooks do it: before the first block the lengths are taken, behind a block tokens are chosen, and the blocks after it get the mask of those.
Layers are looked up by name when the model runs, since quantization replaces them.

Left out: PoWER-BERT's sum over all queries, which needs the scores of tokens that go; its learned shares; EViT's token of the rest.

Legend: B rows, S tokens that come in, L tokens of a block, K tokens that stay, H heads, G heads of keys, D channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from compress.models.architecture.attention import Attention
from compress.models.architecture.blocks import states_given

DENOMINATOR: Final = 1000
"""Shares are whole multiples of its reciprocal: numbers of tokens are integers in every engine."""
MASKS: Final = ("attention_mask", "attn_mask", "mask")
"""What blocks call the mask of their tokens."""
_PADDING: Final = -1.0
"""Added to a score, any less is padding."""
_MASKED: Final = -30000.0
"""Added to the scores of padding; exp(-30000 + score) is 0 in float32, and float16 can hold it (`export.graph.onnx`)."""


def staying(tokens: Any, share: float) -> Any:
    """Returns how many of `tokens` stay: an integer, or a symbol of `torch.export`."""
    return 1 + ((tokens - 1) * _numerator(share) + DENOMINATOR - 1) // DENOMINATOR


def _numerator(share: float) -> int:
    return round(share * DENOMINATOR)


@dataclass
class Passing:
    """What the blocks of a model tell each other during one forward pass."""

    incoming: Any = 0
    """S."""
    others_B1: Tensor | None = None
    """Tokens of each row beside the first one, without padding, int64 `[B, 1]`; None if no row has padding."""
    mask: Tensor | None = None
    """Mask of the tokens that are left, in the form in which the model made its own."""
    added_BL: Tensor | None = None
    """The same mask, added to scores."""
    changed: bool = False
    """Whether tokens have left."""


@dataclass
class DroppedTokens:
    """The hooks of one block."""

    passing: Passing
    """Shared by all blocks."""
    attention: Attention
    """Attention of the block, with its own number of heads."""
    block: str
    """Module name of the block."""
    share: float
    """Share of the tokens that came in which stay behind it; 1 keeps them all."""
    first: bool
    """Whether it is the first block."""
    seen: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of the layers that make queries and keys, until the block ends."""

    def before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Takes the lengths of the rows before the first block; hands later ones the mask of what stayed."""
        names = list(inspect.signature(block.forward).parameters)
        places = [(name, names.index(name)) for name in MASKS if name in names]
        name, place = places[0] if places else ("", len(args))
        if self.first:
            self._enter(states_given(args, kwargs), args[place] if place < len(args) else kwargs.get(name))
        elif self.passing.changed and self.passing.mask is not None:
            if place < len(args):
                args = (*args[:place], self.passing.mask, *args[place + 1 :])
            else:
                kwargs = {**kwargs, name: self.passing.mask}
        if self.share < 1:
            self.seen.clear()
            self._watch(block)
        return args, kwargs

    def after(self, block: nn.Module, args: Any, output: Any) -> Any:
        """Returns the output of the block for the tokens that stay."""
        if isinstance(output, tuple):
            return (self._selected(output[0]), *output[1:])
        return self._selected(output)

    def see(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        """Keeps the output of the layer that makes queries, or keys, or both."""
        for part in ("query", "key"):
            if self._layers[part] is layer:
                self.seen[part] = output

    def _watch(self, block: nn.Module) -> None:
        self._layers = {
            part: block.get_submodule(self.attention.parts[part][0].removeprefix(f"{self.block}.")) for part in ("query", "key")
        }
        for layer in set(self._layers.values()):
            if self.see not in layer._forward_hooks.values():
                layer.register_forward_hook(self.see)

    def _enter(self, states_BSD: Tensor, mask: Tensor | None) -> None:
        passing = self.passing
        passing.incoming, passing.mask, passing.changed = states_BSD.shape[1], mask, False
        passing.added_BL = passing.others_B1 = None
        if mask is not None:
            passing.added_BL = added_to_scores(mask)
            passing.others_B1 = (passing.added_BL > _PADDING).sum(-1, keepdim=True) - 1

    def _selected(self, states_BLD: Tensor) -> Tensor:
        passing = self.passing
        scores_BL = significance(self._part("query"), self._part("key"), self.attention, passing.added_BL)
        self.seen.clear()
        count = staying(passing.incoming, self.share)
        kept_BK = most_significant(scores_BL, count)
        if passing.mask is not None and passing.others_B1 is not None:
            valid_BK = are_tokens(passing.others_B1, self.share, count)
            passing.added_BL = torch.where(valid_BK, 0.0, _MASKED)
            passing.mask = mask_like(passing.mask, valid_BK, passing.added_BL)
        passing.changed = True
        return select_tokens(states_BLD, kept_BK)

    def _part(self, part: str) -> Tensor:
        """Returns queries or keys, `[B, L, heads * head_dim]`, out of the output of their layer."""
        layer, place = self.attention.parts[part]
        beside = [other for other, (name, at) in self.attention.parts.items() if name == layer and at < place]
        start = sum(self.attention.size(other) for other in beside)
        return self.seen[part][..., start : start + self.attention.size(part)]


def significance(query_BLd: Tensor, key_BLd: Tensor, attention: Attention, added_BL: Tensor | None) -> Tensor:
    """Returns how much the first token attends to each token, mean over the heads, float `[B, L]`; far below 0 for padding.

    Products and sums stand for a product of matrices, which would be taken for one of attention, and quantized.

    Args:
        query_BLd: Queries of all heads side by side, `[B, L, H * head_dim]`.
        key_BLd: Keys, `[B, L, G * head_dim]`.
        attention: Names the number of heads and the scaling.
        added_BL: What is added to the scores of padding; None: there is none.
    """
    heads, groups, dim = attention.heads, attention.key_value_heads, attention.head_dim
    first_B1Hd = query_BLd[:, :1].reshape(query_BLd.shape[0], 1, heads, dim)
    key_BLHd = key_BLd.reshape(*key_BLd.shape[:-1], groups, dim)
    if groups < heads:
        key_BLHd = key_BLHd.repeat_interleave(heads // groups, dim=2)
    scores_BHL: Tensor = (first_B1Hd * key_BLHd).sum(-1).mT * attention.scaling
    if added_BL is None:
        return scores_BHL.softmax(-1).mean(1)
    return (scores_BHL + added_BL[:, None]).softmax(-1).mean(1) + added_BL


def most_significant(scores_BL: Tensor, count: Any) -> Tensor:
    """Returns the places of the first token and of the `count - 1` most significant others, in falling order, int64 `[B, K]`."""
    others_BM = scores_BL[:, 1:].topk(count - 1, dim=1).indices + 1
    return torch.cat([torch.zeros_like(scores_BL[:, :1], dtype=torch.long), others_BM], dim=1)


def select_tokens(states_BLD: Tensor, kept_BK: Tensor) -> Tensor:
    """Returns the states of some tokens, `[B, K, D]`."""
    rows_B1 = torch.arange(states_BLD.shape[0], device=states_BLD.device)[:, None]
    return states_BLD[rows_B1, kept_BK]


def are_tokens(others_B1: Tensor, share: float, count: Any) -> Tensor:
    """Returns which of `count` places hold tokens of their row and not padding, bool `[B, K]`: j = 0, and j - 1 < share (n - 1).

    Those are 1 + ceil(share (n - 1)), without a division of integers.
    """
    place_K = torch.arange(count, device=others_B1.device)
    return (place_K - 1) * DENOMINATOR < others_B1 * _numerator(share)


def added_to_scores(mask: Tensor) -> Tensor:
    """Returns what is added to the scores of the first token, float `[B, L]`: 0 for tokens, far less for padding.

    Args:
        mask: True or 1 for tokens, `[B, L]` or `[B, 1, 1 or L, L]`; or a float that is added to the scores, `[B, 1, 1 or L, L]`.
    """
    row_BL = mask if mask.ndim == 2 else mask[:, 0, 0]
    if row_BL.is_floating_point() and mask.ndim == 4:
        return row_BL.clamp(min=_MASKED)
    return torch.where(row_BL.bool(), 0.0, _MASKED)


def mask_like(mask: Tensor, valid_BK: Tensor, added_BK: Tensor) -> Tensor:
    """Returns the mask of places that hold tokens or padding, in the form of another mask: `[B, K]` or `[B, 1, 1, K]`."""
    row_BK = added_BK if mask.is_floating_point() and mask.ndim == 4 else valid_BK
    return (row_BK if mask.ndim == 2 else row_BK[:, None, None]).to(mask.dtype)


def drop_tokens(blocks: Mapping[str, nn.Module], attentions: Sequence[Attention], shares: Sequence[float]) -> None:
    """Lets tokens leave a model behind its blocks, in place.

    Args:
        blocks: Its blocks by module name, in order.
        attentions: The attention of each block.
        shares: Share of the incoming tokens that stay behind each block, in falling order; that of the last one has no effect.
    """
    passing = Passing()
    for number, ((name, block), attention) in enumerate(zip(blocks.items(), attentions, strict=True)):
        earlier = shares[number - 1] if number else 1.0
        drops = shares[number] < earlier and number < len(shares) - 1
        hooks = DroppedTokens(passing, attention, name, shares[number] if drops else 1.0, first=not number)
        block.register_forward_pre_hook(hooks.before, with_kwargs=True)
        if drops:
            block.register_forward_hook(hooks.after)
