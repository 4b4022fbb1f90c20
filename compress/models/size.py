"""Counts the parameters and multiply-accumulates of a model from its config.

Multiply-accumulates (MACs) of one row are counted by running the model on the meta device: a GEMM of [m, k] by [k, n] costs m k n MACs,
including the attention products Q K^T and P V. FLOPs = 2 MACs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.core.errors import InputError
from compress.core.tasks import TASKS, Task
from compress.models.library import REFUSED, one_line, quiet, with_class
from compress.models.shapes import auto_class


@dataclass(frozen=True)
class Counts:
    """Size of a model."""

    parameters: int
    """Number of parameters; shared parameters count once."""
    macs: int
    """Multiply-accumulates of all GEMMs for one row."""

    @property
    def flops(self) -> int:
        """Floating-point operations of all GEMMs for one row."""
        return 2 * self.macs


def count(model: Any, task: Task, length: int) -> Counts:
    """Returns the parameters and MACs of the model that a config describes; allocates no weights.

    Args:
        model: A model (float or int8; only its config matters) or a Transformers config.
        task: The task.
        length: Tokens of the row; ignored for images, which use the model's image size.

    Raises:
        InputError: Transformers cannot run this config.
    """
    from torch.utils.flop_counter import FlopCounterMode

    config: Any = model.config if isinstance(model, nn.Module) else model
    try:
        with torch.device("meta"), quiet():
            config = _countable(config if isinstance(model, nn.Module) else with_class(config, task))
            made = (type(model)(config) if isinstance(model, nn.Module) else auto_class(task, config).from_config(config)).eval()
            inputs = _meta_inputs(config, task, length)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                made(**inputs)
    except REFUSED as error:
        raise InputError(f"model: this {config.model_type} cannot be run ({one_line(error)}); check the sizes in its config") from error
    return Counts(sum(parameter.numel() for parameter in made.parameters()), counter.get_total_flops() // 2)


def _countable(config: Any) -> Any:
    """Returns a copy of a config whose MoE experts, if any, run in float32 on the meta device without reading values."""
    changed = copy.deepcopy(config)
    changed._experts_implementation = "batched_mm"
    return changed


def _meta_inputs(config: Any, task: Task, length: int) -> dict[str, Tensor]:
    if TASKS[task].modality == "image":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.zeros(1, config.num_channels, height, width)}
    # No attention mask: most models read its values, which a meta tensor lacks. The GEMMs are the same.
    ids = torch.zeros(1, length, dtype=torch.long)
    if TASKS[task].answer == "tokens":  # a 4-D additive mask is used unchanged
        return {"input_ids": ids, "attention_mask": torch.zeros(1, 1, length, length)}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if config.model_type.startswith("deberta") else {"input_ids": ids}
