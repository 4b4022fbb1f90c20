"""Builds a TensorRT engine from a Q/DQ ONNX graph and runs it: every call of TensorRT is here. `tensorrt_layers` reads its inspector.

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
- The inspector is asked with the shapes of a profile bound: without them the inspector of TensorRT 10 answers "N/A due to dynamic shapes".

- `Plan` runs a batch kernel by kernel, or as a CUDA graph, which is recorded for one profile and shape: at batch 1 the host needs longer to
  launch the kernels than the GPU to run them. What is recorded is valid until the execution context is given another shape.

float16 needs no code here: it is expressed by casts in the graph, which leave some parts in float32. Not supported: plugins; one engine
across several GPUs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from foundation.standalone.cuda_driver import Device, Graph

Shape = tuple[int, ...]
Range = tuple[Shape, Shape, Shape]
"""Minimum, optimum and maximum shape of an input in one profile."""
COMPATIBILITY = {"none": "NONE", "same_compute_capability": "SAME_COMPUTE_CAPABILITY", "ampere_plus": "AMPERE_PLUS"}


class PlanError(RuntimeError):
    """An engine cannot be built, loaded or run; the message gives the library's errors and node names in one line."""


@dataclass(frozen=True)
class Settings:
    """Settings of the builder; their defaults are the library's."""

    workspace_bytes: int | None = None
    """Most GPU memory that a kernel may use while it runs, in bytes; None: all there is."""
    optimization_level: int | None = None
    """0 to 5: how long the builder searches; None: the library's default."""
    hardware_compatibility: str = "none"
    """GPUs that load the plan besides the one that built it; a key of `COMPATIBILITY`."""
    refit: bool = False
    """Whether the weights of the plan can be replaced."""


@dataclass(frozen=True)
class Built:
    """A finished engine."""

    plan: bytes
    listing: str
    """The layers as the builder's log lists them, for `tensorrt_layers`."""
    seconds: float
    timing_cache: bytes
    gates: tuple[Gate, ...]
    """Attention nodes of the graph: each of them is one fused kernel; without it the build fails."""


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
    trt: Any,
    onnx: Path,
    buckets: Sequence[int],
    max_batch_size: int,
    *,
    capability: str | None = None,
    timing_cache: bytes | None = b"",
    settings: Settings = Settings(),
) -> Built:
    """Builds one engine.

    Args:
        trt: The module `tensorrt` or `tensorrt_rtx_bindings`.
        onnx: The graph; its inputs are [batch, sequence], or [batch, C, H, W] without buckets.
        buckets: Sequence lengths (tokens), one profile each; () for images.
        max_batch_size: Largest batch of every profile.
        capability: Compute capability to build for ahead of time, such as "80" (TensorRT-RTX only); None builds for the current GPU.
        timing_cache: Kernel timings from an earlier build with the same library on the same GPU; None: none are kept.
        settings: The settings of the builder.

    Raises:
        PlanError: The graph does not parse or does not compile.
    """
    started = time.perf_counter()
    parsed = _Parsed(trt, onnx, buckets, max_batch_size, capability, timing_cache, settings)
    groups = parsed.groups()
    for attention in (attention for members in groups.values() for attention in members):
        attention.decomposable = False
    plan = parsed.build()
    if plan is None:
        target = "this GPU" if capability is None else f"compute capability {capability}"
        raise PlanError(f"{onnx.name} does not compile for {target}: {parsed.log.errors()}")
    cache = b"" if capability is not None or timing_cache is None else bytes(memoryview(parsed.config.get_timing_cache().serialize()))
    gates = tuple(Gate(group, tuple(member.name for member in members), None) for group, members in groups.items())
    return Built(bytes(memoryview(plan)), "\n".join(parsed.log.listings), time.perf_counter() - started, cache, gates)


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
        self,
        trt: Any,
        onnx: Path,
        buckets: Sequence[int],
        max_batch_size: int,
        capability: str | None,
        timing_cache: bytes | None,
        settings: Settings = Settings(),
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
        _apply(trt, self.config, settings)
        if capability is not None:
            _set_capability(trt, self.config, capability)
        elif timing_cache is None:
            self.config.set_flag(trt.BuilderFlag.DISABLE_TIMING_CACHE)
        else:
            self.config.set_timing_cache(self.config.create_timing_cache(timing_cache), False)

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


class Plan:
    """An engine on one GPU, ready to predict.

    Args:
        trt: The module that built the engine.
        device: The GPU; its context must be current.
        plan: The serialized engine.
        graphs: Whether `predict` records a shape that comes twice in a row, and from then on runs it as a graph.

    Raises:
        PlanError: The plan does not load; it was built by another version of the library or for another GPU.
    """

    def __init__(self, trt: Any, device: Device, plan: bytes, *, graphs: bool = False) -> None:
        self._trt, self._device, self._log, self._records = trt, device, Log(trt), graphs
        self._runtime = trt.Runtime(self._log.logger)
        self.engine = self._runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            raise PlanError(f"the plan does not load: {self._log.errors()}")
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        self.inputs = tuple(name for name in names if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT)
        (self.output,) = (name for name in names if name not in self.inputs)
        self._contexts: dict[int, Any] = {}
        self._bound: dict[int, tuple[Any, ...]] = {}
        """Shape and address of every input and of the output, by profile."""
        self._recorded: dict[int, Graph] = {}

    def information(self) -> str:
        """Returns the JSON of the engine inspector, for `tensorrt_layers`, with the largest shapes of the last profile bound."""
        index = self.engine.num_optimization_profiles - 1
        context = self._context(index)
        self._unbind(index)
        for name in self.inputs:
            shape = tuple(self.engine.get_tensor_profile_shape(name, index)[2])
            if not context.set_input_shape(name, shape):
                raise PlanError(f"input {name} of shape {shape} is rejected: {self._log.errors()}")
        inspector = self.engine.create_engine_inspector()
        inspector.execution_context = context
        return str(inspector.get_engine_information(self._trt.LayerInformationFormat.JSON))

    def predict(self, features: Mapping[str, NDArray[Any]], *, graph: bool = False) -> NDArray[np.float32]:
        """Returns logits float32 [n, C]; batches larger than the profile allows are split.

        Args:
            features: Arrays [n, ...] by input name, padded to a bucket.
            graph: Run every part as a graph, recorded anew; the logits are spoilt before, so that they are the graph's.

        Raises:
            PlanError: No profile accepts these shapes.
            CudaError: The plan cannot be recorded.
        """
        count = len(features[self.inputs[0]])
        index, largest = self._profile({name: features[name].shape for name in self.inputs})
        starts = range(0, count, largest)
        parts = [self._run(index, {name: features[name][start : start + largest] for name in self.inputs}, graph) for start in starts]
        return np.concatenate(parts)

    def ready(self, features: Mapping[str, NDArray[Any]], *, graph: bool = False) -> Callable[[], None]:
        """Returns a function that runs a batch once and waits for it, for measuring: the rows are already on the GPU, and the logits stay
        there.

        It is valid until the next call of `predict` or `ready` with other shapes.

        Args:
            features: As for `predict`.
            graph: Run it as a graph.

        Raises:
            PlanError: No profile accepts these shapes.
            CudaError: The plan cannot be recorded.
        """
        index, _ = self._profile({name: features[name].shape for name in self.inputs})
        self._run(index, features)
        run = self._record(index).launch if graph else lambda: self._enqueue(index)

        def once() -> None:
            run()
            self._device.wait()

        return once

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

    def _run(self, index: int, features: Mapping[str, NDArray[Any]], graph: bool = False) -> NDArray[np.float32]:
        """Runs a batch, as a graph where that is asked for, or where it is the second one of its shape and graphs are recorded."""
        known = self._bound.get(index)
        address, shape, dtype = self._bind(index, features)
        again = known == self._bound[index]
        if graph:
            self._enqueue(index)  # what the context puts off until its first run must not be recorded
            self._device.wait()
            self._device.upload(np.full(shape, np.nan, dtype), address)
            self._record(index).launch()
        elif again and self._records and (recorded := self._recorded.get(index) or self._record_or_warn(index)) is not None:
            recorded.launch()
        else:
            self._enqueue(index)
        return self._device.download(address, shape, dtype).astype(np.float32)

    def _bind(self, index: int, features: Mapping[str, NDArray[Any]]) -> tuple[int, Shape, np.dtype[Any]]:
        """Copies a batch to the GPU, and gives the context its shapes and addresses where they are new; returns address, shape and type of
        the output."""
        context = self._context(index)
        arrays = {
            name: np.ascontiguousarray(values, self._trt.nptype(self.engine.get_tensor_dtype(name))) for name, values in features.items()
        }
        places = {name: self._device.block(name, array.nbytes) for name, array in arrays.items()}
        for name, array in arrays.items():
            self._device.upload(array, places[name])
        inputs = tuple((name, array.shape, places[name]) for name, array in arrays.items())
        known = self._bound.get(index)
        if known is None or known[:-1] != inputs:
            self._unbind(index)
            for name, shape, place in inputs:
                if not (context.set_input_shape(name, shape) and context.set_tensor_address(name, place)):
                    raise PlanError(f"input {name} of shape {shape} is rejected: {self._log.errors()}")
        shape, dtype = tuple(context.get_tensor_shape(self.output)), np.dtype(self._trt.nptype(self.engine.get_tensor_dtype(self.output)))
        address = self._device.block(self.output, int(np.prod(shape)) * dtype.itemsize)
        if self._bound.get(index) != (*inputs, address):
            self._unbind(index)
            context.set_tensor_address(self.output, address)
            self._bound[index] = (*inputs, address)
        return address, shape, dtype

    def _unbind(self, index: int) -> None:
        """Forgets what was recorded of a context, which is about to change."""
        self._bound.pop(index, None)
        if index in self._recorded:
            self._recorded.pop(index).close()

    def _enqueue(self, index: int) -> None:
        if not self._context(index).execute_async_v3(self._device.stream):
            raise PlanError(f"the plan does not run: {self._log.errors()}")

    def _record(self, index: int) -> Graph:
        """Records a batch whose shapes the context has, and which it has run once."""
        if index in self._recorded:
            self._recorded.pop(index).close()
        self._recorded[index] = self._device.record(lambda: self._enqueue(index))
        return self._recorded[index]

    def _record_or_warn(self, index: int) -> Graph | None:
        """Records a batch; where that fails, warns and records no other one."""
        try:
            return self._record(index)
        except RuntimeError as error:  # of the library, or of the driver, whose module need not be here
            self._records = False
            warnings.warn(f"the plan cannot be recorded as a CUDA graph, and runs kernel by kernel: {error}", stacklevel=2)
            return None


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


def _apply(trt: Any, config: Any, settings: Settings) -> None:
    if settings.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
    if settings.optimization_level is not None:
        config.builder_optimization_level = settings.optimization_level
    if settings.hardware_compatibility != "none":
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, COMPATIBILITY[settings.hardware_compatibility])
    if settings.refit:
        config.set_flag(trt.BuilderFlag.REFIT)


def _set_capability(trt: Any, config: Any, capability: str) -> None:
    target = getattr(trt.ComputeCapability, f"SM{capability}", None)
    if target is None:
        raise PlanError(f"this library does not know compute capability {capability}")
    config.num_compute_capabilities = 1
    config.set_compute_capability(target, 0)


def _parse_errors(parser: Any) -> list[str]:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return [f"node {error.node_name() or '?'} ({error.node_operator() or '?'}): {' '.join(error.desc().split())}" for error in errors]
