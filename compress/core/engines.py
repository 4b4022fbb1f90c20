"""The table of engines: one row of facts for each. Other code asks for a fact, never for a name.

    ENGINES[engine].cpu_only        not  engine == "openvino"

To add an engine, add a row to `ENGINES` and a file of the same name to `export/engines/`, which says how the engine is built and opened
(`export.engines.spec.EngineModule`). The order of the rows is the order of the columns in the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from compress.core.named import Named

Marker = Literal["circle", "square", "diamond", "triangle"]
"""Shapes that tell engines apart in a chart, without colour."""


@dataclass(frozen=True)
class EngineFacts:
    """All that sets an engine apart, apart from its code."""

    title: str
    """Its name in prose."""
    where: str
    """What it runs on, for `compress list engines`."""
    library: str
    """Distribution whose version goes into the manifest."""
    marker: Marker
    """Its shape in charts."""
    cpu_only: bool = False
    """Whether it has no CUDA device."""
    builds: bool = True
    """Whether it builds files from the ONNX graph; False for an engine that runs the checkpoint itself."""
    stores: tuple[Literal["float", "int8"], ...] = ()
    """Which weights it keeps in a file of its own, beside `model.onnx`; `compress plan` counts those bytes."""
    probed: bool = False
    """Whether it shows tensors inside its graph, so that parity compares layer by layer."""
    bf16_float_part: bool = False
    """Whether the float part of its int8 engines may run in bf16 where the processor has it."""
    token_scales_in_graph: bool = False
    """Whether dynamic int8 needs a graph that computes the scale of each token."""
    serves: Literal["cpu", "cuda"] | None = None
    """The device on which the Triton repository serves this engine."""


ENGINES: Mapping[str, EngineFacts] = {
    "torch": EngineFacts(title="torch", where="CPU, CUDA; the baseline", library="torch", marker="circle", builds=False),
    "onnxruntime": EngineFacts(
        title="ONNX Runtime",
        where="CPU",
        library="onnxruntime",
        marker="square",
        stores=("int8",),
        probed=True,
        token_scales_in_graph=True,
    ),
    "openvino": EngineFacts(
        title="OpenVINO",
        where="CPU (default)",
        library="openvino",
        marker="diamond",
        cpu_only=True,
        stores=("float", "int8"),
        probed=True,
        bf16_float_part=True,
        serves="cpu",
    ),
    "tensorrt": EngineFacts(
        title="TensorRT", where="NVIDIA GPUs; proved ahead of time without one", library="tensorrt", marker="triangle", serves="cuda"
    ),
}

EngineName = Annotated[str, Named(ENGINES)]
"""The name of an engine; in a recipe it has to be a row of `ENGINES`."""
DEFAULT_ENGINES: Final = ("openvino", "onnxruntime")
REFERENCE: Final = "torch"
"""The engine that every other one is compared with."""


def served_on(device: str) -> str:
    """Returns the engine that the Triton repository serves on a device."""
    return next(name for name, row in ENGINES.items() if row.serves == device)


def device_of(engine: str, device: str) -> str:
    """Returns the device that an engine runs on where the target asks for `device`."""
    return "cpu" if ENGINES[engine].cpu_only else device
