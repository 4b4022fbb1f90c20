"""OpenVINO: the fastest int8 on x86, built from the Q/DQ graph and read back from its own files.

The model is stored as OpenVINO's IR (xml, bin) with weights as they are (no fp16 compression). It is compiled in one of two modes:

- dynamic: once, for every batch and length;
- static: for each (batch, sequence) by itself, on first use. Known sizes let the compiler fuse attention. A batch of another size is
  filled up to the next compiled batch with copies of its last row, or split.

Where the float part runs in bf16, tables of embeddings are stored in bf16 too (`export.engines.openvino_tables`), in files of their own.

The precision hint is always given: on processors with bf16 the default would be bf16. Threads are not pinned to cores: pinned, several
engines on one machine would be given the same first cores.

Left out: devices other than the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import openvino
from numpy.typing import NDArray

from export.engines.openvino_tables import with_half_tables
from export.engines.spec import NO_BLOCKS, BuildRequest, EngineSpec, Logits, Placement
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array, Features
from foundation.schemes.table import of_precision, weight_only
from foundation.standalone import openvino_request
from foundation.standalone.openvino_request import Request, compiled, for_this_cpu, reshape

if TYPE_CHECKING:
    from export.choices import FloatSetting
    from foundation.artifacts import exported

HALVED = "openvino_bf16.xml"
HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
INT4 = weight_only("int4")
PRECISIONS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "i8": "int8", "u8": "int8", "i4": INT4, "u4": INT4}
GROUP = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""Kept in the model, so that it is compiled alike wherever it is timed, evaluated or served."""
READ_BACK = ("INFERENCE_PRECISION_HINT", GROUP, "KV_CACHE_PRECISION")
"""Settings that decide what a compiled model rounds."""
NO_FP8 = "OpenVINO on a CPU has no FP8 products: it would multiply in float; TensorRT has them, from compute capability 8.9 on"
WEIGHTS = "i8"
"""Precision in the runtime model of a GEMM with int8 weights and a float input: the type of the weights, both where it quantizes its input
by itself and where it multiplies in float."""
WEIGHT_LAYER = "FullyConnected"
CONVOLUTIONS = frozenset({"Convolution", "GroupConvolution"})
GEMM_LAYERS = frozenset({WEIGHT_LAYER, "MatMul", "Convolution"})
FUSED_LAYERS = frozenset({"Subgraph", "ScaledDotProductAttention", "MHA"})


def refusal(precision: str, model: Path) -> str | None:
    """Returns in one line why OpenVINO cannot run a graph of this precision; None where it can."""
    scheme = of_precision(precision)
    if scheme is not None and scheme.activations == "blocks":
        return NO_BLOCKS
    if scheme is None:
        return None
    if scheme.needs_float8:
        return NO_FP8
    if scheme.activations != "float":
        return None
    from export.graph.qdq_schemes import uneven

    short = uneven(Graph(model))
    return None if short is None else f"OpenVINO reads groups of equal width alone: {short}; give a group_size that divides them"


def absence(device: str) -> str | None:
    """Returns None: OpenVINO runs on every CPU."""
    return None


def build(request: BuildRequest) -> Iterator[exported.Engine]:
    """Converts the graph, unless the fp32 build did; yields the static mode, the dynamic one, and static with a bf16 float part."""
    if request.shared == request.folder:
        convert(request.model, request.folder, runtime_options(request.precision, request.model))
    network, threads = files(request.shared)[0], request.target.num_threads
    halved = request.folder / HALVED
    stored = with_half_tables(network, halved) if request.float_precision == "bf16" else network
    settings = properties(threads, request.float_precision)
    for mode in ("static", "dynamic"):
        yield request.entry(mode, pair(stored), properties=settings)
    if request.bf16_float_part:
        half = with_half_tables(network, halved)
        yield request.entry("static", pair(half), float_precision="bf16", properties=properties(threads, "bf16"))


def open_engine(spec: EngineSpec) -> OpenVino:
    """Opens the files of `build`."""
    return OpenVino(spec)


def runtime_options(precision: str, model: Path) -> dict[str, str]:
    """Returns OpenVINO's settings for quantizing activations by itself: in groups for dynamic int8, not at all for int4 weights."""
    scheme = of_precision(precision)
    if scheme is None or scheme.activations == "static":
        return {}
    if scheme.activations == "float":
        return {GROUP: "0"}
    from export.graph.qdq_schemes import group_size

    return {GROUP: str(group_size(Graph(model)))}


def convert(onnx: Path, folder: Path, runtime_options: Mapping[str, str] | None = None) -> tuple[Path, Path]:
    """Converts an ONNX model to `openvino.xml` and `openvino.bin` in `folder`, and returns their paths.

    Args:
        onnx: The model.
        folder: Where to write.
        runtime_options: Properties that the model is compiled with wherever it is read; kept in the xml.
    """
    model = openvino.Core().read_model(onnx)
    for name, value in (runtime_options or {}).items():
        model.set_rt_info(value, ["runtime_options", name])
    xml, weights = files(folder)
    openvino.save_model(model, xml, compress_to_fp16=False)
    return xml, weights


def files(folder: Path) -> tuple[Path, Path]:
    """Returns the paths of what `convert` wrote to `folder`: network and weights."""
    return pair(folder / "openvino.xml")


def pair(network: Path) -> tuple[Path, Path]:
    """Returns the paths of a network and of its weights, which are next to it."""
    return network, network.with_suffix(".bin")


def properties(threads: int, float_precision: str) -> dict[str, str]:
    """Returns the settings that a model is compiled with, wherever it is timed, evaluated or served."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(threads),
        "INFERENCE_PRECISION_HINT": HINTS[float_precision],
        "ENABLE_CPU_PINNING": "NO",
    }


def reported(compiled: openvino.CompiledModel) -> dict[str, str]:
    """Returns the settings of a compiled model that decide its precision, as it reports them."""
    known = compiled.get_property("SUPPORTED_PROPERTIES")
    values = {name: compiled.get_property(name) for name in READ_BACK if name in known}
    return {name: value.get_type_name() if isinstance(value, openvino.Type) else str(value) for name, value in values.items()}


@functools.cache
def computes_bf16() -> bool:
    """Whether this processor has bf16 arithmetic, as OpenVINO sees it."""
    return openvino_request.computes_bf16(openvino.Core())


def float_part(setting: FloatSetting) -> FloatSetting:
    """Returns the setting if this processor computes bf16; it computes no fp16."""
    return setting if setting != "fp16" and computes_bf16() else "fp32"


class OpenVino:
    """An engine from the files of `build`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._core = openvino.Core()
        self._model = self._core.read_model(spec.path)
        self._properties = properties(spec.threads, spec.float_precision)
        self._compiled: dict[tuple[int, ...], Request] = {}
        if spec.mode == "dynamic":
            self._compile(())

    def predict(self, features: Features) -> Logits:
        """Returns logits float32 [n, C]."""
        if self._spec.mode == "dynamic":
            return self._compile(()).infer(features)
        parts = [self._compile(_shape(part)).infer(part)[:rows] for rows, part in chunks(features, self._spec.batch_sizes)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node from the runtime model; see `_find` for how its layers are recognised."""
        shape = () if self._spec.mode == "dynamic" else (batch,) if sequence is None else (batch, sequence)
        layers = [RuntimeLayer(node) for node in self._compile(shape).model.get_runtime_model().get_ops()]
        readers = _readers(self._model)
        found = {gemm: _find(gemm, readers.get(gemm, []), layers) for gemm in gemms}
        if gemms and found[gemms[-1]] is None:  # a GEMM without bias at the end goes by the name of what the graph returns, weight and all
            last = self._model.get_results()[0].input_value(0).get_node().get_friendly_name()
            found[gemms[-1]] = next((layer for layer in layers if layer.is_gemm and layer.comes_from(last)), None)
        found |= _by_elimination(found, layers)
        told = {gemm: layer.precision_of(gemm) for gemm, layer in found.items() if layer is not None}
        names, scheme = PRECISIONS, of_precision(self._spec.precision)
        if scheme is not None and scheme.activations == "dynamic":
            told = {gemm: precision for gemm, precision in told.items() if precision != WEIGHTS}
        elif scheme is not None and scheme.activations == "float":
            names = PRECISIONS | {WEIGHTS: weight_only("int8")}
        return {gemm: names.get(precision, precision) for gemm, precision in told.items()}

    def placement(self) -> Placement:
        """Returns the settings that one of the compiled models reports: without bf16 arithmetic it is float32 (`for_this_cpu`)."""
        compiled = next(iter(self._compiled.values())).model
        (device,) = compiled.get_property("EXECUTION_DEVICES")
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return {"device": device.lower(), "provider": f"OpenVINO {device}", "float_precision": PRECISIONS[precision]}

    def reported(self) -> dict[str, str]:
        """Returns the settings that one of the compiled models reports."""
        return reported(next(iter(self._compiled.values())).model)

    def probe(self, tensors: Sequence[str], features: Features) -> dict[str, Array]:
        """Returns tensors of the stored model, which is compiled once more with these as outputs."""
        model = self._core.read_model(self._spec.path)
        outputs = {name: output for node in model.get_ops() for output in node.outputs() for name in output.get_names()}
        dequantized = {name: tensor for name in tensors if (tensor := _dequantized(outputs[name]))}
        wanted = [dequantized[name][0] if name in dequantized else outputs[name] for name in tensors]
        added = dict(zip(tensors, model.add_outputs(wanted), strict=True))
        positions = {name: model.get_result_index(output) for name, output in added.items()}
        if self._spec.mode == "static":
            reshape(model, _shape(features))
        results = self._core.compile_model(model, "CPU", for_this_cpu(self._core, self._properties))(dict(features))
        found = {name: np.array(results[position]) for name, position in positions.items()}
        return {name: _codes(found[name], dequantized[name][1]) if name in dequantized else found[name] for name in tensors}

    def _compile(self, shape: tuple[int, ...]) -> Request:
        """Returns the compiled model for a shape, () for any."""
        if shape not in self._compiled:
            self._compiled[shape] = Request(compiled(self._core, self._model, shape, self._properties), known=bool(shape))
        return self._compiled[shape]


class RuntimeLayer:
    """One layer of the runtime model."""

    def __init__(self, node: openvino.Node) -> None:
        info = {key: str(node.get_rt_info()[key].value) for key in ("layerType", "runtimePrecision", "originalLayersNames")}
        inputs = node.input_values()
        self.is_gemm, self.is_fused = info["layerType"] in GEMM_LAYERS, info["layerType"] in FUSED_LAYERS
        self.is_product = info["layerType"] == WEIGHT_LAYER
        self.is_subgraph, self.precision = info["layerType"] == "Subgraph", info["runtimePrecision"]
        self.types = [str(value.get_element_type().get_type_name()) for value in inputs]
        self.origins = [origin for origin in info["originalLayersNames"].split(",") if origin]
        self.weight = inputs[1].get_node().get_friendly_name() if len(inputs) > 1 else ""

    def precision_of(self, gemm: str) -> str:
        """Returns the type that a GEMM in this layer multiplies.

        A Subgraph that attention became reads queries, keys, then scale and mask if there are any, and values: the products have the types
        of the first two and of the last, and a mask in float says nothing of them. The runtimePrecision belongs to one input.
        """
        product = gemm.rpartition("/")[2]
        if self.is_subgraph and product.startswith("qk"):
            return _widest(self.types[:2])
        if self.is_subgraph and product.startswith("pv"):
            return _widest(self.types[-1:])
        return _widest(self.types) if self.is_fused else self.precision

    def belongs_to(self, prefix: str) -> bool:
        """Whether a node whose name starts so went into it."""
        return any(origin.startswith(prefix) for origin in self.origins)

    def comes_from(self, *nodes: str) -> bool:
        """Whether one of these ONNX nodes went into it."""
        return any(comes_from(origin, node) for origin in self.origins for node in nodes)


def _find(gemm: str, readers: Sequence[str], layers: Sequence[RuntimeLayer]) -> RuntimeLayer | None:
    """Returns the layer that a GEMM became.

    A layer lists the nodes it was made of, but not always the GEMM: the last one of a graph is listed as its output, and one whose scale
    moved as a node of OpenVINO's own. Those are found by their weight. Attention became part of a fused layer; there the first product
    may be listed as the scaling that followed it, so that what reads the product in the stored model is looked for at last.
    """
    weight = f"{gemm.rpartition('/')[0]}.weight"
    return (
        next((layer for layer in layers if layer.is_gemm and layer.comes_from(gemm)), None)
        or next((layer for layer in layers if layer.is_gemm and (comes_from(layer.weight, gemm) or comes_from(layer.weight, weight))), None)
        or next((layer for layer in layers if layer.is_fused and layer.comes_from(gemm)), None)
        or next((layer for layer in layers if (layer.is_gemm or layer.is_fused) and layer.comes_from(*readers)), None)
    )


def _by_elimination(matched: Mapping[str, RuntimeLayer | None], layers: Sequence[RuntimeLayer]) -> dict[str, RuntimeLayer | None]:
    """Returns layers for the weight GEMMs that went into one without a name: one of those that are left, where all of them run alike.

    A norm whose factors were folded into the weights that read it leaves such products.
    """
    lost = [gemm for gemm, layer in matched.items() if layer is None and not gemm.rpartition("/")[2].startswith(("qk", "pv"))]
    left = [layer for layer in layers if layer.is_product and layer not in matched.values()]
    if len(lost) > len(left) or len({(layer.precision, *layer.types[:2]) for layer in left}) != 1:
        return {}
    return dict.fromkeys(lost, left[0])


def _widest(types: Sequence[str]) -> str:
    """Returns f32, bf16 or f16 where any of these types is that, the first one otherwise."""
    return next((precision for precision in ("f32", "bf16", "f16") if precision in types), types[0])


def _dequantized(codes: openvino.Output) -> tuple[openvino.Output, NDArray[np.float32]] | None:
    """Returns the tensor that the codes of a convolution's input are dequantized to, and its scale; None for any other tensor.

    As an output, int8 codes would stay signed. The convolution of the model itself reads them plus 128, as uint8. With signed inputs oneDNN
    halves the weights of convolutions on CPUs without VNNI, which rounds them, so that the probe would not be the model.
    """
    if codes.get_element_type().get_type_name() != "i8":
        return None
    node = codes.get_node()
    while node.get_type_name() != "Multiply":
        readers = codes.get_target_inputs()
        if not readers:
            return None
        node = next(iter(readers)).get_node()
        codes = node.output(0)
    if not any(reader.get_node().get_type_name() in CONVOLUTIONS for reader in codes.get_target_inputs()):
        return None
    scale = next(value.get_node() for value in node.input_values() if value.get_node().get_type_name() == "Constant")
    return codes, np.array(scale.data, dtype=np.float32)


def _codes(values: Array, scale: NDArray[np.float32]) -> NDArray[np.int8]:
    """Returns the codes that float32 values on a grid stand for."""
    codes: NDArray[np.int8] = np.rint(values / scale).astype(np.int8)
    return codes


def _readers(model: openvino.Model) -> dict[str, list[str]]:
    """Returns the names of the nodes that read each node of the stored model."""
    return {
        node.get_friendly_name(): [
            target.get_node().get_friendly_name() for value in node.outputs() for target in value.get_target_inputs()
        ]
        for node in model.get_ops()
    }


def chunks(features: Features, batch_sizes: Sequence[int]) -> Iterator[tuple[int, dict[str, Array]]]:
    """Cuts a batch into compiled batch sizes.

    Args:
        features: Arrays [n, ...].
        batch_sizes: Ascending.

    Yields:
        The number of real rows, and arrays [b, ...] with b in `batch_sizes`: real rows first, then copies of the last one.
    """
    count, largest = len(next(iter(features.values()))), batch_sizes[-1]
    for start in range(0, count, largest):
        part = {name: array[start : start + largest] for name, array in features.items()}
        rows = min(largest, count - start)
        missing = next(size for size in batch_sizes if size >= rows) - rows
        if missing:
            part = {name: np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) for name, array in part.items()}
        yield rows, part


def comes_from(origin: str, node: str) -> bool:
    """Whether a layer name of the runtime model is the name of an ONNX node, or derived from it: `<node>/...`, `<node>_1`."""
    return origin.startswith(node) and not origin[len(node) : len(node) + 1].isalnum()


def _shape(features: Features) -> tuple[int, ...]:
    """Returns (batch, sequence), or (batch,) for rows of one size."""
    array = next(iter(features.values()))
    return array.shape[:1] if array.ndim > 2 else array.shape[:2]
