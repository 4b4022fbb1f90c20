"""The table of engines, one row of facts per engine. Other code tests a fact, never a name:

    ENGINES[engine].cpu_only        not  engine == "openvino"

To add an engine, add a row to `ENGINES` and a file of the same name in `export/engines/` that builds and opens the engine
(`export.engines.spec.EngineModule`). The report lists engines in the order of the rows.
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
    cuda_only: bool = False
    """Whether the engine needs a CUDA device."""
    own_kernels: bool = False
    """Whether the Triton repository has a model of its own for it, with our kernels in its folder."""
    builds: bool = True
    """Whether the engine is built from the ONNX graph; False if it runs the checkpoint itself."""
    stores: tuple[Literal["float", "int8"], ...] = ()
    """Weights that it writes to a file other than `model.onnx`; `compress plan` counts those bytes."""
    probed: bool = False
    """Whether it can output intermediate tensors, so that parity compares layer by layer."""
    bf16_float_part: bool = False
    """Whether the float part of its int8 engines may run in bf16 if the CPU supports it."""
    fp16_float_part: bool = False
    """Whether the float part of its int8 engines runs in fp16 where the recipe asks for that, from the files of fp32."""
    half_graph: bool = False
    """Whether its graph says which parts run in 16-bit floats (`export.graph.halves`), fp16 or bf16."""
    token_scales_in_graph: bool = False
    """Whether dynamic int8 needs a graph that computes the scale of each token."""
    rounds_blocks: bool = False
    """Whether it multiplies integer weights by inputs that it rounds to int8 itself, with a scale for each block of them
    (`export.parity.own_rounding`)."""
    float_tokens: bool = False
    """Whether it multiplies the weights of dynamic int8 by float activations, so that no sum of integers can saturate."""
    proved: bool = False
    """Whether the engine is proved ahead of time, or recorded as not runnable, where it cannot run; a run then goes on."""
    all_tokens: bool = False
    """Whether its graph computes the tokens of the last layer that no head reads, too (`export.graph.unread_tokens`)."""
    generates: bool = False
    """Whether it answers prompts from a cache of keys and values; such engines are for tasks whose answers are tokens."""
    encoder_decoder: bool = False
    """Whether what it answers from is an encoder-decoder, and not a decoder alone."""
    proposed_to: bool = False
    """Whether a draft or the text may propose tokens to it (`foundation.core.speculation`)."""
    threads_property: str = ""
    """Its property with the number of CPU threads, where the server may run it with others than the target's; empty: it does not."""
    serves: Literal["cpu", "cuda"] | None = None
    """Device on which the Triton repository serves this engine; None if it does not."""


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
        threads_property="intra_op_num_threads",
        serves="cpu",
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
        threads_property="INFERENCE_NUM_THREADS",
        serves="cpu",
    ),
    "openvino_genai": EngineFacts(
        title="OpenVINO GenAI",
        where="CPU; language models that answer",
        library="openvino-genai",
        marker="inverted",
        cpu_only=True,
        stores=("float", "int8"),
        bf16_float_part=True,
        float_tokens=True,
        generates=True,
        proposed_to=True,
        serves="cpu",
    ),
    "onnxruntime_decoder": EngineFacts(
        title="ONNX Runtime, decoder",
        where="CPU; decoders of Llama's layers that answer",
        library="onnxruntime",
        marker="square",
        cpu_only=True,
        stores=("float", "int8"),
        rounds_blocks=True,
        generates=True,
        serves="cpu",
    ),
    "openvino_seq2seq": EngineFacts(
        title="OpenVINO, encoder-decoder",
        where="CPU; encoder-decoders that answer",
        library="openvino",
        marker="inverted",
        cpu_only=True,
        stores=("float", "int8"),
        bf16_float_part=True,
        float_tokens=True,
        generates=True,
        encoder_decoder=True,
        serves="cpu",
    ),
    "tensorrt": EngineFacts(
        title="TensorRT",
        where="NVIDIA GPUs; proved ahead of time without one",
        library="tensorrt",
        marker="triangle",
        half_graph=True,
        all_tokens=True,  # keys and values of a layer with fewer queries come out in float32, and no GPU has timed that
        proved=True,
        serves="cuda",
    ),
    "torch_kernels": EngineFacts(
        title="torch, fused kernels",
        where="NVIDIA GPUs; int8 encoders of BERT's layers",
        library="triton",
        marker="inverted",
        cuda_only=True,
        own_kernels=True,
        fp16_float_part=True,
        stores=("int8",),
        probed=True,
    ),
}

EngineName = Annotated[str, Named(ENGINES)]
"""Name of an engine; in a recipe it must be a row of `ENGINES`."""
DEFAULT_ENGINES: Final = ("openvino", "onnxruntime")
REFERENCE: Final = "torch"
"""The engine that all others are compared with."""


def served_on(device: str, *, generates: bool = False, encoder_decoder: bool = False) -> tuple[str, ...]:
    """Returns the engines that the Triton repository serves on a device, the default one first.

    Args:
        device: cpu or cuda.
        generates: For tasks whose answers are tokens.
        encoder_decoder: For those whose model is an encoder-decoder.
    """
    wanted = (device, generates, encoder_decoder)
    found = [name for name, row in ENGINES.items() if (row.serves, row.generates, row.encoder_decoder) == wanted]
    return tuple(sorted(found, key=lambda name: name != DEFAULT_ENGINES[0]))


def device_of(engine: str, device: str) -> str:
    """Returns the device that an engine runs on if the target device is `device`."""
    return "cpu" if ENGINES[engine].cpu_only else device
