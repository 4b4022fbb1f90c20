"""Trainings of few parameters that are no adapters: virtual tokens, or keys and values in every layer.

prompt    rows of the embedding matrix and other files of a tokenizer     `foundation.training.few_parameters.prompt_tuning`
prefix    keys and values of every attention                              `foundation.training.few_parameters.prefix_tuning`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from foundation.training.few_parameters.prefix_tuning import PrefixTuning, check_prefix, prefixed, with_prefix
from foundation.training.few_parameters.prompt_tuning import PromptTuning, check_prompt, prompted, with_prompt

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from foundation.stage.context import Context


class Settings(Protocol):
    """The settings of a stage that can train few parameters."""

    @property
    def prompt(self) -> PromptTuning | None:
        """Virtual tokens."""

    @property
    def prefix(self) -> PrefixTuning | None:
        """Keys and values."""

    @property
    def key(self) -> str:
        """Key path of the stage."""


class Few(NamedTuple):
    """What is trained."""

    source: Path
    """Folder with the tokenizer of the model and its other small files."""
    parameters: int | None
    """Number of trained parameters, the head included; None: all are trained."""


def config_with_few(config: PreTrainedConfig, settings: Settings) -> PreTrainedConfig:
    """Returns the Transformers config of a model after such a training; the same if all parameters are trained."""
    return with_prefix(with_prompt(config, settings.prompt), settings.prefix, f"{settings.key}.prefix")


def check_few(settings: Settings, config: PreTrainedConfig, context: Context) -> None:
    """Checks, before the first stage, that few parameters can be learned for a task and a model.

    Args:
        settings: The settings.
        config: Transformers config of the model before.
        context: Task, length of a row and processes.

    Raises:
        InputError: They cannot.
    """
    if settings.prompt is not None:
        check_prompt(settings.prompt, config, context, f"{settings.key}.prompt")
    if settings.prefix is not None:
        check_prefix(settings.prefix, config, context, f"{settings.key}.prefix")


@contextmanager
def training_few(model: nn.Module, settings: Settings, source: Path, context: Context) -> Iterator[Few]:
    """Within the block only what the settings say is trainable; afterwards it is part of the model.

    Args:
        model: A model of Transformers on its device; the same object afterwards.
        settings: The settings.
        source: Its checkpoint.
        context: Scratch folder and seed.

    Raises:
        InputError: The model cannot learn it.
    """
    if settings.prompt is not None:
        with prompted(model, settings.prompt, source, context.scratch, context.seed) as prompt:
            yield Few(prompt.source, prompt.trained)
    elif settings.prefix is not None:
        with prefixed(model, settings.prefix, context.seed, f"{settings.key}.prefix") as trained:
            yield Few(source, trained)
    else:
        yield Few(source, None)
