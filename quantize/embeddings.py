"""Rounds the embeddings and the head of a language model to int8 rows (`foundation.schemes.tables`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foundation.schemes.tables import on_table_grid, row_scale, table_modules
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
            rounded, scales[name], noise[name] = rounded_table(table)
            table.copy_(rounded)
    return scales, noise


def rounded_table(table_VD: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Returns a table on its grid, float32 [V, D], its row scales, float32 [V], and the signal-to-noise ratio in dB."""
    scale_V = row_scale(table_VD)
    rounded_VD = on_table_grid(table_VD, scale_V)
    signal, noise = table_VD.float().square().sum(), (rounded_VD - table_VD.float()).square().sum()
    return rounded_VD, scale_V, decibels(float(signal), float(noise))
