"""Prefix tuning and P-tuning v2: keys and values before those of every attention are learned, and the model stays as it is.

    O = softmax(Q [P_K; K]^T * scaling + mask) [P_V; V]         in every layer (`foundation.models.layers.prefix`)
    P-tuning v2      P is learned itself                        Liu et al. 2021, https://arxiv.org/abs/2110.07602
    prefix tuning    P = U tanh(V e + a) + c                    Li and Liang 2021, https://arxiv.org/abs/2101.00190

with e and the network learned in prefix tuning.

The head of a classifier is trained whole, as with adapters (`foundation.training.few_parameters.lora`). The network is peft's
`PrefixEncoder`: the same layers with the same names, but one slice of U at a time, so that each layer can have heads of its own. It is
dropped after training, as in the paper. Then P are weights of the attention modules, and config.json says how many there are: the
checkpoint has a shape of its own.

Unlike in peft, tokens keep their positions, so that none of the trained positions is lost; with peft's positions the logits are equal.

Left out: a start from keys and values of real words; models that write text, whose engines keep keys and values themselves; several
processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from foundation.core.config import Config
from foundation.core.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from foundation.models.architecture.structure import Sizes
    from foundation.stage.context import Context


class PrefixTuning(Config):
    """Keys and values in every layer, trained instead of the weights."""

    tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of keys and values that each attention reads before its own. They do not count towards `data.max_length`."""
    encoder: Literal["mlp"] | None = None
    """Prefix tuning: a network makes them while they are learned, and is dropped afterwards. Absent: P-tuning v2, which learns them
    themselves."""
    hidden: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Width of the hidden layer of that network; absent: the width of the model."""


def with_prefix(config: PreTrainedConfig, settings: PrefixTuning | None, key: str) -> PreTrainedConfig:
    """Returns the Transformers config of a model with a prefix; the same without settings.

    Args:
        config: The config of the model before.
        settings: The prefix.
        key: Key path of the settings.

    Raises:
        InputError: Its attention cannot read one.
    """
    from foundation.models.architecture.shapes import on_meta, with_sizes

    if settings is None:
        return config
    sizes, _ = _readers(on_meta(config), key)
    return with_sizes(config, replace(sizes, prefix=settings.tokens), key)


def check_prefix(settings: PrefixTuning, config: PreTrainedConfig, context: Context, key: str) -> None:
    """Checks, before the first stage, that a prefix can be learned for a task and a model.

    Args:
        settings: The prefix.
        config: Transformers config of the model before.
        context: Task and processes.
        key: Key path of the settings.

    Raises:
        InputError: It cannot.
    """
    from foundation.models.architecture.shapes import on_meta
    from foundation.models.library import with_class

    facts = context.facts
    if facts.modality != "text" or facts.generates or facts.two_towers:
        allowed = "a prefix is for models that read a text and do not write one"
        raise InputError(key, f"given for {context.task}", allowed, "leave it out")
    if settings.hidden is not None and settings.encoder is None:
        raise InputError(f"{key}.hidden", f"{settings.hidden} given", "only encoder: mlp has a hidden layer", "give encoder: mlp too")
    if context.team.size > 1:
        raise InputError(key, f"given with {context.team.size} processes", "a prefix is trained in one", "start one process")
    _readers(on_meta(with_class(config, context.task)), key)


@contextmanager
def prefixed(model: nn.Module, settings: PrefixTuning, seed: int, key: str) -> Iterator[int]:
    """Within the block only a prefix and the head of the model are trainable; afterwards the prefix is part of its attention modules.

    Yields the number of trained parameters.

    Args:
        model: A model of Transformers on its device; the same object afterwards, whose config says that it has a prefix.
        settings: The prefix.
        seed: Seed of the initialization.
        key: Key path of the settings.

    Raises:
        InputError: Its attention cannot read one, or it has one.
    """
    from foundation.models.architecture.shapes import with_sizes
    from foundation.models.layers.prefix import PREFIX, put_prefix
    from foundation.training.few_parameters.lora import head_of
    from foundation.training.few_parameters.prefix_network import NETWORK, MadePrefix, PrefixNetwork, start
    from foundation.training.state import seeded

    stock: Any = model
    sizes, names = _readers(model, key)
    config = with_sizes(stock.config, replace(sizes, prefix=settings.tokens), key)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    head = [parameter for parameter in head_of(model) if parameter.requires_grad]
    model.requires_grad_(False)
    widths = [heads * sizes.head_dim for heads in sizes.key_value_heads]
    prefixes = [put_prefix(model, name, settings.tokens, width) for name, width in zip(names, widths, strict=True)]
    with seeded(seed):
        if settings.encoder is None:
            start(prefixes)
        else:
            network = PrefixNetwork(settings.tokens, sizes.hidden, settings.hidden or sizes.hidden, widths).to(prefixes[0].key)
            model.add_module(NETWORK, network)
            for number, name in enumerate(names):
                model.get_submodule(name).add_module(PREFIX, MadePrefix(network, number))
    own = [parameter for name, parameter in model.named_parameters() if name not in before]
    for parameter in (*head, *own):
        parameter.requires_grad_(True)
    yield sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    for name, prefix in zip(names, prefixes, strict=True):
        made: Any = model.get_submodule(name).get_submodule(PREFIX)
        prefix.take(*made())
        model.get_submodule(name).add_module(PREFIX, prefix)
    if hasattr(model, NETWORK):
        delattr(model, NETWORK)
    stock.config = config
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before.get(name, True))


def _readers(model: nn.Module, key: str) -> tuple[Sizes, list[str]]:
    """Returns the sizes of a model, and the names of the attention modules that can read a prefix, block by block.

    Raises:
        InputError: They cannot, or have one.
    """
    from foundation.models.architecture.structure import Structure
    from foundation.models.layers.prefix import can_read

    config: Any = model.config
    structure = Structure.of(model, key)
    names = [attention.module for attention in structure.attentions]
    if structure.sizes.prefix:
        raise InputError(key, "given", "the model has a prefix already", "give a model without one")
    if len(structure.stacks) > 1:
        raise InputError(key, "given", f"this {config.model_type} has two stacks of blocks", "leave it out")
    if not can_read(model, names):
        raise InputError(key, "given", f"this {config.model_type} attends by code of its own, which reads no prefix", "leave it out")
    return structure.sizes, names
