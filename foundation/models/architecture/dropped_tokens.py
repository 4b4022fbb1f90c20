"""Token dropping: after a block only the most significant tokens remain, for a head that reads only the first token.

Word vectors of an encoder grow alike from layer to layer, so that later layers can do without most of them (Goyal et al. 2020, PoWER-BERT,
https://arxiv.org/abs/2001.08950, section 3). How significant a token is, is read off the states that come into the block it leaves, by a
vector of the block's own (as in Guan et al. 2022, Transkimmer, https://arxiv.org/abs/2205.07324, section 3.1, whose predictor is an MLP):

    significance_j = x_j w                                    of tokens j = 1 ... n - 1; n without padding

Of a row with n tokens, ceil(share n) stay: the first one and the most significant others, in falling order. A row thus keeps the same
tokens in whatever length it is padded to; of S places ceil(share S) stay, and those that a shorter row does not fill are padding. `share`
counts from the tokens that came in, so that shares fall from block to block.

Blocks have to treat tokens alike at every position: positions are added in front of the first one, and none are inside (no rotary ones,
no distances). `prune.tokens.tokens` proves that and that the head reads nothing else, and `prune.tokens.significance` fits w.

Hooks do it: before the first block the lengths are taken, before a block that tokens leave they are chosen, and the blocks after it get
the mask of those that are left. w is the buffer `significance` of its block: it is stored with the weights, and no training changes it.

Left out: scores from attention (PoWER-BERT's sum over queries; the first token's, EViT, https://arxiv.org/abs/2202.07800). They tell least
where dropping saves most: in the first layers a token attends to salient tokens, not to needed ones (benchmarks/README.md).

Legend: B rows, S tokens that come in, L tokens of a block, K tokens that stay, D channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from foundation.models.architecture.blocks import Arguments, Keywords, hidden_states_of
from foundation.models.inputs.padding import MASKED

SIGNIFICANCE: Final = "significance"
"""Name of the buffer of a block that holds w, float `[D]`."""
DENOMINATOR: Final = 1000
"""Shares are whole multiples of its reciprocal: numbers of tokens are integers in every engine."""
MASKS: Final = ("attention_mask", "attn_mask", "mask")
"""Names of the mask argument of blocks."""
_PADDING: Final = -1.0
"""Added to a score, any less is padding."""


def staying(tokens: Any, share: float) -> Any:
    """Returns how many of `tokens` stay: an integer, or a symbol of `torch.export`."""
    return (tokens * _numerator(share) + DENOMINATOR - 1) // DENOMINATOR


def _numerator(share: float) -> int:
    return round(share * DENOMINATOR)


@dataclass
class Passing:
    """State that the blocks of a model share during one forward pass."""

    incoming: Any = 0
    """S."""
    lengths_B1: Tensor | None = None
    """Tokens of each row without padding, int64 `[B, 1]`; None if no row has padding."""
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
    share: float
    """Share of the tokens that came in which stay after the block; 1 keeps them all."""
    first: bool
    """Whether it is the first block."""
    mask_name: str
    """Name of the block's mask argument; empty if it takes none."""
    mask_place: int
    """Place of the mask among the arguments."""
    selected_BK: Tensor | None = None
    """Places of the tokens that stay, while the block runs."""

    def before(self, block: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Takes the lengths of the rows before the first block, hands later ones the mask of what is left, and chooses what stays."""
        passing, name, place = self.passing, self.mask_name, self.mask_place
        if self.first:
            self._enter(hidden_states_of(args, kwargs), args[place] if place < len(args) else kwargs.get(name))
        elif passing.changed and passing.mask is not None:
            if place < len(args):
                args = (*args[:place], passing.mask, *args[place + 1 :])
            else:
                kwargs = {**kwargs, name: passing.mask}
        if self.share < 1:
            scores_BL = significance(hidden_states_of(args, kwargs), block.get_buffer(SIGNIFICANCE), passing.added_BL)
            self.selected_BK = most_significant(scores_BL, staying(passing.incoming, self.share))
        return args, kwargs

    def after(self, block: nn.Module, args: Arguments, output: Any) -> Any:
        """Returns the output of the block for the tokens that stay."""
        if isinstance(output, tuple):
            return (self._selected(output[0]), *output[1:])
        return self._selected(output)

    def _enter(self, states_BSD: Tensor, mask: Tensor | None) -> None:
        passing = self.passing
        passing.incoming, passing.mask, passing.changed = states_BSD.shape[1], mask, False
        passing.added_BL = passing.lengths_B1 = None
        if mask is not None:
            passing.added_BL = added_to_scores(mask)
            passing.lengths_B1 = (passing.added_BL > _PADDING).sum(-1, keepdim=True)

    def _selected(self, states_BLD: Tensor) -> Tensor:
        passing, selected_BK = self.passing, self.selected_BK
        assert selected_BK is not None, "chosen before the block"
        if passing.mask is not None and passing.lengths_B1 is not None:
            valid_BK = are_tokens(passing.lengths_B1, self.share, staying(passing.incoming, self.share))
            passing.added_BL = torch.where(valid_BK, 0.0, MASKED)
            passing.mask = mask_like(passing.mask, valid_BK, passing.added_BL)
        passing.changed, self.selected_BK = True, None
        return select_tokens(states_BLD, selected_BK)


def significance(states_BLD: Tensor, weight_D: Tensor, added_BL: Tensor | None) -> Tensor:
    """Returns how significant each token is, float `[B, L]`; far below 0 for padding.

    Products and a sum stand for a product of matrices, which would be taken for a layer, and quantized.

    Args:
        states_BLD: States that come into the block.
        weight_D: w of the block.
        added_BL: What is added to the scores of padding; None: there is none.
    """
    scores_BL = (states_BLD * weight_D).sum(-1)
    return scores_BL if added_BL is None else scores_BL + added_BL


def most_significant(scores_BL: Tensor, count: Any) -> Tensor:
    """Returns the places of the first token and of the `count - 1` most significant others, in falling order, int64 `[B, K]`."""
    others_BM = scores_BL[:, 1:].topk(count - 1, dim=1).indices + 1
    return torch.cat([torch.zeros_like(scores_BL[:, :1], dtype=torch.long), others_BM], dim=1)


def select_tokens(states_BLD: Tensor, selected_BK: Tensor) -> Tensor:
    """Returns the states of some tokens, `[B, K, D]`."""
    rows_B1 = torch.arange(states_BLD.shape[0], device=states_BLD.device)[:, None]
    return states_BLD[rows_B1, selected_BK]


def are_tokens(lengths_B1: Tensor, share: float, count: Any) -> Tensor:
    """Returns which of `count` places hold tokens of their row and not padding, bool `[B, K]`: j < share n.

    Those are ceil(share n), without a division of integers.
    """
    place_K = torch.arange(count, device=lengths_B1.device)
    return place_K * DENOMINATOR < lengths_B1 * _numerator(share)


def added_to_scores(mask: Tensor) -> Tensor:
    """Returns the additive mask of the first token's scores, float `[B, L]`: 0 for tokens, far less for padding.

    Args:
        mask: True or 1 for tokens, `[B, L]` or `[B, 1, 1 or L, L]`; or a float that is added to the scores, `[B, 1, 1 or L, L]`.
    """
    row_BL = mask if mask.ndim == 2 else mask[:, 0, 0]
    if row_BL.is_floating_point() and mask.ndim == 4:
        return row_BL.clamp(min=MASKED)
    return torch.where(row_BL.bool(), 0.0, MASKED)


def mask_like(mask: Tensor, valid_BK: Tensor, added_BK: Tensor) -> Tensor:
    """Returns the mask of places that hold tokens or padding, in the form of another mask: `[B, K]` or `[B, 1, 1, K]`."""
    row_BK = added_BK if mask.is_floating_point() and mask.ndim == 4 else valid_BK
    return (row_BK if mask.ndim == 2 else row_BK[:, None, None]).to(mask.dtype)


def drop_tokens(blocks: Mapping[str, nn.Module], shares: Sequence[float], width: int) -> None:
    """Lets tokens leave a model after its blocks, in place. What counts is unknown until their buffer `significance` is set.

    Args:
        blocks: Its blocks by module name, in order.
        shares: Share of the incoming tokens that remain after each block, in falling order; the last one has no effect.
        width: D.
    """
    passing = Passing()
    for number, block in enumerate(blocks.values()):
        earlier = shares[number - 1] if number else 1.0
        drops = shares[number] < earlier and number < len(shares) - 1
        names = list(inspect.signature(block.forward).parameters)
        name, place = next(((name, names.index(name)) for name in MASKS if name in names), ("", len(names)))
        hooks = DroppedTokens(passing, shares[number] if drops else 1.0, not number, name, place)
        block.register_forward_pre_hook(hooks.before, with_kwargs=True)
        if drops:
            block.register_buffer(SIGNIFICANCE, torch.zeros(width))
            block.register_forward_hook(hooks.after)
