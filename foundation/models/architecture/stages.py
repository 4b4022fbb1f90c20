"""Stages of a pipeline: consecutive blocks of a Transformer, the first with the embeddings, the last with the head.

    stage 0      embeddings, blocks 0 .. a - 1
    stage 1      blocks a .. b - 1                    what goes from stage to stage: hidden states, float32 [b, L, D]
    stage S - 1  blocks y .. z, head

Every stage runs the code of the whole model on the rows, with three changes: blocks of other stages hand on what they are given, the first
block of the stage reads the hidden states that were received, and the pass ends when the last block of the stage is done. So each stage
makes the padding mask, positions and rotary angles again, in the form that its blocks read: that form belongs to the model and its
attention, costs next to nothing to make, and would cost messages and a rule for each architecture to send.

Which stages read a parameter outside of the blocks is found by the graph of gradients, not by name: a table of words that the head shares
is read by the first and the last stage, a table of relative positions by all. All of them hold it.

Stages are balanced by the weights that are multiplied for each token: in blocks (pruned ones differ), and in a head with an answer
for every token. Tables are read, not multiplied, and cost no time. The slowest stage sets the pace of all, so the largest sum is made as
small as it can be; where several cuts do that, later stages get more, since the first one keeps activations of most micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError, Problem
from foundation.labels.tasks import Task
from foundation.models.architecture.blocks import Arguments, Keywords, block_of, blocks_of, hidden_states_of, states_of, with_layers
from foundation.models.architecture.shapes import auto_class
from foundation.models.forward import modes_kept, without_cache
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import REFUSED, one_line, quiet, uninitialized, with_class
from foundation.models.meta import on_meta_device
from foundation.models.size import inputs_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

RTOL, ATOL = 1e-4, 1e-5
"""How far the stages, one after another, may be from the whole model."""
Forward = Callable[..., Any]


class _Handed(Exception):
    """Ends the forward pass of a model where its stage ends.

    Args:
        states: What the last block of the stage has computed.
    """

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


@dataclass(frozen=True)
class Stages:
    """How the blocks of a model are divided into stages."""

    blocks: tuple[str, ...]
    """Module names of all blocks."""
    spans: tuple[range, ...]
    """Numbers of the blocks of each stage."""
    readers: Mapping[str, tuple[int, ...]]
    """Stages that read a parameter outside of the blocks, by its name, the first of those that tied weights have."""
    by_token: bool
    """Whether hidden states have a vector for each token of `input_ids`; else their number does not depend on the rows."""
    form: int
    """Length of the tuple that a block returns, hidden states first and None after them; 0 if it returns only the states."""
    state: tuple[int, int]
    """Vectors of a row and their width, as they were when the stages were found."""

    def __len__(self) -> int:
        return len(self.spans)

    def stages_with(self, name: str) -> tuple[int, ...]:
        """Returns the stages that hold a parameter or buffer; the first of them saves it. What no stage reads is with the first one."""
        number = block_of(name, self.blocks)
        if number is None:
            readers = self.readers.get(name, ())
            return readers if readers else (0,)
        return (next(stage for stage, span in enumerate(self.spans) if number in span),)

    def shape(self, features: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """Returns the shape of the hidden states of some rows."""
        rows = next(iter(features.values()))
        return len(rows), features["input_ids"].shape[1] if self.by_token else self.state[0], self.state[1]


def balanced(costs: Sequence[int], head: int, count: int) -> tuple[range, ...]:
    """Returns which blocks each of `count` stages has, so that the largest sum of costs is as small as possible.

    Args:
        costs: Cost of each block, at least `count`.
        head: Cost of what the last stage has besides.
        count: Number of stages.
    """
    padded = [*costs[:-1], costs[-1] + head]
    sums = sorted({sum(padded[first:last]) for first in range(len(padded)) for last in range(first + 1, len(padded) + 1)})
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _filled(padded, count, sums[middle])[0].start == 0 else (middle + 1, high)
    return _filled(padded, count, sums[low])


def _filled(costs: Sequence[int], count: int, most: int) -> tuple[range, ...]:
    """Returns stages that are filled from the last one on, up to `most` each; what does not fit is left before the first one."""
    spans: list[range] = []
    end = len(costs)
    for left in range(count - 1, -1, -1):  # stages that come before
        start, total = end - 1, costs[end - 1]
        while start > left and total + costs[start - 1] <= most:
            start -= 1
            total += costs[start]
        spans.append(range(start if total <= most else end, end))
        end = spans[-1].start
        if not spans[-1]:
            return (range(1, 1),)
    return tuple(reversed(spans))


def run_stage(
    forward: Forward, blocks: Sequence[nn.Module], span: range, form: int, states: Tensor | None, features: Mapping[str, Tensor]
) -> Tensor:
    """Runs the blocks of a stage, and the embeddings or the head with them.

    Args:
        forward: The forward pass of the whole model.
        blocks: All blocks of the model; blocks of other stages need no weights.
        span: Numbers of the blocks of the stage.
        form: What a block returns; see `Stages`.
        states: Hidden states of the stage before, float `[b, L, D]`; None for the first stage.
        features: The rows, as the whole model reads them.

    Returns:
        Hidden states float32 `[b, L, D]`, or the logits of the last stage.
    """
    with _routed(blocks, span, form, states):
        try:
            logits: Tensor = forward(**features).logits
        except _Handed as handed:
            return handed.states.float().contiguous()
    return logits


@contextmanager
def _routed(blocks: Sequence[nn.Module], span: range, form: int, states: Tensor | None) -> Iterator[None]:
    """Within the block only the blocks of a stage compute. What wraps their forward pass, such as checkpointing, stays inside."""
    before = [(block, block.__dict__.get("forward")) for block in blocks]
    for number, block in enumerate(blocks):
        if number not in span:
            block.forward = _hands_on if not form else partial(_hands_on_in_tuple, form)
            continue
        own = block.forward
        received = states if number == span.start else None
        ends = number == span.stop - 1 < len(blocks) - 1
        block.forward = _first_or_last(own, received, ends) if received is not None or ends else own
    try:
        yield
    finally:
        for block, forward in before:
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.forward = forward


def _hands_on(*args: Any, **kwargs: Any) -> Tensor:
    return hidden_states_of(args, kwargs)


def _hands_on_in_tuple(length: int, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    return hidden_states_of(args, kwargs), *[None] * (length - 1)


def _first_or_last(own: Forward, received: Tensor | None, ends: bool) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if received is not None and args:
            args = (received, *args[1:])
        elif received is not None:
            kwargs["hidden_states"] = received
        output = own(*args, **kwargs)
        if ends:
            raise _Handed(states_of(output))
        return output

    return run


def stages_of(model: nn.Module, features: Mapping[str, Tensor], count: int, key: str, compare: bool = True) -> Stages:
    """Divides the blocks of a model into stages, after running a few rows whole and stage by stage.

    Args:
        model: A Transformers model with one stack of blocks.
        features: A few rows, on its device.
        count: Number of stages.
        key: Key path in the recipe, for messages.
        compare: Whether both have to give the same; not where weights have no values.

    Raises:
        InputError: There are fewer blocks than stages, blocks hand on more than hidden states, or the stages give something else.
    """
    config: PreTrainedConfig = model.config
    named = blocks_of(model, key)
    blocks, forward = list(named.values()), model.forward
    given = Problem(f"{key}: parallel.pipeline", "given", f"this {config.model_type}")
    if len(blocks) < count:
        raise InputError.of([given.because(f"has {len(blocks)} blocks for {count} stages", "give a smaller pipeline")])
    with modes_kept(model), _all_trained(model):
        model.eval()
        seen = _Seen(named)
        with seen.watching():
            whole = forward(**features).logits
        seen.check(len(whole), given)
        costs, even = [_numel(block) for block in blocks], balanced([1] * len(blocks), 0, count)
        _, readers = _run(model, seen, even, features)
        tables = [parameter.numel() for name, parameter in model.named_parameters() if count - 1 in readers.get(name, ())]
        spans = balanced(costs, sum(tables) if whole.ndim == 3 else 0, count)
        logits, readers = _run(model, seen, spans, features)
    if logits.shape != whole.shape or (compare and not torch.allclose(logits, whole, RTOL, ATOL)):
        raise InputError.of(
            [given.because("does not give in stages what it gives whole", "give pipeline: 1, and strategy: fsdp2 if it is large")]
        )
    _check_apart(model, list(named), spans, given)
    ids = features.get("input_ids")
    return Stages(tuple(named), spans, readers, ids is not None and seen.shape[0] == ids.shape[1], seen.form, seen.shape)


def check_stages(config: PreTrainedConfig, task: Task, length: int, count: int, key: str) -> None:
    """Checks before the first stage of a run that a model can be divided, by running a row whole and in stages.

    It runs on the meta device; models that look at values run on the CPU, with a block for each stage and weights that are not initialized.

    Args:
        config: Transformers config of the model.
        task: The task.
        length: Tokens of a row.
        count: Number of stages.
        key: Key path of the training, for messages.

    Raises:
        InputError: It cannot; see `stages_of`.
    """
    named = with_class(config, task)
    try:
        try:
            _try(named, task, length, count, key, meta=True)
        except InputError:
            raise
        except REFUSED:
            small = with_layers(named, range(count))
            _try(small, task, length, count, key, meta=False)
    except InputError:
        raise
    except REFUSED as error:
        reason, remedy = (
            f"a stage of this {config.model_type} does not run ({one_line(error)})",
            "give pipeline: 1, and strategy: fsdp2 if it is large",
        )
        raise InputError(f"{key}: parallel.pipeline", "given", reason, remedy) from error


def _try(config: PreTrainedConfig, task: Task, length: int, count: int, key: str, *, meta: bool) -> None:
    with torch.random.fork_rng(devices=[]), on_meta_device() if meta else uninitialized(), quiet():
        model: PreTrainedModel = with_linears(auto_class(task, config).from_config(config))
        with without_cache(model):
            stages_of(model, inputs_of(config, task, length, masked=not meta), count, key, compare=False)


class _Seen:
    """Inputs and outputs of the blocks of a model, recorded in a run of the whole model.

    Args:
        named: All blocks by module name.
    """

    def __init__(self, named: Mapping[str, nn.Module]) -> None:
        self.names, self.blocks = list(named), list(named.values())
        self.others: list[list[Tensor]] = []
        self.shapes: set[tuple[int, ...]] = set()
        self.forms: set[int] = set()
        self.more = False

    @property
    def shape(self) -> tuple[int, int]:
        """Vectors of a row and their width."""
        _, vectors, width = next(iter(self.shapes))
        return vectors, width

    @property
    def form(self) -> int:
        """See `Stages`."""
        return next(iter(self.forms))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, runs of the model are noted."""
        handles = [block.register_forward_pre_hook(self._before, with_kwargs=True) for block in self.blocks]
        handles += [block.register_forward_hook(self._after) for block in self.blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, block: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        states = hidden_states_of(args, kwargs)
        self.shapes.add(tuple(states.shape))
        self.others.append([value for value in _tensors((args, dict(kwargs))) if value is not states and value.requires_grad])

    def _after(self, block: nn.Module, args: Arguments, output: Any) -> None:
        self.shapes.add(tuple(states_of(output).shape))
        self.forms.add(len(output) if isinstance(output, tuple) else 0)
        self.more |= len(_tensors(output)) > 1

    def check(self, rows: int, setting: Problem) -> None:
        """Raises an `InputError` if blocks are not run one after another, or hand on more than hidden states `[b, L, D]` of some rows."""
        weights: list[nn.Parameter] = []
        alike = len(self.shapes) == len(self.forms) == 1 and len(next(iter(self.shapes))) == 3 and next(iter(self.shapes))[0] == rows
        problem = self.more or not alike or len(self.others) != len(self.blocks)
        for block, others in zip(self.blocks, self.others, strict=False):
            if others and weights and not problem:
                total = torch.stack([other.float().sum() for other in others]).sum()
                found = torch.autograd.grad(total, weights, allow_unused=True, retain_graph=True)
                problem |= any(gradient is not None for gradient in found)
            weights += [weight for weight in block.parameters() if weight.requires_grad]
        if problem:
            raise InputError.of(
                [setting.because("has blocks that hand on more than hidden states", "give pipeline: 1, and strategy: fsdp2 if it is large")]
            )


def _tensors(value: Any) -> list[Tensor]:
    """Returns all tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


@contextmanager
def _all_trained(model: nn.Module) -> Iterator[None]:
    """Within the block all parameters take part in graphs of gradients, frozen ones too: a stage has to hold whatever it reads."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad and parameter.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _run(
    model: nn.Module, seen: _Seen, spans: Sequence[range], features: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, tuple[int, ...]]]:
    """Runs the stages one after another; returns the logits, and the stages that read each parameter outside of the blocks."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    outside = {name: parameter for name, parameter in trained if block_of(name, seen.names) is None}
    readers: dict[str, tuple[int, ...]] = dict.fromkeys(outside, ())
    states: Tensor | None = None
    for stage, span in enumerate(spans):
        states = run_stage(model.forward, seen.blocks, span, seen.form, states, features)
        found = torch.autograd.grad(states.float().sum(), list(outside.values()), allow_unused=True) if outside else ()
        for name, gradient in zip(outside, found, strict=True):
            readers[name] += (stage,) if gradient is not None else ()
        states = states.detach()
    assert states is not None, "at least one stage"
    return states, readers


def _check_apart(model: nn.Module, blocks: Sequence[str], spans: Sequence[range], setting: Problem) -> None:
    """Raises an `InputError` if blocks of different stages share a parameter, or one with what is outside of blocks."""
    places: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        number = block_of(name, blocks)
        stage = -1 if number is None else next(stage for stage, span in enumerate(spans) if number in span)
        places.setdefault(id(parameter), set()).add(stage)
        if len(places[id(parameter)]) > 1:
            raise InputError.of(
                [setting.because(f"has {name} in several of its stages", "give pipeline: 1, and strategy: fsdp2 if it is large")]
            )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
