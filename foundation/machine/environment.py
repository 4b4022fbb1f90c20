"""Describes this machine: library versions, processor features, memory, GPUs. Used in manifests, engine cache keys and the report."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import TypedDict

import psutil

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "openvino",
    "tensorrt",
    "tensorrt_rtx_cu13_libs",
    "tritonclient",
    "numpy",
)
NATIVE_INT8 = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""CPU features that multiply int8 and accumulate in int32, without saturating at 16 bits."""
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


class Processor(TypedDict):
    """What decides how fast a machine computes."""

    cpu: str
    cpu_features: list[str]
    cores: int
    """Usable physical cores."""
    gpus: list[str]


class Hardware(Processor):
    """A machine."""

    memory_bytes: int
    kernel: str


class Fingerprint(TypedDict):
    """What everything depends on that is measured on or built for this machine."""

    versions: dict[str, str]
    hardware: Hardware


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and of those installed libraries that results depend on."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def hardware() -> Hardware:
    """Returns processor, features, usable physical cores, memory (bytes), GPUs and kernel of this machine."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.M)
    present = set(flags[1].split()) if flags else set()
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cpu_features": [feature for feature in FEATURES if feature in present],
        "cores": physical_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
        "kernel": platform.release(),
    }


def processor() -> Processor:
    """Returns the part of `hardware` that decides how fast this machine computes."""
    known = hardware()
    return {"cpu": known["cpu"], "cpu_features": known["cpu_features"], "cores": known["cores"], "gpus": known["gpus"]}


@functools.cache
def gpus() -> list[str]:
    """Returns the names of the NVIDIA GPUs that the driver lists; empty if there are none."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")) if os.path.isdir("/proc/driver/nvidia/gpus") else []
    names = [re.search(r"^Model:\s*(.+)$", card.read_text(), re.M) for card in cards]
    return [name[1].strip() for name in names if name]


def physical_cores() -> int:
    """Returns the number of physical cores that this process may use by its affinity mask (at least 1)."""
    allowed = len(psutil.Process().cpu_affinity()) if platform.system() == "Linux" else psutil.cpu_count() or 1
    logical, physical = psutil.cpu_count() or 1, psutil.cpu_count(logical=False) or 1
    return max(1, round(allowed * physical / logical))


def cache_folder() -> Path:
    """Returns the cache folder shared by all runs on this machine: below $XDG_CACHE_HOME if that is an absolute path, else ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache") / "compress"


def fingerprint() -> Fingerprint:
    """Returns versions and hardware, which are part of the cache key of everything measured on or built for this machine."""
    return {"versions": versions(), "hardware": hardware()}
