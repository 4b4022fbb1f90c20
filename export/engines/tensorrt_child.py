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
from typing import Any

from foundation.standalone.cuda_driver import Device, load_driver
from foundation.standalone.tensorrt_layers import inspected_layers, listed_layers
from foundation.standalone.tensorrt_plan import Plan, PlanError, build, gate

TENSORRT, RTX = "tensorrt", "tensorrt_rtx_bindings"
"""Modules of the libraries."""


def answer(job: dict[str, Any]) -> dict[str, Any]:
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
    listed = [[layer.name, layer.kind, layer.inputs, layer.constants, layer.nodes, layer.tactic] for layer in layers]
    name = "TensorRT" if job["library"] == TENSORRT else "TensorRT-RTX"
    figures = {"seconds": built.seconds, "size_bytes": len(built.plan), "gates": [asdict(one) for one in built.gates]}
    return {"library": name, "version": trt.__version__, "layers": listed, **figures}


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    Path(request["answer"]).write_text(json.dumps(answer(request)), encoding="utf-8")
