"""ONNX Runtime: the portable reference.

Float models run as they are, with all graph optimizations. For int8 on x86 its fast kernels multiply uint8 by int8, so that the Q/DQ
graph is stored a second time with uint8 activations (`export.graph.qdq.uint8_activations`): the same integers, moved by the zero-point 128;
convolutions are spelled out in integers there (`export.graph.integer_convolutions`).
Threads do not spin while they wait, since a server has other work for the cores.

The share of int8 is read off the graph that the session itself optimized: fused nodes keep the name of the GEMM they came from.

A build of ONNX Runtime without CUDA would run on the CPU in silence; asked for CUDA, it is refused.

Left out: providers other than CPU and CUDA.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from export.engines.block_products import reported
from export.engines.module import Probe, static_layers
from export.engines.spec import DYNAMIC_GRAPH, NO_BLOCKS, BuildRequest, EngineSpec, Logits, Placement
from export.stored_weights import BLOCKS, attribute
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array, Features
from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from foundation.schemes.table import SchemeFacts, of_precision, weight_only
from foundation.standalone.onnx_decoder import session_options

if TYPE_CHECKING:
    import onnx

    from export.parity.parity import LayerParity
    from foundation.artifacts import exported

INTEGER = frozenset(
    {"QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QGemm", "QLinearConv", "ConvInteger", "QAttention"}
)
FLOAT = frozenset({"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "TransposeMatMul", "Conv", "FusedConv", "Attention", "MultiHeadAttention"})
WEIGHTS = {4: weight_only("int4"), 8: weight_only("int8")}
"""Operation of a product with codes of so many bits and a float input."""
ACTIVATIONS = frozenset({"Relu", "Sigmoid", "HardSigmoid", "Tanh", "LeakyRelu", "Clip"})
"""Operations that may be merged with a convolution."""
NO_FP8 = "ONNX Runtime has no FP8 products: it would multiply in float; TensorRT has them, from compute capability 8.9 on"
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
FLOATS = {"tensor(float)": "fp32", "tensor(float16)": "fp16", "tensor(bfloat16)": "bf16"}


def refusal(precision: str, model: Path) -> str | None:
    """Returns in one line why ONNX Runtime cannot run a graph of this precision; None where it can."""
    scheme = of_precision(precision)
    if scheme is not None and scheme.activations == "blocks":
        return NO_BLOCKS
    if scheme is None or scheme.integer:
        return None
    return NO_FP8 if scheme.needs_float8 else f"ONNX Runtime on a CPU dequantizes integers alone, and these weights are {scheme.numbers}"


def absence(device: str) -> str | None:
    """Returns in one line why ONNX Runtime cannot run on a device of this machine; None where it can. By itself it would take the CPU."""
    missing = PROVIDERS[device] not in onnxruntime.get_available_providers()
    return f"this build of ONNX Runtime has no {PROVIDERS[device]}: pip install onnxruntime-gpu" if missing else None


def build(request: BuildRequest) -> Iterator[exported.Engine]:
    """Writes the graph with uint8 activations where it is static int8; yields the one mode."""
    scheme = of_precision(request.precision)
    file = request.model
    if scheme is not None and scheme.activations == "dynamic":
        file = request.model.with_name(DYNAMIC_GRAPH)
    elif scheme is not None and scheme.activations == "static":
        file = with_uint8_activations(request.model, request.folder)
    yield request.entry("dynamic", [file, file.with_name(f"{file.name}.data")], properties=properties(request.target.num_threads))


def write_graph(scheme: SchemeFacts, floating: Path, checkpoint: Checkpoint, model: Path) -> None:
    """Writes the graph of dynamic int8 that computes the scale of each token itself; ONNX Runtime has no such products of its own."""
    if scheme.activations == "dynamic":
        from export.graph.qdq_schemes import insert_dynamic

        insert_dynamic(Graph(floating), checkpoint, model.with_name(DYNAMIC_GRAPH))


def rounding(scheme: SchemeFacts) -> None:
    """Returns None: the graph says how tokens are rounded."""


def layers(scheme: SchemeFacts | None, model: Path, probe: Probe) -> list[LayerParity]:
    """Compares the int8 layers with torch, those with scales of tokens in the graph too."""
    if scheme is None or scheme.activations != "dynamic":
        return static_layers(scheme, model, probe)
    from export.parity.dynamic import compare_all, dynamic_gemms

    gemms = dynamic_gemms(Graph(model.with_name(DYNAMIC_GRAPH)))
    return compare_all(gemms, probe(gemms)) if gemms else []


def properties(threads: int) -> dict[str, str]:
    """Returns the settings of a session, which the server repeats: its attributes, and entries of its configuration, whose names have dots.

    Args:
        threads: CPU threads of the engine.
    """
    return {
        "intra_op_num_threads": str(threads),
        "inter_op_num_threads": "1",
        "session.intra_op.allow_spinning": "0",
        # int4 weights are multiplied with float activations, as in torch; by default they would become int8
        "session.qdq_matmulnbits_accuracy_level": "1",
    }


def open_engine(spec: EngineSpec) -> OnnxRuntime:
    """Opens the file of `build`."""
    return OnnxRuntime(spec)


def with_uint8_activations(model: Path, folder: Path) -> Path:
    """Writes a Q/DQ graph once more with uint8 activations and integer convolutions: `model_uint8.onnx` in `folder`; returns its path."""
    # Imported here: they bring torch, which would start its threads in the process that runs the engine.
    from export.graph.integer_convolutions import integer_convolutions
    from export.graph.onnx import save
    from export.graph.qdq import uint8_activations

    return save(integer_convolutions(uint8_activations(Graph(model).load())), folder / "model_uint8.onnx")


class OnnxRuntime:
    """An engine from an ONNX file."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        if (lacking := absence(spec.device)) is not None:
            raise InputError("target.device", f"{spec.device} given", lacking)
        self._session = self._opened(spec.path, session_options(properties(spec.threads)))

    def predict(self, features: Features) -> Logits:
        """Returns logits float32 [n, C]."""
        (logits,) = self._session.run(["logits"], dict(features))
        answer: Logits = np.asarray(logits, dtype=np.float32)
        return answer

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node from the session's optimized graph; it is the same for every shape."""
        nodes = Graph(Path(self._spec.path)).structure.node
        activated = {node.input[0]: node.output[0] for node in nodes if node.op_type in ACTIVATIONS}
        outputs = {node.name: (node.output[0], activated.get(node.output[0], node.output[0])) for node in nodes}
        found: dict[str, str] = {}
        for node in self._optimized_graph().node:
            precision = "int8" if node.op_type in INTEGER else self._spec.float_precision if node.op_type in FLOAT else None
            precision = WEIGHTS[attribute(node, "bits")] if node.op_type == BLOCKS else precision
            if precision is not None:
                found |= {gemm: precision for gemm in gemms if _comes_from(node.name, gemm, outputs[gemm])}
        return found

    def reported(self) -> dict[str, str]:
        """Returns what products with integer weights multiply."""
        return reported(self._optimized_graph().node)

    def placement(self) -> Placement:
        """Returns the first provider of the session, and the type of its logits."""
        provider = self._session.get_providers()[0]
        device = next((name for name, known in PROVIDERS.items() if known == provider), provider)
        (logits,) = self._session.get_outputs()
        return {"device": device, "provider": provider, "float_precision": FLOATS[logits.type]}

    def probe(self, tensors: Sequence[str], features: Features) -> dict[str, Array]:
        """Returns tensors of the stored model, opened once more with these as outputs; integer codes come as int8."""
        path = Path(self._spec.path)
        model = Graph(path).load(external=False)
        quantized = {node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
        for name in tensors:
            kind = TensorProto.UINT8 if name in quantized else TensorProto.FLOAT
            model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
        options = session_options(properties(self._spec.threads))
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        session = self._opened(model.SerializeToString(), options)
        values = session.run(list(tensors), dict(features))
        return {name: _codes(value) if name in quantized else value for name, value in zip(tensors, values, strict=True)}

    def _optimized_graph(self) -> onnx.GraphProto:
        with tempfile.TemporaryDirectory() as folder:
            options = session_options(properties(self._spec.threads))
            options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
            self._opened(self._spec.path, options)
            return Graph(Path(options.optimized_model_filepath)).load(external=False).graph

    def _opened(self, model: str | bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(model, options, providers=[PROVIDERS[self._spec.device]])


def _comes_from(name: str, gemm: str, outputs: Collection[str]) -> bool:
    """Whether an optimized node was made of a GEMM: it keeps its name, gets a prefix with an activation, a suffix with a scale.

    A convolution in blocked layout is called after its output, or after the output of the activation which was merged with it.
    """
    name = name.removeprefix("fused ")
    return name == gemm or name.startswith(f"{gemm}/") or name in [f"{output}_nchwc" for output in outputs]


def _codes(values: NDArray[np.uint8]) -> NDArray[np.int8]:
    codes: NDArray[np.int8] = (values.astype(np.int16) - 128).astype(np.int8)
    return codes
