"""Imports causal language models without loading them, if possible, and checks that they are causal.

If the safetensors files contain every tensor of the config under the expected name and shape, the files are hard-linked (or copied, if the
file system has no links). If they also contain tensors that Transformers ignores, such as the inverse frequencies in older checkpoints,
the needed tensors are copied one by one and the others dropped. All other folders, for example with tensors that need renaming, are loaded
and saved by `foundation.models.importing`.

A hard link is the same file: writing into the source file later, instead of replacing it, also changes the checkpoint, and the manifest
check then reports it. Not supported: models that `foundation.models.streaming` cannot run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foundation.artifacts.safetensors import check_finite, weight_files
from foundation.artifacts.shards import ShardWriter
from foundation.core.errors import InputError
from foundation.models.config import set_labels
from foundation.models.files import copy_files
from foundation.models.folder import Checkpoint
from foundation.models.library import quiet, task_of
from foundation.models.streaming import StreamedModel, meta_model, stored_names, structure_problem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROBED_TOKENS = 4
INDEX = "model.safetensors.index.json"
DROPPED = r"rotary_emb\.inv_freq$|rotary_pos_emb\.inv_freq$"
"""Tensors that Transformers ignores in every model."""


def check_causal(config: PreTrainedConfig, answer: Callable[[Mapping[str, Tensor]], Tensor]) -> None:
    """Checks that a model does not read the token it predicts, as an encoder with a language-model head does.

    Compares the logits of two sequences that differ only in their last token. Of an encoder-decoder that is what the decoder reads.

    Args:
        config: The model's Transformers config.
        answer: Maps features to logits, float32 [b, L, V].

    Raises:
        InputError: The model is not causal.
    """
    ids = torch.arange(PROBED_TOKENS).remainder(config.vocab_size).repeat(2, 1)
    ids[1, -1] = (int(ids[1, -1]) + 1) % config.vocab_size
    features = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        features = {"input_ids": ids[:1].repeat(2, 1), "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    with torch.no_grad():
        first, second = answer(features)[:, :-1]
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5):
        raise InputError(
            "model",
            f"this {config.model_type} reads the tokens that it has to predict",
            "a causal model is needed (for an encoder type, set is_decoder: true in its config)",
        )


def link_model(config: PreTrainedConfig, source: Path, out: Path) -> tuple[Any, int] | None:
    """Links or copies a causal language model into another folder, without loading it.

    Args:
        config: The model's Transformers config, already checked for the task.
        source: The model's folder.
        out: Existing empty folder; receives weights, config and generation settings.

    Returns:
        The written config and the number of parameters; None, with nothing written, if weights need to be changed.

    Raises:
        InputError: A file is damaged, a weight is not finite, or the model is not causal.
    """
    set_labels(config, task_of(config, generates=True), ())
    parameters = _link_weights(config, source, out)
    if parameters is None:
        return None
    check_finite(source, "model.path")
    with quiet():
        config.save_pretrained(out)
    copy_files(source, out, ("generation_config.json",))
    check_causal(config, StreamedModel(out).forward)
    return config, parameters


def _link_weights(config: PreTrainedConfig, source: Path, out: Path) -> int | None:
    """Links or copies the weights; returns the number of parameters, or None if weights need to be changed."""
    weights = Checkpoint(source, "model.path").weights
    model, transposed = meta_model(config)
    if structure_problem(model) is not None:
        return None
    try:
        needed = set(stored_names(model, transposed, weights, "model.path").values())
    except InputError:  # the loader may still succeed: it knows alternative tensor names. If not, it reports the error
        return None
    wanted = needed | set(model.state_dict())  # a tied weight may be stored under either name, or both
    others = [name for name in weights.names if name not in wanted]
    dropped = "|".join([DROPPED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())])
    if not all(re.search(dropped, name) for name in others):
        return None
    if others:
        writer = ShardWriter(out, wanted)
        for name in weights.names:
            if name in wanted:
                writer.copy(name, weights[name])
        writer.close()
    else:
        _link([*weight_files(source, "model.path"), *([source / INDEX] if not (source / "model.safetensors").is_file() else [])], out)
    return sum(parameter.numel() for parameter in model.parameters())


def _link(files: Iterable[Path], out: Path) -> None:
    for file in files:
        try:
            os.link(file.resolve(), out / file.name)  # the Hub's cache consists of symbolic links
        except OSError:  # source on another file system, or no support for hard links
            shutil.copyfile(file, out / file.name)
