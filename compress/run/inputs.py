"""Checks before anything is trained what rows a model can be given: builds its tokenizer and its preprocessor, and prepares one row.

No weights are read. `compress plan` shows what is noted, and an import logs it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compress.run.split_sizes import lengths
from foundation.artifacts.artifact import digest
from foundation.core.errors import InputError, Problem
from foundation.data.splits import content_key
from foundation.models.config import ModelConfig, label_names, set_labels
from foundation.models.files import find, state_of
from foundation.models.generation import noted
from foundation.models.inputs.padding import configured_pad
from foundation.models.inputs.saving import save_preprocessing, settle_inputs
from foundation.models.inputs.sounds import settle
from foundation.models.inputs.tokenizer import TrainedTokenizer
from foundation.models.library import quiet
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor, Row

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_inputs(
    config: ModelConfig, checked: PreTrainedConfig, tokenizer: str | TrainedTokenizer | None, context: Context
) -> tuple[str, ...]:
    """Builds the preprocessor of a model as its import would, and prepares a row of the data.

    Args:
        config: The recipe's model section.
        checked: Transformers config of the model, as `foundation.models.importing.check_model` returns it.
        tokenizer: Hub id or folder of a tokenizer, or one that the recipe trained.
        context: The context of the first step.

    Returns:
        Lines about what is not as in the folder of the model, one each.

    Raises:
        InputError: Rows cannot be prepared for the model.
    """
    source = None if config.path is None else find(config.path, "model.path", weights=False)
    notes, _ = _once(config, source, checked, tokenizer, context)
    return (*notes, *(noted(source) if source is not None and config.facts.generates else ()))


def num_truncated(
    config: ModelConfig, checked: PreTrainedConfig, tokenizer: str | TrainedTokenizer | None, context: Context, rows: Sequence[Row]
) -> int:
    """Returns the number of texts longer than data.max_length; 0 if texts are split into windows, or rows are not texts.

    Args:
        config: The recipe's model section.
        checked: Transformers config of the model.
        tokenizer: Hub id or folder of a tokenizer, or one that the recipe trained.
        context: The context of the first step.
        rows: Texts or pairs of texts.
    """
    if not _cuts_texts(config, context):
        return 0
    source = None if config.path is None else find(config.path, "model.path", weights=False)
    _, prepared = _once(config, source, checked, tokenizer, context)
    return sum(length > prepared.max_length for length in lengths(prepared, rows))


def _cuts_texts(config: ModelConfig, context: Context) -> bool:
    """Whether rows are texts of one model that are cut at data.max_length: no blocks, no windows, no images next to them."""
    task = config.facts
    return task.reads_text and not (task.generates or task.finds_spans or task.two_towers or context.stride)


def mean_share(config: ModelConfig, checked: PreTrainedConfig, tokenizer: str | TrainedTokenizer | None, context: Context) -> float:
    """Returns the mean length that evaluation rows are padded to, as a share of data.max_length; 1 where rows have one length.

    Args:
        config: The recipe's model section.
        checked: Transformers config of the model.
        tokenizer: Hub id or folder of a tokenizer, or one that the recipe trained.
        context: The context of the first step.
    """
    rows = context.data.evaluation.rows
    if not len(rows) or not _cuts_texts(config, context):
        return 1.0
    source = None if config.path is None else find(config.path, "model.path", weights=False)
    _, prepared = _once(config, source, checked, tokenizer, context)
    some = [rows[number * len(rows) // SAMPLED] for number in range(SAMPLED)] if len(rows) > SAMPLED else list(rows)
    padded = [min(bucket for bucket in prepared.buckets if bucket >= tokens.shape[1]) for tokens in prepared.tokenized(some)]
    return sum(padded) / len(padded) / context.max_length


SAMPLED = 256
"""Rows whose lengths stand for all."""
_known: dict[str, tuple[tuple[str, ...], Preprocessor]] = {}
"""Cached inputs, keyed by everything they depend on: a search checks the same model for every candidate."""


def _once(
    config: ModelConfig, source: Path | None, checked: PreTrainedConfig, tokenizer: str | TrainedTokenizer | None, context: Context
) -> tuple[tuple[str, ...], Preprocessor]:
    key = _key(config, source, checked, tokenizer, context)
    if key not in _known:
        _known[key] = _checked(config, source, checked, tokenizer, context)
    return _known[key]


def _key(
    config: ModelConfig, source: Path | None, checked: PreTrainedConfig, tokenizer: str | TrainedTokenizer | None, context: Context
) -> str:
    named = tokenizer.digest if isinstance(tokenizer, TrainedTokenizer) else tokenizer
    folders = [source, None if named is None or named is not tokenizer else find(named, "tokenizer", weights=False)]
    states = [None if folder is None else (str(folder), state_of(folder)) for folder in folders]
    rows = [content_key(row).hex() for row in context.data.evaluation.rows[:1]]
    how = (context.max_length, context.target.model_dump(mode="json"), context.stride, context.aggregate, list(context.data.labels))
    return digest([config.model_dump(mode="json"), checked.to_json_string(use_diff=False), named, states, rows, *how])


def _checked(
    config: ModelConfig, source: Path | None, checked: PreTrainedConfig, tokenizer: str | TrainedTokenizer | None, context: Context
) -> tuple[tuple[str, ...], Preprocessor]:
    """Returns the notes of `check_inputs`, and the preprocessor."""
    built, notes, problems = copy.deepcopy(checked), list[str](), dict[Problem, None]()
    set_labels(settle(built), config.task, label_names(config) or context.data.labels)
    with tempfile.TemporaryDirectory(prefix="compress-inputs-") as scratch:
        folder, named = Path(scratch), source or Path("model.config")

        def write() -> None:
            with quiet():
                built.save_pretrained(folder)
            save_preprocessing(config, source, built, folder, tokenizer, lambda note: notes.append(note.strip()))

        def prepare() -> None:
            made.append(context.preprocessor(folder))

        made: list[Preprocessor] = []
        steps: list[Callable[[], None]] = [partial(settle_inputs, config, source, built, tokenizer), write, prepare]
        for step in steps:
            try:
                step()
            except InputError as error:  # the scratch folder is gone when the user reads this
                named_by_user = (problem.renamed(str(folder), str(named)).renamed(folder.name, named.name) for problem in error.problems)
                problems.update(dict.fromkeys(named_by_user))
                if step is write:
                    break
    if problems:
        raise InputError.of(problems)
    (prepared,) = made
    for row in context.data.evaluation.rows[:1] if config.facts.reads_text else ():
        try:
            prepared.encode([row], 0)
        except ValueError as error:
            raise InputError("data", f"the first evaluation row: {error}") from error
    return tuple(notes), prepared


def check_teacher(config: PreTrainedConfig, folder: Path, context: Context) -> None:
    """Builds the preprocessor of a teacher outside the run, which is read in place.

    Args:
        config: Its Transformers config.
        folder: Its folder.
        context: The context of the first step.

    Raises:
        InputError: Rows cannot be prepared for it.
    """
    problems: list[Problem] = []
    try:
        context.preprocessor(folder)
    except InputError as error:
        problems += error.problems
    row = context.facts
    if row.pads_texts and configured_pad(config) is None:
        problems.append(
            Problem(
                f"{folder / 'config.json'}", "no pad_token_id, which batches of texts need", remedy="set it to the id of the padding token"
            )
        )
    if problems:
        raise InputError.of(problems)
