"""How the gradients of one training are computed and summed over processes: torch's own engine, driven by whole steps.

    ddp     `DistributedDataParallel` reduces a bucket of gradients as soon as they are complete, while the backward pass runs
    fsdp2   `fully_shard` reduces and scatters the gradients of a block while backward computes the gradients of the next one; what it does
            not shard (parameters of the objective, scalars) is reduced by `DistributedDataParallel`
    tensor  between processes that share each layer there is nothing to sum: they have the same rows, hence the same gradients of what is
            whole. Between groups of them it is as with fsdp2, for both strategies (`foundation.training.processes.division`).

`DistributedDataParallel` expects one forward of one module before each backward. A distillation runs its student more than once, trains
projections along with it and leaves some parts unused. So we wrap not the model but the step: a module whose forward is the whole
objective. The hooks sit where autograd adds up the gradient of a parameter, which happens once per backward however often the model
ran. The model itself stays unwrapped: losses, captures and evaluation use it as before.

    unused parameters   `find_unused_parameters` looks at the graph of the losses in every step, because phases of a distillation change
                        which parts are used. A parameter without a gradient in all processes keeps none: the optimizer skips it, as in one
                        process. The buckets are then never rebuilt, so a resumed training adds in the same order: bit-equal.
    sum, not mean       losses are already divided by the rows of the whole batch; the hook `summed` replaces the division, and so do those
                        that compress (`foundation.training.processes.gradients`)
    frozen parts        (LoRA, teachers) have no hooks
    context             processes that share tokens sum gradients like those that share rows: each takes its part of the loss
    micro-batches       accumulate without communication (`no_sync`, `set_requires_gradient_sync`) until the last one of a step. With fsdp2
                        that holds the whole gradient.

The composable `replicate` is not used: it hooks the forward of the model, which must then run exactly once per backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.target import Parallel
from foundation.machine.parallel import Team
from foundation.machine.sharding import is_sharded
from foundation.training.processes.gradients import hook_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Objective = Callable[[nn.Module, Any], Mapping[str, Tensor]]


class WholeStep(nn.Module):
    """A module whose forward is the whole objective.

    Args:
        objective: Returns the loss terms of a batch.
        model: The first argument of the objective.
        whole: The trained parameters that are not sharded; the only ones of this module.
    """

    def __init__(self, objective: Objective, model: nn.Module, whole: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.whole = nn.ParameterList(whole)
        self.call = (objective, model)  # in a tuple, so that they are not submodules: sharded parameters must not be ours

    def forward(self, batch: Any) -> Mapping[str, Tensor]:
        """Returns the loss terms by name, float `[b]` each."""
        objective, model = self.call
        return objective(model, batch)


class Engine:
    """Runs the objective, and sums the gradients of all processes while backward runs.

    Args:
        objective: Returns the loss terms of a batch.
        model: The model, sharded if the team shards.
        trained: Model and objective, as far as they are trained.
        team: The training processes.
        parallel: How gradients travel.
        num_steps: Steps of the training.
    """

    def __init__(
        self, objective: Objective, model: nn.Module, trained: nn.Module, team: Team, parallel: Parallel | None = None, num_steps: int = 1
    ) -> None:
        whole = [parameter for parameter in trained.parameters() if parameter.requires_grad and not is_sharded(parameter)]
        self.step = WholeStep(objective, model, whole)
        self.sharded: Any = model if hasattr(model, "set_requires_gradient_sync") else None  # after `fully_shard`
        # `foundation.training.processes.pipeline` sums the gradients of a pipeline
        several = team.data_size * team.context > 1 and team.pipeline == 1 and whole
        self.reduced = _reduced(self.step, team.gradient_group(), parallel or Parallel(), num_steps) if several else None

    def __call__(self, batch: Any) -> Mapping[str, Tensor]:
        """Returns the loss terms of a batch by name, float `[b]` each; call it and backward within `micro_batch`."""
        terms: Mapping[str, Tensor] = (self.reduced or self.step)(batch)
        return terms

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Within the block, forward and backward of one micro-batch take place.

        Args:
            last: Whether it is the last one of the step: its backward sums the accumulated gradients over all processes.
        """
        with ExitStack() as stack:
            if self.reduced is not None and not last:
                stack.enter_context(self.reduced.no_sync())
            if self.sharded is not None:
                self.sharded.set_requires_gradient_sync(last)
            yield


def _reduced(step: nn.Module, group: ProcessGroup | None, parallel: Parallel, num_steps: int) -> nn.parallel.DistributedDataParallel:
    """Returns the step in `DistributedDataParallel`, which sums gradients; its weights must be equal in all processes of the group."""
    reduced = nn.parallel.DistributedDataParallel(
        step,
        process_group=group,
        init_sync=False,  # `Team.align` has copied the weights
        forward_sync_buffers=False,  # the first process saves its own, as it did before
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )
    gradients = "float32" if parallel.strategy != "ddp" else parallel.gradients  # with shards few gradients are summed here
    hook = hook_of(gradients, parallel.powersgd_rank, num_steps, lambda buffer: summed(buffer, group))
    # a lambda, because DDP compares annotations of a hook with classes, and ours are strings
    reduced.register_comm_hook(None, lambda _, bucket: hook(bucket))
    return reduced


def summed(gradients: Tensor, group: ProcessGroup | None = None) -> torch.futures.Future[Tensor]:
    """Starts to sum a bucket of gradients over a group, in place: the sum, where `DistributedDataParallel` would take the mean."""
    import torch.distributed as dist

    work: Any = dist.all_reduce(gradients, group=group, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
