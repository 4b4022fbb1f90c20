"""Token dropping: after a layer only the most significant tokens remain (`foundation.models.architecture.dropped_tokens`).

    tokens: [0.5, 0.25]      half of the tokens stay after the first layer, a quarter after the second one and all after it
    tokens: 0.25             a quarter reaches the last layer; in between they fall evenly:  share_l = 0.25^(l / (L - 1)),  l = 1 ... L - 1

No weight is removed, and `sparsity` does not count it: of a row, later layers compute fewer tokens. What is lost is learned again by the
fine-tuning of the stage, with the tokens gone (Goyal et al. 2020, PoWER-BERT, https://arxiv.org/abs/2001.08950, section 3.4). There shares
are learned too, against the cost; here they are given, or searched.

What is significant is fitted before that, on calibration rows (`prune.tokens.significance`).

They can merge instead (`foundation.models.architecture.merged_tokens`), also where the head reads a mean of all tokens. That fits nothing.

Two things are proved on rows of the data before anything is trained: that the head reads only the first token, and that the layers treat
tokens alike at every position, so that the remaining ones may be in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError, Problem
from foundation.labels.tasks import TASKS, Task
from foundation.models.architecture.blocks import Arguments, Keywords, Output, blocks_of, states_of
from foundation.models.architecture.dropped_tokens import DENOMINATOR, SIGNIFICANCE
from foundation.models.architecture.merged_tokens import LEAST
from foundation.models.architecture.shapes import remade, with_sizes
from foundation.models.architecture.structure import Sizes, Structure
from foundation.models.forward import forward
from foundation.models.library import REFUSED, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOLERANCE: Final = 1e-3
ALL: Final = 1 - 0.4 / DENOMINATOR
"""A share that keeps all tokens, in the order of their significance."""
HALF: Final = 0.5
Tokens = float | tuple[float, ...]


def shares_of(tokens: Tokens, depth: int, key: str, merged: bool = False) -> tuple[float, ...]:
    """Returns the share of the tokens that remain after each layer.

    Args:
        tokens: Shares after the first layers, or the share that reaches the last one.
        depth: Number of layers.
        key: Key path of the stage, for messages.
        merged: Whether tokens merge.

    Raises:
        InputError: There are more shares than layers with a layer after them, or more tokens would merge at once than can.
    """
    shares = _shares_of(tokens, depth, key)
    steep = next((later for earlier, later in zip((1.0, *shares), shares, strict=False) if later < LEAST * earlier - 1e-9), None)
    if merged and steep is not None:
        why = f"a layer leaves {steep:.3g} of the tokens, less than {LEAST:g} of those before it: no more can merge at once"
        raise InputError(f"{key}.tokens", f"{tokens if isinstance(tokens, float) else list(tokens)} given", why, "give more, or more steps")
    return shares


def _shares_of(tokens: Tokens, depth: int, key: str) -> tuple[float, ...]:
    if depth < 2:
        raise InputError(
            f"{key}.tokens", "given for a model of one layer, behind which no tokens are read but the first", remedy="leave it out"
        )
    if not isinstance(tokens, tuple):
        return (*(tokens ** (layer / (depth - 1)) for layer in range(1, depth)), tokens)
    if len(tokens) > depth - 1:
        raise InputError(f"{key}.tokens", f"{len(tokens)} shares given for a model of {depth} layers", remedy=f"give at most {depth - 1}")
    return (*tokens, *[tokens[-1]] * (depth - len(tokens)))


def check_tokens(model: nn.Module, structure: Structure, task: Task, key: str) -> None:
    """Checks, without running it, whether tokens may leave a model.

    Raises:
        InputError: They may not.
    """
    facts = TASKS[task]
    config: PreTrainedConfig = model.config
    about = Problem(f"{key}.tokens", "given")
    if facts.answer.PER_TOKEN or facts.two_towers:
        raise InputError.of([about.because(f"{task} needs the states of all tokens", "leave it out")])
    if len(structure.stacks) > 1:
        raise InputError.of([about.because(f"the decoder of a {config.model_type} reads all tokens of its encoder", "leave it out")])
    if any(attention.transformed for attention in structure.attentions):
        why = "change queries or keys before they meet, as rotary positions do"
        raise InputError.of([about.because(f"the layers of a {config.model_type} {why}", "leave it out")])


def prove_tokens(model: nn.Module, features: Mapping[str, Tensor], key: str) -> None:
    """Checks on rows of the data that the head reads only the first token, and that layers treat tokens alike at every position.

    Args:
        model: The model that tokens shall leave, in evaluation mode.
        features: Its inputs; the first two rows are used.
        key: Key path of the stage, for messages.

    Raises:
        InputError: One of the two does not hold, or the model does not run without some tokens.
    """
    config: PreTrainedConfig = model.config
    few = {name: value[:2] for name, value in features.items()}
    about = Problem(f"{key}.tokens", "given")
    blocks = list(blocks_of(model, key).values())
    with torch.no_grad():
        expected = forward(model, few)
        with _hooked(blocks[-1], _only_first):
            alone = forward(model, few)
        if _distance(alone, expected) > TOLERANCE:
            raise InputError.of(
                [about.because(f"the head of this {config.model_type} reads other tokens than the first one", "leave it out")]
            )
        drawn = torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(0))
        try:
            reordered, fewer = (
                forward(with_tokens(model, [share] * len(blocks), [drawn] * len(blocks), key).to(expected.device), few)
                for share in (ALL, HALF)
            )
        except REFUSED as error:
            raise InputError.of(
                [about.because(f"this {config.model_type} does not run without some tokens ({one_line(error)})", "leave it out")]
            ) from error
        assert fewer.shape == expected.shape
        if _distance(reordered, expected) > TOLERANCE:
            raise InputError.of([about.because(f"the layers of this {config.model_type} read where tokens stand", "leave it out")])


def prove_merging(model: nn.Module, features: Mapping[str, Tensor], key: str) -> bool:
    """Checks on rows of the data that layers treat tokens alike at every position; returns whether the head reads the first token alone.

    Args:
        model: The model whose tokens shall merge, in evaluation mode.
        features: Its inputs; the first two rows are used, without padding.
        key: Key path of the stage, for messages.

    Raises:
        InputError: They do not, or the model does not run with fewer tokens.
    """
    config: PreTrainedConfig = model.config
    few = {name: torch.ones_like(value[:2]) if name == "attention_mask" else value[:2] for name, value in features.items()}
    about = Problem(f"{key}.tokens", "given with token_reduction: merge")
    blocks = list(blocks_of(model, key).values())
    with torch.no_grad():
        expected = forward(model, few)
        with _hooked(blocks[-1], _only_first):
            alone = forward(model, few)
        first_stays = _distance(alone, expected) <= TOLERANCE
        handle = blocks[0].register_forward_pre_hook(_reordered_before, with_kwargs=True)
        try:
            with _hooked(blocks[-1], _reordered_after):
                reordered = forward(model, few)
        finally:
            handle.remove()
        if _distance(reordered, expected) > TOLERANCE:
            raise InputError.of([about.because(f"the layers of this {config.model_type} read where tokens stand", "leave it out")])
        try:
            fewer = forward(with_merged_tokens(model, [LEAST] * len(blocks), key, first_stays).to(expected.device), few)
        except REFUSED as error:
            why = f"this {config.model_type} does not run with fewer tokens ({one_line(error)})"
            raise InputError.of([about.because(why, "leave it out")]) from error
    assert fewer.shape == expected.shape
    return first_stays


@contextmanager
def _hooked(block: nn.Module, hook: Callable[..., Output]) -> Iterator[None]:
    handle = block.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _reordered_before(block: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Reverses the tokens that come into the first block."""
    if args:
        return (args[0].flip(1), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"].flip(1)}


def _reordered_after(block: nn.Module, args: object, output: Output) -> Output:
    """Puts them back in their order."""
    states_BLD = states_of(output).flip(1)
    return (states_BLD, *output[1:]) if isinstance(output, tuple) else states_BLD


def with_tokens(model: nn.Module, shares: Sequence[float], weights: Sequence[Tensor], key: str) -> nn.Module:
    """Returns a copy of a model on the CPU, in evaluation mode, after whose blocks only these shares of the tokens stay.

    Args:
        model: The model; what it knows of significant tokens is left out.
        shares: Share of the tokens that remain after each block; none: all of them do.
        weights: What `significance` returned, for each block.
        key: Key path of the stage, for messages.
    """
    return _with_shares(model, replace(Structure.of(model, key).sizes, tokens=tuple(shares), merged=False, first_stays=False), weights, key)


def with_merged_tokens(model: nn.Module, shares: Sequence[float], key: str, first_stays: bool) -> nn.Module:
    """Returns a copy of a model on the CPU, in evaluation mode, after whose blocks similar tokens merge until these shares are left.

    Args:
        model: The model.
        shares: Share of the tokens that are left after each block.
        key: Key path of the stage, for messages.
        first_stays: Whether the first token never merges: the head reads it alone (`prove_merging`).
    """
    sizes = replace(Structure.of(model, key).sizes, tokens=tuple(shares), merged=True, first_stays=first_stays)
    return _with_shares(model, sizes, (), key)


def _with_shares(model: nn.Module, sizes: Sizes, weights: Sequence[Tensor], key: str) -> nn.Module:
    made = remade(model, with_sizes(model.config, sizes, key))
    own = {name: value.cpu() for name, value in model.state_dict().items() if name.rpartition(".")[2] != SIGNIFICANCE}
    blocks = blocks_of(made, key)
    fitted = {
        f"{name}.{SIGNIFICANCE}": weights[number]
        for number, name in enumerate(blocks)
        if SIGNIFICANCE in dict(blocks[name].named_buffers())
    }
    made.load_state_dict({**own, **fitted})
    return made.eval()


def _only_first(block: nn.Module, args: object, output: Output) -> Output:
    """Sets the states of all tokens but the first to other numbers."""
    states_BLD = states_of(output)
    changed_BLD = torch.cat([states_BLD[:, :1], -states_BLD[:, 1:].flip(1)], dim=1)
    return (changed_BLD, *output[1:]) if isinstance(output, tuple) else changed_BLD


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))
