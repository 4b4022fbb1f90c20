"""The engines that this machine can open, by name."""

from __future__ import annotations

from pathlib import Path

from export.engines.spec import Engine, EngineSpec


def open_engine(spec: EngineSpec) -> Engine:
    """Opens an engine in this process; raises what its library raises where it does not run here."""
    match spec.engine:
        case "openvino":
            from export.engines.openvino import OpenVino

            return OpenVino(spec)
        case "onnxruntime":
            from export.engines.onnxruntime import OnnxRuntime

            return OnnxRuntime(spec)
        case "torch":
            from export.engines.torch_engine import Torch

            return Torch(spec)
        case "tensorrt":
            from export.engines.tensorrt import TensorRt

            return TensorRt(Path(spec.path))
