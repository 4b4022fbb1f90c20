"""Which parts of TensorRT are called, and what its type stubs say of them.

    python -m tests.export.engines.tensorrt_calls tensorrt_bindings/tensorrt.pyi VERSION > tests/export/engines/tensorrt_10_13.json

wrote the recording from the package tensorrt-stubs 10.13.0.35.1 of PyPI, whose stubs are made from NVIDIA's bindings. For each class it has
the arguments of every overload of a method, `[name, whether it may be left out]` each, and null for what is no method.

No stubs are published for TensorRT 11. Its bindings print their signatures themselves, and need NVIDIA's libraries (2 GB) for 9 functions
alone: with empty ones under the names libnvinfer.so.11, libnvinfer_plugin.so.11 and libnvonnxparser.so.11 they can be imported, and

    python -m tests.export.engines.tensorrt_calls tensorrt_bindings/tensorrt.so VERSION > tests/export/engines/tensorrt_11_4.json

wrote that recording from tensorrt-cu13-bindings 11.4.0.106.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

CALLS = {
    "Builder": {"create_network", "create_builder_config", "create_optimization_profile", "build_serialized_network"},
    "INetworkDefinition": {"num_inputs", "get_input", "num_layers", "get_layer"},
    "ITensor": {"name", "shape"},
    "ILayer": {"type"},
    "OnnxParser": {"parse_from_file", "num_errors", "get_error"},
    "ParserError": {"node_name", "node_operator", "desc"},
    "IBuilderConfig": {"profiling_verbosity", "clear_flag", "set_flag", "add_optimization_profile", "set_timing_cache"}
    | {"create_timing_cache", "get_timing_cache", "set_memory_pool_limit", "builder_optimization_level", "hardware_compatibility_level"},
    "ITimingCache": {"serialize"},
    "IOptimizationProfile": {"set_shape"},
    "Runtime": {"deserialize_cuda_engine"},
    "ICudaEngine": {"get_tensor_name", "get_tensor_mode", "get_tensor_dtype", "get_tensor_profile_shape", "create_execution_context"}
    | {"create_engine_inspector", "num_io_tensors", "num_optimization_profiles"},
    "IExecutionContext": {"set_optimization_profile_async", "set_input_shape", "set_tensor_address", "get_tensor_shape"}
    | {"execute_async_v3"},
    "EngineInspector": {"execution_context", "get_engine_information"},
    "ILogger": {"Severity"},
    "NetworkDefinitionCreationFlag": {"STRONGLY_TYPED"},
    "BuilderFlag": {"TF32", "SPARSE_WEIGHTS", "DISABLE_TIMING_CACHE", "REFIT"},
    "MemoryPoolType": {"WORKSPACE"},
    "HardwareCompatibilityLevel": {"NONE", "SAME_COMPUTE_CAPABILITY", "AMPERE_PLUS"},
    "ProfilingVerbosity": {"DETAILED"},
    "TensorIOMode": {"INPUT"},
    "LayerInformationFormat": {"JSON"},
}
"""What every version has to have."""
LATER = {
    "LayerType": {"ATTENTION_INPUT"},
    "IAttentionInputLayer": {"attention"},
    "IAttention": {"decomposable", "get_input", "mask", "name"},
    "ComputeCapability": set(),
}
"""What versions may lack; `IBuilderConfig.set_compute_capability` is that of TensorRT-RTX alone."""
ONLY_RTX = {"set_compute_capability", "num_compute_capabilities"}


def recorded(text: str) -> dict[str, Any]:
    """Returns what a stub says of the names in `CALLS`.

    Some of its other classes are no valid Python, and of a network the methods that add layers are none: these are not read.
    """
    parts = {re.match(r"class (\w+)", part)[1]: part for part in re.split(r"^(?=class )", text, flags=re.M) if part.startswith("class ")}
    network = "INetworkDefinition"
    parts[network] = re.sub(r"def (add_\w+)\(self, .*\) ->", r"def \1(self) ->", parts[network])
    classes: dict[str, ast.ClassDef] = {}
    for kind in (*CALLS, "INoCopy"):
        [node] = [node for node in ast.parse(parts[kind]).body if isinstance(node, ast.ClassDef)] if kind in parts else [None]
        if node is not None:
            classes[kind] = node
    return {kind: {name: _member(classes, kind, name) for name in sorted(names)} for kind, names in CALLS.items()}


def _member(classes: dict[str, ast.ClassDef], kind: str, name: str) -> Any:
    found: list[Any] = []
    for node in classes[kind].body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            if any(ast.unparse(one) == "property" or ast.unparse(one).endswith(".setter") for one in node.decorator_list):
                return None
            given = node.args.args[1:]
            optional = len(given) - len(node.args.defaults)
            found.append([[argument.arg, index >= optional] for index, argument in enumerate(given)])
        elif (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name) or (
            isinstance(node, ast.ClassDef) and node.name == name
        ):
            return None
    bases = [ast.unparse(base) for base in classes[kind].bases]
    return found or next((_member(classes, base, name) for base in bases if base in classes), "absent")


def printed(trt: Any) -> dict[str, Any]:
    """Returns what bindings print of the names in `CALLS` and `LATER`; a class that is missing has "absent" for all."""
    return {
        kind: {name: _printed(getattr(getattr(trt, kind, None), name, "absent"), name) for name in sorted(names)}
        for kind, names in (CALLS | LATER).items()
    }


def _printed(member: Any, name: str) -> Any:
    if member == "absent":
        return member
    signatures = re.findall(rf"{name}\(self: [^,)]*,? ?(.*?)\) ->", member.__doc__ or "") if callable(member) else []
    overloads = [[part for part in re.split(r", (?=\w+: )", given) if part] for given in signatures]
    return [[[part.partition(":")[0], " = " in part] for part in given] for given in overloads] or None


if __name__ == "__main__":
    source = Path(sys.argv[1])
    if source.suffix == ".pyi":
        contents = {"source": f"tensorrt-stubs {sys.argv[2]}", "classes": recorded(source.read_text(encoding="utf-8"))}
    else:
        sys.path.insert(0, str(source.parent))
        contents = {"source": f"tensorrt-cu13-bindings {sys.argv[2]}", "classes": printed(importlib.import_module(source.stem))}
    print(json.dumps(contents, indent=1))
