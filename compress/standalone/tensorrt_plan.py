"""Builds a TensorRT engine from a Q/DQ ONNX graph, lists its layers, and runs it.

The TensorRT module is a parameter, `trt`. TensorRT 10, TensorRT 11 and TensorRT-RTX share the interface used here, so the same code builds
plans on a GPU and checks, without a GPU, that a graph compiles. It needs only numpy and is copied next to `build_plans.py` in a GPU model
repository.

- The network is strongly typed: the types in the graph are the types that run. Only tensors between QuantizeLinear and DequantizeLinear
  are int8. There are no calibrators and no precision flags.
- Each bucket has one optimisation profile, in the order of the buckets: the sequence length is fixed to the bucket, the batch ranges from 1
  to the largest, and kernels are tuned for the largest. Rows are padded to a bucket anyway, so the compiler knows every size except the
  batch; the profiles share weights. Images have a single profile.
- TF32, on by default in TensorRT, is disabled: float_precision fp32 must mean float32.
- SPARSE_WEIGHTS is enabled: for weights with 2:4 sparsity the builder uses sparse kernels if they are faster.

- Attention that is one node of the graph (operator Attention) has to run as one kernel: a build for a GPU without such a kernel fails.
  `gate` says which of them fail it.
- The types of layers are read with the shapes of a profile bound: without them the inspector of TensorRT 10 answers "N/A due to dynamic
  shapes". Where it does all the same, the name of a kernel tells what it multiplies (`..._i8i8_i8i32_f32_...`: int8, added up as int32).

float16 needs no code here: it is expressed by casts in the graph, which leave some parts in float32. Not supported: plugins; one engine
across several GPUs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from compress.standalone.cuda_driver import Device

Shape = tuple[int, ...]
Range = tuple[Shape, Shape, Shape]
"""Minimum, optimum and maximum shape of an input in one profile."""
FLOATS = {"float": "fp32", "fp32": "fp32", "half": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
POINTWISE = "kgen"
FUSED = "mha"
"""Part of the names of layers that run an attention as a whole, such as `_gemm_mha_v2_myl0_7`; their kind is that of pointwise ones."""
ATTENTION = "/attention"
"""How names of attention nodes begin behind the module; their products would be `/qk` and `/pv`."""
_LISTED = re.compile(
    r"^Name: (.*?), LayerType: (\w+), Inputs: \[(.*?)\], (?:Constants: \[(.*?)\], )?Outputs: \[.*?\], "
    r"TacticName: (.*?), StreamId: (.*)$",
    re.M,
)
_ORIGIN = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_DATATYPE = re.compile(r"Datatype: (\w+)")
UNTOLD = "n/a"
"""How what an inspector says of a tensor begins where its type depends on shapes that are not bound."""
_MULTIPLIED = re.compile(r"_(i8|f16|bf16|tf32|f32)(?:i32|f32|f16)_(?:i8|i32|f16|bf16|f32)_")
"""In the name of a kernel: the type of the factors and of their sum, behind the types of its tensors and before that of its scales."""
_WORDS = (("imma", "int8"), ("int8", "int8"), ("bf16", "bf16"), ("hmma", "fp16"), ("h16816", "fp16"), ("h1688", "fp16"), ("sgemm", "fp32"))
"""Parts of the names of other kernels, and what they multiply."""
_KERNEL_TYPES = {"i8": "int8", "f16": "fp16", "bf16": "bf16", "tf32": "tf32", "f32": "fp32"}


class PlanError(RuntimeError):
    """An engine cannot be built, loaded or run; the message gives the library's errors and node names in one line."""


@dataclass(frozen=True)
class Layer:
    """One layer of a compiled engine, as the library lists it."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    """Data types of its inputs, as the library names them, in lower case."""
    constants: tuple[str, ...]
    """Data types of its weights and other constants."""
    nodes: tuple[str, ...]
    """ONNX nodes that were fused into it."""
    tactic: str
    """Name of the kernel; "__myelin_CASK_STUB" if it is chosen later, on the GPU."""


@dataclass(frozen=True)
class Built:
    """A finished engine."""

    plan: bytes
    layers: tuple[Layer, ...]
    """Layers as listed in the builder's log."""
    seconds: float
    timing_cache: bytes
    gates: tuple[Gate, ...]
    """Attention nodes of the graph: each of them is one fused kernel, or there would be no engine."""


@dataclass(frozen=True)
class Gate:
    """Attention nodes whose tensors have the same shapes, and whether a fused kernel runs them."""

    group: str
    """Their shapes, for readers, such as "12 heads of 64, mask [-1, 1, 1, -1]"."""
    nodes: tuple[str, ...]
    """Names of the nodes."""
    reason: str | None
    """Why none does, in the library's words; None where one does."""


def build(
    trt: Any, onnx: Path, buckets: Sequence[int], max_batch_size: int, *, capability: str | None = None, timing_cache: bytes = b""
) -> Built:
    """Builds one engine.

    Args:
        trt: The module `tensorrt` or `tensorrt_rtx_bindings`.
        onnx: The graph; its inputs are [batch, sequence], or [batch, C, H, W] without buckets.
        buckets: Sequence lengths (tokens), one profile each; () for images.
        max_batch_size: Largest batch of every profile.
        capability: Compute capability to build for ahead of time, such as "80" (TensorRT-RTX only); None builds for the current GPU.
        timing_cache: Kernel timings from an earlier build with the same library on the same GPU.

    Raises:
        PlanError: The graph does not parse or does not compile.
    """
    started = time.perf_counter()
    parsed = _Parsed(trt, onnx, buckets, max_batch_size, capability, timing_cache)
    groups = parsed.groups()
    for attention in (attention for members in groups.values() for attention in members):
        attention.decomposable = False
    plan = parsed.build()
    if plan is None:
        target = "this GPU" if capability is None else f"compute capability {capability}"
        raise PlanError(f"{onnx.name} does not compile for {target}: {parsed.log.errors()}")
    cache = b"" if capability is not None else bytes(memoryview(parsed.config.get_timing_cache().serialize()))
    layers = listed_layers("\n".join(parsed.log.listings))
    gates = tuple(Gate(group, tuple(member.name for member in members), None) for group, members in groups.items())
    return Built(bytes(memoryview(plan)), layers, time.perf_counter() - started, cache, gates)


def gate(
    trt: Any, onnx: Path, buckets: Sequence[int], max_batch_size: int, *, capability: str | None = None, timing_cache: bytes = b""
) -> tuple[Gate, ...]:
    """Finds which attention nodes a fused kernel runs: each group is built with all others allowed to fall apart.

    Args:
        trt: As for `build`, like the others.
        onnx: The graph, some of whose attention nodes fail the gate.
        buckets: Sequence lengths.
        max_batch_size: Largest batch.
        capability: Compute capability, or None.
        timing_cache: Kernel timings.

    Raises:
        PlanError: The graph does not parse.
    """
    parsed = _Parsed(trt, onnx, buckets, max_batch_size, capability, timing_cache)
    groups, found = parsed.groups(), []
    for group, members in groups.items():
        for attention in (attention for others in groups.values() for attention in others):
            attention.decomposable = not any(attention is member for member in members)
        passed = parsed.build() is not None
        found.append(Gate(group, tuple(member.name for member in members), None if passed else parsed.log.errors()))
    return tuple(found)


class _Parsed:
    """A graph as the library has read it, ready to be built, more than once if need be."""

    def __init__(
        self, trt: Any, onnx: Path, buckets: Sequence[int], max_batch_size: int, capability: str | None, timing_cache: bytes
    ) -> None:
        self.trt, self.log = trt, Log(trt)
        self.builder = trt.Builder(self.log.logger)
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)  # an option in TensorRT 10, the only mode in 11
        self.network = self.builder.create_network(flags)
        self.parser = trt.OnnxParser(self.network, self.log.logger)  # holds the weights that the network reads
        if not self.parser.parse_from_file(str(onnx)):
            raise PlanError(f"{onnx.name} does not parse: {'; '.join(_parse_errors(self.parser)) or self.log.errors()}")
        self.config = self.builder.create_builder_config()
        self.config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        self.config.clear_flag(trt.BuilderFlag.TF32)
        self.config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)  # allows sparse kernels for 2:4 weights; does not change any weight
        _add_profiles(self.builder, self.network, self.config, buckets, max_batch_size)
        if capability is None:
            self.config.set_timing_cache(self.config.create_timing_cache(timing_cache), False)
        else:
            _set_capability(trt, self.config, capability)

    def groups(self) -> dict[str, list[Any]]:
        """Returns the attention nodes of the network by the shapes of their tensors."""
        kind = getattr(self.trt.LayerType, "ATTENTION_INPUT", None)  # versions that lack it do not parse the operator
        found: dict[str, list[Any]] = {}
        for layer in map(self.network.get_layer, range(self.network.num_layers)):
            if layer.type == kind:
                layer.__class__ = self.trt.IAttentionInputLayer  # the bindings give every layer as ILayer
                found.setdefault(_shapes_of(layer.attention), []).append(layer.attention)
        return found

    def build(self) -> Any:
        """Returns the serialized engine; None where it does not compile, and the log says why."""
        self.log.listings.clear()
        self.log.messages.clear()
        return self.builder.build_serialized_network(self.network, self.config)


class Log:
    """Collects errors and the list of compiled layers from the library's log."""

    def __init__(self, trt: Any) -> None:
        self.messages: list[str] = []
        self.listings: list[str] = []
        severity, outer = trt.ILogger.Severity, self

        class Logger(trt.ILogger):  # type: ignore[misc]  # the base is a parameter
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, level: Any, message: str) -> None:
                if level in (severity.INTERNAL_ERROR, severity.ERROR):
                    outer.messages.append(" ".join(message.split()))
                elif "LayerType: " in message:
                    outer.listings.append(message)

        self.logger = Logger()

    def errors(self) -> str:
        """Returns the last three errors in one line."""
        return "; ".join(self.messages[-3:]) or "the library gave no message"


def profile_ranges(name: str, shape: Sequence[int], bucket: int | None, max_batch_size: int) -> Range:
    """Returns the minimum, optimum and maximum shape of one input in one profile.

    Args:
        name: Name of the input, for the message.
        shape: Shape in the graph, with -1 for dynamic axes: [-1, -1] or [-1, C, H, W].
        bucket: Sequence length in tokens; None for images.
        max_batch_size: Largest batch.

    Raises:
        PlanError: The batch axis is not dynamic, or an axis is dynamic that the profile does not fix.
    """
    rest = [bucket if size == -1 and axis == 1 and bucket else size for axis, size in enumerate(shape[1:], 1)]
    if shape[0] != -1 or -1 in rest:
        raise PlanError(f"input {name} has shape {list(shape)}; [-1, -1] with buckets, or [-1, C, H, W] without, is allowed")
    smallest, largest = (1, *rest), (max_batch_size, *rest)
    return smallest, largest, largest


def listed_layers(log: str) -> tuple[Layer, ...]:
    """Reads the layers of a compiled engine from the builder's verbose log."""
    found = []
    for name, kind, inputs, constants, tactic, rest in _LISTED.findall(log):
        types = [tuple(value.lower() for value in _DATATYPE.findall(part)) for part in (inputs, constants)]
        found.append(Layer(name, kind, types[0], types[1], tuple(_ORIGIN.findall(rest)), tactic))
    return tuple(found)


def inspected_layers(information: str) -> tuple[Layer, ...]:
    """Reads the layers from the JSON of the engine inspector (`ProfilingVerbosity.DETAILED`)."""
    return tuple(_inspected(layer) for layer in json.loads(information)["Layers"] if isinstance(layer, dict))


def gemm_precisions(layers: Sequence[Layer], gemms: Sequence[str]) -> dict[str, str]:
    """Returns the precision of each GEMM node of the ONNX graph, judged by the operands of the layers it was compiled into.

    A GEMM counts as int8 if in every such layer one input and a second operand (weights or another input) are int8. Otherwise it has the
    type of the layer's first float input. Where a layer does not tell the types of its inputs, or that of its weights beside int8, it has
    what the name of its kernel says.
    Nodes that no layer names, or whose layers tell neither, are absent from the result.
    """
    found: dict[str, str] = {}
    for gemm in gemms:
        made = [layer for layer in layers if gemm in layer.nodes]
        # The generated pointwise kernel after an int8 GEMM also names the GEMM's node, because it applies the scales; skip it.
        made = [layer for layer in made if layer.kind != POINTWISE or FUSED in layer.name] or made
        precisions = {precision for layer in made if (precision := _precision(layer)) is not None}
        if precisions:
            found[gemm] = min(precisions - {"int8"}, default="int8")
    return found


def with_products(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Returns the layers with the names of both products, `/qk` and `/pv`, in place of that of an attention node."""
    return tuple(replace(layer, nodes=tuple(name for node in layer.nodes for name in _products(node))) for layer in layers)


def fused_attentions(layers: Sequence[Layer], products: Sequence[str]) -> int:
    """Returns how many attentions run as one layer.

    Args:
        layers: Those of an engine, attention nodes replaced (`with_products`).
        products: Names of the nodes `/pv`, one for each attention of the graph.
    """
    whole = {node for layer in layers if FUSED in layer.name for node in layer.nodes}
    return sum(product in whole for product in products)


class Plan:
    """An engine on one GPU, ready to predict.

    Args:
        trt: The module that built the engine.
        device: The GPU; its context must be current.
        plan: The serialized engine.

    Raises:
        PlanError: The plan does not load; it was built by another version of the library or for another GPU.
    """

    def __init__(self, trt: Any, device: Device, plan: bytes) -> None:
        self._trt, self._device, self._log = trt, device, Log(trt)
        self._runtime = trt.Runtime(self._log.logger)
        self.engine = self._runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            raise PlanError(f"the plan does not load: {self._log.errors()}")
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        self.inputs = tuple(name for name in names if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT)
        (self.output,) = (name for name in names if name not in self.inputs)
        self._contexts: dict[int, Any] = {}

    @cached_property
    def float_precision(self) -> str | None:
        """The narrowest float type that a layer reads: fp16, bf16 or fp32; None where the inspector tells no type."""
        told = {FLOATS[name] for layer in self.layers() for name in layer.inputs + layer.constants if name in FLOATS}
        return next((name for name in ("fp16", "bf16", "fp32") if name in told), None)

    def layers(self) -> tuple[Layer, ...]:
        """Returns the layers from the engine inspector, with the largest shapes of the last profile bound."""
        index = self.engine.num_optimization_profiles - 1
        context = self._context(index)
        for name in self.inputs:
            shape = tuple(self.engine.get_tensor_profile_shape(name, index)[2])
            if not context.set_input_shape(name, shape):
                raise PlanError(f"input {name} of shape {shape} is rejected: {self._log.errors()}")
        inspector = self.engine.create_engine_inspector()
        inspector.execution_context = context
        return inspected_layers(inspector.get_engine_information(self._trt.LayerInformationFormat.JSON))

    def predict(self, features: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Returns logits float32 [n, C]; batches larger than the profile allows are split.

        Args:
            features: Arrays [n, ...] by input name, padded to a bucket.

        Raises:
            PlanError: No profile accepts these shapes.
        """
        count = len(features[self.inputs[0]])
        index, largest = self._profile({name: features[name].shape for name in self.inputs})
        starts = range(0, count, largest)
        parts = [self._run(index, {name: features[name][start : start + largest] for name in self.inputs}) for start in starts]
        return np.concatenate(parts)

    def _profile(self, shapes: Mapping[str, Shape]) -> tuple[int, int]:
        """Returns the index of the first profile that accepts these shapes (any batch size), and its largest batch."""
        for index in range(self.engine.num_optimization_profiles):
            largest = {name: tuple(self.engine.get_tensor_profile_shape(name, index)[2]) for name in shapes}
            if all(tuple(shapes[name][1:]) == largest[name][1:] for name in shapes):
                return index, int(largest[self.inputs[0]][0])
        raise PlanError(f"no profile of the plan accepts {dict(shapes)}")

    def _context(self, index: int) -> Any:
        if index not in self._contexts:
            context = self.engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(index, self._device.stream):
                raise PlanError(f"profile {index} cannot be used: {self._log.errors()}")
            self._contexts[index] = context
        return self._contexts[index]

    def _run(self, index: int, features: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        context = self._context(index)
        for name, values in features.items():
            array = np.ascontiguousarray(values, self._trt.nptype(self.engine.get_tensor_dtype(name)))
            address = self._device.block(name, array.nbytes)
            self._device.upload(array, address)
            if not (context.set_input_shape(name, array.shape) and context.set_tensor_address(name, address)):
                raise PlanError(f"input {name} of shape {array.shape} is rejected: {self._log.errors()}")
        shape, dtype = tuple(context.get_tensor_shape(self.output)), np.dtype(self._trt.nptype(self.engine.get_tensor_dtype(self.output)))
        address = self._device.block(self.output, int(np.prod(shape)) * dtype.itemsize)
        context.set_tensor_address(self.output, address)
        if not context.execute_async_v3(self._device.stream):
            raise PlanError(f"the plan does not run: {self._log.errors()}")
        return self._device.download(address, shape, dtype).astype(np.float32)


def _add_profiles(builder: Any, network: Any, config: Any, buckets: Sequence[int], max_batch_size: int) -> None:
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for bucket in buckets or (None,):
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            profile.set_shape(tensor.name, *profile_ranges(tensor.name, tuple(tensor.shape), bucket, max_batch_size))
        if config.add_optimization_profile(profile) < 0:
            raise PlanError(f"TensorRT rejects the profile for bucket {bucket}")


def _shapes_of(attention: Any) -> str:
    """Returns the shapes that a kernel is chosen by."""
    _, heads, _, size = attention.get_input(0).shape
    key_heads, value_size = attention.get_input(1).shape[1], attention.get_input(2).shape[3]
    text = "1 head" if heads == 1 else f"{'any number of' if heads == -1 else heads} heads"
    text += f" of {size}"
    text += "" if key_heads == heads else f", {key_heads} of keys"
    text += "" if value_size == size else f", values of {value_size}"
    return text + ("" if attention.mask is None else f", mask {list(attention.mask.shape)}")


def _products(node: str) -> tuple[str, ...]:
    module, found, run = node.rpartition(ATTENTION)
    return (f"{module}/qk{run}", f"{module}/pv{run}") if found and (not run or run.startswith(".")) else (node,)


def _set_capability(trt: Any, config: Any, capability: str) -> None:
    target = getattr(trt.ComputeCapability, f"SM{capability}", None)
    if target is None:
        raise PlanError(f"this library does not know compute capability {capability}")
    config.num_compute_capabilities = 1
    config.set_compute_capability(target, 0)


def _parse_errors(parser: Any) -> list[str]:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return [f"node {error.node_name() or '?'} ({error.node_operator() or '?'}): {' '.join(error.desc().split())}" for error in errors]


def _inspected(layer: Mapping[str, Any]) -> Layer:
    types = [tuple(_datatype(tensor) for tensor in layer.get(key, ())) for key in ("Inputs", "Constants")]
    nodes = tuple(_ORIGIN.findall(str(layer.get("Metadata", ""))))
    return Layer(str(layer["Name"]), str(layer.get("LayerType", "")), types[0], types[1], nodes, str(layer.get("TacticName", "")))


def _datatype(tensor: Mapping[str, Any]) -> str:
    """Returns the type of a tensor: "Datatype": "Int8" (TensorRT 11), or "Format/Datatype": "Row major Int8 format" or "Half(64,1:8,...)"
    (TensorRT 10); `UNTOLD` where the inspector does not tell it."""
    text = str(tensor.get("Datatype") or tensor.get("Format/Datatype") or "").lower()
    if text.startswith(UNTOLD):
        return UNTOLD
    return next((word for word in re.split(r"[\s(]+", text) if word == "int8" or word in FLOATS), text)


def _precision(layer: Layer) -> str | None:
    operands = layer.inputs + layer.constants
    if "int8" in layer.inputs and operands.count("int8") >= 2:
        return "int8"
    if UNTOLD in layer.inputs or ("int8" in layer.inputs and not layer.constants):  # TensorRT 10 does not list weights
        named = kernel_precision(layer.tactic)
        if named is not None:
            return named
    return next((FLOATS[name] for name in layer.inputs if name in FLOATS), None)


def kernel_precision(tactic: str) -> str | None:
    """Returns what a kernel multiplies, by its name; None where the name does not tell."""
    found = _MULTIPLIED.search(tactic)
    if found:
        return _KERNEL_TYPES[found.group(1)]
    return next((precision for word, precision in _WORDS if word in tactic.lower()), None)
