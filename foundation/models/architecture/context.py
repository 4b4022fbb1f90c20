"""Context parallel: processes share the tokens of every row from the first block of a model to the last; weights are whole in each.

    embeddings             all tokens [b, L, D]
    blocks                 own tokens [b, T, D]; only attention sees keys and values of the others
                           (`foundation.models.layers.context_attention`)
    final norm, heads      all tokens again, gathered after the last block
    output layer           own tokens, of a language model that trains (`foundation.models.layers.own_answers`)

Between first and last block each process computes and keeps 1 / N of what one process would: for rows that are long. Positions that blocks
are given, such as the angles of rotary embeddings, are cut to own tokens like hidden states.

Every process has the same logits and the same loss, and takes 1 / N of it (`foundation.training.train`). The gradient of a weight is then
the sum over all processes, whether it is used on own tokens, as in blocks, or on all, as in heads: what `DistributedDataParallel` and
`fully_shard` compute anyway, over the processes that share rows as over those that share tokens. So fsdp2 shards over all of them.

Not supported: models that attend by code of their own, without the attention functions of Transformers, or add learned numbers to the
products of queries and keys; what mixes tokens elsewhere (convolutions, batch norms); two stacks of blocks; blocks that are left out at
random. `check_context` finds them by running blocks of the model whole and in shares, with random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foundation.core.errors import InputError, Problem
from foundation.labels.tasks import Task
from foundation.models.architecture.blocks import (
    Arguments,
    Keywords,
    between_blocks,
    blocks_of,
    hidden_states_of,
    stacks_of,
    states_of,
    with_layers,
)
from foundation.models.architecture.sequence import TOKENS, check_one_stack, with_states
from foundation.models.architecture.shapes import auto_class, on_meta
from foundation.models.forward import without_cache
from foundation.models.layers import context_attention
from foundation.models.layers.context_attention import Sharing, within
from foundation.models.layers.conv1d import with_linears
from foundation.models.layers.own_answers import answering, sharers
from foundation.models.layers.token_shares import Group, all_tokens, joined, parted
from foundation.models.library import REFUSED, one_line, quiet, sizes_config, uninitialized, with_class
from foundation.models.size import inputs_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

POSITIONS = ("position_embeddings", "position_ids", "cache_position")
"""Arguments of blocks that have an axis of tokens: the second one, or the only one."""
KNOWN_IDS = 64
"""Rows of tables of words that have values in a trial."""
TOLERANCE = 1e-3
"""Largest difference between shares and the whole in a trial, relative to the standard deviation of the states."""


def share_context(model: nn.Module, group: Group) -> Tokens:
    """Shares the tokens of rows between the processes of a group, in place; returns what its blocks know of them.

    Args:
        model: A Transformers model with one stack of blocks.
        group: The processes.
    """
    context_attention.register()
    tokens, blocks = Tokens(group, writes(model)), list[Any](blocks_of(model, "model").values())
    for config in _configs(model):
        config._attn_implementation = context_attention.NAME
    whole: Any = model
    whole.forward = partial(tokens.pass_through, whole.forward)
    blocks[0].register_forward_pre_hook(tokens.enter, with_kwargs=True)
    for block in blocks:
        block.register_forward_pre_hook(tokens.tell, with_kwargs=True)
        block.forward = partial(tokens.run, block.forward)
    blocks[-1].register_forward_hook(tokens.leave)
    if tokens.writes:
        share_answers(model, lambda: tokens.group)
    return tokens


def share_answers(model: nn.Module, group: Callable[[], Group]) -> None:
    """Makes the output layer of a language model read only own tokens inside `answering`, in place.

    Raises:
        ValueError: It has none.
    """
    stock: Any = model
    head: nn.Module | None = stock.get_output_embeddings()
    if head is None:
        raise ValueError(f"a {type(model).__name__} has no output layer")
    head.register_forward_pre_hook(lambda _, args: (parted(args[0], group()), *args[1:]) if sharers() else args)


def writes(model: nn.Module) -> bool:
    """Whether a model is a causal language model, whose logits are of a token each."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(kind.__name__ in names for kind in type(model).__mro__)


def _configs(model: nn.Module) -> list[Any]:
    """Returns the configs that modules of a model look at, each once."""
    found: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if hasattr(config, "_attn_implementation")}.values())


class Tokens:
    """Shares of the tokens of a pass, for the blocks of a model.

    Args:
        group: The processes that share them.
        writes: Whether the layers after the blocks treat each token separately.
    """

    def __init__(self, group: Group, writes: bool) -> None:
        self.group, self.writes = group, writes
        self.passing = 0  # tokens of the current forward pass

    def pass_through(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the model, which makes masks of own tokens before its first block."""
        with within(Sharing(self.group)):
            return forward(*args, **kwargs)

    def enter(self, block: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Takes the own tokens of what the first block is given.

        Raises:
            ValueError: Rows and tokens are one axis in it.
        """
        states = hidden_states_of(args, kwargs)
        if states.ndim != 3:
            raise ValueError(f"a {type(block).__name__} reads states of the shape {tuple(states.shape)}, without an axis of tokens")
        self.passing = states.shape[1]
        return with_states(parted(states, self.group), args, kwargs)

    def tell(self, block: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Gives a block the positions of own tokens, and the number of tokens of a row."""
        positions = {name: self._own(kwargs[name]) for name in POSITIONS if kwargs.get(name) is not None}
        return args, {**kwargs, **positions, TOKENS: self.passing}

    def run(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a block, now or again for activation checkpointing.

        Raises:
            ValueError: It did not attend by the function that sees the keys of all processes.
        """
        sharing = Sharing(self.group, kwargs.pop(TOKENS))
        with within(sharing):
            output = forward(*args, **kwargs)
        if not sharing.calls:
            raise ValueError("a block attends by code of its own, not by the attention functions of Transformers")
        return output

    def leave(self, block: nn.Module, args: Arguments, output: Any) -> Any:
        """Gathers what the last block gives; where own tokens are answered for, their gradients are whole in each process."""
        gather = all_tokens if self.writes and sharers() is not None else joined
        whole = gather(states_of(output), self.group, self.passing)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _own(self, positions: Any) -> Any:
        """Returns the part of own tokens of positions, or of several of them."""
        if isinstance(positions, tuple | list):
            return type(positions)(self._own(each) for each in positions)
        axis = min(1, positions.ndim - 1)
        if positions.shape[axis] != self.passing:
            return positions
        share = self.group.share(self.passing)
        start = min(self.group.rank * share, self.passing)
        own = positions.narrow(axis, start, min(share, self.passing - start))
        missing = share - own.shape[axis]
        return functional.pad(own, (0, 0) * (own.ndim - 1 - axis) + (0, missing)) if missing else own


def check_context(config: PreTrainedConfig, task: Task, length: int, processes: int, key: str) -> None:
    """Checks before the first stage that processes can share the tokens of a model, by running a part of it whole and in shares.

    Args:
        config: Transformers config of the model.
        task: The task.
        length: Tokens of a row.
        processes: Number of processes that share tokens.
        key: Key path of the stage, for messages.

    Raises:
        InputError: They cannot.
    """
    named = with_class(config, task)
    given, remedy = Problem(f"{key}: parallel.context", f"{processes} given", f"this {config.model_type}"), "give context: 1"
    check_one_stack(config, given, remedy)
    stack = stacks_of(on_meta(named), key)[0]
    kinds = getattr(sizes_config(config), "layer_types", None) or ["one"] * stack.depth
    small = with_layers(named, [kinds.index(kind) for kind in dict.fromkeys(kinds)])
    try:
        apart = _difference(small, task, min(length, 4 * processes + 1), processes)
    except REFUSED as error:
        raise InputError.of([given.because(f"does not run on shares of its tokens ({one_line(error)})", remedy)]) from error
    if apart > TOLERANCE:
        problem = f"computes something else on shares of its tokens (by {apart:.2g} standard deviations)"
        raise InputError(f"{given} {problem}", "something beside attention reads several tokens at once", remedy=remedy)


def _difference(config: PreTrainedConfig, task: Task, length: int, processes: int) -> float:
    """Returns the largest difference between states that shares compute and states of the whole, in standard deviations.

    Raises:
        ValueError, TypeError, ...: It does not run (`foundation.models.library.REFUSED`).
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), uninitialized(), quiet(), torch.no_grad():
        model: PreTrainedModel = with_linears(auto_class(task, config).from_config(config)).eval()
        _draw_weights(model, generator)
        features = _drawn(inputs_of(config, task, length), generator)
        blocks = list(blocks_of(model, "model").values())
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.train()
        with without_cache(model):
            with between_blocks(blocks) as states:
                model(**features)
            tokens, sent = share_context(model, Group(1)), list[Tensor]()
            tokens.group = _Recording(1, sent=sent)
            answers = model(**features)
            shares = [_Replaying(processes, rank, sent=sent) for rank in range(processes)]
            for share in shares:
                tokens.group = share
                with answering(share):
                    found = model(**features)
                if tokens.writes:
                    share.apart.append(_apart(*(logits[..., :KNOWN_IDS] for logits in (found.logits, share.own(answers.logits)))))
    return max(_apart(sent[-1], states[-1]), *(apart for share in shares for apart in share.apart))


@dataclass(frozen=True)
class _Recording(Group):
    """One process that has all tokens, and notes what it would send: keys and values of each block, and the last states."""

    sent: list[Tensor] = field(default_factory=list)

    def gather(self, own_bTD: Tensor, length: int) -> Tensor:
        """Returns the tokens of all processes, which are its own."""
        self.sent.append(own_bTD)
        return own_bTD


@dataclass(frozen=True)
class _Replaying(_Recording):
    """One of several processes, which hears of the others what the one with all tokens has noted, and compares its own with it."""

    apart: list[float] = field(default_factory=list)

    def gather(self, own_bTD: Tensor, length: int) -> Tensor:
        """Returns the tokens of all processes."""
        whole_bLD = self.sent[len(self.apart)]
        held = max(0, min(own_bTD.shape[1], length - self.rank * own_bTD.shape[1]))  # without those that fill up
        self.apart.append(_apart(own_bTD[:, :held], self.own(whole_bLD)[:, :held]))
        return whole_bLD


def _apart(actual: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference, in standard deviations; infinity where shapes differ."""
    if actual.shape != wanted.shape:
        return float("inf")
    return float((actual - wanted).abs().max() / wanted.std().clamp(min=1e-9)) if actual.numel() else 0.0


def _draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Gives random values to weights that have none; of a table of words to the rows that are read."""
    for parameter in model.parameters():
        part = parameter[:KNOWN_IDS] if parameter.ndim == 2 and len(parameter) > 16 * KNOWN_IDS else parameter
        part.normal_(0, 1 / max(1, parameter[0].numel()) ** 0.5 if parameter.ndim > 1 else 1.0, generator=generator)


def _drawn(features: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Returns features of the same shapes with random words or pixels."""
    drawn = dict(features)
    for name, value in features.items():
        if name == "input_ids":
            drawn[name] = torch.randint(3, KNOWN_IDS, value.shape, generator=generator)
        elif value.is_floating_point():
            drawn[name] = torch.randn(value.shape, generator=generator)
    return drawn
