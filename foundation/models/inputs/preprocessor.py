"""Builds the preprocessor of a checkpoint from the files in its folder."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from foundation.artifacts.safetensors import MOST_JSON, parse_json
from foundation.core.errors import InputError, Problem
from foundation.core.files import read_plain
from foundation.core.shown import reason, shown
from foundation.core.stamps import Stamps
from foundation.core.target import Target
from foundation.labels.tasks import TASKS, Task
from foundation.models.adapter_files import adapter_names
from foundation.models.config import most_tokens, read_config
from foundation.models.heads.embedding import EMBEDDING_KEY, EmbeddingSettings
from foundation.models.heads.embedding import width_of as vector_width
from foundation.models.heads.reader import THRESHOLD_KEY
from foundation.models.heads.towers import CAUSAL_TEXT, check_towers, width_of
from foundation.models.heads.transcriber import strides_of
from foundation.models.inputs.padding import named_pad, pad_token_id
from foundation.models.inputs.sounds import INPUT, SETTINGS, sound_steps
from foundation.models.inputs.tokenizer_file import class_inputs, has_token_types, settings_of, tokenizer_file
from foundation.models.library import REFUSED, model_class, task_classes
from foundation.models.own_shape import stock_type
from foundation.models.raw_config import check_labels
from foundation.standalone.image import BadImage
from foundation.standalone.preprocess import ADAPTER_IDS, TWO_TOWERS, BadRow, Preprocessor
from foundation.standalone.sound import BadSound

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UNLIMITED = 10**30
"""Tokens of a model without a limit; Transformers writes this number."""
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
ENCODER_DECODER_INPUTS = ("input_ids", "attention_mask", "decoder_input_ids")


@lru_cache(maxsize=16)
def preprocessor(checkpoint: Path, task: Task, max_length: int, target: Target, windows: tuple[int, str], state: Stamps) -> Preprocessor:
    """Returns the result of `foundation.models.folder.Checkpoint.preprocessor`, which all callers share until `state` changes.

    Args:
        checkpoint: A Transformers folder with config.json, and tokenizer.json or preprocessor_config.json.
        task: The task of the model.
        max_length: Maximum tokens, or samples of a waveform, per row.
        target: Provides the sequence lengths to pad to.
        windows: `stride` and `aggregate`.
        state: The files of the folder (`foundation.models.files.state_of`).
    """
    facts = TASKS[task]
    del state  # part of the cache's key
    (stride, aggregate), config = windows, stock_type(_read_json(checkpoint / "config.json"))
    try:
        if facts.two_towers:
            return _two_towers(checkpoint, task, max_length, target)
        if facts.modality == "image":
            inner = config.get("vision_config")
            own = inner if inner else config
            if not isinstance(own, dict):
                raise InputError(f"{checkpoint / 'config.json'}", f"vision_config: {shown(own)} given", "a map is allowed")
            image = _image_steps(checkpoint, _whole(own, "num_channels", 3, checkpoint / "config.json"))
            return Preprocessor("image", ("pixel_values",), _names(checkpoint, config, task), task, image=image)
        if facts.modality == "audio":
            return _sound_preprocessor(checkpoint, config, task, max_length, target)
        made = _text_preprocessor(checkpoint, config, task, max_length, target)
        if aggregate:
            return replace(made, stride=stride, aggregate=aggregate)
        return replace(made, stride=stride, null_threshold=_threshold(checkpoint, config)) if made.finds_spans else made
    except (BadRow, BadImage, BadSound) as error:
        raise InputError(f"{checkpoint}", f"{error}") from error


def _two_towers(checkpoint: Path, task: Task, max_length: int, target: Target) -> Preprocessor:
    """Returns the preprocessor of images and texts; a text tower that reads padding gets every text in one length."""
    settings = read_config(checkpoint, "checkpoint")
    check_towers(settings, "checkpoint", max_length)
    made = _text_preprocessor(checkpoint, settings.text_config.to_dict(), task, max_length, target)
    return replace(
        made,
        modality=TWO_TOWERS,
        input_names=("pixel_values", "input_ids"),
        buckets=made.buckets if CAUSAL_TEXT[settings.model_type] else (max_length,),
        dimensions=width_of(settings),
        image=_image_steps(checkpoint, settings.vision_config.num_channels),
    )


def _sound_preprocessor(checkpoint: Path, config: Mapping[str, object], task: Task, max_length: int, target: Target) -> Preprocessor:
    facts = TASKS[task]
    own, response = read_config(checkpoint, "checkpoint"), facts.answer.RESPONSE
    sound = sound_steps(_read_json(checkpoint / SETTINGS), own, str(checkpoint / SETTINGS))
    masked, labels = sound.pop("return_attention_mask"), _names(checkpoint, config, task)
    if sound["kind"] == "spectrogram":
        return Preprocessor("audio", (INPUT,), labels, task, response=response, sound=sound)
    if facts.transcribes:
        sound["strides"] = strides_of(own)
    buckets = tuple(sorted({length for length in target.lengths if length < max_length} | {max_length}))
    if buckets[0] < sound["least"]:
        least = f"this {config.get('model_type')} reads {sound['least']} samples or more ({sound['sampling_rate']} a second)"
        raise InputError("target.sequence_lengths", f"{buckets[0]} given", least)
    names = (INPUT, "attention_mask") if masked else (INPUT,)
    return Preprocessor("audio", names, labels, task, max_length, buckets, response=response, sound=sound)


def _text_preprocessor(checkpoint: Path, config: dict[str, Any], task: Task, max_length: int, target: Target) -> Preprocessor:
    facts = TASKS[task]
    settings = settings_of(checkpoint)
    tokenizer = tokenizer_file(checkpoint, embeds=facts.embeds_texts).tokenizer()
    generates = facts.generates  # its rows are ids: nothing is truncated
    reads_blocks = generates and not facts.encoder_decoder  # which have no padding that is read
    named = config.get(EMBEDDING_KEY) if facts.embeds else None
    embedding: EmbeddingSettings = named if named else {}
    own = read_config(checkpoint, "checkpoint")
    own = own.text_config if facts.two_towers else own
    problems = [*_unreadable(checkpoint, settings, own, max_length, generates)]
    pad = 0
    if not reads_blocks:
        try:
            pad = _pad_token_id(own, checkpoint, tokenizer, task)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError.of(problems)
    adapters = adapter_names(checkpoint)
    return Preprocessor(
        modality="text",
        input_names=_input_names(checkpoint, own, settings, task) + ((ADAPTER_IDS,) if adapters else ()),
        labels=_names(checkpoint, config, task),
        task=task,
        max_length=max_length,
        buckets=tuple(sorted({length for length in target.lengths if length < max_length} | {max_length})),
        pad_token_id=pad,
        pad_token_type_id=_whole(settings, "pad_token_type_id", 0, checkpoint / "tokenizer_config.json"),
        decoder_start_token_id=_decoder_start_token_id(checkpoint, config) if facts.encoder_decoder else None,
        prompt=embedding.get("prompt", ""),
        dimensions=vector_width(own) if embedding else 0,
        response=facts.answer.RESPONSE,
        adapters=adapters,
        tokenizer=tokenizer,
    )


def _unreadable(
    checkpoint: Path, settings: Mapping[str, object], own: PreTrainedConfig, max_length: int, generates: bool
) -> Iterator[Problem]:
    """Yields what of a tokenizer's settings, or of `data.max_length`, does not fit the model."""
    where = checkpoint / "tokenizer_config.json"
    sides = [settings.get("padding_side", "right"), settings.get("truncation_side", "right")]
    if sides != ["right", "right"] and not generates:
        yield Problem(f"{where}", f"padding or truncation on the side {shown(sides)}", "only right is allowed")
    read = most_tokens(own)
    limit = min(UNLIMITED if read is None else read, _whole(settings, "model_max_length", UNLIMITED, where))
    if max_length > limit:
        yield Problem("data.max_length", f"{max_length} given", f"{checkpoint.name} reads at most {limit} tokens")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_plain(path, MOST_JSON), constants=True)
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}", f"cannot be read ({reason(error)})", "a Transformers checkpoint folder needs this file") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}", f"a JSON {type(value).__name__}", "a JSON object is allowed")
    return value


def _names(checkpoint: Path, config: Mapping[str, object], task: Task) -> tuple[str, ...]:
    known = TASKS[task].answer.LABELS
    if known is not None:
        return known
    where = checkpoint / "config.json"
    named = config.get("id2label")
    if not named:
        named = {str(i): f"LABEL_{i}" for i in range(_whole(config, "num_labels", 2, where))}
    if not isinstance(named, dict) or not all(str(key).isascii() and str(key).isdigit() and len(str(key)) < 10 for key in named):
        raise InputError(f"{where}", f"id2label: {shown(named)} given", "a map from ids to names is allowed")
    return check_labels({int(key): name for key, name in named.items()}, str(where))


def _whole(settings: Mapping[str, object], name: str, default: int, where: Path) -> int:
    """Returns a setting that is a count; the default if it is absent, null or zero."""
    value = settings.get(name)
    if value is None or (type(value) is int and value == 0):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10 * UNLIMITED or value != int(value):
        raise InputError(f"{where}", f"{name}: {shown(value)} given", "a whole number is allowed")
    return int(value)


def _pad_token_id(own: PreTrainedConfig, checkpoint: Path, tokenizer: Tokenizer, task: Task) -> int:
    """Returns the padding id. For a tower that reads padding (SigLIP) it is the padding token of the training, named by the tokenizer."""
    named = named_pad(checkpoint, tokenizer) if TASKS[task].two_towers else None
    return pad_token_id(own, checkpoint, tokenizer) if named is None else named


def _decoder_start_token_id(checkpoint: Path, config: Mapping[str, object]) -> int:
    found = config.get("decoder_start_token_id")
    if found is None and (checkpoint / "generation_config.json").is_file():
        found = _read_json(checkpoint / "generation_config.json").get("decoder_start_token_id")
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise InputError(f"{checkpoint / 'config.json'}", f"decoder_start_token_id: {shown(found)} given", "the id of a token is needed")
    return found


def _threshold(checkpoint: Path, config: Mapping[str, object]) -> float | None:
    value = config.get(THRESHOLD_KEY)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{checkpoint / 'config.json'}", f"{THRESHOLD_KEY}: {shown(value)} given", "a number is allowed")
    return float(value)


def _input_names(checkpoint: Path, own: PreTrainedConfig, settings: Mapping[str, object], task: Task) -> tuple[str, ...]:
    """Returns the inputs that the model's forward accepts and uses, and that its tokenizer makes in Transformers.

    Some models accept token_type_ids but have a single type (RoBERTa), or none, and then add the embedding of the token of that id (GPT-2,
    CTRL, XLM); these do not get that input.

    Args:
        checkpoint: The folder, for messages.
        own: Transformers config of the model.
        settings: tokenizer_config.json.
        task: The task of the model.
    """
    facts = TASKS[task]
    if facts.two_towers:
        return TEXT_INPUTS[:1]
    if facts.encoder_decoder:
        return ENCODER_DECODER_INPUTS
    if facts.generates:
        return TEXT_INPUTS[:1]
    if not task_classes(own, task):
        raise InputError(f"{checkpoint}", f"model_type {own.model_type!r} has no model for {task} in Transformers")
    forward = inspect.signature(model_class(own, task).forward).parameters
    made = class_inputs(settings, own.model_type)
    types = has_token_types(own) and (made is None or "token_type_ids" in made)
    return tuple(name for name in TEXT_INPUTS if name in forward and (name != "token_type_ids" or types))


def _image_steps(checkpoint: Path, num_channels: int) -> dict[str, object]:
    """Returns preprocessor_config.json with all defaults of its processor class filled in."""
    from transformers import AutoImageProcessor
    from transformers.image_processing_backends import PilBackend

    given = _read_json(checkpoint / "preprocessor_config.json")
    try:
        processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil", trust_remote_code=False, local_files_only=True)
    except (OSError, *REFUSED) as error:
        kind = shown(given.get("image_processor_type"))
        raise InputError(f"{checkpoint / 'preprocessor_config.json'}", f"processor {kind} cannot be loaded ({reason(error)})") from error
    own = [step for step in ("_preprocess", "resize", "center_crop", "rescale", "normalize") if not _is_stock(processor, PilBackend, step)]
    if own or getattr(processor, "do_pad", None):
        kind = type(processor).__name__.removesuffix("Pil")
        raise InputError(
            f"{checkpoint}",
            f"{kind} has custom steps ({', '.join(own) or 'padding'})",
            "only resize, crop, rescale and normalize are allowed",
        )
    keys = ("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize", "image_mean")
    resolved = processor.to_dict()
    steps = {key: resolved.get(key) for key in (*keys, "image_std", "do_convert_rgb")}
    steps |= {
        key: {name: edge for name, edge in dict(steps[key]).items() if edge is not None} for key in ("size", "crop_size") if steps[key]
    }
    plain: dict[str, object] = json.loads(json.dumps({**steps, "num_channels": num_channels}))  # plain JSON types, no tuples or enums
    return plain


def _is_stock(processor: object, stock: type, step: str) -> bool:
    return getattr(type(processor), step, None) is getattr(stock, step)
