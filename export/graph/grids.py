"""Weights of a quantized checkpoint, exactly on the grids of their scales.

A checkpoint stores its weights on their grids in the type of the model. Where that has 16 bits, the grid is only as precise as that type:
0.7 s is stored as the nearest bfloat16. Codes are found by rounding, so that torch's integers are right; a graph that is made of the stored
floats is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from foundation.artifacts.safetensors import headers
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import SHORT_FLOATS, load_quantization
from foundation.schemes.scales import Scales
from foundation.schemes.tables import load_tables, on_table_grid


def put_on_grids(model: nn.Module, checkpoint: Checkpoint) -> tuple[Mapping[str, Scales], Mapping[str, Tensor]]:
    """Rounds the weights that a quantized checkpoint stores in 16 bits to their grids, in place.

    Args:
        model: Its float model, in float32, with linear layers and separate experts (`foundation.models.layers.conv1d`,
            `foundation.models.layers.experts`).
        checkpoint: The checkpoint.

    Returns:
        Scales of linear layers and convolutions, and of the rows of tables (float32 [V]), by module path.

    Raises:
        InputError: Its files are damaged.
    """
    layers, tables = load_quantization(checkpoint.folder)[0], load_tables(checkpoint.folder)
    short = {name for name, (_, kind) in headers(checkpoint.folder, "checkpoint").items() if kind in SHORT_FLOATS}
    modules: dict[str, Any] = dict(model.named_modules())
    for name, scales in layers.items():
        stack = name.rpartition(".")[0]  # of an expert: all of a layer are stored in one tensor
        if {f"{name}.weight", stack} & short:
            modules[name].weight.data = scales.on_grid(modules[name].weight.data)
    for name, scale_V in tables.items():
        if f"{name}.weight" in short:
            modules[name].weight.data = on_table_grid(modules[name].weight.data, scale_V)
    return layers, tables
