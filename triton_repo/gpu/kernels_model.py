"""Triton Python model on the fused kernels: `cpu_model`, whose engine runs on the GPU of its instance. Runs inside the server.

Beside what `cpu_model` needs, its folder holds plan.safetensors and the modules that run it, under `compress` and `export`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # this folder is hashed: nothing may be added to it
shutil.rmtree(Path(__file__).parent / "__pycache__", ignore_errors=True)  # Python wrote this file's bytecode before its first line ran
sys.path.insert(0, str(Path(__file__).parent))

import torch
from cpu_model import TritonPythonModel as OnCpu  # type: ignore[import-not-found]


class TritonPythonModel(OnCpu):  # type: ignore[misc]
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Takes the GPU of this instance, then does what `cpu_model` does."""
        if args["model_instance_kind"] == "GPU":
            torch.cuda.set_device(int(args["model_instance_device_id"]))
        super().initialize(args)
