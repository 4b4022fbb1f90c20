"""The process that a build of TensorRT runs in: `python -m export.engines.tensorrt_child JOB`, started by `export.engines.tensorrt`.

The job is one line of JSON, and so is the answer, in the file that the job names. It imports the library and standalone modules, no torch:
a build of a small graph takes less time than that import.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, final

from foundation.standalone.cuda_driver import Device, load_driver
from foundation.standalone.tensorrt_layers import inspected_layers, listed_layers
from foundation.standalone.tensorrt_plan import Plan, PlanError, build, gate

if TYPE_CHECKING:
    from foundation.artifacts import exported
    from foundation.core.json_value import Json

TENSORRT, RTX = "tensorrt", "tensorrt_rtx_bindings"
"""Modules of the libraries."""
Listed = tuple[str, str, list[str], list[str], list[str], str]
"""The fields of a `Layer`."""


class Gate(TypedDict):
    """Attention nodes of one shape (`foundation.standalone.tensorrt_plan.Gate`)."""

    group: str
    nodes: list[str]
    reason: str | None


class Graphs(TypedDict):
    """What is to be built."""

    onnx: str
    fused: str | None
    """The graph whose attentions have to be fused, which is built first."""
    left: dict[str, str]
    """Why attentions are no nodes of `fused`."""
    ends: list[str]
    """The nodes `/pv` of `onnx`."""
    float_precision: str
    buckets: tuple[int, ...]
    max_batch_size: int


class Job(Graphs):
    """What a child is to do."""

    library: str
    capability: str | None
    plan: str | None
    """File to write."""
    timing_cache: str | None
    """File to read and to write."""
    gate: bool
    """Only say which attentions a kernel runs."""


@final
class Answer(TypedDict):
    """What a child has done."""

    library: str
    version: str
    seconds: float
    size_bytes: int
    layers: list[Listed]
    gates: list[Gate]
    """Attention nodes of the graph, all fused; where the job has `gate`, the answer has no other key."""
    attention: NotRequired[exported.Fused]


@final
class Failed(TypedDict):
    """Why a child has not done it."""

    error: str


def answer(job: Job) -> dict[str, Json]:
    """Does what `export.engines.tensorrt.run_child` asks for, in this process."""
    trt = importlib.import_module(job["library"])
    cache = Path(job["timing_cache"]) if job["timing_cache"] else None
    known = cache.read_bytes() if cache and cache.exists() else b""
    try:
        if job.get("gate"):
            gates = gate(trt, Path(job["onnx"]), job["buckets"], job["max_batch_size"], capability=job["capability"], timing_cache=known)
            return {"gates": [asdict(one) for one in gates]}
        built = build(trt, Path(job["onnx"]), job["buckets"], job["max_batch_size"], capability=job["capability"], timing_cache=known)
        layers = listed_layers(built.listing)
        if job["plan"]:
            Path(job["plan"]).write_bytes(built.plan)
            layers = inspected_layers(Plan(trt, Device(load_driver()), built.plan).information())
    except PlanError as error:
        return {"error": str(error)}
    if cache:
        cache.write_bytes(built.timing_cache)
    listed: list[Json] = [[layer.name, layer.kind, [*layer.inputs], [*layer.constants], [*layer.nodes], layer.tactic] for layer in layers]
    name = "TensorRT" if job["library"] == TENSORRT else "TensorRT-RTX"
    figures: dict[str, Json] = {"seconds": built.seconds, "size_bytes": len(built.plan), "gates": [asdict(one) for one in built.gates]}
    return {"library": name, "version": trt.__version__, "layers": listed, **figures}


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    Path(request["answer"]).write_text(json.dumps(answer(request)), encoding="utf-8")
