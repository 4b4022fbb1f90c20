"""Writes the preprocessing files of a checkpoint: its tokenizer, or the settings of its image processor or feature extractor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import read_json
from foundation.core.errors import InputError
from foundation.labels.tasks import TASKS, Task
from foundation.models.config import ModelConfig, label_list
from foundation.models.files import IMAGE_FILES, TEXT_FILES, check_tokenizer, copy_files, find
from foundation.models.heads.transcriber import write_vocabulary
from foundation.models.inputs.images import image_settings
from foundation.models.inputs.padding import configured_pad, padding_of, settle_padding
from foundation.models.inputs.sounds import settings_of, sound_steps
from foundation.models.inputs.tokenizer import TrainedTokenizer
from foundation.models.inputs.tokenizer_file import has_token_types, token_types_note, tokenizer_file, write_tokenizer
from foundation.models.library import model_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PADDED_LAST = "in Transformers, which pads this type on the left, short rows get other answers; train it here, or give another model"


def save_preprocessing(
    config: ModelConfig,
    source: Path | None,
    built: PreTrainedConfig,
    out: Path,
    tokenizer: str | TrainedTokenizer | None,
    log: Callable[[str], None],
) -> None:
    """Writes the preprocessing files of a checkpoint: the tokenizer, or the settings of the image processor or feature extractor.

    Args:
        config: The recipe's model section.
        source: Folder of the model; None for random weights.
        built: Transformers config of the checkpoint.
        out: Folder of the checkpoint.
        tokenizer: Hub id or folder of a tokenizer, or one that the recipe trained.
        log: Receives a line about everything that is not as in the source.

    Raises:
        InputError: A file is missing, damaged or does not fit the model.
    """
    if config.facts.modality == "audio":
        settings = settings_of(source, built, config.preprocessor)
        sound_steps(settings, built, "model.preprocessor" if source is None else f"model.path: {source / IMAGE_FILES[0]}")
        write_json(out / IMAGE_FILES[0], settings)
        if config.facts.transcribes:
            write_vocabulary(out, label_list(built))
        return
    if config.facts.modality == "image":
        if config.preprocessor is not None:
            write_json(out / IMAGE_FILES[0], config.preprocessor)
        elif source is None:
            write_json(out / IMAGE_FILES[0], image_settings(built))
        else:
            read_json(source / IMAGE_FILES[0], "model.path")
            copy_files(source, out, IMAGE_FILES)
    if not config.facts.reads_text:
        return
    if isinstance(tokenizer, TrainedTokenizer):
        tokenizer.write(out)
        return
    if getattr(built, "summary_type", None) == "last" and config.facts.modality == "text":
        log(f"  model: a {built.model_type} answers at the last place of a row, and rows are padded on the right: {PADDED_LAST}")
    folder = tokenizer_folder(source, tokenizer)
    _save_tokenizer(folder, out, config.task, built, log)


def settle_inputs(config: ModelConfig, source: Path | None, built: PreTrainedConfig, tokenizer: str | TrainedTokenizer | None) -> None:
    """Gives the config of a checkpoint, in place, the padding id of its tokenizer where it has none and the model reads padded texts.

    Args:
        config: The recipe's model section.
        source: Folder of the model; None for random weights.
        built: Transformers config of the checkpoint.
        tokenizer: Hub id or folder of a tokenizer, or one that the recipe trained.

    Raises:
        InputError: There is no padding token, or texts end with it.
    """
    row = config.facts
    if row.pads_texts and not isinstance(tokenizer, TrainedTokenizer) and configured_pad(built) is None:
        folder = tokenizer_folder(source, tokenizer)
        settle_padding(built, folder, tokenizer_file(folder).tokenizer())


def tokenizer_folder(source: Path | None, tokenizer: str | None) -> Path:
    """Returns the folder of the tokenizer of the recipe, or the folder of its model."""
    folder = find(tokenizer, "tokenizer", weights=False) if tokenizer is not None else cast(Path, source)
    check_tokenizer(folder, "model.path")
    return folder


def _save_tokenizer(folder: Path, out: Path, task: Task, built: PreTrainedConfig, log: Callable[[str], None]) -> None:
    """Writes the tokenizer files: unchanged, as far as tokenizer.json is there and says all (`foundation.models.inputs.tokenizer_file`)."""
    copy_files(folder, out, TEXT_FILES)
    row, texts = TASKS[task], getattr(built, "text_config", built)
    embeds = row.embeds_texts
    used = tokenizer_file(folder, embeds=embeds).tokenizer()
    changes: dict[str, Any] = {}
    if row.pads_texts:
        forward = inspect.signature(model_class(built, task).forward).parameters
        if "token_type_ids" in forward and not has_token_types(built) and getattr(built, "type_vocab_size", None) is None:
            changes["model_input_names"] = ["input_ids", "attention_mask"]
        changes.update(padding_of(built, folder, used))
        if "token_type_ids" in forward and (note := token_types_note(folder, built)) is not None:
            log(f"  tokenizer: {note}")
    for note in write_tokenizer(folder, out, changes, embeds=embeds):
        log(f"  tokenizer: {note}")
    highest = max(used.get_vocab(with_added_tokens=True).values())
    if highest >= texts.vocab_size:
        raise InputError(
            "model.path",
            f"the tokenizer's highest id is {highest}, but the model has {texts.vocab_size} embeddings",
            remedy="give its own tokenizer",
        )
