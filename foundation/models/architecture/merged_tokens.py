"""Token merging: after a block similar tokens become one (Bolya et al. 2022, ToMe, https://arxiv.org/abs/2210.09461, section 3).

Of a row with n tokens, ceil(share n0) are left, where n0 came into the model. The tokens are split in two by turns, A and B:

    s_ab = cos(x_a, x_b)                 of a in A with every b in B; b(a): the best one
    merged                               the n - ceil(share n0) tokens of A with the largest s_ab(a)
    x_b  <- (m_b x_b + sum m_a x_a) / (m_b + sum m_a)       over the merged a with b(a) = b; m: how many tokens a token stands for
    m_b  <- m_b + sum m_a

Later blocks add log m to the scores of attention, so that a token that stands for m counts m times, where blocks take a mask (ToMe's
proportional attention). After the last block each token that came in gets the state of the token that it became part of: the head then sees
all of them, and a mean over them is the mean weighted by m. It does not matter which mean a head takes, or how it leaves out padding.

Where the head reads the first token alone (`first_stays`), such as the class token of ViT, this token never merges, and it stays the first
one. The last block then returns the tokens that are left. Of 2 or 4 tokens of a short row one is dropped where too few can merge.

Blocks have to treat tokens alike at every position, as for dropped tokens (`foundation.models.architecture.dropped_tokens`). Shares and
padding are as there. A share is at least `LEAST` of the one before it, since at most all of A can be merged.

Where this differs from the paper: tokens merge between blocks by their states, not inside of blocks by their keys; shares take the place of
a number of tokens for each block; padding never merges.

Legend: B rows, S tokens that come in, L tokens of a block, A and M tokens of the two parts, K tokens that are left, D channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from foundation.models.architecture.blocks import Arguments, Keywords, hidden_states_of
from foundation.models.architecture.dropped_tokens import MASKS, added_to_scores, are_tokens, staying
from foundation.models.inputs.padding import MASKED

LEAST: Final = 0.6
"""Smallest ratio of a share to the one before it."""
_PADDING: Final = -1.0
"""Added to a score, any less is padding."""
_NEVER: Final = -4.0
"""Score of a pair with padding: cosines are at least -1."""


class Merged(NamedTuple):
    """The tokens that are left."""

    states_BKD: Tensor
    sizes_BK: Tensor
    """How many tokens each stands for, float; 0 for padding."""
    valid_BK: Tensor
    """Which are tokens and not padding, bool."""
    place_BL: Tensor
    """For each token before, its place among those that are left, int64."""


@dataclass
class Tokens:
    """State that the blocks of a model share during one forward pass."""

    incoming: Any = 0
    """S."""
    lengths_B1: Tensor | None = None
    """Tokens of each row without padding, int64 `[B, 1]`."""
    sizes_BL: Tensor | None = None
    valid_BL: Tensor | None = None
    place_BS: Tensor | None = None
    """For each token that came in, the place of the one that it became part of."""
    changed: bool = False
    """Whether tokens have merged."""


@dataclass
class MergedTokens:
    """The hooks of one block."""

    tokens: Tokens
    """Shared by all blocks."""
    share: float
    """Share of the tokens that came in which are left after the block; 1: none merge."""
    first: bool
    last: bool
    mask_name: str
    """Name of the block's mask argument; empty if it takes none."""
    mask_place: int
    """Place of the mask among the arguments."""
    first_stays: bool = False
    """Whether the first token never merges, and the head reads it alone."""

    def before(self, block: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Takes the lengths of the rows before the first block, and hands later ones a mask with the sizes of the tokens."""
        name, place = self.mask_name, self.mask_place
        if self.first:
            self._enter(hidden_states_of(args, kwargs), args[place] if place < len(args) else kwargs.get(name))
        elif self.tokens.changed and name:
            mask = self._mask()
            if place < len(args):
                return (*args[:place], mask, *args[place + 1 :]), kwargs
            return args, {**kwargs, name: mask}
        return args, kwargs

    def after(self, block: nn.Module, args: Arguments, output: Any) -> Any:
        """Returns the output of the block for the tokens that are left; of the last block for all that came in, if the head reads them."""
        states = output[0] if isinstance(output, tuple) else output
        states = self._merged(states) if self.share < 1 else states
        tokens = self.tokens
        if self.last and tokens.changed and not self.first_stays:
            assert tokens.place_BS is not None, "set before the first block"
            states = at_places(states, tokens.place_BS)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def _enter(self, states_BSD: Tensor, mask: Tensor | None) -> None:
        tokens, ones_BS = self.tokens, torch.ones_like(states_BSD[..., 0])
        tokens.incoming, tokens.changed = states_BSD.shape[1], False
        tokens.valid_BL = (ones_BS > 0) if mask is None else ((added_to_scores(mask) + 0 * ones_BS) > _PADDING)
        tokens.sizes_BL = ones_BS.float() * tokens.valid_BL
        tokens.lengths_B1 = tokens.valid_BL.sum(-1, keepdim=True)
        tokens.place_BS = torch.arange(states_BSD.shape[1], device=states_BSD.device).expand(states_BSD.shape[:2])

    def _mask(self) -> Tensor:
        """Returns what is added to the scores of attention, float `[B, 1, 1, L]`: log m, and far less for padding."""
        tokens = self.tokens
        assert tokens.sizes_BL is not None, "set before the first block"
        assert tokens.valid_BL is not None, "set before the first block"
        return torch.where(tokens.valid_BL, tokens.sizes_BL.clamp(min=1.0).log(), MASKED)[:, None, None]

    def _merged(self, states_BLD: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and states_BLD.shape[1] < 2:  # graphs are made for two tokens and more
            return states_BLD
        tokens, count = self.tokens, staying(self.tokens.incoming, self.share)
        assert tokens.sizes_BL is not None, "set before the first block"
        assert tokens.valid_BL is not None, "set before the first block"
        assert tokens.lengths_B1 is not None, "set before the first block"
        assert tokens.place_BS is not None, "set before the first block"
        left_B1 = are_tokens(tokens.lengths_B1, self.share, count).sum(-1, keepdim=True)
        made = merge(states_BLD, tokens.sizes_BL, tokens.valid_BL, left_B1, count, self.first_stays)
        tokens.sizes_BL, tokens.valid_BL, tokens.changed = made.sizes_BK, made.valid_BK, True
        tokens.place_BS = made.place_BL.gather(1, tokens.place_BS)
        return made.states_BKD


def merge(states_BLD: Tensor, sizes_BL: Tensor, valid_BL: Tensor, left_B1: Tensor, count: Any, first_stays: bool = False) -> Merged:
    """Returns the tokens that are left of each row.

    Args:
        states_BLD: States of the tokens; at least two.
        sizes_BL: How many tokens each stands for, float32.
        valid_BL: Which are tokens and not padding, bool; those come first.
        left_B1: Tokens to leave of each row, int64: at least half of its tokens.
        count: K, at least as many as are left of any row.
        first_stays: Whether the first token never merges.
    """
    even_BAD, odd_BMD = states_BLD[:, ::2], states_BLD[:, 1::2]
    valid_BA, valid_BM = valid_BL[:, ::2], valid_BL[:, 1::2]
    may_BA = valid_BA & (torch.arange(valid_BA.shape[1], device=valid_BA.device) > 0) if first_stays else valid_BA
    best_BA, partner_BA = _best_pairs(even_BAD.float(), odd_BMD.float(), may_BA, valid_BM)
    merges_B1 = valid_BL.sum(-1, keepdim=True) - left_B1
    merged_BA = (_rank(best_BA) < merges_B1) & (best_BA > _NEVER / 2)
    weight_BA = sizes_BL[:, ::2] * merged_BA
    size_BM = sizes_BL[:, 1::2]
    total_BM = size_BM.scatter_add(1, partner_BA, weight_BA)
    places_BAD = partner_BA[..., None].expand(even_BAD.shape)
    sum_BMD = (odd_BMD.float() * size_BM[..., None]).scatter_add(1, places_BAD, even_BAD.float() * weight_BA[..., None])
    mean_BMD = torch.where(size_BM[..., None] > 0, sum_BMD / total_BM[..., None].clamp(min=1.0), odd_BMD.float())
    joined_BLD = torch.cat([even_BAD, mean_BMD.to(states_BLD.dtype)], dim=1)
    joined_BL = torch.cat([sizes_BL[:, ::2], total_BM], dim=1)
    stays_BL = torch.cat([valid_BA & ~merged_BA, valid_BM], dim=1)
    chosen_BK, rank_BL = _in_front(stays_BL, count)
    split = even_BAD.shape[1]
    rank_BA, rank_BM = rank_BL[:, :split], rank_BL[:, split:]
    new_BA = torch.where(merged_BA, rank_BM.gather(1, partner_BA), rank_BA)
    position_L = torch.arange(states_BLD.shape[1], device=states_BLD.device)
    source_L = torch.where(position_L % 2 == 0, position_L // 2, split + position_L // 2)
    place_BL = torch.cat([new_BA, rank_BM], dim=1).gather(1, source_L.expand(valid_BL.shape)).clamp(max=count - 1)
    valid_BK = stays_BL.gather(1, chosen_BK)
    return Merged(at_places(joined_BLD, chosen_BK), joined_BL.gather(1, chosen_BK) * valid_BK, valid_BK, place_BL)


def at_places(states_BLD: Tensor, places_BK: Tensor) -> Tensor:
    """Returns the states at some places, `[B, K, D]`; written so that graphs do not take it for a selection that may move."""
    return states_BLD.gather(1, places_BK[..., None].expand(-1, -1, states_BLD.shape[-1]))


def _best_pairs(even_BAD: Tensor, odd_BMD: Tensor, valid_BA: Tensor, valid_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each token of A its largest cosine with a token of B, and the place of that one."""
    unit_BAD, unit_BMD = (states / states.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt() for states in (even_BAD, odd_BMD))
    cosine_BAM = unit_BAD @ unit_BMD.transpose(1, 2)
    pair_BAM = valid_BA[:, :, None] & valid_BM[:, None, :]
    return torch.where(pair_BAM, cosine_BAM, _NEVER).max(dim=-1)


def _rank(values_BA: Tensor) -> Tensor:
    """Returns how many values of a row come before each, int64 `[B, A]`: larger ones, and equal ones in front of it."""
    place_A = torch.arange(values_BA.shape[1], device=values_BA.device)
    larger_BAA = values_BA[:, None, :] > values_BA[:, :, None]
    equal_BAA = (values_BA[:, None, :] == values_BA[:, :, None]) & (place_A[None, :] < place_A[:, None])
    return (larger_BAA | equal_BAA).sum(-1)


def _in_front(stays_BL: Tensor, count: Any) -> tuple[Tensor, Tensor]:
    """Returns the places of the tokens that stay, in order, and then of others, int64 `[B, K]`; and the new place of each, `[B, L]`."""
    length = stays_BL.shape[1]
    place_L = torch.arange(length, device=stays_BL.device)
    order_BL = stays_BL.long() * length + (length - 1 - place_L)
    chosen_BK = order_BL.topk(count, dim=1).indices
    rank_BL = torch.where(stays_BL, stays_BL.long().cumsum(1) - 1, 0)
    return chosen_BK, rank_BL


def merge_tokens(blocks: Mapping[str, nn.Module], shares: Sequence[float], first_stays: bool = False) -> None:
    """Lets tokens of a model merge after its blocks, in place.

    Args:
        blocks: Its blocks by module name, in order.
        shares: Share of the incoming tokens that are left after each block, in falling order; the last one has no effect.
        first_stays: Whether the first token never merges: the head reads it alone.
    """
    tokens, end = Tokens(), len(shares) - 1
    for number, block in enumerate(blocks.values()):
        earlier = shares[number - 1] if number else 1.0
        merges = shares[number] < earlier and number < end
        names = list(inspect.signature(block.forward).parameters)
        name, place = next(((name, names.index(name)) for name in MASKS if name in names), ("", len(names)))
        hooks = MergedTokens(tokens, shares[number] if merges else 1.0, not number, number == end, name, place, first_stays)
        block.register_forward_pre_hook(hooks.before, with_kwargs=True)
        if merges or number == end:
            block.register_forward_hook(hooks.after)
