"""Low-rank adapters (LoRA): training that changes few parameters, so that a large model is repaired without training all of it.

Each chosen linear layer gets two small matrices. The model is frozen, and the product is added to the weight when training ends:

    y = x @ W.T + b + (alpha / r) * (dropout(x) @ A.T) @ B.T        A [r, I] random, B [O, r] zero, so that training starts at the model
    W <- W + (alpha / r) * B @ A                                    afterwards; the model has the layers that it had before

The head of a classifier is trained whole: it may be new.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1. The adapters come from the library `peft`, in which the field
trains them: initialization, dropout and merging are what its users know.

A step needs no gradient of W and no moments of the optimizer for it: with r = 16 a layer of 4096 x 4096 trains 0.8 % of its parameters.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from foundation.core.config import Config
from foundation.core.errors import InputError, Problem, nearest

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


class Lora(Config):
    """Low-rank adapters, trained instead of the weights."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the change of each weight."""
    alpha: Annotated[int, Field(ge=1, le=65536)] = 32
    """The change is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the input of the adapters."""
    layers: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Linear layers of the blocks that get an adapter, by name patterns such as `*.q_proj`; default: all of them."""


@contextmanager
def adapted(model: nn.Module, lora: Lora | None, seed: int, label: str) -> Iterator[None]:
    """Within the block only adapters and the head of the model are trainable; afterwards the adapters are part of its weights.

    Args:
        model: A model whose layers are `nn.Linear`; the same object afterwards.
        lora: The adapters; None trains all weights.
        seed: Seed of the random matrices A.
        label: Name of the training, for messages.

    Raises:
        InputError: No layer matches a pattern, or the model keeps zeros, which adapters would fill.
    """
    from foundation.training.state import seeded

    if lora is None:
        yield
        return
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with seeded(seed):
        adapters = attached(model, lora, label)
    yield
    adapters.merge_and_unload()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)


def attached(model: nn.Module, lora: Lora, label: str) -> Any:
    """Puts adapters on the layers of a model, in place, and freezes all else but the head; returns peft's model of them.

    Args:
        model: The model.
        lora: The adapters.
        label: Name of the training, for messages.

    Raises:
        InputError: As `adapted`.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=_chosen(model, lora, label))
    head = [parameter for parameter in head_of(model) if parameter.requires_grad]
    adapters = LoraModel(model, config, "default")
    for parameter in head:
        parameter.requires_grad_(True)
    return adapters


def check_lora(lora: Lora | None, config: PreTrainedConfig, key: str) -> None:
    """Checks before the first stage that a model can be trained with these adapters.

    Args:
        lora: The adapters; None for none.
        config: Transformers config of the model.
        key: Key path of the settings that hold `lora`, for messages.

    Raises:
        InputError: As `adapted`.
    """
    from foundation.models.architecture.shapes import on_meta

    if lora is not None:
        _chosen(on_meta(config), lora, key)


def head_of(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a head that classifies or estimates; the output layer of a language model is none."""
    stock: Any = model
    body, output = getattr(stock, stock.base_model_prefix, stock), stock.get_output_embeddings()
    outside = {id(parameter) for part in (body, output) if part is not None for parameter in part.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in outside]


def _chosen(model: nn.Module, lora: Lora, label: str) -> list[str]:
    """Returns the names of the layers that get an adapter."""
    from foundation.training.kept_zeros import block_linears, keeps_zeros

    if keeps_zeros(model):
        raise InputError(f"{label}.lora", "given for a model that keeps its zeros, which adapters would fill", remedy="leave lora out")
    return matching_layers(list(block_linears(model)), lora, label, "linear layer of a block")


def matching_layers(layers: Sequence[str], lora: Lora, key: str, kind: str) -> list[str]:
    """Returns the layers that get an adapter.

    Args:
        layers: Names of the layers that can have one.
        lora: Its `layers` are patterns of names.
        key: Key path of the stage, for messages.
        kind: What the layers are called in messages, in the singular.

    Raises:
        InputError: A pattern matches none of them.
    """
    examples = f"layers are named like {', '.join(layers[:3])}"
    problems = [
        Problem(f"{key}.lora.layers", f"{pattern!r} matches no {kind}", f"{examples}{nearest(pattern, layers)}")
        for pattern in lora.layers
        if not fnmatch.filter(layers, pattern)
    ]
    if problems:
        raise InputError.of(problems)
    return [name for name in layers if any(fnmatch.fnmatchcase(name, pattern) for pattern in lora.layers)]
