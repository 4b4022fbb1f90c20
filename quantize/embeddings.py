"""Rounds the embeddings and the head of a language model to int8 rows (`compress.schemes.tables`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.schemes.tables import on_table_grid, row_scale, table_modules
from quantize.schemes import decibels


def quantize_tables(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """Rounds the tables of a language model in place.

    Args:
        model: The model.

    Returns:
        The row scales, float32 [V], and the signal-to-noise ratio in dB of each table, by module path.
    """
    scales, noise = {}, {}
    with torch.no_grad():
        for name, module in table_modules(model).items():
            table: Tensor = module.get_parameter("weight")
            scales[name] = row_scale(table)
            rounded = on_table_grid(table, scales[name])
            noise[name] = decibels(float(table.float().square().sum()), float((rounded - table).square().sum()))
            table.copy_(rounded)
    return scales, noise
