"""Language models from outside: checked for looking ahead, and taken over without loading them where no weight has to change.

A language model whose weights need no change has every tensor that its config asks for, by name and shape, in safetensors files. Then its
files are linked (copied where the file system does not link). Tensors that Transformers leaves aside when it loads, such as the inverse
frequencies that older checkpoints kept, are dropped: then the others are copied, tensor by tensor. All other folders, whose names have to
be changed for example, are loaded and saved (`compress.models.importing`).

A link is the same file: who writes into the source afterwards, instead of replacing it, changes the checkpoint too, which its manifest
then tells. Left out: models that are not recognized by `compress.models.streaming`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifacts.safetensors import check_finite, weight_files
from compress.artifacts.shards import ShardWriter, StoredWeights
from compress.core.errors import InputError
from compress.models.config import set_labels
from compress.models.files import copy_files
from compress.models.library import quiet, task_of
from compress.models.streaming import StreamedModel, meta_model, stored_names, structure_problem

PROBED_TOKENS = 4
INDEX = "model.safetensors.index.json"
DROPPED = r"rotary_emb\.inv_freq$|rotary_pos_emb\.inv_freq$"
"""What Transformers leaves aside whatever the model."""


def check_causal(config: Any, answer: Callable[[Mapping[str, Tensor]], Tensor]) -> None:
    """Checks that a model does not look at the token that it has to predict, as an encoder with a head for language does: tried on two
    texts that differ in their last token alone.

    Args:
        config: Its Transformers config.
        answer: From features to logits, float32 [b, L, V].

    Raises:
        InputError: It does.
    """
    ids = torch.arange(PROBED_TOKENS).remainder(config.vocab_size).repeat(2, 1)
    ids[1, -1] = (int(ids[1, -1]) + 1) % config.vocab_size
    with torch.inference_mode():
        first, second = answer({"input_ids": ids})[:, :-1]
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5):
        raise InputError(
            f"model: this {config.model_type} reads the tokens that it has to predict; a causal model is allowed (of an encoder: "
            "is_decoder: true in its config)"
        )


def link_model(config: Any, source: Path, out: Path) -> tuple[Any, int] | None:
    """Takes a causal language model over into another folder, without loading it.

    Args:
        config: Its Transformers config, checked for the task.
        source: Its folder.
        out: Existing empty folder; gets weights, config and the settings of generation.

    Returns:
        The config that was written and the number of parameters; None, and nothing is written, where weights have to be changed on the way.

    Raises:
        InputError: A file is damaged, a weight is not finite, or the model is not causal.
    """
    set_labels(config, task_of(config, "tokens"), ())
    parameters = _link_weights(config, source, out)
    if parameters is None:
        return None
    check_finite(source, "model.path")
    with quiet():
        config.save_pretrained(out)
    copy_files(source, out, ("generation_config.json",))
    check_causal(config, StreamedModel(out).forward)
    return config, parameters


def _link_weights(config: Any, source: Path, out: Path) -> int | None:
    """Links the weight files and their index, and returns the number of parameters."""
    weights = StoredWeights(source, "model.path")
    model, turned = meta_model(config)
    if structure_problem(model) is not None:
        return None
    try:
        needed = set(stored_names(model, turned, weights, "model.path").values())
    except InputError:  # told by the loader, which knows more names for a weight than one
        return None
    kept = needed | set(model.state_dict())  # a tied weight may be stored under either name, or both
    others = [name for name in weights.names if name not in kept]
    dropped = "|".join([DROPPED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())])
    if not all(re.search(dropped, name) for name in others):
        return None
    if others:
        writer = ShardWriter(out, kept)
        for name in weights.names:
            if name in kept:
                writer.copy(name, weights[name])
        writer.close()
    else:
        _link([*weight_files(source, "model.path"), *([source / INDEX] if not (source / "model.safetensors").is_file() else [])], out)
    return sum(parameter.numel() for parameter in model.parameters())


def _link(files: Iterable[Path], out: Path) -> None:
    for file in files:
        try:
            os.link(file.resolve(), out / file.name)  # the Hub's cache consists of symbolic links
        except OSError:  # another file system, or one without links
            shutil.copyfile(file, out / file.name)
