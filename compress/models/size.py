"""Parameters and multiply-accumulates of a model, from its shape alone.

Multiply-accumulates (MACs) of one row are counted by running the shape on the meta device: each GEMM of [m, k] by [k, n] costs m k n,
the products Q K^T and P V of attention included; FLOPs = 2 MACs.
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
    """Number of parameters; shared ones count once."""
    macs: int
    """Multiply-accumulates of all GEMMs for one row."""

    @property
    def flops(self) -> int:
        """Floating-point operations of all GEMMs for one row."""
        return 2 * self.macs


def count(model: Any, task: Task, length: int) -> Counts:
    """Returns parameters and MACs of the shape that a config describes; allocates and loads no weights.

    Args:
        model: A model (float or int8: its config decides) or a Transformers config.
        task: The task.
        length: Tokens of the row; ignored for images, which have the model's image size.

    Raises:
        InputError: Transformers cannot run this shape.
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
    """Returns a copy of a config whose experts, where it has any, run without a look at values and multiply float32 on the meta device."""
    changed = copy.deepcopy(config)
    changed._experts_implementation = "batched_mm"
    return changed


def _meta_inputs(config: Any, task: Task, length: int) -> dict[str, Tensor]:
    if TASKS[task].modality == "image":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.zeros(1, config.num_channels, height, width)}
    # No attention mask: most models look at its values, and a meta tensor has none. The GEMMs are the same.
    ids = torch.zeros(1, length, dtype=torch.long)
    if TASKS[task].answer == "tokens":  # one that is additive already is taken as it is
        return {"input_ids": ids, "attention_mask": torch.zeros(1, 1, length, length)}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if config.model_type.startswith("deberta") else {"input_ids": ids}
