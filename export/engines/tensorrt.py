"""TensorRT: real plans where there is a GPU, otherwise a proof that the graph compiles to int8 for one.

- With `tensorrt` and an NVIDIA GPU: a plan for that GPU, its int8 share counted by the engine inspector.
- With TensorRT-RTX (`tensorrt_rtx_cu13_bindings`) and no GPU: an ahead-of-time build for each compute capability. Parsing, type checks,
  the fusion of Q/DQ into integer GEMMs and memory planning are the real ones. The kernels are chosen on the GPU, so that nothing is known
  of time or of answers. Such engines are not plans that Triton loads; they are measured and thrown away (60 MB and more each).
- With neither: one entry that says what to install.

Every build has a process of its own: a library that crashes takes nothing with it but its entry, which keeps its last words.
What is common to all of them is in `foundation.standalone.tensorrt_plan`.

`precision` is fp32, fp16, bf16, or the precision of a scheme with static or float activations. The float part runs in what the graph says:
fp32, or a half where the request has a half graph (`export.half_graphs`). Where TensorRT runs, an int8 build is made with both, so that the
answers can decide; a proof says nothing about answers, and is made only from the half graph.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from export.choices import FloatSetting
from export.engines.spec import NO_BLOCKS, BuildRequest, EngineSpec, Placement, engine_entry
from export.engines.tensorrt_child import RTX, TENSORRT, Answer, Failed, Gate, Graphs, Job
from export.graph.attention import fuse_attention
from export.graph.macs import count_macs
from export.graph.onnx import save
from export.graph.split_products import split_products
from export.half_graphs import HalfGraph
from export.share import share
from foundation.artifacts import exported
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Features
from foundation.machine.process import environment, spawn
from foundation.schemes.table import SCHEMES, is_static_int8, of_precision
from foundation.standalone.cuda_driver import Device, capabilities, load_driver
from foundation.standalone.tensorrt_layers import Layer, float_precision, fused_attentions, gemm_precisions, inspected_layers, with_products
from foundation.standalone.tensorrt_plan import Plan, PlanError

CAPABILITIES: Final = ("80", "86", "89", "120")
"""Ampere (A100), Ampere (A10, RTX 30), Ada (L4, L40S), Blackwell (RTX 50): what TensorRT-RTX builds for ahead of time."""
ALLOWED: Final = (
    "fp32",
    "fp16",
    "bf16",
    *(row.precision for row in SCHEMES.values() if row.activations == "static" or (row.grouped and row.activations == "float")),
)
CHILD = "export.engines.tensorrt_child"
SPLIT = "model_split.onnx"
TIMING_CACHE = "tensorrt.timing-cache"
NO_DYNAMIC = "TensorRT takes the scales of activations from the graph alone; quantize with scheme w8a8"
NO_INT8_WEIGHTS = "TensorRT multiplies int8 weights by int8 alone; quantize with scheme w8a8, or with w4a16 for float activations"
NO_ZERO_POINTS = "TensorRT has no zero points; quantize with symmetric: true"
INSTALL = (
    "TensorRT is not installed: pip install 'compress-transformers[tensorrt]' on a machine with an NVIDIA GPU builds a plan;"
    " pip install 'compress-transformers[tensorrt-rtx]' anywhere proves that the graph compiles"
)
PROVED = "built ahead of time by TensorRT-RTX, without a GPU: proves that the graph compiles; not a plan, not run, not kept"
NO_NODES = "the graph has no attention nodes, so that none has to be fused"
Count = Callable[[Sequence[Layer]], exported.Shares]
"""From the layers that a library lists to what it computes in integers."""
NOT_INSPECTED = "an engine is inspected on its GPU, and there was none"


def refusal(precision: str, model: Path) -> str | None:
    """Returns in one line why TensorRT cannot run a graph of this precision; None where it can."""
    scheme = of_precision(precision)
    if scheme is not None and scheme.activations == "blocks":
        return NO_BLOCKS
    if scheme is None:
        return None
    if scheme.activations == "dynamic":
        return NO_DYNAMIC
    if scheme.activations == "float" and not scheme.grouped:
        other = f"TensorRT has no products of {scheme.numbers} weights and floats; quantize with scheme w4a16"
        return NO_INT8_WEIGHTS if scheme.numbers == "int8" else other
    if not scheme.zero_points:
        return None
    from export.graph.qdq_schemes import has_zero_points

    return NO_ZERO_POINTS if has_zero_points(Graph(model)) else None


def absence(device: str) -> str | None:
    """Returns in one line why TensorRT cannot run on this machine; None where it can. Its engines may still be proved ahead of time."""
    return None if installed(TENSORRT) and gpus() else INSTALL


def proves_ahead() -> bool:
    """Returns True: without a GPU the graph is proved to compile, or the entry says what to install."""
    return True


def float_part(setting: FloatSetting) -> FloatSetting:
    """Returns the setting for strongly typed networks: the graph gives the float type of every operation."""
    return setting


def strongly_typed() -> bool:
    """Returns True: a network has the types of its graph."""
    return True


def own_graph(precision: str, model: Path, folder: Path) -> Path:
    """Returns a graph of static int8 whose products are split where their results are, or `model` if none has to be."""
    if not is_static_int8(precision):
        return model
    proto = Graph(model).load()
    return save(proto, folder / SPLIT) if split_products(proto) else model


def all_tokens() -> bool:
    """Returns True: keys and values of a layer with fewer queries come out in float32, and no GPU has timed that."""
    return True


def build(request: BuildRequest) -> Iterator[exported.Engine]:
    """Builds or proves the graphs: in fp32 where that is asked for and can be compared, and the half graph; see `build_plans`."""
    settings: dict[str, Any] = {"buckets": request.buckets, "max_batch_size": max(request.target.batch_sizes), "log": request.log}
    half = request.half_graph
    if half is None or (request.precision != half.half and absence("cuda") is None):
        yield from build_plans(request.model, request.folder, precision=request.precision, **settings)
    if half is None:
        return
    facts = half.facts(request.root)
    entries = build_plans(request.model, request.folder, precision=request.precision, half=half, **settings)
    if half.fused is not None and not _narrow(half.plain, half.fused, entries):
        facts = facts.with_(fused=None)
    yield from (entry.with_(half_graph=facts) for entry in entries)


def _narrow(plain: Path, fused: Path, entries: Sequence[exported.Engine]) -> bool:
    """Leaves in a fused graph the attentions that no build refused, so that it compiles wherever these do; whether any is left.

    Args:
        plain: The graph with separate products.
        fused: That with attentions as nodes; written anew, or removed where none is left.
        entries: What was built or proved of both.
    """
    groups = [group for entry in entries if entry.attention is not None for group in entry.attention.groups]
    refused = {node: group.reason for group in groups if group.reason for node in group.nodes}
    nodes = {node.name for node in Graph(fused).structure.node if node.op_type == "Attention"}
    if not nodes & refused.keys():
        return True
    refused |= _not_in(plain, nodes)  # before the graph is loaded once more
    made = fuse_attention(Graph(plain).load(), {}, refused)
    for file in fused.parent.glob(f"{fused.name}*"):
        file.unlink()
    if made.products:
        save(made.model, fused)
    return bool(made.products)


def _not_in(plain: Path, nodes: Collection[str]) -> dict[str, str]:
    """Returns why attentions of a graph were not nodes before, by the name that their node would have."""
    every = fuse_attention(Graph(plain).load(), {}).products
    return {name: "it was no attention node before" for name in every if name not in nodes}


def open_engine(spec: EngineSpec) -> TensorRt:
    """Opens a plan on the first GPU."""
    return TensorRt(Path(spec.path), spec.float_precision)


def build_plans(
    graph: Path,
    out: Path,
    *,
    precision: str,
    buckets: tuple[int, ...],
    max_batch_size: int,
    capabilities: tuple[str, ...] = CAPABILITIES,
    half: HalfGraph | None = None,
    log: Callable[[str], None],
) -> list[exported.Engine]:
    """Builds what this machine can build.

    Args:
        graph: The float or Q/DQ graph.
        out: Folder of the build inside the export artifact; a plan and its timing cache are written into it.
        precision: What the graph holds; one of `ALLOWED`.
        buckets: Sequence lengths (tokens), one optimisation profile each; () for images.
        max_batch_size: Largest batch of every profile.
        capabilities: What to prove the graph for where there is no GPU.
        half: The half graph of `graph`, which is built in its place. Its attentions have to be fused; those that no kernel runs are
            separate products again, and the entry says why.
        log: Takes one line for each build.

    Returns:
        Entries for `engines` of export.json: one for the GPU of this machine; or one for each capability, not runnable; or one that says
        what is missing. A failed build is an entry with `runnable` false, and the library's words as `reason`. `gemms` has the MACs of
        each weight GEMM by node, at the largest shape.
    """
    if precision not in ALLOWED:
        raise ValueError(f"precision {precision}; allowed: {', '.join(ALLOWED)}")
    rest = "fp32" if half is None else half.half
    real = installed(TENSORRT) and bool(gpus())
    if not real and not installed(RTX):
        log(INSTALL)
        return [_entry(out, float_precision=rest, reason=INSTALL, int8_share_reason=NOT_INSPECTED)]
    gemms = count_macs(Graph(graph), max_batch_size, buckets[-1] if buckets else None)

    def counted(layers: Sequence[Layer]) -> exported.Shares:
        return share(gemms, gemm_precisions(layers, [gemm.node for gemm in gemms]))

    ends = [gemm.node for gemm in gemms if gemm.kind == "attention" and gemm.node.rpartition("/")[2].startswith("pv")]
    graphs: Graphs = {
        "onnx": str(graph if half is None else half.plain),
        "fused": None if half is None or half.fused is None else str(half.fused),
        "left": {} if half is None else dict(half.left),
        "ends": ends,
        "float_precision": rest,
        "buckets": buckets,
        "max_batch_size": max_batch_size,
    }
    entries = [_real(out, graphs, counted, log)] if real else [_proof(out, graphs, counted, kind, log) for kind in capabilities]
    macs = {gemm.node: gemm.macs for gemm in gemms if gemm.kind == "weight"}
    return [entry.with_(gemms=macs) for entry in entries]


def installed(module: str) -> bool:
    """Whether a library can be imported; does not import it. A folder with only type stubs, such as `tensorrt-stubs`, is not a library."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def gpus() -> tuple[str, ...]:
    """Returns the compute capability of every GPU of this machine."""
    return capabilities(load_driver())


class TensorRt:
    """A plan on the first GPU.

    Args:
        path: What `build_plans` wrote; has to be built by the installed version of TensorRT, for this GPU.
        float_precision: What the graph that it was built from runs its float part in: taken for types that the plan does not report.
    """

    def __init__(self, path: Path, float_precision: str) -> None:
        self._typed = float_precision
        driver = load_driver()
        if not capabilities(driver):
            raise PlanError("no NVIDIA GPU")
        self._plan = Plan(importlib.import_module(TENSORRT), Device(driver), path.read_bytes(), graphs=True)

    @cached_property
    def _layers(self) -> tuple[Layer, ...]:
        return inspected_layers(self._plan.information())

    def predict(self, features: Features) -> NDArray[np.float32]:
        """Returns logits float32 [n, C]; the sequence has to be a bucket. Batches of one shape in a row run as a CUDA graph."""
        return self._plan.predict(features)

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node by the engine inspector; the same for every shape."""
        return gemm_precisions(self._layers, gemms)

    def placement(self) -> Placement:
        """Returns the GPU that the plan was loaded on, and the narrowest float type that its layers read."""
        return {"device": "cuda", "provider": TENSORRT, "float_precision": float_precision(self._layers) or self._typed}


def _real(out: Path, graphs: Graphs, counted: Count, log: Callable[[str], None]) -> exported.Engine:
    capability, rest = gpus()[0], graphs["float_precision"]
    plan = out / f"tensorrt-sm{capability}{'' if rest == 'fp32' else f'-{rest}'}.plan"
    cache = str(out / TIMING_CACHE)
    answer = _either({**graphs, "library": TENSORRT, "capability": None, "plan": str(plan), "timing_cache": cache, "gate": False})
    if "error" in answer:
        log(f"tensorrt: no plan for sm{capability}: {answer['error']}")
        return _entry(out, float_precision=rest, capability=capability, reason=answer["error"], int8_share_reason="there is no engine")
    log(f"tensorrt {answer['version']}: plan for sm{capability} in {answer['seconds']:.1f} s")
    figures = {**_figures(answer, capability), **dict(counted(_layers(answer)))}
    return _entry(out, plan, float_precision=rest, runnable=True, attention=answer["attention"], **figures)


def _proof(out: Path, graphs: Graphs, counted: Count, capability: str, log: Callable[[str], None]) -> exported.Engine:
    rest = graphs["float_precision"]
    answer = _either({**graphs, "library": RTX, "capability": capability, "plan": None, "timing_cache": None, "gate": False})
    if "error" in answer:
        log(f"tensorrt-rtx: does not build for sm{capability}: {answer['error']}")
        return _entry(out, float_precision=rest, capability=capability, reason=answer["error"], int8_share_reason="there is no engine")
    listed = counted(_layers(answer))
    weights = [layer.precision for layer in listed.layers if layer.kind == "weight"]
    evidence = (
        f"{weights.count('int8')} of {len(weights)} weight GEMMs take int8 activations and int8 weights in the compiler's list of layers"
    )
    log(f"tensorrt-rtx {answer['version']}: sm{capability} in {answer['seconds']:.1f} s; {evidence}")
    reason = f"{NOT_INSPECTED}; {evidence}, their kernels are chosen on the GPU"
    known = {**_figures(answer, capability), "float_precision": rest, "attention": answer["attention"], "compiled": listed}
    return _entry(out, None, **known, reason=PROVED, int8_share_reason=reason)


def _either(job: Job) -> Answer | Failed:
    """Builds the graph whose attentions have to be fused. Where that does not build, `gate` says which of them no kernel runs: those become
    separate products again, and the others have to be fused still. Where none is left or none is given, the other graph is built.

    Args:
        job: The build.

    Returns:
        The answer of the child, with `attention`.
    """
    left: list[Gate] = [{"group": "no node", "nodes": [name], "reason": reason} for name, reason in job["left"].items()]
    if job["fused"] is None:
        return _with_attention(run_child(job), job, left, None if left else NO_NODES)
    answer = run_child({**job, "onnx": job["fused"]})
    if "error" not in answer:
        return _with_attention(answer, job, [*answer["gates"], *left])
    refused = answer["error"]
    gates = run_child({**job, "onnx": job["fused"], "gate": True})
    if "error" in gates:
        return _with_attention(run_child(job), job, left, refused)
    failed = {node: group["reason"] for group in gates["gates"] for node in group["nodes"] if group["reason"]}
    groups = [*gates["gates"], *left]
    if all(group["reason"] for group in gates["gates"]):
        return _with_attention(run_child(job), job, groups)
    with tempfile.TemporaryDirectory(dir=Path(job["fused"]).parent, prefix="gated-") as folder:
        mixed = Path(folder) / "model.onnx"
        nodes = {node for group in gates["gates"] for node in group["nodes"]}
        failed |= _not_in(Path(job["onnx"]), nodes)  # before the graph is loaded once more
        save(fuse_attention(Graph(Path(job["onnx"])).load(), {}, failed).model, mixed)
        answer = run_child({**job, "onnx": str(mixed)})
    if "error" in answer:
        return _with_attention(run_child(job), job, groups, answer["error"])
    return _with_attention(answer, job, groups)


def _with_attention(answer: Answer | Failed, job: Graphs, groups: Sequence[Gate], why: str | None = None) -> Answer | Failed:
    """Adds `attention` to the answer of a child that built an engine; see `_either`."""
    if "error" in answer:
        return answer
    missing = [(len(group["nodes"]), f"{group['group']}: {group['reason']}") for group in groups if group["reason"]]
    reasons = "; ".join(f"{count} of {len(job['ends'])}: {reason}" for count, reason in missing)
    attention = exported.Fused(
        fused=fused_attentions(_layers(answer), job["ends"]),
        of=len(job["ends"]),
        reason=why or reasons or None,
        required=sum(len(group["nodes"]) for group in answer["gates"]),
        groups=tuple(exported.Attentions(**group) for group in groups),
    )
    return {**answer, "attention": attention}


def _figures(answer: Answer, capability: str) -> dict[str, object]:
    return {
        "capability": capability,
        "library": f"{answer['library']} {answer['version']}",
        "seconds": answer["seconds"],
        "size_bytes": answer["size_bytes"],
        "num_layers": len(answer["layers"]),
    }


def _entry(out: Path, file: Path | None = None, **values: Any) -> exported.Engine:
    """Returns one engine of export.json; what is not given is absent or unknown."""
    unknown = {"runnable": False, "capability": None, "library": None, "seconds": None, "num_layers": None, "attention": None}
    return engine_entry("tensorrt", "dynamic", **{**unknown, "file": f"{out.name}/{file.name}" if file else None, **values})


def _layers(answer: Answer) -> tuple[Layer, ...]:
    listed = [
        Layer(name, kind, tuple(inputs), tuple(constants), tuple(nodes), tactic)
        for name, kind, inputs, constants, nodes, tactic in answer["layers"]
    ]
    return with_products(listed)


def run_child(job: Job) -> Answer | Failed:
    """Runs one build in a process of its own.

    Args:
        job: The build; only its graph `onnx` is built.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, words = Path(folder) / "answer.json", Path(folder) / "stderr"
        with words.open("wb") as stderr:
            command = [sys.executable, "-P", "-m", CHILD, json.dumps({**job, "answer": str(answer)})]
            status = spawn(command, env=environment(), stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr).wait()
        if status == 0 and answer.exists():
            result: Answer = json.loads(answer.read_text(encoding="utf-8"))
            return result
        last = words.read_text(encoding="utf-8", errors="replace").split("\n")[-6:]
        return {"error": " ".join(f"{job['library']} ended with status {status}: {' '.join(last)}".split())[:600]}
