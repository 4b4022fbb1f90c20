"""Loads and saves checkpoints.

A checkpoint is a plain Transformers folder: config.json (with label names), model.safetensors, tokenizer.json or preprocessor_config.json,
and a README.md. Attention uses `scaled_dot_product_attention` if the model supports it. Loaded models have `nn.Linear` in place of GPT-2's
`Conv1D` (`foundation.models.layers.conv1d`); saved weights have the stock layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foundation.artifacts.safetensors import headers
from foundation.core.errors import InputError
from foundation.models.adapter_files import apply_adapters
from foundation.models.adapters import without_adapter
from foundation.models.architecture.shapes import auto_class, mark
from foundation.models.files import IMAGE_FILES, TEXT_FILES, copy_files
from foundation.models.folder import Checkpoint
from foundation.models.heads.embedding import write_files
from foundation.models.layers.conv1d import stock_state, with_linears
from foundation.models.layers.experts import with_separate_experts
from foundation.models.library import REFUSED, one_line, preview, quiet, task_of
from foundation.schemes.checkpoint import apply_quantization
from foundation.schemes.sites import apply_sites

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GENERATED = ("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate")
"""Settings in generation_config.json of what `generate` returns next to the answer; with one of them it returns no plain ids."""


def load(folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Loads a checkpoint in evaluation mode; if it is quantized, with its quantized layers, and with its adapters, if it has some.

    Raises:
        InputError: The folder is not a complete checkpoint.
    """
    model = _without_adapters(folder, dtype)
    if Checkpoint(folder).is_quantized:
        with_separate_experts(model)
        apply_quantization(model, folder)
        apply_sites(model, folder)
    apply_adapters(model, folder)
    placed: nn.Module = model.to(device).eval()
    return placed


def load_float(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Loads the float weights of a checkpoint in evaluation mode, with its adapters; weights of a quantized one are on the grids of its
    scales.

    Raises:
        InputError: The folder is not a complete checkpoint.
    """
    model = _without_adapters(folder, dtype)
    apply_adapters(model, folder)
    return model


def _without_adapters(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Loads the float weights of a checkpoint in evaluation mode, without its adapters: quantized layers may have to come first."""
    config = Checkpoint(folder).config
    headers(folder, "checkpoint")
    model, info = load_weights(auto_class(task_of(config), config), folder, config, dtype)
    if info["missing"] or info["mismatched"]:
        raise InputError(
            "checkpoint",
            f"{folder} lacks weights: {preview(info['missing'] | info['mismatched'])}",
            remedy="write it again with save_pretrained",
        )
    with_linears(model)
    floating: nn.Module = model.eval()
    return floating


def save(model: nn.Module, source: Path, out: Path, summary: str) -> None:
    """Saves a float model as a checkpoint; tokenizer and processor files are copied from `source`.

    Args:
        model: A Transformers model.
        source: The checkpoint that the model was made from.
        out: Existing folder.
        summary: One sentence for the model card: what was done to the model.
    """
    with quiet():
        model.save_pretrained(out, state_dict=stock_state(model))  # type: ignore[operator]
    mark(out)
    write_files(model, out)
    copy_files(source, out, TEXT_FILES + IMAGE_FILES)
    card = (source / "README.md").read_text(encoding="utf-8") if (source / "README.md").is_file() else "# Model\n"
    (out / "README.md").write_text(f"{card.rstrip()}\n- {summary}\n", encoding="utf-8")


def load_weights(auto: Any, folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> tuple[Any, dict[str, set[str]]]:
    """Loads all weights that match the config, without an adapter next to them; returns the model and the names of the others: `missing`,
    `mismatched`, `unexpected`."""
    try:
        with quiet(), without_adapter(folder) as own:
            model, info = auto.from_pretrained(
                own,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, *REFUSED) as error:
        raise InputError(
            "model", f"{folder} cannot be loaded ({one_line(error)})", remedy="check that config.json and the weights belong together"
        ) from error
    answers = getattr(model, "generation_config", None)
    for name in GENERATED:
        if getattr(answers, name, None):
            setattr(answers, name, False)
    mismatched = {entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]}
    return model, {"missing": set(info["missing_keys"]), "mismatched": mismatched, "unexpected": set(info["unexpected_keys"])}
