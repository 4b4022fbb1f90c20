"""How a model is divided among the processes of a training, and put together again.

    tensor > 1   neighbouring processes share each layer (`foundation.models.architecture.split`), by `parallelize_module` of
                 torch.distributed.tensor.parallel or by itself (`foundation.training.processes.layer_share`): weights become DTensors of
                 the mesh dimension `tensor`
    fsdp2        `fully_shard` then shards every weight, or every share of one, over the mesh dimension `data`
    ddp          nothing more in one group of processes. Between several, `fully_shard` on a mesh [data, 1] replicates: it sums gradients
                 over data and knows DTensors.
    experts > 1  neighbouring processes spread the experts of a mixture (`foundation.models.layers.expert_parallel`). The gradient of an
                 expert is complete in its process; between groups of such processes it is summed once a step.
    context > 1  neighbouring processes share the tokens of each row (`foundation.models.architecture.context`). Weights are whole, or
                 sharded by `fully_shard` over all processes.

Processes that share each layer have the same rows, and draw the same dropout where activations are whole. Within a share, between column
and row layers, each draws its own: otherwise heads of different processes would lose the same entries. The random state is put aside there
and continued afterwards, as Megatron's random tracker does. An adapter drops entries of what its layer reads: of a column layer that is
whole, although it is inside, so that the state of all processes is taken for it; of a row layer each process has its own. Where processes
share tokens (`foundation.models.architecture.sequence`, `foundation.models.architecture.context`), each draws its own from the first block
to the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foundation.core.target import Parallel
from foundation.machine.device import computing_device
from foundation.machine.parallel import Team
from foundation.machine.random_state import draw_apart, generator_state, set_generator_state
from foundation.machine.sharding import full, shard, sharded_like, skeleton, unshard
from foundation.models.architecture.blocks import Arguments, Keywords, blocks_of, hidden_states_of, states_of
from foundation.models.architecture.context import share_answers, share_context, writes
from foundation.models.architecture.sequence import share_tokens
from foundation.models.architecture.shapes import set_counts
from foundation.models.architecture.split import Split, split_of
from foundation.models.forward import uses_of_weights
from foundation.models.layers.expert_parallel import Spread, spread_experts
from foundation.models.layers.token_shares import Group
from foundation.training.processes.layer_share import LayerShare, ReadOnce, SharesItself, owner_of, plain, shared_axes, styles_of
from foundation.training.state import Entry, Gathers, by_bytes


@dataclass(frozen=True)
class Division:
    """A model that was divided."""

    model: nn.Module
    plain: nn.Module | None
    """The `skeleton` of the model before; None if it is whole."""
    orders: Mapping[str, Tensor]
    """Row order that makes the shares of a weight contiguous, by name of the weight."""
    spread: Spread | None = None
    """What processes count that spread experts; None if they do not."""
    replicated: tuple[nn.Parameter, ...] = ()
    """Weights of experts that other groups of processes have too."""
    replicas: Any = None
    """The process group of those that have the same experts."""

    def sum_gradients(self) -> None:
        """Sums the gradients of experts over the processes that have the same ones; all of them must call it."""
        import torch.distributed as dist

        for weight in self.replicated:
            if weight.grad is None:  # a layer that did not run
                weight.grad = torch.zeros_like(weight)
            gradient: Any = weight.grad
            dist.all_reduce(gradient.to_local(), group=self.replicas)

    def whole(self, name: str, value: Tensor) -> Tensor:
        """Returns the whole of a weight, or of something of its shape, in the order of the model; all processes must call it.

        Args:
            name: Name of the weight in the model.
            value: It as this process has it.
        """
        gathered = full(value)
        order = self.orders.get(name)
        return gathered if order is None or not gathered.ndim else gathered[order.to(gathered.device).argsort()]

    def part(self, name: str, like: Tensor, whole: Tensor) -> Tensor:
        """Returns a process's shard of `whole`: the inverse of the method `whole`.

        Args:
            name: Name of the weight in the model.
            like: The weight, divided.
            whole: It, or something of its shape; other shapes stay as they are.
        """
        order = self.orders.get(name)
        return sharded_like(like, whole if order is None or not whole.ndim else whole[order.to(whole.device)])

    def collected(self, entries: Mapping[str, Entry]) -> Gathers:
        """Returns functions that make entries of a checkpoint whole, by name."""
        return {name: partial(self._collected, name, entry) for name, entry in by_bytes(entries.items()).items()}

    def _collected(self, name: str, entry: Entry) -> Tensor:
        value = entry.make()
        return (value if self.plain is None else self.whole(in_model(name), value)).cpu()

    def holds(self, entry: str) -> bool:
        """Whether this process has a part of an entry of a checkpoint."""
        return True

    def undo(self) -> None:
        """Makes the model whole again in every process, with its current weights; the object stays the same."""
        if self.plain is not None:
            unshard(self.model, self.plain, self.whole)


def divided(model: nn.Module, team: Team, parallel: Parallel, key: str, share: bool = True) -> Division:
    """Divides a model, or the tokens of its rows, among the processes of a team, in place; on the device afterwards.

    Args:
        model: The same weights in all processes; on the CPU where it would not fit on a device.
        team: The processes.
        parallel: The section of the recipe.
        key: Key path in the recipe, for messages.
        share: Whether processes may share its layers or tokens; without, it is whole in each group of them, or sharded over data.

    Raises:
        InputError: The layers cannot be shared; see `foundation.models.architecture.split.split_of`.
    """
    if not team.without_pipeline.runs_together:
        return Division(model, None, {})
    before, orders = skeleton(model), dict[str, Tensor]()
    blocks = list(blocks_of(model, key).values())
    if team.tensor > 1 and share:
        split = split_of(_bare(model), team.tensor, key)
        orders = _reorder(model, split)
        _parallelize(model, split, team)
    own: set[nn.Parameter] = set()
    spread = None
    if team.experts > 1 and share:
        mesh_of_experts = team.mesh()["expert"]
        spread = Spread(team.experts, team.expert_rank, mesh_of_experts.get_group(), parallel.expert_capacity)
        own = spread_experts(model, spread, mesh_of_experts)
    group = sharers_of(team)
    if group is not None and share:
        share_context(model, group)
        _draw_apart_in(blocks, team.context_rank)
    elif group is not None and writes(model):
        share_answers(model, lambda: group)
    if team.strategy == "fsdp2" or (team.tensor > 1 and team.data_size > 1 and share):
        mesh = None if team.tensor == 1 else team.mesh()["data"] if team.strategy == "fsdp2" else team.mesh()["data", "one"]
        shard(model, [*blocks, *ends_of(model)], parallel.offload, mesh, own)
    else:
        model.to(computing_device())
    if spread is None:
        return Division(model, before, orders)
    replicated = tuple(weight for weight in model.parameters() if weight in own and weight.requires_grad and team.size > team.experts)
    return Division(model, before, orders, spread, replicated, team.mesh()["replica"].get_group())


def counted(spread: Spread | None, team: Team) -> list[int]:
    """Returns the choices of experts that all processes have counted, and those dropped; none without experts. All of them must call it."""
    return [] if spread is None else [int(count) for count in team.total([spread.chosen, spread.dropped])]


def sharers_of(team: Team) -> Group | None:
    """Returns the processes that share tokens with this one, and hold whole layers; None where there are none."""
    return Group(team.context, team.context_rank, team.mesh()["context"].get_group()) if team.context > 1 else None


def _bare(model: nn.Module) -> nn.Module:
    """Returns a copy of a model without values, and with plain linear layers."""
    copy = skeleton(model)
    for name, layer in list(copy.named_modules()):
        bare = plain(layer)
        if bare is not layer:
            owner, child = owner_of(copy, name)
            setattr(owner, child, bare)
    return copy


def ends_of(model: nn.Module) -> list[nn.Module]:
    """Returns the embedding of the tokens and the output layer of a language model unless another module shares their weights.

    They are gathered for their own moment, as blocks are, and not with the rest, which stays for the whole step: of a Llama of a billion
    parameters and 32,000 tokens each has a sixteenth of the weights, and its gradient as much. Tied ones are one weight, and stay.
    """
    stock: Any = model
    try:
        found = [stock.get_input_embeddings(), stock.get_output_embeddings()]
    except (AttributeError, NotImplementedError):  # of images and sounds
        return []
    uses = uses_of_weights(model)
    return [end for end in found if type(end) in (nn.Embedding, nn.Linear) and all(uses[id(weight)] == 1 for weight in end.parameters())]


@torch.no_grad()
def _reorder(model: nn.Module, split: Split) -> dict[str, Tensor]:
    """Reorders the outputs of layers so that shares are contiguous; returns the order by name of the weight."""
    orders: dict[str, Tensor] = {}
    for name, order in split.orders().items():
        layer = model.get_submodule(name)
        of_outputs, _ = shared_axes(layer)
        for tensor in of_outputs:
            owner, child = owner_of(layer, tensor)
            value = getattr(owner, child)
            if value is not None:
                value.copy_(value[order.to(value.device)])
                orders[f"{name}.{tensor}"] = order
    return orders


def _parallelize(model: nn.Module, split: Split, team: Team) -> None:
    from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

    mesh, plan = team.mesh()["tensor"], dict[str, ParallelStyle]()
    for names, columns in ((split.columns, True), (split.rows, False)):
        for name in names:
            layer = model.get_submodule(name)
            if team.sequence:
                LayerShare(mesh, columns).cut(layer, shared_axes(layer)[0 if columns else 1])
            elif isinstance(layer, SharesItself):
                layer.share(LayerShare(mesh, columns))
            else:
                plan |= {f"{name}{part}": style for part, style in styles_of(layer, columns).items()}
    parallelize_module(model, mesh, plan, src_data_rank=None)  # all processes have the same weights
    for name, counts in split.counts.items():
        set_counts(model.get_submodule(name), counts)
    if team.sequence:
        share_tokens(model, split, Group(team.tensor, team.tensor_rank, mesh.get_group()))
        _draw_apart_in([*blocks_of(model, "model").values()], team.tensor_rank)
        return
    for columns_of, last in split.regions:
        together = [layer for name in columns_of if type(layer := model.get_submodule(name)) is nn.Linear]
        ReadOnce(mesh).attach(together, model.get_submodule(last))
        _draw_apart([model.get_submodule(name) for name in columns_of], model.get_submodule(last), team.tensor_rank)


def _draw_apart(columns: Sequence[nn.Module], row: nn.Module, rank: int) -> None:
    """Gives each process random numbers of its own between column layers and a row layer."""
    region = _OwnDropout(rank)
    columns[0].register_forward_pre_hook(region.begin)
    row.register_forward_pre_hook(region.end)
    for dropout in (dropout for column in columns for dropout in _of_adapter(column)):
        dropout.register_forward_pre_hook(region.swap)
        dropout.register_forward_hook(region.swap)
    for dropout in _of_adapter(row):
        own = _OwnDropout(rank)
        dropout.register_forward_pre_hook(own.begin)
        dropout.register_forward_hook(own.end)


def _draw_apart_in(blocks: Sequence[nn.Module], rank: int) -> None:
    """Gives each process random numbers of its own in all blocks, where it has its own tokens, heads and neurons."""
    region = _OwnDropout(rank)

    def begin(block: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        region.begin(block, (hidden_states_of(args, kwargs),))

    def end(block: nn.Module, args: Any, output: Any) -> None:
        region.end(block, (states_of(output),))

    blocks[0].register_forward_pre_hook(begin, with_kwargs=True)
    blocks[-1].register_forward_hook(end)


def _of_adapter(layer: nn.Module) -> list[nn.Module]:
    """Returns the dropout of the adapter of a layer, if it has one."""
    return [dropout for dropout in getattr(layer, "lora_dropout", nn.ModuleDict()).children() if isinstance(dropout, nn.Dropout)]


class _OwnDropout:
    """Gives each process random numbers of its own between a column and a row layer, or from the first block to the last.

    The seed follows from the common state, so that a block that activation checkpointing recomputes, or a resumed training, draws
    the same. That second run may stop before the end of the region, with the state restored by torch; so `begin` does not rely on `end`.

    Args:
        rank: Index of the process among those that share the layer.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.aside: Tensor | None = None

    def begin(self, module: nn.Module, args: Any) -> None:
        """Saves the random state and continues from a seed of this process."""
        if module.training:
            self.aside = draw_apart(args[0].device, self.rank)

    def end(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Continues with the random state that was put aside."""
        if self.aside is not None:
            set_generator_state(args[0].device, self.aside)
            self.aside = None

    def swap(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Within a region: swaps the current random state with the saved one, or swaps them back."""
        if module.training and self.aside is not None:
            other, self.aside = self.aside, generator_state(args[0].device)
            set_generator_state(args[0].device, other)


def in_model(entry: str) -> str:
    """Returns the name in the model of an entry of a checkpoint, such as `optimizer.exp_avg.0.head.weight`; "" for none of the model."""
    kind, _, name = entry.partition(".")
    name = name.partition(".")[2] if kind == "optimizer" else name
    return name.removeprefix("0.") if name.startswith("0.") else ""  # the second entry of what is trained is the objective
