"""Counts the parameters and multiply-accumulates of a model from its config.

Multiply-accumulates (MACs) of one row are counted by running the model on the meta device: a GEMM of [m, k] by [k, n] costs m k n MACs,
including the attention products Q K^T and P V. FLOPs = 2 MACs.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.labels.tasks import TASKS, Task
from foundation.models.architecture.shapes import auto_class
from foundation.models.inputs.images import image_shape
from foundation.models.inputs.sounds import INPUT, least_samples, spectrogram_shape
from foundation.models.library import REFUSED, on_meta_else_cpu, one_line, quiet, uninitialized, with_class
from foundation.models.meta import on_meta_device
from foundation.models.tied import shared_as, shared_names, untie_noted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Counts:
    """Size of a model."""

    parameters: int
    """Number of parameters; shared parameters count once."""
    macs: int
    """Multiply-accumulates of all GEMMs for one row."""
    attention_macs: int = 0
    """MACs of the products of attention, Q K^T and P V, which grow with the square of the length; the others grow with the length."""

    @property
    def flops(self) -> int:
        """Floating-point operations of all GEMMs for one row."""
        return 2 * self.macs


@dataclass(frozen=True)
class Passes:
    """Cost of forward passes of a stage's models, for the prediction of its time."""

    before: int
    """MACs of the input model for one row."""
    after: int
    """MACs of the output model for one row."""
    layers: int
    """Transformer layers of the input model, of all stacks together."""


_known: dict[Hashable, Counts] = {}
"""Cache of counts: one takes a tenth of a second, and the steps of a plan need the same few models."""


def count(model: PreTrainedModel | PreTrainedConfig, task: Task, length: int) -> Counts:
    """Returns the parameters and MACs of the model that a config describes; reads no weights.

    Models that look at values while they run, such as at the padding mask, cannot run on the meta device; they run on the CPU, with
    weights that are not initialized.

    Args:
        model: A model (float or int8; only its config matters) or a Transformers config, in which the model class of the task is named
            where there is none, whether or not the model was counted before.
        task: The task.
        length: Tokens of the row, or samples of a waveform; ignored for images and spectrograms, whose size is the model's.

    Raises:
        InputError: Transformers cannot run this config.
    """
    config: PreTrainedConfig = model.config if isinstance(model, nn.Module) else with_class(model, task)
    shared = shared_names(model) if isinstance(model, nn.Module) else None
    key = type(model), config.to_json_string(), shared, task, length
    if key not in _known:
        try:
            _known[key] = on_meta_else_cpu(lambda meta: _counted(model, task, length, on_meta=meta))
        except REFUSED as error:
            raise InputError(
                "model", f"this {config.model_type} cannot be run ({one_line(error)})", remedy="check the sizes in its config"
            ) from error
    return _known[key]


def _counted(model: PreTrainedModel | PreTrainedConfig, task: Task, length: int, on_meta: bool) -> Counts:
    """Builds the model and runs it on one row.

    Raises:
        ValueError, TypeError, ...: What Transformers raises for an unusable config (`foundation.models.library.REFUSED`).
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def fused(queries: torch.Size, keys: torch.Size, values: torch.Size, *_: object, **__: object) -> int:
        return int(sdpa_flop_count(queries, keys, values))  # type: ignore[no-untyped-call]

    on_cpu = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused}  # of which the counter of torch 2.13 counts nothing
    config: PreTrainedConfig = model.config if isinstance(model, nn.Module) else model
    with on_meta_device() if on_meta else uninitialized(), quiet():
        config = _countable(config)
        made: Any = (type(model)(config) if isinstance(model, nn.Module) else auto_class(task, config).from_config(config)).eval()
        made.tie_weights()  # which is left out where weights are not initialized
        if isinstance(model, nn.Module):
            shared_as(made, model)
        else:
            untie_noted(made)
        made.requires_grad_(False)  # the counter follows gradients, which some models cut off
        inputs = inputs_of(config, task, length, masked=not on_meta)
        with FlopCounterMode(display=False, custom_mapping=on_cpu) as counter, torch.no_grad():
            made(**inputs)
    products = sum(flops for kind, flops in counter.get_flop_counts().get("Global", {}).items() if _is_product(str(kind)))
    return Counts(sum(parameter.numel() for parameter in made.parameters()), counter.get_total_flops() // 2, products // 2)


def _is_product(kind: str) -> bool:
    """Whether an operation of torch multiplies two activations: batched products, and attention as one operation. Experts of a MoE are
    batched products too."""
    return "bmm" in kind or "scaled_dot_product" in kind


def _countable(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of a config whose MoE experts, if any, run in float32 on the meta device without reading values."""
    changed = copy.deepcopy(config)
    changed._experts_implementation = "batched_mm"
    return changed


def inputs_of(config: PreTrainedConfig, task: Task, length: int, masked: bool = True) -> dict[str, Tensor]:
    """Returns the inputs of one row; `masked`: with a padding mask, whose values most models read, and which changes no GEMM."""
    facts = TASKS[task]
    if facts.modality == "image":
        channels, height, width = image_shape(config)
        texts = {"input_ids": torch.zeros(1, length, dtype=torch.long)} if facts.two_towers else {}
        return {"pixel_values": torch.zeros(1, channels, height, width), **texts}
    if facts.modality == "audio":  # a mask changes no GEMM
        return {INPUT: torch.zeros(1, *(spectrogram_shape(config) or (max(length, least_samples(config)),)))}
    ids = torch.zeros(1, length, dtype=torch.long)
    if facts.encoder_decoder:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):  # its head reads the state of the end of the text
        ids[:, -1] = config.eos_token_id
    if not masked and facts.generates:  # a 4-D additive mask is used unchanged
        return {"input_ids": ids, "attention_mask": torch.zeros(1, 1, length, length)}
    masked |= config.model_type.startswith("deberta")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if masked else {"input_ids": ids}
