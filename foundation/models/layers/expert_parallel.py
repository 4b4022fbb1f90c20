"""Experts of a mixture that neighbouring processes spread among themselves: each has some of them, whole, and rows of its own.

Tokens go to the processes of their experts, and answers come back, by all-to-all (GShard, https://arxiv.org/abs/2006.16668). With S
choices of an expert (token n, expert e, weight g_ne), sorted by expert:

    counts [P, E]   all-gather of the choices that each process has made for each expert
    dispatch        all-to-all    x_n [S, D] -> the tokens [M, D] that chose experts of this process, by process and expert
    answers         E_e(x_n) of the experts that are here
    combine         all-to-all    answers [M, D] -> answers [S, D]
    y_n           = sum over e of g_ne E_e(x_n)                                   where the token is

Backward the same is sent the other way. So each layer sends 4 S D (P - 1) / P numbers where the router spreads evenly. The gradient of an
expert is complete in its process: it is the sum over the tokens of all P.

With a capacity factor c an expert takes at most C = ceil(c S / E) of the choices, S here the choices of all P processes. Those with the
largest weight stay (batch prioritized routing, https://arxiv.org/abs/2106.05974, section 4.1), so that it does not matter which process has
a token: one process with the same rows would drop the same. A choice that is dropped adds nothing to its token. Weights are sent first, so
that what is dropped is not sent. Without a capacity nothing is dropped.

Tensor names carry their shapes: N tokens, k experts of a token, S choices that are sent, M that are received, E experts, P processes,
D channels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foundation.machine.random_state import draw_apart, set_generator_state
from foundation.machine.sharding import is_sharded
from foundation.models.layers.expert_names import expert_name
from foundation.models.layers.experts import is_stacked
from foundation.models.layers.listed_experts import CLASSES, gates_of_kind
from foundation.models.layers.token_shares import of_all_processes


@dataclass(eq=False)
class Spread:
    """The processes that spread the experts of a model, and what they count."""

    processes: int
    """How many they are."""
    rank: int
    """Index of this one."""
    group: Any
    """Their process group."""
    capacity: float | None = None
    """The capacity factor; None: an expert takes all tokens that choose it."""
    chosen: int = 0
    """Choices of an expert that came to this process in training."""
    dropped: int = 0
    """Of these, how many were dropped."""
    idle: bool = False
    """Whether this process trains on rows that do not count, only to take part: then its tokens choose no expert, and take no room."""

    def answers(self, states_ND: Tensor, choices: Choices, module: Any, answer: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Returns the answer to each choice, `[S', D]`, with S' of the S choices left in `choices` if some are dropped.

        Args:
            states_ND: float `[N, D]`.
            choices: The choices of the tokens of this process.
            module: The experts; the processes divide their number. In evaluation mode nothing is dropped or counted.
            answer: Returns the answers of experts that are here, `[M, D]`, to states `[M, D]` and their numbers among these, int64 `[M]`.
        """
        num_experts = int(module.num_experts)
        if self.idle and module.training:
            choices.keep(torch.zeros_like(choices.experts_S, dtype=torch.bool))
        counts_PE = self._gathered(torch.bincount(choices.experts_S, minlength=num_experts))
        first = self.rank * (num_experts // self.processes)
        own_PE = counts_PE[:, first : first + num_experts // self.processes]
        sent, received = counts_PE[self.rank].view(self.processes, -1).sum(dim=1), own_PE.sum(dim=1)
        numbers_M = torch.arange(own_PE.shape[1], device=own_PE.device).repeat(self.processes).repeat_interleave(own_PE.flatten())
        self.chosen += len(numbers_M) if module.training else 0
        if self.capacity is not None and module.training:
            most = math.ceil(self.capacity * int(counts_PE.sum()) / num_experts)
            weights_M = self._exchange(choices.weights_S.detach().float()[:, None], sent, received)[:, 0]
            stays_M = within_capacity(weights_M, numbers_M, most)
            stays_S = self._exchange(stays_M.to(torch.uint8)[:, None], received, sent)[:, 0].bool()
            sent, received = _counted(stays_S, sent), _counted(stays_M, received)
            numbers_M = numbers_M[stays_M]
            choices.keep(stays_S)
            self.dropped += len(stays_M) - len(numbers_M)
        dispatched_MD = _Exchange.apply(states_ND[choices.tokens_S], sent, received, self)  # type: ignore[no-untyped-call]
        answers_SD: Tensor = _Exchange.apply(answer(dispatched_MD, numbers_M), received, sent, self)  # type: ignore[no-untyped-call]
        return answers_SD

    def _gathered(self, counts_E: Tensor) -> Tensor:
        """Returns the counts of all processes, `[P, E]`."""
        return of_all_processes(counts_E, self.processes, self.group)

    def _exchange(self, rows: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        """Sends rows `[S, ...]`, the first ones to the first process, and returns those from all processes; without a gradient."""
        import torch.distributed as dist

        arrived = rows.new_empty(int(received.sum()), *rows.shape[1:])
        # as bytes, which every back end sends
        flat, into = (tensor.contiguous().flatten(1).view(torch.uint8) for tensor in (rows, arrived))
        dist.all_to_all_single(into, flat, received.tolist(), sent.tolist(), group=self.group)
        return arrived


class _Exchange(torch.autograd.Function):
    """Sends rows to other processes, whose gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Tensor, received: Tensor, spread: Spread) -> Tensor:
        """Returns the rows that came, `[M, D]`; `sent` and `received` are the rows to and from each process, int64 `[P]`."""
        ctx.sent, ctx.received, ctx.spread = sent, received, spread
        return spread._exchange(rows, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns the gradient of the rows that were sent."""
        return ctx.spread._exchange(gradient, ctx.received, ctx.sent), None, None, None


@dataclass
class Choices:
    """Which experts the tokens of this process chose, sorted by expert."""

    tokens_S: Tensor
    """Index of the token, int64 `[S]`."""
    experts_S: Tensor
    """The expert, int64 `[S]`."""
    weights_S: Tensor
    """The weight that the router gives it, float `[S]`."""

    def keep(self, stays_S: Tensor) -> None:
        """Drops choices, in place."""
        self.tokens_S, self.experts_S, self.weights_S = self.tokens_S[stays_S], self.experts_S[stays_S], self.weights_S[stays_S]


def within_capacity(weights_M: Tensor, experts_M: Tensor, most: int) -> Tensor:
    """Returns which choices an expert has room for, bool `[M]`: the `most` ones with the largest weights, of equal ones the first."""
    by_weight = torch.argsort(weights_M, descending=True, stable=True)
    order = by_weight[torch.argsort(experts_M[by_weight], stable=True)]
    counts = torch.bincount(experts_M) if len(experts_M) else experts_M
    begins = (counts.cumsum(0) - counts)[experts_M[order]]
    stays_M = torch.empty(len(experts_M), dtype=torch.bool, device=experts_M.device)
    stays_M[order] = torch.arange(len(order), device=order.device) - begins < most
    return stays_M


def _counted(stays: Tensor, parts: Tensor) -> Tensor:
    """Returns how many rows of each part stay, int64 `[P]`."""
    return torch.stack([part.sum() for part in torch.split(stays, parts.tolist())])


class StackedExperts(nn.Module):
    """Experts that are modules of their own, as one tensor `[E, ...]` for each of their weights, such as `wi_weight` for `wi.weight`.

    Args:
        listed: The module of Transformers; its experts lose their weights to this one.
    """

    def __init__(self, listed: Any) -> None:
        super().__init__()
        self.num_experts, self.kind = int(listed.num_experts), type(listed).__name__
        self.token_dropout = float(getattr(listed, "moe_token_dropout", 0.0))
        experts = [listed[expert_name(number)] for number in range(self.num_experts)]
        self.names = {name.replace(".", "_"): name for name, _ in experts[0].named_parameters()}
        self._expert = (copy.deepcopy(experts[0]).to("meta"),)  # in a tuple: it has no weights, and is not a child
        for own, name in self.names.items():
            weights = [expert.get_parameter(name) for expert in experts]
            self.register_parameter(own, nn.Parameter(torch.stack([each.detach() for each in weights]), weights[0].requires_grad))
            for each in weights:
                each.data = each.data.new_empty(0)

    def give_back(self, listed: Any) -> None:
        """Gives the experts of a module their weights."""
        for own, name in self.names.items():
            for number, weight in enumerate(self.get_parameter(own).detach()):
                listed[expert_name(number)].get_parameter(name).data = weight.clone()
        listed.train(self.training)

    def of_own(self, weights: Mapping[str, Tensor], states_MD: Tensor, numbers_M: Tensor) -> Tensor:
        """Returns the answers of the experts of this process, `[M, D]`; `numbers_M` are their numbers among these."""
        (expert,) = self._expert
        expert.train(self.training)
        order = torch.argsort(numbers_M, stable=True)
        num_here = len(next(iter(weights.values())))
        parts = torch.split(states_MD[order], torch.bincount(numbers_M, minlength=num_here).tolist())
        answers = [
            torch.func.functional_call(expert, {name: weights[own][number] for own, name in self.names.items()}, (part,))
            for number, part in enumerate(parts)
        ]
        return torch.cat(answers)[torch.argsort(order)]


@contextmanager
def stacked_where_listed(model: nn.Module, spreads: bool) -> Iterator[None]:
    """Within the block, experts that are modules are stacked, if processes spread them; afterwards they have the new weights.

    After an error the model stays as it is: the weights are divided, and other processes may be gone that would have to gather them.
    """
    listed = stack_listed(model) if spreads else {}
    yield
    for path, module in listed.items():
        stacked: Any = model.get_submodule(path)
        stacked.give_back(module)
        model.set_submodule(path, module)


def stack_listed(model: nn.Module) -> dict[str, nn.Module]:
    """Stacks experts that are modules, in place; returns these modules, which have lost their weights, by their path."""
    listed = {name: module for name, module in model.named_modules() if type(module).__name__ in CLASSES}
    for path, module in listed.items():
        model.set_submodule(path, StackedExperts(module).train(module.training))
    return listed


def experts_to_spread(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the experts of each layer that processes can spread, by the path of their module, once listed ones are stacked."""
    return {name: module for name, module in model.named_modules() if is_stacked(module) or isinstance(module, StackedExperts)}


def spread_experts(model: nn.Module, spread: Spread, mesh: Any) -> set[nn.Parameter]:
    """Lets each process keep its part of the experts of every layer, in place; returns their weights.

    Args:
        model: The same weights in all processes, with listed experts stacked; on any device. One weight after the other comes whole to the
            device of the mesh, where the part of this process stays.
        spread: The processes.
        mesh: Their mesh, of one dimension.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    weights_here: set[nn.Parameter] = set()
    for module in experts_to_spread(model).values():
        for name, weight in list(module.named_parameters(recurse=False)):  # what is inside, such as a norm, all experts share
            part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)  # all processes have the same
            own = nn.Parameter(part, requires_grad=weight.requires_grad)
            module.register_parameter(name, own)
            weights_here.add(own)
        forward = _forward_of_listed if isinstance(module, StackedExperts) else _forward_of_stacked
        module.forward = forward(module, spread)
    return weights_here


def _forward_of_stacked(module: Any, spread: Spread) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the forward pass of experts that Transformers stacks; its arguments are theirs."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts_S, order = torch.sort(top_k_index.flatten(), stable=True)
        choices = Choices(order // top_k_index.shape[1], experts_S, top_k_weights.flatten()[order])

        def answer(states_MD: Tensor, numbers_M: Tensor) -> Tensor:
            weights = _own_weights(module)
            view = copy.copy(module)  # the stock code, on the experts that are here
            view.__dict__ = {**module.__dict__, "_parameters": weights, "num_experts": module.num_experts // spread.processes}
            ones_M1 = top_k_weights.new_ones(len(numbers_M), 1)
            # nobody chose an expert that is here: stock code may return new zeros, and then backward would not send what others wait for
            answers_MD = type(module).forward(view, states_MD, numbers_M[:, None], ones_M1) if len(numbers_M) else states_MD
            return _used(answers_MD, weights)

        answers_SD = spread.answers(hidden_states, choices, module, answer)
        return _added(hidden_states, choices, answers_SD * choices.weights_S[:, None])

    return forward


def _forward_of_listed(module: Any, spread: Spread) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the forward pass of experts that were listed; its arguments are those of the module of Transformers."""

    def forward(hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gates_NE = gates_of_kind(module.kind, chosen, weights)
        experts_S, tokens_S = torch.where(gates_NE.T != 0)
        choices = Choices(tokens_S, experts_S, gates_NE[tokens_S, experts_S])

        def answer(states_MD: Tensor, numbers_M: Tensor) -> Tensor:
            own = _own_weights(module)
            return _used(module.of_own(own, states_MD, numbers_M), own)

        dropout = module.token_dropout
        with drawing_apart(hidden_states.device, spread.rank) if module.training else nullcontext():
            answers_SD = spread.answers(hidden_states, choices, module, answer)
            answers_SD = answers_SD * choices.weights_S[:, None]
            answers_SD = nn.functional.dropout(answers_SD, dropout) if module.training else answers_SD * (1 - dropout)
        return _added(hidden_states, choices, answers_SD)

    return forward


@contextmanager
def drawing_apart(device: torch.device, rank: int) -> Iterator[None]:
    """Within the block, a process draws random numbers of its own; afterwards all of them go on as if none had been drawn.

    How many numbers the dropout of experts draws depends on the tokens that come. On CPUs processes have one seed
    (`foundation.training.processes.row_draws`): without this they would draw apart from the first mixture on, and a checkpoint, which has
    the random state of one of them, would not resume to the same bits.

    Args:
        device: Where the experts compute.
        rank: Index of the process.
    """
    common = draw_apart(device, rank)
    try:
        yield
    finally:
        set_generator_state(device, common)


def _own_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of the experts of this process, `[E / P, ...]` each."""
    weights: dict[str, Tensor] = {}
    for name, weight in module.named_parameters(recurse=False):
        assert is_sharded(weight), name
        shard: Any = weight
        weights[name] = shard.to_local()
    return weights


def _used(answers_MD: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Returns answers that depend on all weights, so that experts without tokens have a gradient of zeros."""
    nothing = sum((weight.flatten()[:0].sum() for weight in weights.values()), start=answers_MD.new_zeros(()))
    return answers_MD + nothing


def _added(states_ND: Tensor, choices: Choices, answers_SD: Tensor) -> Tensor:
    """Returns the sum of the answers to each token, `[N, D]`."""
    return torch.zeros_like(states_ND).index_add_(0, choices.tokens_S, answers_SD.to(states_ND.dtype))
