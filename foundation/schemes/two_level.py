"""Two-level scales: a group's scale is a small integer times a number that the groups of a super-block share.

    s = d a         d > 0 for `GROUPS` neighbouring groups of an output, a integer [1, 63] for each of them
    m = e b         offsets alike: e > 0 for the super-block, b integer [0, 63]

8 groups of 32 inputs are a super-block of Q4_K, one of the K-quants of llama.cpp, where d and e are float16. Here they have at most 5
significant bits. d a and e b are then float16 numbers themselves: formats that hold a float16 scale for each group, such as Q4_0 and Q4_1
of GGUF, take the same numbers without rounding. This costs nothing, as the integers a and b are chosen for the d and e at hand.

The last super-block of an output may have fewer groups.

Shape suffixes: O outputs, G groups, S super-blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUPS = 8
"""Groups of a super-block."""
LARGEST = 63
"""Largest integer: 6 bits."""
DIGITS = 5
"""Significant bits of d and e: 11 bits of float16 less 6 of the integers."""
SMALLEST_SHARED, LARGEST_SHARED = 2.0**-24, 2.0**10
"""Range of d and e, of whose multiples by up to 63 none leaves float16."""


def num_super_blocks(groups: int) -> int:
    """Returns the number of super-blocks; the last one may have fewer groups."""
    return -(-groups // GROUPS)


def of_groups(shared_OS: Tensor, groups: int) -> Tensor:
    """Expands numbers of super-blocks to one per group, `[O, G]`."""
    return shared_OS.repeat_interleave(GROUPS, dim=1)[:, :groups]


def in_super_blocks(value_OG: Tensor, filler: float = 0.0) -> Tensor:
    """Returns values by super-block, `[O, S, 8]`; padded with `filler`."""
    outputs, groups = value_OG.shape
    blocks = num_super_blocks(groups)
    return torch.nn.functional.pad(value_OG, (0, blocks * GROUPS - groups), value=filler).reshape(outputs, blocks, GROUPS)


def shared(value: Tensor, *, up: bool = False) -> Tensor:
    """Returns the numbers next to `value` that d and e can be, float32; with `up` the next larger ones."""
    value = value.clamp(min=SMALLEST_SHARED, max=LARGEST_SHARED)
    quantum = torch.ldexp(torch.ones_like(value), torch.frexp(value).exponent - DIGITS).clamp(min=SMALLEST_SHARED)
    steps = value / quantum  # exact: a power of two
    return ((steps.ceil() if up else steps.round()) * quantum).clamp(max=LARGEST_SHARED)


def integers(value_OG: Tensor, shared_OS: Tensor) -> Tensor:
    """Returns a or b of two-level numbers, int32 `[O, G]`."""
    return (value_OG / of_groups(shared_OS, value_OG.shape[1])).round().to(torch.int32)


def are_two_level(value_OG: Tensor, shared_OS: Tensor, smallest: int) -> bool:
    """Whether numbers are integers from `smallest` to 63 times the numbers of their super-blocks, and these have few bits."""
    if shared_OS.shape != (len(value_OG), num_super_blocks(value_OG.shape[1])):
        return False
    if not bool((shared_OS.isfinite() & (shared_OS > 0)).all()) or not torch.equal(shared(shared_OS), shared_OS):
        return False
    integer_OG = integers(value_OG, shared_OS)
    exact = torch.equal(integer_OG * of_groups(shared_OS, value_OG.shape[1]), value_OG)
    return exact and bool(((integer_OG >= smallest) & (integer_OG <= LARGEST)).all())
