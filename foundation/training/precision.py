"""The number format that a model trains in: bfloat16 where it is faster here and the model computes the same in it, else float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foundation.core.progress import Progress
from foundation.machine.bfloat16 import bfloat16_pays
from foundation.models.forward import modes_kept
from foundation.models.library import one_line

MOST_APART = 0.5
"""How far bfloat16 may be from float32, as a share of the outputs. Its rounding makes some hundredths; the kernels of some processors for
grouped convolutions with few channels compute something else."""


def in_float32(like: Tensor) -> torch.autocast:
    """Returns the context that a loss is computed in: no autocast on the device of a tensor.

    Losses compare what is nearly equal once there is little left to learn, and exponentiate it. bfloat16 has 8 bits: a similarity of 0.99
    becomes one of three neighbours, and the difference of two of them noise. What a loss reads may be bfloat16, and has to be cast first.
    """
    return torch.autocast(like.device.type, enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 if the hardware supports it natively (CUDA 8.0 or later, AVX512-BF16, AMX), else float32.

    A processor has to be faster in it too (`foundation.machine.bfloat16`).
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native and bfloat16_pays() else torch.float32


@torch.no_grad()
def dtype_for(model: nn.Module, features: Mapping[str, Tensor], dtype: torch.dtype, label: str, progress: Progress) -> torch.dtype:
    """Returns `dtype` if the model computes in it what it does in float32, else float32: some models mix dtypes under autocast (DeBERTa,
    X-MOD), and some kernels are wrong.

    Args:
        model: The model on its device.
        features: Features of a few rows on the same device.
        dtype: What the hardware runs fast.
        label: Start of the warning if the model does not run in bfloat16.
        progress: Receives the warning.
    """
    if dtype == torch.float32:
        return dtype
    try:
        with modes_kept(model):
            for module in model.modules():  # as in training, but without dropout and running means
                module.training = isinstance(module, nn.Linear)
            expected = _values(model(**features))
            with torch.autocast(next(model.parameters()).device.type, dtype):
                apart = (_values(model(**features)) - expected).norm() / expected.norm().clamp(min=1e-12)
    except RuntimeError as error:
        kind = getattr(getattr(model, "config", None), "model_type", "model")
        progress.warn(f"{label}: this {kind} does not run in bfloat16 ({one_line(error)}); it trains in float32")
        return torch.float32
    if apart > MOST_APART:
        kind = getattr(getattr(model, "config", None), "model_type", "model")
        progress.warn(f"{label}: this {kind} computes something else in bfloat16 here ({apart:.0%} of its outputs); it trains in float32")
        return torch.float32
    return dtype


def _values(outputs: Any) -> Tensor:
    """Returns the first output of a model, float32."""
    values: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0] if isinstance(outputs, tuple | Mapping) else outputs.logits
    return values.float()
