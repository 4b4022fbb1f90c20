"""What a training refuses, said before the first stage of a run."""

from __future__ import annotations

from typing import Any, Protocol

from compress.core.errors import InputError
from compress.models.architecture.blocks import blocks_of
from compress.models.architecture.shapes import on_meta
from compress.models.architecture.split import check_split
from compress.models.library import with_class
from compress.stage.context import Context
from compress.training.lora import Lora, check_lora
from compress.training.optimizers import Optimizer, check_optimizer
from compress.training.recompute import check_recomputed


class Settings(Protocol):
    """The settings that all trainings share."""

    @property
    def lora(self) -> Lora | None:
        """Adapters that are trained instead of the weights."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""

    @property
    def batch_size(self) -> int:
        """Rows per step."""

    @property
    def micro_batch_size(self) -> int | None:
        """Rows in memory at once in each process."""


def check_training(settings: Settings, config: Any, context: Context, key: str) -> None:
    """Checks that a model can be trained with some settings, and as the section `parallel` of the recipe says.

    Args:
        settings: Settings of the training.
        config: Transformers config of the model.
        context: Task, data, processes, length of a row, and the section.
        key: Key path of the settings, for messages.

    Raises:
        InputError: It cannot.
    """
    check_lora(settings.lora, config, key)
    check_optimizer(settings.optimizer, context.team, key)
    if context.team.shards:
        blocks_of(on_meta(with_class(config, context.task)), f"parallel: {{{context.team.given}}} given for {key}")
    if settings.lora is not None and context.team.tensor > 1:
        raise InputError(f"{key}.lora: given with parallel.tensor: {context.team.tensor}; adapters are not shared: give tensor: 1")
    check_split(config, context.task, context.max_length, context.team.tensor, key)
    check_recomputed(config, context.task, context.max_length, context.parallel.checkpointing, key)
    if context.data.train.together > 1:
        check_pairs(settings, context.team.data_size, key)


def check_pairs(settings: Settings, processes: int, key: str) -> None:
    """Checks that no batch takes texts without their partners.

    Args:
        settings: Settings of a training on pairs, whose two texts are rows of one batch.
        processes: Number of training processes, those that share each layer counted once.
        key: Key path of the settings, for messages.

    Raises:
        InputError: A batch would.
    """
    for name, size in (("batch_size", settings.batch_size), ("micro_batch_size", settings.micro_batch_size)):
        if size is not None and size % 2:
            raise InputError(f"{key}.{name}: {size} given; the two texts of a pair are rows of one batch: give an even number")
    if processes > 1:
        raise InputError(f"{key}: {processes} processes would share the texts of a pair; run one process")
