"""The data of a run: read, checked, labelled and divided; and the preprocessor that fits a checkpoint.

`load_data` is the way from the data section of a recipe to a `Data`: find and read the files (`sources`), turn their labels into class
ids or values (`labels`), and decide which rows are for training, choosing and final figures (`splits`). Text to generate is cut into
blocks of tokens instead (`text_blocks`). `preprocessor` reads from a checkpoint folder how its rows have to be prepared.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from compress import labels
from compress.core.errors import InputError
from compress.core.target import Target
from compress.core.tasks import TASKS, Task
from compress.model_config import NO_TOKENIZER, read_config
from compress.model_files import stock_type
from compress.sources import Columns, DataConfig, FileConfig, FilesConfig, Source, read_sources
from compress.splits import Data, Split, divide, hold_out
from compress.standalone.preprocess import BadRow, Preprocessor, Row
from compress.text_blocks import load_blocks
from compress.tokenizer import TrainTokenizer, train_bpe

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
HOLD_OUT_SHARE = 0.2
# Their position ids start behind the padding id, which takes that many places from the position table.
OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "roberta-prelayernorm", "mpnet"})

__all__ = ["Columns", "Data", "DataConfig", "FileConfig", "FilesConfig", "Row", "Split", "load_data", "preprocessor"]


def load_data(
    config: DataConfig,
    task: Task,
    label_names: tuple[str, ...] | None,
    log: Callable[[str], None],
    tokenizer: str | TrainTokenizer | None = None,
) -> Data:
    """Reads the data of a recipe.

    Args:
        config: The data section.
        task: What the model predicts.
        label_names: Name of each class by id where the model fixes them; None takes them from the train split. Unused for regression.
        log: Where to tell what was found and decided.
        tokenizer: Hub id or folder of the tokenizer that text-generation cuts its text with, or how to train one on the train split.

    Returns:
        All splits with class ids (int64), values (float32) or the ids of the next tokens (int32), and the tokenizer where one was trained.

    Raises:
        InputError: Every problem of the files, or of their labels, one line each.
    """
    if TASKS[task].answer == "tokens":
        if tokenizer is None:
            raise InputError(NO_TOKENIZER)
        return load_blocks(config, tokenizer, log)
    data = _load_labelled(config, task, label_names, log)
    if not isinstance(tokenizer, TrainTokenizer):
        return data
    texts = [text for row in data.train.rows for text in (row if isinstance(row, tuple) else (row,)) if isinstance(text, str)]
    return replace(data, tokenizer=train_bpe(texts, tokenizer.vocab_size, pads=True))


def _load_labelled(config: DataConfig, task: Task, label_names: tuple[str, ...] | None, log: Callable[[str], None]) -> Data:
    sources = read_sources(config, task, log)
    log_unlabelled = [name for name, found in sources.items() if labels.is_unlabelled(found)]
    for name in log_unlabelled:
        if name == "train":
            raise InputError(f"{sources[name][0].name}: every label is -1, so train is unlabelled; labelled train rows are needed")
        log(f"data: every label of {name} is -1; the split counts as unlabelled and is not used")
        del sources[name]
    names, origin = labels.SCORE, "data"
    if task != "text-regression":
        names, origin = (label_names, "the model") if label_names else (labels.class_names(sources["train"]), "the train split")
    splits = _label(sources, None if task == "text-regression" else names, origin)
    if list(splits) == ["train"] and not log_unlabelled and Path(config.path).expanduser().is_file():
        splits["train"], splits["test"] = hold_out(splits["train"], HOLD_OUT_SHARE)
        log(f"data: {config.path} is one file; {len(splits['test'])} of its rows, chosen by hash of their content, are the test split")
    return divide(splits["train"], splits.get("test"), splits.get("validation"), names, f"data.path {config.path}", log)


def _label(sources: dict[str, list[Source]], names: tuple[str, ...] | None, origin: str) -> dict[str, Split]:
    splits: dict[str, Split] = {}
    problems: list[str] = []
    for split, found in sources.items():
        try:
            targets: np.ndarray = labels.values(found) if names is None else labels.class_ids(found, names, origin)
            splits[split] = Split([row for source in found for row in source.rows], targets)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return splits


def preprocessor(checkpoint: Path, task: Task, max_length: int, target: Target) -> Preprocessor:
    """Reads from a checkpoint folder how its rows have to be prepared.

    Args:
        checkpoint: A Transformers folder: config.json and tokenizer.json, or preprocessor_config.json.
        task: What the model predicts.
        max_length: Tokens kept of a row; unused for images.
        target: Gives the lengths to pad to.

    Raises:
        InputError: A file is missing or damaged, `max_length` is beyond what the model takes, or the model needs steps that the
            preprocessor does not have.
    """
    config = stock_type(_read_json(checkpoint / "config.json"))
    try:
        if task == "image-classification":
            image = _image_steps(checkpoint, int(config.get("num_channels", 3)))
            return Preprocessor("image", ("pixel_values",), _names(config, task), task, image=image)
        return _text_preprocessor(checkpoint, config, task, max_length, target)
    except BadRow as error:
        raise InputError(f"{checkpoint}: {error}") from error


def _text_preprocessor(checkpoint: Path, config: dict[str, Any], task: Task, max_length: int, target: Target) -> Preprocessor:
    settings, file = _read_json(checkpoint / "tokenizer_config.json"), checkpoint / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"{checkpoint}: no tokenizer.json; convert it: AutoTokenizer.from_pretrained({str(checkpoint)!r}).save_pretrained(...)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the binding raises bare Exception
        raise InputError(f"{file}: not a tokenizer ({' '.join(str(error).split())[:160]}); save it again with save_pretrained") from error
    generates = TASKS[task].answer == "tokens"  # its rows are blocks of ids: nothing is truncated, and what pads the last one is never read
    sides = {settings.get("padding_side", "right"), settings.get("truncation_side", "right")}
    if sides != {"right"} and not generates:
        raise InputError(f"{checkpoint / 'tokenizer_config.json'}: padding or truncation on the left; right is allowed")
    limit = min(_positions(config), int(settings.get("model_max_length") or 1e30))
    if max_length > limit:
        raise InputError(f"data.max_length: {max_length} given; {checkpoint.name} takes at most {limit} tokens")
    return Preprocessor(
        modality="text",
        input_names=TEXT_INPUTS[:1] if generates else _input_names(checkpoint, config),
        labels=_names(config, task),
        task=task,
        max_length=max_length,
        buckets=tuple(sorted({length for length in target.sequence_lengths if length < max_length} | {max_length})),
        pad_token_id=0 if generates else _pad_token_id(checkpoint, tokenizer, settings, config),
        pad_token_type_id=int(settings.get("pad_token_type_id") or 0),
        tokenizer=tokenizer,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error}); a checkpoint folder of Transformers has it") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: a JSON {type(value).__name__}; a map is allowed")
    return value


def _names(config: dict[str, Any], task: Task) -> tuple[str, ...]:
    if TASKS[task].answer != "class":
        return labels.SCORE if TASKS[task].answer == "value" else ()
    named = config.get("id2label") or {str(i): f"LABEL_{i}" for i in range(int(config.get("num_labels", 2)))}
    return tuple(str(named[key]) for key in sorted(named, key=int))


def _positions(config: dict[str, Any]) -> int:
    positions = int(config.get("max_position_embeddings") or config.get("n_positions") or 10**30)  # the second is GPT-2's name for it
    return positions - int(config.get("pad_token_id") or 0) - 1 if config.get("model_type") in OFFSET_POSITIONS else positions


def _pad_token_id(checkpoint: Path, tokenizer: Tokenizer, settings: dict[str, Any], config: dict[str, Any]) -> int:
    token = settings.get("pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    found = tokenizer.token_to_id(token) if isinstance(token, str) else None
    if found is None:
        found = config.get("pad_token_id")
    if not isinstance(found, int):
        raise InputError(f"{checkpoint}: no padding token; set pad_token in tokenizer_config.json to a token of the vocabulary")
    return found


def _input_names(checkpoint: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the arrays that the model's forward takes and makes use of.

    Some families (RoBERTa) take token_type_ids for the sake of the interface but have a single type: nothing to say there.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    settings = read_config(checkpoint, "checkpoint")
    if type(settings) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise InputError(f"{checkpoint}: model_type {config.get('model_type')!r} has no sequence classification model in Transformers")
    forward = inspect.signature(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(settings)].forward).parameters
    types = getattr(settings, "type_vocab_size", 2)
    return tuple(name for name in TEXT_INPUTS if name in forward and (name != "token_type_ids" or types > 1))


def _image_steps(checkpoint: Path, num_channels: int) -> dict[str, Any]:
    """Returns preprocessor_config.json with every default of its processor class written out."""
    from transformers import AutoImageProcessor
    from transformers.image_processing_backends import PilBackend

    given = _read_json(checkpoint / "preprocessor_config.json")
    try:
        processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    except (OSError, ValueError, ImportError, TypeError, KeyError) as error:
        kind = given.get("image_processor_type")
        raise InputError(f"{checkpoint / 'preprocessor_config.json'}: processor {kind!r} cannot be made ({str(error)[:160]})") from error
    own = [step for step in ("_preprocess", "resize", "center_crop", "rescale", "normalize") if not _is_stock(processor, PilBackend, step)]
    if own or getattr(processor, "do_pad", None):
        kind = type(processor).__name__.removesuffix("Pil")
        raise InputError(
            f"{checkpoint}: {kind} has steps of its own ({', '.join(own) or 'padding'}); resize, crop, rescale and normalize are allowed"
        )
    keys = ("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize", "image_mean")
    resolved = processor.to_dict()
    steps = {key: resolved.get(key) for key in (*keys, "image_std", "do_convert_rgb")}
    steps |= {
        key: {name: edge for name, edge in dict(steps[key]).items() if edge is not None} for key in ("size", "crop_size") if steps[key]
    }
    plain: dict[str, Any] = json.loads(json.dumps({**steps, "num_channels": num_channels}))  # no tuples and enums: as it is read back
    return plain


def _is_stock(processor: Any, stock: type, step: str) -> bool:
    return getattr(type(processor), step, None) is getattr(stock, step)
