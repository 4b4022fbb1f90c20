"""The random generator of dropout, on a CPU or a GPU, and how processes draw apart from a common state."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def generator_state(device: torch.device) -> Tensor:
    """Returns the state, on the CPU, of the random generator of dropout."""
    import torch

    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Sets the state of the random generator of dropout."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def draw_apart(device: torch.device, rank: int) -> Tensor:
    """Continues with random numbers of one process, and returns the state before, which is common to several and goes on later.

    The seed follows from the common state, so that a run that is resumed, or computed again, draws the same.

    Args:
        device: Where random numbers are drawn.
        rank: Index of the process.
    """
    import torch

    torch.rand((), device=device)  # a step on, or a region without draws before it would begin as the last one did
    common = generator_state(device)
    seed = hashlib.blake2b(common.numpy().tobytes(), digest_size=7).digest()  # no number is read back from a GPU
    (torch.cuda if device.type == "cuda" else torch).manual_seed(int.from_bytes(seed) + rank)
    return common
