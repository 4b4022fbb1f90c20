"""How gradients are sent between processes with `ddp`: uncompressed, or compressed by the communication hooks of torch.

    float32    the sum of float32 gradients
    fp16       half of the bytes: gradients are rounded to float16 before they are summed; what is below 6e-8 becomes 0
    powersgd   (https://arxiv.org/abs/1905.13727) each matrix G [n, m] is sent as P [n, r] and Q [m, r], rank r:

                   P = orthogonal(sum_ranks (G + E) Q),    Q = sum_ranks (G + E)^T P,    G' = P Q^T,    E <- G + E - G'

               E, which a process keeps for itself, is what the approximation left out; it goes into the next step, so that nothing is lost
               over time. Q of a step starts the next one. Biases, norms and matrices that would not shrink to a half travel whole, and so
               does everything during the first tenth of the steps, when gradients change most.

All hooks of torch return the mean over processes; losses are divided by the rows of the whole batch already, so the mean is multiplied by
the number of processes.

Sums of powersgd do not overlap with the backward pass: a bucket waits for the one before.

A killed training does not keep E and Q: it starts again with float32 gradients for as long as a training does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundation.core.target import Gradients

Hook = Callable[[Any], "torch.futures.Future[Tensor]"]
"""Starts to sum a bucket of gradients (`torch.distributed.GradBucket`) over all processes."""
WHOLE_SHARE = 0.1
"""Share of the steps in which powersgd does not compress."""
LEAST_WHOLE = 2
"""Fewest steps without compression; torch requires two."""
TINY = 1e-8
"""Added to the norm of a column: a part of the model that no loss reads has gradients of zeros, which are orthogonal to nothing."""


def hook_of(gradients: Gradients, rank: int, num_steps: int, summed: Callable[[Tensor], torch.futures.Future[Tensor]]) -> Hook:
    """Returns the hook that sums gradients.

    Args:
        gradients: How they are sent.
        rank: Rank of powersgd.
        num_steps: Steps of the training.
        summed: Sums a bucket in float32, in place.
    """
    if gradients == "float32":
        return lambda bucket: summed(bucket.buffer())
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if gradients == "fp16":
        return lambda bucket: _times_processes(default_hooks.fp16_compress_hook(None, bucket))  # type: ignore[arg-type]
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=whole_steps(num_steps),
        orthogonalization_epsilon=TINY,
    )
    return lambda bucket: _times_processes(_finished(powerSGD_hook.powerSGD_hook(state, bucket)))


def whole_steps(num_steps: int) -> int:
    """Returns the number of steps of a training in which powersgd does not compress."""
    return max(LEAST_WHOLE, math.ceil(WHOLE_SHARE * num_steps))


def _finished(future: torch.futures.Future[Tensor]) -> torch.futures.Future[Tensor]:
    """Waits for a bucket before the next one begins.

    The hook of powersgd calls further collectives when the first is done. Over gloo they come from other threads, in an order that may
    differ between processes, which then take each other's tensors.
    """
    future.wait()
    return future


def _times_processes(mean: torch.futures.Future[Tensor]) -> torch.futures.Future[Tensor]:
    """Returns the sum of gradients, given their mean."""
    size = torch.distributed.get_world_size()
    return mean.then(lambda done: _value(done).mul_(size))


def _value(done: torch.futures.Future[Any]) -> Tensor:
    found: Tensor = done.value()
    return found
