"""TensorRT: real plans where there is a GPU, otherwise a proof that the graph compiles to int8 for one.

- With `tensorrt` and an NVIDIA GPU: a plan for that GPU, its int8 share counted by the engine inspector.
- With TensorRT-RTX (`tensorrt_rtx_cu13_bindings`) and no GPU: an ahead-of-time build for each compute capability. Parsing, type checks,
  the fusion of Q/DQ into integer GEMMs and memory planning are the real ones. The kernels are chosen on the GPU, so that nothing is known
  of time or of answers. Such engines are not plans that Triton loads; they are measured and thrown away (60 MB and more each).
- With neither: one entry that says what to install.

Every build has a process of its own: a library that crashes takes nothing with it but its entry, which keeps its last words.
What is common to all of them is in `compress.standalone.tensorrt_plan`.

`precision` is fp32 or that of a scheme with static or float activations. Left out: what `build` gives to a run has its float part in
float32. Half graphs (`export.graph.halves`, `export.graph.attention`) go through `build_plans` all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compress.machine.process import environment, spawn
from compress.schemes.table import SCHEMES, of_precision
from compress.standalone.cuda_driver import Device, capabilities, load_driver
from compress.standalone.tensorrt_plan import Layer, Plan, PlanError, fused_attentions, gemm_precisions, with_products
from compress.standalone.tensorrt_plan import build as build_plan
from export.engines.spec import BuildRequest, EngineSpec, Features, Placement, engine_entry
from export.graph.macs import count_macs
from export.share import share

CAPABILITIES: Final = ("80", "86", "89", "120")
"""Ampere (A100), Ampere (A10, RTX 30), Ada (L4, L40S), Blackwell (RTX 50): what TensorRT-RTX builds for ahead of time."""
ALLOWED: Final = ("fp32", *(row.precision for row in SCHEMES.values() if row.activations != "dynamic"))
TENSORRT, RTX = "tensorrt", "tensorrt_rtx_bindings"
TIMING_CACHE = "tensorrt.timing-cache"
NO_DYNAMIC = "TensorRT takes the scales of activations from the graph alone; quantize with scheme w8a8"
NO_ZERO_POINTS = "TensorRT has no zero points; quantize with symmetric: true"
INSTALL = (
    "TensorRT is not installed: pip install 'compress-transformers[tensorrt]' on a machine with an NVIDIA GPU builds a plan;"
    " pip install 'compress-transformers[tensorrt-rtx]' anywhere proves that the graph compiles"
)
PROVED = "built ahead of time by TensorRT-RTX, without a GPU: proves that the graph compiles; not a plan, not run, not kept"
NO_NODES = "the graph has no attention nodes, so that none has to be fused"
Shares = Callable[[Sequence[Layer]], dict[str, Any]]
"""From the layers that a library lists to int8_share, int8_share_all, int8_share_reason and layers."""
NOT_INSPECTED = "an engine is inspected on its GPU, and there was none"


def refusal(precision: str, model: Path) -> str | None:
    """Returns in one line why TensorRT cannot run a graph of this precision; None where it can."""
    scheme = of_precision(precision)
    if scheme is None:
        return None
    if scheme.activations == "dynamic":
        return NO_DYNAMIC
    if not scheme.zero_points:
        return None
    from export.graph.qdq_schemes import has_zero_points

    return NO_ZERO_POINTS if has_zero_points(model) else None


def absence(device: str) -> str | None:
    """Returns in one line why TensorRT cannot run on this machine; None where it can. Its engines may still be proved ahead of time."""
    return None if installed(TENSORRT) and gpus() else INSTALL


def build(request: BuildRequest) -> list[dict[str, Any]]:
    """Builds or proves the graph; see `build_plans`."""
    return build_plans(
        request.model,
        request.folder,
        precision=request.precision,
        buckets=request.buckets,
        max_batch_size=max(request.target.batch_sizes),
        log=request.log,
    )


def open_engine(spec: EngineSpec) -> TensorRt:
    """Opens a plan on the first GPU."""
    return TensorRt(Path(spec.path))


def build_plans(
    onnx: Path,
    out: Path,
    *,
    precision: str,
    buckets: tuple[int, ...],
    max_batch_size: int,
    capabilities: tuple[str, ...] = CAPABILITIES,
    attention: Path | None = None,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Builds what this machine can build.

    Args:
        onnx: The float or Q/DQ graph.
        out: Folder of the build inside the export artifact; a plan and its timing cache are written into it.
        precision: What the graph holds; one of `ALLOWED`.
        buckets: Sequence lengths (tokens), one optimisation profile each; () for images.
        max_batch_size: Largest batch of every profile.
        capabilities: What to prove the graph for where there is no GPU.
        attention: The same graph with each attention as one node (`export.graph.attention`), which is built where all of them have a
            fused kernel; otherwise `onnx` is, and the entry says why.
        log: Takes one line for each build.

    Returns:
        Entries for `engines` of export.json: one for the GPU of this machine; or one for each capability, not runnable; or one that says
        what is missing. A failed build is an entry with `runnable` false, and the library's words as `reason`.
    """
    if precision not in ALLOWED:
        raise ValueError(f"precision {precision}; allowed: {', '.join(ALLOWED)}")
    real = installed(TENSORRT) and bool(gpus())
    if not real and not installed(RTX):
        log(INSTALL)
        return [_entry(out, reason=INSTALL, int8_share_reason=NOT_INSPECTED)]
    gemms = count_macs(onnx, max_batch_size, buckets[-1] if buckets else None)

    def shares(layers: Sequence[Layer]) -> dict[str, Any]:
        return share(gemms, gemm_precisions(layers, [gemm.node for gemm in gemms]))

    ends = [gemm.node for gemm in gemms if gemm.kind == "attention" and gemm.node.rpartition("/")[2].startswith("pv")]
    fused = None if attention is None else str(attention)
    job = {"onnx": str(onnx), "fused": fused, "ends": ends, "buckets": buckets, "max_batch_size": max_batch_size}
    if real:
        return [_real(out, job, shares, log)]
    return [_proof(out, job, shares, capability, log) for capability in capabilities]


def installed(module: str) -> bool:
    """Whether a library can be imported; it is not."""
    return importlib.util.find_spec(module) is not None


def gpus() -> tuple[str, ...]:
    """Returns the compute capability of every GPU of this machine."""
    return capabilities(load_driver())


class TensorRt:
    """A plan on the first GPU.

    Args:
        path: What `build_plans` wrote; has to be built by the installed version of TensorRT, for this GPU.
    """

    def __init__(self, path: Path) -> None:
        driver = load_driver()
        if not capabilities(driver):
            raise PlanError("no NVIDIA GPU")
        self._plan = Plan(importlib.import_module(TENSORRT), Device(driver), path.read_bytes())

    def predict(self, features: Features) -> NDArray[np.float32]:
        """Returns logits float32 [n, C]; the sequence has to be a bucket."""
        return self._plan.predict(features)

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node by the engine inspector; the same for every shape."""
        return gemm_precisions(self._plan.layers(), gemms)

    def placement(self) -> Placement:
        """Returns the GPU that the plan was loaded on, and the type of its logits."""
        return {"device": "cuda", "provider": TENSORRT, "float_precision": self._plan.float_precision}


def _real(out: Path, job: dict[str, Any], shares: Shares, log: Callable[[str], None]) -> dict[str, Any]:
    capability = gpus()[0]
    plan = out / f"tensorrt-sm{capability}.plan"
    answer = _either({**job, "library": TENSORRT, "capability": None, "plan": str(plan), "timing_cache": str(out / TIMING_CACHE)})
    if "error" in answer:
        log(f"tensorrt: no plan for sm{capability}: {answer['error']}")
        return _entry(out, capability=capability, reason=answer["error"], int8_share_reason="there is no engine")
    log(f"tensorrt {answer['version']}: plan for sm{capability} in {answer['seconds']:.1f} s")
    return _entry(out, plan, **_figures(answer, capability), runnable=True, attention=answer["attention"], **shares(_layers(answer)))


def _proof(out: Path, job: dict[str, Any], shares: Shares, capability: str, log: Callable[[str], None]) -> dict[str, Any]:
    answer = _either({**job, "library": RTX, "capability": capability, "plan": None, "timing_cache": None})
    if "error" in answer:
        log(f"tensorrt-rtx: does not build for sm{capability}: {answer['error']}")
        return _entry(out, capability=capability, reason=answer["error"], int8_share_reason="there is no engine")
    listed = shares(_layers(answer))
    weights = [layer["precision"] for layer in listed["layers"] if layer["kind"] == "weight"]
    evidence = (
        f"{weights.count('int8')} of {len(weights)} weight GEMMs take int8 activations and int8 weights in the compiler's list of layers"
    )
    log(f"tensorrt-rtx {answer['version']}: sm{capability} in {answer['seconds']:.1f} s; {evidence}")
    reason = f"{NOT_INSPECTED}; {evidence}, their kernels are chosen on the GPU"
    compiled = {**listed, "attention": answer["attention"]}
    return _entry(out, **_figures(answer, capability), reason=PROVED, int8_share_reason=reason, compiled=compiled)


def _either(job: dict[str, Any]) -> dict[str, Any]:
    """Builds the graph whose attentions have to be fused; where that does not build or is not given, the other one.

    Args:
        job: As for `run_child`; `fused`, the first graph, or None; `ends`, the nodes `/pv` of the other one.

    Returns:
        The answer of the child, with `attention`: how many are `fused`, `of` how many, and as `reason` why not all of them have to be.
    """
    reason, ends = NO_NODES, job["ends"]
    if job["fused"] is not None:
        answer = run_child({**job, "onnx": job["fused"]})
        if "error" not in answer:
            left = len(ends) - answer["attentions"]
            reason = f"{left} of {len(ends)} are no attention nodes" if left else ""
            return {**answer, "attention": {"fused": fused_attentions(_layers(answer), ends), "of": len(ends), "reason": reason or None}}
        reason = answer["error"]
    answer = run_child(job)
    if "error" in answer:
        return answer
    return {**answer, "attention": {"fused": fused_attentions(_layers(answer), ends), "of": len(ends), "reason": reason}}


def _figures(answer: dict[str, Any], capability: str) -> dict[str, Any]:
    return {
        "capability": capability,
        "library": f"{answer['library']} {answer['version']}",
        "seconds": answer["seconds"],
        "size_bytes": answer["size_bytes"],
        "num_layers": len(answer["layers"]),
    }


def _entry(out: Path, file: Path | None = None, **values: Any) -> dict[str, Any]:
    """Returns one engine of export.json; what is not given is absent or unknown."""
    unknown = {"runnable": False, "capability": None, "library": None, "seconds": None, "num_layers": None}
    return engine_entry("tensorrt", "dynamic", **{**unknown, "file": f"{out.name}/{file.name}" if file else None, **values})


def _layers(answer: dict[str, Any]) -> tuple[Layer, ...]:
    listed = [
        Layer(name, kind, tuple(inputs), tuple(constants), tuple(nodes), tactic)
        for name, kind, inputs, constants, nodes, tactic in answer["layers"]
    ]
    return with_products(listed)


def run_child(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one build in a process of its own.

    Args:
        job: `library`, `onnx`, `buckets`, `max_batch_size`, `capability` or None, `plan` and `timing_cache` (files to write) or None.

    Returns:
        `library`, `version`, `seconds`, `size_bytes`, `layers` and `attentions` (nodes of the graph, all fused); or `error`, one line.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, words = Path(folder) / "answer.json", Path(folder) / "stderr"
        with words.open("wb") as stderr:
            command = [sys.executable, "-P", "-m", "export.engines.tensorrt", json.dumps({**job, "answer": str(answer)})]
            status = spawn(command, env=environment(), stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr).wait()
        if status == 0 and answer.exists():
            result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return result
        last = words.read_text(encoding="utf-8", errors="replace").split("\n")[-6:]
        return {"error": " ".join(f"{job['library']} ended with status {status}: {' '.join(last)}".split())[:600]}


def _child(job: dict[str, Any]) -> dict[str, Any]:
    """Does what `run_child` asks for, in this process."""
    trt = importlib.import_module(job["library"])
    cache = Path(job["timing_cache"]) if job["timing_cache"] else None
    known = cache.read_bytes() if cache and cache.exists() else b""
    try:
        built = build_plan(trt, Path(job["onnx"]), job["buckets"], job["max_batch_size"], capability=job["capability"], timing_cache=known)
        layers = built.layers
        if job["plan"]:
            Path(job["plan"]).write_bytes(built.plan)
            layers = Plan(trt, Device(load_driver()), built.plan).layers()
    except PlanError as error:
        return {"error": str(error)}
    if cache:
        cache.write_bytes(built.timing_cache)
    listed = [[layer.name, layer.kind, layer.inputs, layer.constants, layer.nodes, layer.tactic] for layer in layers]
    name = "TensorRT" if job["library"] == TENSORRT else "TensorRT-RTX"
    figures = {"seconds": built.seconds, "size_bytes": len(built.plan), "attentions": built.attentions}
    return {"library": name, "version": trt.__version__, "layers": listed, **figures}


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    Path(request["answer"]).write_text(json.dumps(_child(request)), encoding="utf-8")
