"""Checks of trainings before the first stage of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foundation.core.errors import InputError, Problem
from foundation.data.splits import Split
from foundation.machine.device import computing_device
from foundation.models.architecture.blocks import blocks_of
from foundation.models.architecture.context import check_context
from foundation.models.architecture.expert_shares import check_experts
from foundation.models.architecture.sequence import LAYERS_LEFT_OUT, check_left_out, check_sequence
from foundation.models.architecture.shapes import on_meta
from foundation.models.architecture.split import check_split
from foundation.models.architecture.stages import check_stages
from foundation.models.inputs.sounds import spectrogram_shape
from foundation.models.library import depths_of, with_class
from foundation.stage.context import Context
from foundation.training.few_parameters.lora import check_lora
from foundation.training.optimizers import check_optimizer
from foundation.training.recompute import check_recomputed
from foundation.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NAMES = {2: "texts of a pair", 3: "texts of a triplet"}
"""Name of a group of rows, for messages."""


def check_training(settings: TrainingSettings, config: PreTrainedConfig, context: Context, key: str) -> None:
    """Checks that a model can be trained with some settings, and as the section `parallel` of the recipe says.

    Args:
        settings: TrainingSettings of the training.
        config: Transformers config of the model.
        context: Task, data, processes, length of a row, and the section.
        key: Key path of the settings, for messages.

    Raises:
        InputError: The model cannot be trained like this.
    """
    check_lora(settings.lora, config, key)
    check_optimizer(settings.optimizer, context.team, key)
    if context.team.runs_together:
        blocks_of(on_meta(with_class(config, context.task)), f"parallel: {{{context.team.settings}}} given for {key}")
    check_split(config, context.task, context.max_length, context.team.tensor, key)
    if context.team.sequence:
        if settings.lora is not None:
            raise InputError(f"{key}.lora", "given with parallel.sequence: true", "adapters read all tokens", "give sequence: false")
        check_sequence(config, context.task, context.max_length, context.team.tensor, key)
    if context.team.context > 1:
        check_context(config, context.task, context.max_length, context.team.context, key)
    if context.team.strategy == "fsdp2" and context.team.data_size > 1 and computing_device().type == "cuda":
        # on CPUs all processes draw alike (`foundation.training.processes.row_draws`), and leave out the same blocks
        given = Problem(f"{key}: parallel.strategy", "fsdp2 given", f"this {config.model_type}")
        check_left_out(config, given, lambda name: f"give ddp, or {name}: 0 in config.json", LAYERS_LEFT_OUT)
    if context.team.experts > 1:
        check_experts(config, context.task, context.team.experts, key, adapters=settings.lora is not None)
    if context.team.pipeline > 1:
        check_pipeline(settings, config, context, key)
    check_recomputed(config, context.task, context.max_length, context.parallel.checkpointing, key)
    if context.data.train.together > 1:
        check_together(settings, context.data.train, key)


def check_pipeline(settings: TrainingSettings, config: PreTrainedConfig, context: Context, key: str) -> None:
    """Checks that a pipeline of processes can train a model with some settings.

    Args:
        settings: TrainingSettings of the training.
        config: Transformers config of the model.
        context: Task, data, processes, length of a row, and the section `parallel`.
        key: Key path of the settings, for messages.

    Raises:
        InputError: The model cannot be trained like this.
    """
    team, parallel, facts = context.team, context.parallel, context.facts
    given = Problem(f"{key}: parallel.pipeline", f"{team.pipeline} given")
    if facts.embeds or context.data.train.together > 1:
        raise InputError.of([given.because(f"{context.task} compares the rows of a batch, which micro-batches part", "give pipeline: 1")])
    if len(depths_of(config) or ()) > 1 or facts.encoder_decoder:
        remedy = "give pipeline: 1, and strategy: fsdp2 if it is large"
        raise InputError.of([given.because(f"this {config.model_type} has two stacks of blocks", remedy)])
    if facts.modality == "audio" and spectrogram_shape(config) is None:
        remedy = "give pipeline: 1, and strategy: fsdp2 if it is large"
        raise InputError.of([given.because("the states of waveforms are not as long as their rows", remedy)])
    if settings.lora is not None:
        raise InputError(
            f"{key}.lora", f"given with parallel.pipeline: {team.pipeline}", "adapters are not divided into stages", "give pipeline: 1"
        )
    share = -(-settings.batch_size // team.data_size)
    rows = min(share, settings.micro_batch_size or share)
    parts = parallel.parts(rows)
    if parts > rows:
        name = "batch_size" if rows == share else "micro_batch_size"
        least = parts * (team.data_size if rows == share else 1)
        raise InputError(
            f"{key}.{name}", f"{getattr(settings, name)} given for {parts} micro-batches of a pipeline", remedy=f"give at least {least}"
        )
    check_stages(config, context.task, context.max_length, team.pipeline * parallel.stages_each, key)


def check_together(settings: TrainingSettings, split: Split, key: str) -> None:
    """Checks that no batch takes rows without those that they belong to.

    Args:
        settings: TrainingSettings of a training on runs of rows that belong together (`foundation.core.runs`).
        split: The training rows.
        key: Key path of the settings, for messages.

    Raises:
        InputError: A batch would.
    """
    run, most = split.labels.RUN, split.together
    name = run or _NAMES.get(most, f"texts of a row with {most - 2} negatives")
    for setting, size in (("batch_size", settings.batch_size), ("micro_batch_size", settings.micro_batch_size)):
        if size is not None and most == 2 and size % 2 and not run:
            raise InputError(f"{key}.{setting}", f"{size} given", f"the two {name} are rows of one batch", "give an even number")
        if size is not None and size < most:
            raise InputError(f"{key}.{setting}", f"{size} given", f"the {most} {name} are rows of one batch", f"give at least {most}")
