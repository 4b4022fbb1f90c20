"""The device that torch computes on in this process. The engines have their own: `target.device` of the recipe."""

from __future__ import annotations

import torch


def computing_device() -> torch.device:
    """Returns the GPU if torch sees one, else the CPU: for training, evaluation, calibration and quantization.

    Not for the quantization layer by layer of models that do not fit into memory (`quantize.streaming`), which stays on the CPU.
    """
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
