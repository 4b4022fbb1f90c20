"""`compress doctor`: what works on this machine, what is missing, and how to install it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

from foundation.machine import environment


def examine(fix: bool = False) -> Iterator[str]:
    """Yields one line for each component that a run may need; with `fix`, builds the server environment if it is missing.

    Raises:
        InputError: With `fix`, the server environment cannot be built.
    """
    machine = environment.hardware()
    yield f"processor      {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    yield f"features       {', '.join(machine['cpu_features']) or 'none of AVX2, AVX-512, VNNI and AMX'}"
    yield from _int8(machine["cpu_features"])
    yield f"GPU            {', '.join(machine['gpus']) or 'none: TensorRT engines are checked ahead of time, but never run'}"
    for name in ("torch", "transformers", "onnx", "onnxruntime", "openvino", "tritonclient"):
        yield f"{name:<15}{environment.versions().get(name, f'missing: pip install {name}')}"
    yield from _tensorrt()
    yield f"compiler       {shutil.which('g++') or 'no g++: torch is measured in eager mode only, not compiled'}"
    yield from _server(fix)


def _int8(features: list[str]) -> Iterator[str]:
    if not environment.NATIVE_INT8.isdisjoint(features):
        yield "int8           native int8 dot products; weights use 8 bits"
    else:
        yield "int8           no VNNI or AMX: int8 products saturate at 16 bits, so weights use 7 bits; little speed-up here"


def _tensorrt() -> Iterator[str]:
    if importlib.util.find_spec("tensorrt"):
        yield f"tensorrt       {environment.versions().get('tensorrt', 'installed')}"
    elif importlib.util.find_spec("tensorrt_rtx_bindings"):
        yield "tensorrt       not installed; TensorRT-RTX checks the graphs ahead of time"
    else:
        yield "tensorrt       not installed: pip install tensorrt (with a GPU) or 'compress-transformers[tensorrt-rtx]' (check without one)"


def _server(fix: bool) -> Iterator[str]:
    from foundation.core.errors import InputError
    from triton_repo import environment as server  # starts the interpreter of the server environment

    try:
        if fix:
            server.build()
        found = server.check()
        yield f"triton server  {found.path}, {', '.join(f'{name} {version}' for name, version in found.versions.items())}"
        for name, version in server.additions(found).items():
            yield f"{name:<15}{version or f'missing in the server environment: JSON_SCHEMA and REGEX are refused; {server.cure(name)}'}"
    except InputError as error:
        if fix:
            raise
        yield f"triton server  {error.problems[0]}"
