"""The table of engines: a row for each, with the facts that other code needs without importing the engine. Other code tests a fact, never
a name:

    ENGINES[engine].cpu_only        not  engine == "openvino"

To add an engine, add a row to `ENGINES` and a file of the same name in `export/engines/` that builds and opens the engine. What the engine
does differently from others is a function of that file (`export.engines.module`). The report lists engines in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from foundation.core.named import Named

Marker = Literal["circle", "square", "diamond", "triangle", "inverted"]
"""Marker shapes in charts, so that engines can be distinguished without colour."""


@dataclass(frozen=True)
class EngineFacts:
    """The facts about one engine that other code needs."""

    title: str
    """Name of the engine in prose."""
    where: str
    """Devices it runs on, for `compress list engines`."""
    library: str
    """Distribution whose version is recorded in the manifest."""
    marker: Marker
    """Marker shape in charts."""
    cpu_only: bool = False
    """Whether the engine cannot use a CUDA device."""
    stores: tuple[Literal["float", "int8"], ...] = ()
    """Weights that it writes to a file other than `model.onnx`; `compress plan` counts those bytes."""
    probed: bool = False
    """Whether it can output intermediate tensors, so that parity compares layer by layer."""
    float_tokens: bool = False
    """Whether it multiplies the weights of dynamic int8 by float activations, so that no sum of integers can saturate."""
    products_saturate: bool = False
    """Whether its products of two int8 activations saturate at 16 bits on a processor without VNNI or AMX."""
    multiplies_blocks: bool = False
    """Whether its products of int4 weights and int8 activations in blocks (w4a8-block) are faster than those with floats (w4a16)."""
    offsets: bool = False
    """Whether int4 weights can have real offsets in place of integer zero points (`group_scales: k_quant`)."""
    generates: Literal["decoder", "encoder-decoder"] | None = None
    """Architecture with which it answers prompts, with a cache of keys and values; None if it does not. Such engines are for tasks whose
    answers are tokens."""
    proposed_to: bool = False
    """Whether a draft or the text may propose tokens to it (`foundation.core.speculation`)."""
    threads_property: str = ""
    """Its property with the number of CPU threads, where the server may run it with others than the target's; empty: it does not."""
    serves: Literal["cpu", "cuda", "kernels"] | None = None
    """Which Triton repository serves this engine: for the CPU, for plans on a GPU, or a model of its own with our kernels in its folder;
    None if none does."""
    published: Literal[".onnx", ".xml"] | None = None
    """Ending of its file, where `compress publish` writes folders from it; None if it does not."""


ENGINES: Mapping[str, EngineFacts] = {
    "torch": EngineFacts(title="torch", where="CPU, CUDA; the baseline", library="torch", marker="circle", offsets=True),
    "onnxruntime": EngineFacts(
        title="ONNX Runtime",
        where="CPU",
        library="onnxruntime",
        marker="square",
        stores=("int8",),
        probed=True,
        threads_property="intra_op_num_threads",
        serves="cpu",
        published=".onnx",
    ),
    "openvino": EngineFacts(
        title="OpenVINO",
        where="CPU (default)",
        library="openvino",
        marker="diamond",
        cpu_only=True,
        stores=("float", "int8"),
        probed=True,
        products_saturate=True,
        threads_property="INFERENCE_NUM_THREADS",
        serves="cpu",
        published=".xml",
    ),
    "openvino_genai": EngineFacts(
        title="OpenVINO GenAI",
        offsets=True,
        where="CPU; language models that answer",
        library="openvino-genai",
        marker="inverted",
        cpu_only=True,
        stores=("float", "int8"),
        float_tokens=True,
        generates="decoder",
        proposed_to=True,
        serves="cpu",
        published=".xml",
    ),
    "onnxruntime_decoder": EngineFacts(
        multiplies_blocks=True,
        title="ONNX Runtime, decoder",
        where="CPU; decoders of Llama's layers that answer",
        library="onnxruntime",
        marker="square",
        cpu_only=True,
        stores=("float", "int8"),
        generates="decoder",
        serves="cpu",
    ),
    "openvino_seq2seq": EngineFacts(
        title="OpenVINO, encoder-decoder",
        offsets=True,
        where="CPU; encoder-decoders that answer",
        library="openvino",
        marker="inverted",
        cpu_only=True,
        stores=("float", "int8"),
        float_tokens=True,
        generates="encoder-decoder",
        serves="cpu",
    ),
    "tensorrt": EngineFacts(
        title="TensorRT",
        where="NVIDIA GPUs; proved ahead of time without one",
        library="tensorrt",
        marker="triangle",
        serves="cuda",
    ),
    "torch_kernels": EngineFacts(
        title="torch, fused kernels",
        where="NVIDIA GPUs; int8 encoders of BERT's, T5's and ViT's layers",
        library="triton",
        marker="inverted",
        stores=("int8",),
        probed=True,
        serves="kernels",
    ),
    "torch_kernels_decoder": EngineFacts(
        title="torch, fused kernels, decoder",
        where="NVIDIA GPUs; decoders of GPT-2's and Llama's layers that answer",
        library="triton",
        marker="inverted",
        stores=("int8",),
        probed=True,
        generates="decoder",
        serves="kernels",
    ),
    # rows are added above this line
}

EngineName = Annotated[str, Named(ENGINES)]
"""Name of an engine; in a recipe it must be a row of `ENGINES`."""
DEFAULT_ENGINES: Final = ("openvino", "onnxruntime")
REFERENCE: Final = "torch"
"""The engine that all others are compared with."""
SERVERS: Mapping[str, str] = {"triton": "Triton"}
"""Servers behind which a model is evaluated, and their names in prose. The report lists them after the engines; a stage that writes the
models of another server names it in them (`foundation.artifacts.triton.TritonModel.server`)."""


def served_on(device: str, *, generates: bool = False, encoder_decoder: bool = False) -> tuple[str, ...]:
    """Returns the engines that the Triton repository serves on a device, the default one first.

    Args:
        device: cpu, or cuda for plans; kernels for our own kernels, which have a repository of their own.
        generates: For tasks whose answers are tokens.
        encoder_decoder: For those whose model is an encoder-decoder.
    """
    wanted = (device, ("encoder-decoder" if encoder_decoder else "decoder") if generates else None)
    found = [name for name, row in ENGINES.items() if (row.serves, row.generates) == wanted]
    return tuple(sorted(found, key=lambda name: name != DEFAULT_ENGINES[0]))


def device_of(engine: str, device: str) -> str:
    """Returns the device that an engine runs on if the target device is `device`."""
    return "cpu" if ENGINES[engine].cpu_only else device
