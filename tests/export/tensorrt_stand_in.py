"""Stands in for TensorRT and its GPU: TensorRT-RTX builds for real, ONNX Runtime answers, host memory is the memory of the GPU.

`StandIn` is what the code under test takes for the module `tensorrt`, `Driver` for the CUDA driver. Builder, network, parser and
configuration are the library's own; only what needs a GPU (engines, contexts, memory) is written out here.
"""

import ctypes
import hashlib
import itertools
import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import tensorrt_rtx_bindings as rtx


class Driver:
    """A CUDA driver with GPUs of the given capabilities; allocations are counted. While a stream is recorded, what an engine does is kept
    instead of done, and waiting or copying is an error."""

    recording = None
    """What was kept since the recording began; of the class, since an engine does not know its driver."""

    def __init__(self, *capabilities, fail=None):
        self.capabilities, self.fail, self.blocks = capabilities, fail, {}
        self.freed, self.graphs, self.executables, self.launched = [], {}, {}, []
        self.handles = itertools.count(1000)

    def __getattr__(self, name):
        def call(*arguments):
            return 2 if name == self.fail else 0

        return call

    def cuInit(self, flags):
        return 0 if self.capabilities else 100

    def cuGetErrorName(self, status, name):
        name._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        capability = self.capabilities[device.value]
        value._obj.value = int({75: capability[:-1], 76: capability[-1]}[attribute])
        return 0

    def cuStreamCreate(self, stream, flags):
        stream._obj.value = 77
        return 0

    def _handle(self, place, kept, value):
        place._obj.value = next(self.handles)
        kept[place._obj.value] = value

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert stream.value == 77
        if Driver.recording is not None or mode != 1:
            return 1
        Driver.recording = []
        return 0

    def cuStreamEndCapture(self, stream, graph):
        kept, Driver.recording = Driver.recording, None
        if self.fail == "cuStreamEndCapture" or kept is None:
            return 901
        self._handle(graph, self.graphs, kept)
        return 0

    def cuGraphInstantiateWithFlags(self, executable, graph, flags):
        if self.fail == "cuGraphInstantiateWithFlags":
            return 2
        self._handle(executable, self.executables, self.graphs[graph.value])
        return 0

    def cuGraphDestroy(self, graph):
        del self.graphs[graph.value]
        return 0

    def cuGraphExecDestroy(self, executable):
        del self.executables[executable.value]
        return 0

    def cuGraphLaunch(self, executable, stream):
        assert stream.value == 77
        self.launched.append(executable.value)
        for work in self.executables[executable.value]:
            work()
        return 0

    def cuStreamSynchronize(self, stream):
        return 0 if Driver.recording is None else 900

    def cuMemAlloc_v2(self, pointer, size):
        if self.fail == "cuMemAlloc_v2":
            return 2
        block = ctypes.create_string_buffer(max(1, size.value))
        pointer._obj.value = ctypes.addressof(block)
        self.blocks[pointer._obj.value] = block
        return 0

    def cuMemFree_v2(self, pointer):
        self.freed.append(self.blocks.pop(pointer.value))
        return 0

    def cuMemcpyHtoD_v2(self, target, source, size):
        assert Driver.recording is None
        assert size.value <= len(self.blocks[target.value])
        ctypes.memmove(target.value, source.value, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, target, source, size):
        assert Driver.recording is None
        assert size.value <= len(self.blocks[source.value])
        ctypes.memmove(target.value, source.value, size.value)
        return 0


class StandIn:
    """The module `tensorrt`. `spoil` changes the logits of the engine, knowing the rows in the batch. What is in `compiled`, where that is
    given, is not compiled again: the library takes a second for it."""

    __version__ = f"stand-in {rtx.__version__}"

    def __init__(self, spoil=lambda logits, batch: logits, compiled=None):
        self.spoil, self.built, self.asked, self.compiled = spoil, [], {}, compiled

    def __getattr__(self, name):
        return getattr(rtx, name)

    def Builder(self, logger):
        return _Builder(self, rtx.Builder(logger))

    def OnnxParser(self, network, logger):
        return _Parser(self, rtx.OnnxParser(network.real, logger))

    def Runtime(self, logger):
        return _Runtime(self)


class _Forward:
    def __init__(self, outer, real):
        object.__setattr__(self, "outer", outer)
        object.__setattr__(self, "real", real)

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __setattr__(self, name, value):
        setattr(self.real, name, value)


class _Parser(_Forward):
    def parse_from_file(self, path):
        self.outer.__dict__["graph"] = path
        return self.real.parse_from_file(path)


class _Network(_Forward):
    pass


class _Config(_Forward):
    """Notes what is set. TensorRT-RTX builds nothing that can be refitted ahead of time, so that this is not passed on."""

    def __setattr__(self, name, value):
        self.outer.asked[name] = value
        super().__setattr__(name, value)

    def set_memory_pool_limit(self, pool, size):
        self.outer.asked[str(pool)] = size
        self.real.set_memory_pool_limit(pool, size)

    def set_flag(self, flag):
        self.outer.asked[str(flag)] = True
        if flag != rtx.BuilderFlag.REFIT:
            self.real.set_flag(flag)

    def create_timing_cache(self, known):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.real.create_timing_cache(known)

    def set_timing_cache(self, cache, ignore_mismatch):
        return True

    def get_timing_cache(self):
        return self

    def serialize(self):
        return b"times"


class _Builder(_Forward):
    """Builds for SM80, where the real one would build for the GPU of the machine; remembers the profiles."""

    def create_network(self, flags):
        assert flags & 1 << int(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        return _Network(self.outer, self.real.create_network(flags))

    def create_builder_config(self):
        config = self.real.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(rtx.ComputeCapability.SM80, 0)
        return _Config(self.outer, config)

    def build_serialized_network(self, network, config):
        ranges = self.outer.__dict__.pop("ranges")
        size = self._compiled_size(network, config, ranges)
        if size is None:
            return None
        inputs = [network.get_input(index).name for index in range(network.num_inputs)]
        self.outer.built.append({"bytes": size, "inputs": inputs, "profiles": config.num_optimization_profiles})
        return json.dumps({"graph": self.outer.graph, "ranges": ranges}).encode()

    def _compiled_size(self, network, config, ranges):
        """Returns the bytes of the plan; None where the library refuses. Attention nodes are marked in the network, which no key tells."""
        graph, known = Path(self.outer.graph), self.outer.compiled
        content = graph.read_bytes()
        if known is None or b"Attention" in content:
            return self._compile(network, config)
        weights = graph.with_name(f"{graph.name}.data")
        content += weights.read_bytes() if weights.exists() else b""
        key = hashlib.sha256(content).hexdigest(), json.dumps(ranges), repr(sorted(self.outer.asked.items()))
        if key not in known:
            known[key] = self._compile(network, config)
        return known[key]

    def _compile(self, network, config):
        plan = self.real.build_serialized_network(network.real, config.real)
        return None if plan is None else plan.nbytes

    def create_optimization_profile(self):
        profile = self.real.create_optimization_profile()
        self.outer.__dict__.setdefault("ranges", []).append({})
        return _Profile(self.outer, profile)


class _Profile(_Forward):
    def set_shape(self, name, smallest, tuned, largest):
        self.outer.ranges[-1][name] = [smallest, tuned, largest]
        self.real.set_shape(name, smallest, tuned, largest)


class _Runtime:
    def __init__(self, outer):
        self.outer = outer

    def deserialize_cuda_engine(self, plan):
        return _Engine(self.outer, json.loads(plan)) if plan.startswith(b"{") else None


def apart(path):
    """Reads a graph, each Attention written out: ONNX Runtime does not take masks [B, 1, 1, S] there."""
    model = onnx.load(path)
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Attention":
            nodes.append(node)
            continue
        name, (query, key, value, *mask) = node.name, node.input
        nodes.append(onnx.helper.make_node("Transpose", [key], [f"{name}.t"], perm=[0, 1, 3, 2]))
        nodes.append(onnx.helper.make_node("MatMul", [query, f"{name}.t"], [f"{name}.s"]))
        if mask:
            nodes.append(onnx.helper.make_node("Add", [f"{name}.s", *mask], [f"{name}.m"]))
        nodes.append(onnx.helper.make_node("Softmax", [f"{name}.m" if mask else f"{name}.s"], [f"{name}.p"], axis=-1))
        nodes.append(onnx.helper.make_node("MatMul", [f"{name}.p", value], list(node.output)))
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


class _Engine:
    def __init__(self, outer, description):
        self.outer, self.ranges, self.graph = outer, description["ranges"], description["graph"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(apart(self.graph).SerializeToString(), options)
        self.names = [value.name for value in self.session.get_inputs()] + ["logits"]
        self.execution_context = None  # of the inspector, which is this object too
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), len(self.ranges)

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_mode(self, name):
        return rtx.TensorIOMode.OUTPUT if name == "logits" else rtx.TensorIOMode.INPUT

    def get_tensor_dtype(self, name):
        kinds = {value.name: value.type for value in self.session.get_inputs()}
        return rtx.DataType.INT64 if kinds.get(name) == "tensor(int64)" else rtx.DataType.FLOAT

    def get_tensor_profile_shape(self, name, index):
        return self.ranges[index][name]

    def create_execution_context(self):
        return _Context(self)

    def create_engine_inspector(self):
        return self

    def get_engine_information(self, form):
        """Lists one int8 layer for each GEMM with DequantizeLinear on both inputs, in the words of TensorRT 10: without the shapes of a
        profile it does not tell the types."""
        assert form == rtx.LayerInformationFormat.JSON
        graph = onnx.load(self.graph).graph
        bound = set(self.execution_context.shapes) == set(self.names[:-1]) if self.execution_context else False
        halves = any(item.data_type == onnx.TensorProto.FLOAT16 for item in graph.initializer)
        made = set()
        for node in graph.node:
            if node.op_type == "DequantizeLinear" or (node.op_type == "Cast" and node.input[0] in made):
                made |= set(node.output)
        layers = []
        for node in graph.node:
            if node.op_type in ("MatMul", "Gemm", "Attention"):
                floats = "Row major linear FP16 format" if halves else "Row major linear FP32"
                kind = "Row major Int8 format" if set(node.input[:2]) <= made else floats
                tensor = {"Name": "t", "Format/Datatype": kind if bound else "N/A due to dynamic shapes"}
                layers.append(
                    {
                        "Name": "_gemm_mha_v2_myl0_7" if node.op_type == "Attention" else node.name,
                        "LayerType": "gemm",
                        "Inputs": [tensor],
                        "Constants": [tensor],
                        "Metadata": f"[ONNX Layer: {node.name}]",
                    }
                )
        return json.dumps({"Layers": layers})


class _Context:
    def __init__(self, engine):
        self.engine, self.addresses, self.shapes, self.profile = engine, {}, {}, None

    def set_optimization_profile_async(self, index, stream):
        assert stream == 77
        self.profile = index
        return True

    def set_input_shape(self, name, shape):
        smallest, _, largest = self.engine.ranges[self.profile][name]
        self.shapes[name] = tuple(shape)
        return all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True))

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name):
        return (next(iter(self.shapes.values()))[0], self.engine.session.get_outputs()[0].shape[-1])

    def execute_async_v3(self, stream):
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        if Driver.recording is None:
            self._run(shapes, addresses)
        else:
            Driver.recording.append(lambda: self._run(shapes, addresses))
        return True

    def _run(self, shapes, addresses):
        features = {}
        for name, shape in shapes.items():
            dtype = rtx.nptype(self.engine.get_tensor_dtype(name))
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            features[name] = np.frombuffer(ctypes.string_at(addresses[name], size), dtype).reshape(shape)
        batch = len(next(iter(features.values())))
        logits = self.engine.outer.spoil(self.engine.session.run(["logits"], features)[0], batch)
        ctypes.memmove(addresses["logits"], np.ascontiguousarray(logits, np.float32).tobytes(), logits.nbytes)
