"""Imports the recipe's model as a clean checkpoint (`foundation.models.checkpoint`).

All checks that need no weights come first; then the weights are loaded, or initialized randomly, and saved. Not supported: models that need
their own Python code.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foundation.artifacts.artifact import digest, file_digest
from foundation.artifacts.safetensors import FLOATS, check_finite, first_and_last_rows, headers, read_json, weight_files
from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.labels.tasks import TASKS, Task, tasks_with
from foundation.machine.environment import hardware
from foundation.models.adapters import brought, merged, model_folder
from foundation.models.architecture.shapes import auto_class, mark
from foundation.models.causal import check_causal, link_model
from foundation.models.checkpoint import load_weights
from foundation.models.config import (
    ModelConfig,
    add_embedding,
    build_config,
    check_length,
    check_task,
    label_list,
    label_names,
    own_names,
    set_labels,
)
from foundation.models.files import SMALL_FILES, WEIGHT_FILES, find, is_local
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.models.generation import noted
from foundation.models.heads.embedding import dense_files, load_head, pooling_file, write_files
from foundation.models.heads.towers import check_towers, with_first_scale
from foundation.models.inputs.padding_effect import SEEN, padding_effect
from foundation.models.inputs.saving import save_preprocessing, settle_inputs
from foundation.models.inputs.sounds import settle
from foundation.models.inputs.tokenizer import TrainedTokenizer
from foundation.models.library import REFUSED, as_with_head, one_line, preview, quiet, with_class
from foundation.models.meta import on_meta_device
from foundation.models.raw_config import check_raw
from foundation.models.size import count
from foundation.models.tied import note_apart, shared_as, shared_names

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FLOAT_BYTES = 4
WRAPPER = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Prefixes that torch wrappers add to the names of weights."""
NEW_HEAD = 100_000_000
"""Weights that a new head and pooler may have on top of the stored ones, which a config may also use twice."""


@dataclass(frozen=True)
class Checked:
    """Facts about a model before its weights are read."""

    config: PreTrainedConfig
    """The Transformers config."""
    labels: tuple[str, ...] | None
    """Class names; None if the data determines them."""
    weight_bytes: int
    """Size of the weight files; 0 for random weights and for a Hub id that has not been downloaded yet."""


def check_model(
    config: ModelConfig, num_labels: int | None = None, max_length: int | None = None, tokenizer: str | TrainedTokenizer | None = None
) -> Checked:
    """Checks a model as far as possible without reading its weights.

    Args:
        config: The recipe's model section.
        num_labels: Number of labels of the data, if known.
        max_length: Maximum number of tokens, for text.
        tokenizer: The recipe's tokenizer.

    Raises:
        InputError: The model cannot be used; the message says why and what to do.
    """
    if config.path is None:
        checked, size = with_class(add_embedding(build_config(config, tokenizer), config, None), config.task), 0
        parameters = count(checked, config.task, max_length or 8).parameters
        if FLOAT_BYTES * parameters > hardware()["memory_bytes"]:
            needed, present = FLOAT_BYTES * parameters / 1e9, hardware()["memory_bytes"] / 1e9
            raise InputError(
                "model.config",
                f"{parameters} weights of {needed:.0f} GB",
                f"this machine has {present:.0f} GB of memory",
                "give smaller sizes",
            )
    else:
        source = model_folder(config.path, "model.path", config.adapter)
        checked = Checkpoint(source, "model.path").config
        is_there = any(source.glob("*.safetensors*")) or is_local(config.path)
        size = sum(file.stat().st_size for file in weight_files(source, "model.path")) if is_there else 0
        check_task(config, checked, num_labels)
        if config.head == "new":
            as_with_head(checked, config.task)
        add_embedding(checked, config, source)
        if is_there:
            note_apart(checked, _check_stored(config, checked, source))
    if config.preprocessor is not None:
        check_raw(config.preprocessor, {}, "model.preprocessor")
    names = label_names(config)
    if max_length is not None and config.facts.reads_text:
        check_length(checked, max_length)
    if config.facts.two_towers:
        check_towers(checked, "model.path", max_length)
    if not config.facts.answer.classifies or (num_labels is not None and names is None):
        set_labels(checked, config.task, tuple(f"LABEL_{i}" for i in range(num_labels or 1)))
    return Checked(checked, names, size)


def import_model(
    config: ModelConfig,
    data_labels: tuple[str, ...],
    seed: int,
    out: Path,
    tokenizer: str | TrainedTokenizer | None = None,
    log: Callable[[str], None] = lambda message: None,
    warn: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Writes the recipe's model into `out` as a clean checkpoint.

    Args:
        config: The recipe's model section.
        data_labels: Class names of the data, ordered by id; ignored for regression.
        seed: Seed of the random initialization.
        out: Existing empty folder.
        tokenizer: Hub id or folder of a tokenizer, or one that the recipe trained; required for text models with random weights.
        log: Receives progress messages.
        warn: Receives warnings.

    Returns:
        `source`, `model_type`, `parameters`, `labels`, `new_weights` (names of randomly initialized weights; "all" for random weights); for
        models that answer whole texts `padding_effect` (`foundation.models.inputs.padding_effect`).

    Raises:
        InputError: The model cannot be used; the message says why and what to do.
    """
    task, facts = config.task, config.facts
    if facts.answer.classifies and len(data_labels) < 2:
        values = tasks_with(lambda row: row.regression)
        raise InputError("data", f"{len(data_labels)} labels", f"classification needs at least 2 (regression: model.task: {values})")
    source = None if config.path is None else model_folder(config.path, "model.path", config.adapter, weights=True)
    figures: dict[str, Any] = {}
    linked = _linked(config, source, out)
    if linked is not None:
        (built, parameters), new = linked, []
    else:
        if source is None:
            model, new = _random_model(config, data_labels, seed, tokenizer), ["all"]
        else:
            model, new = _import_folder(config, source, data_labels, seed)
        built, parameters = model.config, sum(parameter.numel() for parameter in model.parameters())
        settle_inputs(config, source, built, tokenizer)
        if facts.generates:
            check_causal(built, partial(forward, model.eval()))
        if facts.answers_whole_texts:
            figures["padding_effect"] = _padding_effect(built, model.eval(), warn)
        with quiet():
            model.save_pretrained(out)
        write_files(model, out)
    mark(out)
    save_preprocessing(config, source, built, out, tokenizer, log)
    for line in noted(source) if source is not None and facts.generates else ():
        log(f"  model: {line}")
    labels = list(label_list(built)) if facts.answer.classifies else []
    origin = (config.path or "random weights") + (", with its adapter merged" if config.adapter else "")
    _write_card(out, origin, task, labels)
    log(f"  model: {built.model_type} from {origin}, labels {', '.join(labels) or 'none'}; new weights: {', '.join(new) or 'none'}")
    return {"source": origin, "model_type": built.model_type, "parameters": parameters, "labels": labels, "new_weights": new, **figures}


def _padding_effect(config: PreTrainedConfig, model: nn.Module, warn: Callable[[str], None]) -> float:
    """Returns how far padding changes the answers of a model; warns if it does."""
    effect = padding_effect(config, partial(forward, model))
    if effect > SEEN:
        warn(
            f"model: {config.model_type} sees the padding behind a text: its answers to random rows change by up to {effect:.1%}; "
            "so an answer depends on the length that its row is padded to, and in a server on the rows of its batch"
        )
    return effect


def _linked(config: ModelConfig, source: Path | None, out: Path) -> tuple[Any, int] | None:
    """Links the files of a language model that is taken as it is; None for other models (`foundation.models.causal.link_model`)."""
    row = config.facts
    if source is None or not row.generates or row.encoder_decoder or config.head == "new" or config.adapter is not None:
        return None
    return link_model(_checked_config(config, source, 0), source, out)


def _import_folder(config: ModelConfig, source: Path, data_labels: tuple[str, ...], seed: int) -> tuple[Any, list[str]]:
    """Loads a model folder with the requested head; returns the model and the names of the randomly initialized weights."""
    found = _checked_config(config, source, len(data_labels))
    check_finite(source, "model.path")
    labels = own_names(found) if config.head == "keep" and config.facts.answer.classifies else None
    if labels is not None and labels != tuple(data_labels):
        raise InputError(
            "model.path",
            f"the model's labels are {preview(labels)}, the data's {preview(data_labels)}",
            remedy="rename them, or give model.head: new",
        )
    set_labels(settle(found), config.task, labels or data_labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, info = load_weights(auto_class(config.task, found), source, found, torch.float32)
        if config.adapter is not None:
            replaced = brought(source, "model.path")
            info = {**info, "missing": info["missing"] - replaced}
            model = merged(model, source, "model.path")
        info = {**info, "missing": info["missing"] - load_head(model, source, config.path, info["missing"])}
        head = _head(model)
        _check_weights(source, config, model.base_model_prefix, head, info)
        drawn = info["missing"] | info["mismatched"]
        if config.head == "new":
            drawn |= {name for name in head if "pooler" not in name.split(".")}
            model = _with_new(model, drawn, config.task)
    return model, sorted(drawn)


def _checked_config(config: ModelConfig, source: Path, num_labels: int) -> Any:
    if Checkpoint(source).is_quantized:
        raise InputError("model.path", f"{source} is already quantized", remedy="give the float model it was made from")
    found = Checkpoint(source, "model.path").config
    check_task(config, found, num_labels)
    add_embedding(found, config, source)
    _check_stored(config, found, source)
    return found


def _check_stored(config: ModelConfig, stored_config: Any, source: Path) -> set[str]:
    """Checks that the files can hold the model of the config, in floating point; returns the names of tied weights that they store apart.

    Of the weights, only rows of these are read.
    """
    stored = headers(source, "model.path")
    try:
        with on_meta_device(), quiet():
            model = auto_class(config.task, stored_config).from_config(with_class(copy.deepcopy(stored_config), config.task))
    except REFUSED as error:
        raise InputError(
            "model.path", f"{source / 'config.json'} describes no model ({one_line(error)})", remedy="check its sizes"
        ) from error
    parameters = {name: value.numel() for name, value in model.named_parameters()}
    _check_names(source, list(stored), set(parameters), model.base_model_prefix)
    held = sum(math.prod(shape) for shape, _ in stored.values())
    if sum(parameters.values()) > 2 * held + NEW_HEAD:
        sizes = f"{sum(parameters.values())} weights, its safetensors files hold {held}"
        raise InputError("model.path", f"{source}: config.json describes {sizes}", remedy="give files that belong together")
    for name, (_, dtype) in stored.items():
        renamed = re.sub(r"(LayerNorm\.)gamma$", r"\1weight", re.sub(r"(LayerNorm\.)beta$", r"\1bias", name))
        names = {renamed, f"{model.base_model_prefix}.{renamed}", renamed.removeprefix(f"{model.base_model_prefix}.")}
        if dtype not in FLOATS and not names.isdisjoint(parameters):
            raise InputError(
                "model.path", f"{source}: {name} is {dtype}", "only float weights are allowed", "give the model before quantization"
            )
    return _stored_apart(model, source, stored)


def _stored_apart(model: PreTrainedModel, source: Path, stored: Collection[str]) -> set[str]:
    """Returns the names of tied weights of a model whose files hold different values for them; Transformers then leaves these apart."""
    model.tie_weights()
    apart: set[str] = set()
    for group in shared_names(model):
        rows = first_and_last_rows(source, "model.path", group & set(stored))
        first = next(iter(rows.values()), None)
        if any(row.shape != first.shape or not row.equal(first) for row in rows.values() if first is not None):
            apart |= rows.keys()
    return apart


def _check_names(source: Path, stored: Sequence[str], parameters: set[str], prefix: str) -> None:
    """Raises if weights have the names that they have inside a wrapper of torch, under which Transformers does not find them."""
    wrapped = [name for name in stored if WRAPPER.search(name)]
    bare = {WRAPPER.sub("", name) for name in wrapped}
    meant = bare | {f"{prefix}.{name}" for name in bare} | {name.removeprefix(f"{prefix}.") for name in bare}
    if meant & parameters and not set(wrapped) & parameters:
        wrappers = sorted({found[0] for name in wrapped for found in WRAPPER.finditer(name)})
        raise InputError(
            "model.path",
            f"{source}: {len(wrapped)} weights have names with {' and '.join(wrappers)}, such as {wrapped[0]}: "
            "the model was saved inside a wrapper (torch.compile: _orig_mod., DataParallel and DistributedDataParallel: module.)",
            remedy="save the model inside it, model._orig_mod or model.module, with save_pretrained",
        )


def _head(model: PreTrainedModel) -> set[str]:
    """Returns the names of the weights of the head: outside the backbone, or in the pooler, which language model checkpoints lack.

    Models of embeddings, two-tower models and T5 are their own backbone: no prefix marks its weights. Their head is the output layer of the
    vocabulary, where there is one.
    """
    if model.base_model is not model:
        prefix = model.base_model_prefix
        return {name for name in model.state_dict() if not name.startswith(f"{prefix}.") or name.startswith(f"{prefix}.pooler.")}
    words = model.get_output_embeddings()
    heads = ("pooler", *(name for name, module in model.named_modules() if words is not None and module is words))
    return {name for name in model.state_dict() if name.startswith(tuple(f"{head}." for head in heads))}


def _check_weights(source: Path, config: ModelConfig, prefix: str, head: set[str], info: Mapping[str, set[str]]) -> None:
    lost = info["missing"] | info["mismatched"]
    if lost - head:
        raise InputError(
            "model.path",
            f"{source}: {len(lost - head)} weights are missing or differ in shape from config.json: {preview(lost - head)}",
            "only the head may be new",
            "give a complete model",
        )
    if lost and config.head == "keep":
        row = config.facts
        remedy = "give a complete model" if row.generates or row.two_towers else "give model.head: new"
        raise InputError("model.path", f"{source} has no trained head ({preview(lost)} missing or with another shape)", remedy=remedy)
    known = ("text_model.", "vision_model.") if config.facts.two_towers else f"{prefix}."
    layers = {name for name in info["unexpected"] if name.startswith(known) and re.search(r"\.\d+\.", name)}
    if layers:
        raise InputError(
            "model.path",
            f"{source} has weights of layers that are not in config.json: {preview(layers)}",
            remedy="give files that belong together",
        )


def _with_new(model: PreTrainedModel, drawn: set[str], task: Task) -> Any:
    """Returns a randomly initialized model with all weights of `model` except those in `drawn`."""
    fresh = auto_class(task, model.config).from_config(model.config)
    shared_as(fresh, model)
    fresh.load_state_dict({name: value for name, value in model.state_dict().items() if name not in drawn}, strict=False)
    return fresh


def source_digest(config: ModelConfig, tokenizer: str | TrainedTokenizer | None = None) -> str:
    """Returns the digest of all inputs of an import outside the recipe: file contents, or the Hub's commit."""
    parts: dict[str, Any] = {}
    for name, path in (("path", config.path), ("tokenizer", tokenizer)):
        if isinstance(path, TrainedTokenizer):
            parts[name] = path.digest
        elif path is not None:
            folder = find(path, f"model.{name}" if name == "path" else name, weights=False)
            parts[name] = _folder_digest(folder) if is_local(path) else [path, folder.name]
            pooling = pooling_file(folder, path) if name == "path" and config.facts.embeds and is_local(path) else None
            if pooling is not None and pooling.is_file():
                parts["pooling"] = file_digest(pooling)
                parts |= {f"dense {file.name}": file_digest(file) for file in dense_files(folder, path)}
    if isinstance(config.config, str):
        parts["config"] = read_json(local(config.config, "model.config"), "model.config")
    return digest(parts)


def _folder_digest(folder: Path) -> dict[str, str]:
    patterns = (*WEIGHT_FILES, *SMALL_FILES)
    return {file.name: file_digest(file) for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()}


def _random_model(config: ModelConfig, data_labels: tuple[str, ...], seed: int, tokenizer: str | TrainedTokenizer | None) -> Any:
    built = add_embedding(build_config(config, tokenizer), config, None)
    set_labels(settle(built), config.task, data_labels)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        return with_first_scale(auto_class(config.task, built).from_config(with_class(built, config.task)))


def _write_card(out: Path, origin: str, task: Task, labels: list[str]) -> None:
    lines = [
        "---",
        f"pipeline_tag: {TASKS[task].pipeline_tag}",
        "library_name: transformers",
        "---",
        "# Model",
        "",
        f"- Source: {origin}",
        f"- Task: {task}",
        f"- Labels: {', '.join(labels) or 'none'}",
    ]
    (out / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
