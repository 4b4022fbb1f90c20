"""Sequence parallel: the processes that share the layers of a block also share the tokens between these layers.

    x                                   own tokens [b, T, D]: residual stream, norms, dropout
    gathered x -> columns ... rows      all tokens [b, L, .]: heads and neurons of this process
    + bias, dropout, residual, norm     own tokens again

Source: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.2; arithmetic: `foundation.models.layers.token_shares`.
The first block takes the own tokens of what the embeddings give, and what the last one gives is gathered: embeddings, final norm and heads
see all tokens in every process, which computes the same loss. In between each process keeps 1 / N of what one process keeps for backward.

Weights that a block uses on own tokens (norms, biases of row layers) are whole in every process. Their gradients are of other tokens in
each, and summed by one message for a block.

Hidden states are gathered where the attention module of a block, or the module around its first FFN layers, is called. The number of tokens
goes along as an argument of each block, so that activation checkpointing, which runs a block again later, has the argument of its own pass.

Not supported: what mixes tokens outside of attention (convolutions, batch norms, pooling), blocks that read more than one tensor with a
gradient (encoder-decoders), blocks that are left out at random (`layerdrop`, stochastic depth), since the processes draw apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foundation.core.errors import InputError, Problem
from foundation.labels.tasks import Task
from foundation.machine.sharding import is_sharded
from foundation.models.architecture.blocks import Arguments, Keywords, blocks_of, hidden_states_of, stacks_of, states_of, with_layers
from foundation.models.architecture.shapes import auto_class, on_meta
from foundation.models.architecture.split import Split, shrink, split_of
from foundation.models.forward import without_cache
from foundation.models.layers.conv1d import with_linears
from foundation.models.layers.token_shares import Group, Reading, all_tokens, own_tokens, read, reduced
from foundation.models.library import REFUSED, depths_of, on_meta_else_cpu, one_line, quiet, uninitialized, with_class
from foundation.models.meta import on_meta_device
from foundation.models.size import inputs_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOKENS = "tokens_of_a_row"
"""The argument that gives a block their number."""
LAYERS_LEFT_OUT = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Config keys: the share of blocks that a training leaves out at random, for all rows of a batch."""
LEFT_OUT = (*LAYERS_LEFT_OUT, "drop_path_rate")
"""The same, with the share that single rows leave out."""


def share_tokens(model: nn.Module, split: Split, group: Group) -> None:
    """Shares the tokens between the layers of a model, in place.

    Args:
        model: A Transformers model with one stack of blocks, whose layers are cut to what this process has of them (`split`).
        split: How its layers are shared.
        group: The processes.
    """
    blocks = blocks_of(model, "model")
    tokens = _Tokens(group)
    for columns, row in split.regions:
        region = _Region(tokens)
        reader = model.get_submodule(reader_of(columns, split, list(blocks)))
        reader.register_forward_pre_hook(region.open, with_kwargs=True)
        for name in columns:
            layer: Any = model.get_submodule(name)
            layer.forward = partial(region.column, layer, name)
        last: Any = model.get_submodule(row)
        last.forward = partial(region.row, last)
    cut = {*(f"{name}.{kind}" for name in split.columns for kind in ("weight", "bias")), *(f"{name}.weight" for name in split.rows)}
    every: list[Any] = list(blocks.values())
    every[0].register_forward_pre_hook(tokens.enter, with_kwargs=True)
    for name, block in blocks.items():
        block.register_forward_pre_hook(tokens.tell, with_kwargs=True)
        whole = [(module, child) for module, child, weight in _weights(block, name) if weight not in cut]
        block.forward = partial(tokens.run, block.forward, whole)
    every[-1].register_forward_hook(tokens.leave)


def reader_of(columns: Sequence[str], split: Split, blocks: Sequence[str]) -> str:
    """Returns the name of the module at which the column layers of an attention or FFN get their input.

    Args:
        columns: Names of the column layers.
        split: How layers are shared.
        blocks: Names of all blocks.
    """
    attention = next((module for module in split.counts if columns[0].startswith(f"{module}.")), None)
    if attention is not None:
        return attention
    owner = columns[0].rpartition(".")[0]
    alike = all(name.rpartition(".")[0] == owner for name in columns)
    return owner if len(columns) > 1 and alike and owner not in blocks else columns[0]


def _weights(block: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Yields every weight of a block: its module, its name there, and its name in the model."""
    for name, module in block.named_modules(prefix=prefix):
        for child, _ in module.named_parameters(recurse=False):
            yield module, child, f"{name}.{child}"


class _Tokens:
    """Shares of the tokens of a pass, for the blocks of a model.

    Args:
        group: The processes that share them.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.passing = 0  # tokens of the current forward pass
        self.length = 0  # of the block that runs, which may belong to an earlier pass

    def enter(self, block: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Takes the own tokens of what the first block is given."""
        states = hidden_states_of(args, kwargs)
        self.passing = states.shape[1]
        return with_states(own_tokens(states, self.group), args, kwargs)

    def tell(self, block: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Tells a block how many tokens a row has."""
        return args, {**kwargs, TOKENS: self.passing}

    def run(self, forward: Any, weights: Sequence[tuple[nn.Module, str]], *args: Any, **kwargs: Any) -> Any:
        """Runs a block, whose weights on own tokens get their gradients from all processes."""
        before, self.length = self.length, kwargs.pop(TOKENS)
        try:
            with _summed(weights, self.group):
                return forward(*args, **kwargs)
        finally:
            self.length = before

    def leave(self, block: nn.Module, args: Arguments, output: Any) -> Any:
        """Gathers what the last block gives."""
        whole = all_tokens(states_of(output), self.group, self.passing)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole


class _Region:
    """An attention or FFN, from its column layers to its row layer.

    Args:
        tokens: What is known of the tokens.
    """

    def __init__(self, tokens: _Tokens) -> None:
        self.tokens = tokens
        self.reading: Reading | None = None

    def open(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Gathers what the column layers are about to read, in the dtype in which they do.

        Raises:
            ValueError: Rows and tokens are one axis in it, as in OPT.
        """
        states = hidden_states_of(args, kwargs)
        if states.ndim != 3:
            raise ValueError(f"a {type(module).__name__} reads states of the shape {tuple(states.shape)}, without an axis of tokens")
        device = states.device.type
        if torch.is_autocast_enabled(device):
            states = states.to(torch.get_autocast_dtype(device))
        self.reading = Reading(self.tokens.group, states, self.tokens.length)
        return with_states(self.reading.whole_bLD, args, kwargs)

    def column(self, layer: nn.Linear, name: str, x_bLI: Tensor) -> Tensor:
        """The forward pass of a column layer.

        Raises:
            ValueError: It does not read the states that were gathered, so that the gradient of what it reads would not be summed.
        """
        if self.reading is None or x_bLI is not self.reading.whole_bLD:
            raise ValueError(f"{name} reads something else than the hidden states that its module is given")
        bias = None if layer.bias is None else _own(layer.bias).to(x_bLI.dtype)
        return self.reading.product(_own(layer.weight).to(x_bLI.dtype), bias)

    def row(self, layer: nn.Linear, x_bLI: Tensor) -> Tensor:
        """The forward pass of a row layer."""
        assert self.reading is not None, "a row layer comes after its columns"
        self.reading.close()
        self.reading = None
        y_bTD = reduced(functional.linear(x_bLI, _own(layer.weight)), self.tokens.group)
        return y_bTD if layer.bias is None else y_bTD + layer.bias.to(y_bTD.dtype)


def with_states(states: Tensor, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Returns the arguments of a module with other hidden states."""
    return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})


def _own(weight: Tensor) -> Tensor:
    """Returns this process's shard of a weight."""
    shard: Any = weight
    part: Tensor = shard.to_local() if is_sharded(weight) else weight
    return part


@contextmanager
def _summed(weights: Sequence[tuple[nn.Module, str]], group: Group) -> Iterator[None]:
    """Within the block, the gradients of weights are summed over the processes as soon as all of them are there.

    Modules get views in the place of their weights: hooks on weights would miss those that `fully_shard` puts in their place.
    """
    here = [(module._parameters, name) for module, name in weights]
    found = [(place, name, weight) for place, name in here if (weight := place[name]) is not None and weight.requires_grad]
    if not found or not torch.is_grad_enabled():
        yield
        return
    views = read([weight for _, _, weight in found], group)
    for (place, name, _), view in zip(found, views, strict=True):
        place[name] = view  # type: ignore[assignment]
    try:
        yield
    finally:
        for place, name, weight in found:
            place[name] = weight


def check_sequence(config: PreTrainedConfig, task: Task, length: int, processes: int, key: str) -> None:
    """Checks before the first stage that processes can share the tokens of a model, by a step of the share of one.

    It runs on the meta device; models that look at values run on the CPU, with weights that are not initialized.

    Args:
        config: Transformers config of the model, whose layers can be shared (`foundation.models.architecture.split.check_split`).
        task: The task.
        length: Tokens of a row.
        processes: Number of processes that share each layer.
        key: Key path of the stage, for messages.

    Raises:
        InputError: They cannot.
    """
    named = with_class(config, task)
    model = on_meta(named)
    given, remedy = Problem(f"{key}: parallel.sequence", "true given", f"this {config.model_type}"), "give sequence: false"
    check_one_stack(config, given, remedy)
    mixing = next(_mixing(model, split_of(model, processes, key)), None)
    if mixing is not None:
        raise InputError.of(
            [given.because(f"has {mixing} between the layers of its blocks, which may read several tokens at once", remedy)]
        )
    small = with_layers(named, [stack.first for stack in stacks_of(model, key)])
    try:
        on_meta_else_cpu(lambda meta: _step_of_share(small, task, length, processes, meta=meta))
    except REFUSED as error:
        raise InputError.of([given.because(f"does not run on shares of its tokens ({one_line(error)})", remedy)]) from error


def check_one_stack(config: PreTrainedConfig, setting: Problem, remedy: str) -> None:
    """Raises an `InputError` if a model has two stacks of blocks, or leaves out blocks at random."""
    if len(depths_of(config) or ()) > 1:
        raise InputError.of([setting.because("has two stacks of blocks, one of which reads the tokens of the other", remedy)])
    check_left_out(config, setting, lambda name: remedy)


def check_left_out(config: PreTrainedConfig, setting: Problem, remedy: Callable[[str], str], names: Sequence[str] = LEFT_OUT) -> None:
    """Raises an `InputError` if a model leaves out blocks at random.

    Args:
        config: Transformers config of the model.
        setting: The setting that does not go with it.
        remedy: Returns what to do, from the key of the config.
        names: The keys.
    """
    for name in names:
        if getattr(config, name, 0):
            reason = f"leaves out blocks at random ({name}: {getattr(config, name):g}), each process others"
            raise InputError.of([setting.because(reason, remedy(name))])


def _mixing(model: nn.Module, split: Split) -> Iterator[str]:
    """Yields modules in blocks that may read several tokens at once and do not lie between column and row layers."""
    blocks = blocks_of(model, "model")
    inside = (*split.counts, *(reader_of(columns, split, list(blocks)) for columns, _ in split.regions), *split.rows)
    for prefix, block in blocks.items():
        for name, module in block.named_modules(prefix=prefix):
            is_inside = any(name == each or name.startswith(f"{each}.") for each in inside)
            if not is_inside and not list(module.children()) and not _is_for_each_token(module):
                yield f"{name} ({type(module).__name__})"


def _is_for_each_token(module: nn.Module) -> bool:
    """Whether a leaf module is known to treat each token separately."""
    kind = type(module).__name__
    if "Norm" in kind:
        return not isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm)
    if isinstance(module, nn.Linear | nn.Dropout | nn.Identity) or "LayerScale" in kind:
        return True
    return type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation")


def _step_of_share(config: PreTrainedConfig, task: Task, length: int, processes: int, *, meta: bool) -> None:
    """Runs forward and backward pass of what one process has of a model.

    Raises:
        ValueError, TypeError, ...: It does not run (`foundation.models.library.REFUSED`).
    """
    with torch.random.fork_rng(devices=[]), on_meta_device() if meta else uninitialized(), quiet():
        model: PreTrainedModel = with_linears(auto_class(task, config).from_config(config)).train()
        split = split_of(on_meta(config), processes, "model")
        share_tokens(shrink(model, split), split, Group(processes))
        for block in blocks_of(model, "model").values():
            block.register_forward_pre_hook(_alone_with_gradient, with_kwargs=True)
        with without_cache(model):
            model(**inputs_of(config, task, length, masked=not meta)).logits.float().sum().backward()


def _alone_with_gradient(block: nn.Module, args: Arguments, kwargs: Keywords) -> None:
    """Raises a `ValueError` if a block reads more than hidden states whose gradient would cover only own tokens or heads."""
    states = hidden_states_of(args, kwargs)
    if states.ndim != 3:
        raise ValueError(f"hidden states have the shape {tuple(states.shape)}")
    flat = [each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, tuple) else (value,))]
    if any(isinstance(each, Tensor) and each.requires_grad and each is not states for each in flat):
        raise ValueError("blocks read more than hidden states")
