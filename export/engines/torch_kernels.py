"""torch on the fused kernels of `export.kernels`: w8a8 encoders of BERT's, T5's and ViT's layers on NVIDIA GPUs, without padding.

    packed    tokens of all rows one after another, a forward pass of seven kernels a layer, recorded as CUDA graphs

The engine runs one file, the plan of `export.fused.plan`; it needs torch, the Triton language and safetensors, and neither transformers nor
the checkpoint. Its integers equal those in `foundation.schemes.int8`: parity compares them layer by layer. What is float is float32, and
fp16 where the recipe asks for `float_precision: fp16`.

Without a GPU the environment variable TRITON_INTERPRET=1 runs every kernel in the interpreter of the language, on the CPU: for tests, as it
takes seconds for a row. CUDA graphs and measured tiles are only for GPUs.

Left out: float builds and other schemes than w8a8, which are torch's own; models that `export.fused.parts` lists.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from export.engines.spec import BuildRequest, EngineSpec, Logits, Placement
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array, Features
from foundation.core.errors import InputError
from foundation.schemes.table import is_static_int8
from foundation.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from export.choices import FloatPrecision, FloatSetting
    from export.fused.decoder.plan import DecoderPlan
    from export.fused.graphs import Record
    from export.fused.launches import Launches, Passes
    from export.fused.layers import Probe
    from export.fused.library_attention import Time
    from export.fused.plan import Plan
    from foundation.artifacts import exported

MODE, FILE = "packed", "torch_kernels.safetensors"
INTERPRET = "TRITON_INTERPRET"
NO_GPU = "torch finds no NVIDIA GPU that it can use"
NO_TRITON = "the package triton is not installed: pip install 'compress-transformers[kernels]'"
PREFIX = "its kernels of attention read no learned prefix, and the model has one"
LOW_RANK = "its kernels look up whole rows of embeddings, and the embeddings of the model are in low rank"
OWNERS = {"packed": "our", "varlen": "torch's"}
"""Of the kernels of attention."""
ATTENTION_PRODUCTS = ("qk", "pv")


def interprets() -> bool:
    """Whether kernels of this process run in the interpreter, which the language decides when it is imported."""
    return os.environ.get(INTERPRET) == "1"


def refusal(precision: str, model: Path) -> str | None:
    """Returns in one line why the kernels cannot run a graph of this precision; None where they can."""
    return None if is_static_int8(precision) else f"it runs int8 with static scales only (scheme w8a8), and this build is {precision}"


def model_refusal(config: PreTrainedConfig) -> str | None:
    """Returns in one line why the kernels cannot run the model of a Transformers config, as far as the config shows it."""
    from foundation.models.own_shape import embedding_rank_of, prefix_of

    return PREFIX if prefix_of(config) else LOW_RANK if embedding_rank_of(config) else None


def absence(device: str) -> str | None:
    """Returns in one line why no kernel can run on a device of this machine; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return NO_TRITON
    if interprets():
        return None
    if device != "cuda":
        return f"its kernels are for NVIDIA GPUs, and the device is {device}"
    return None if torch.cuda.is_available() else NO_GPU


def float_part(setting: FloatSetting) -> FloatPrecision:
    """Returns fp16 if the recipe says so, and fp32 otherwise: no float build of this engine is there to judge by."""
    return "fp16" if setting == "fp16" else "fp32"


def build(request: BuildRequest) -> Iterator[exported.Engine]:
    """Writes the plan; yields the one mode, in fp32 and where asked for in fp16 too."""
    from export.fused.compared_launches import passes
    from export.fused.parts import UNLIMITED, plan_of
    from export.fused.plan import write_plan

    path = request.folder / FILE
    try:
        plan = plan_of(request.checkpoint, nodes_of(request.model), max(request.buckets, default=UNLIMITED))
    except InputError as error:
        problem = "; ".join(error.lines)
        request.log(f"{request.engine}: {problem}")
        yield request.entry(MODE, runnable=False, reason=problem, int8_share_reason="there is no engine")
        return
    floats = dict.fromkeys((request.float_precision, *(["fp16"] if request.fp16_float_part else [])))
    if request.target.device == "cuda" and absence("cuda") is None and not interprets():
        if "fp16" in floats:
            plan = with_attention(plan, request)
        chosen = launches_of(request, plan.longest, "fp16" if "fp16" in floats else "fp32", partial(passes, plan))
        plan = replace(plan, launches=chosen)
    write_plan(plan, path)
    for floating in floats:
        yield request.entry(MODE, [path], float_precision=floating, integer_weights=plan.integer_share, properties={})


def with_attention(plan: Plan, request: BuildRequest, time: Time | None = None) -> Plan:
    """Returns a plan with the faster kernel of attention in float16, ours or torch's, and the times of both.

    Args:
        plan: A plan.
        request: Gives device, lengths and batch sizes, and takes the choice as a line.
        time: Takes the times; None: the GPU.
    """
    from export.fused import library_attention
    from export.fused.tuning import work_on_gpu

    device = torch.device(request.target.device)
    why = library_attention.refusal(plan, device, torch.float16)
    if why is not None:
        request.log(f"{request.engine}: attention by our kernel; torch's does not run: {why}")
        return plan
    lengths = [min(length, plan.longest) for length in request.buckets] or [plan.longest]
    rows = max(request.target.batch_sizes)
    kernel, times = library_attention.fastest(plan, device, lengths, rows, work_on_gpu if time is None else time)
    compared = "; ".join(f"{length} tokens: ours {ms['packed']:.3f} ms, torch's {ms['varlen']:.3f} ms" for length, ms in times.items())
    request.log(f"{request.engine}: attention by {OWNERS[kernel]} kernel in fp16 ({compared})")
    return replace(plan, attention=kernel, attention_ms=times)


def launches_of(
    request: BuildRequest, longest: int, floating: str, passes: Passes, time: Time | None = None, record: Record | None = None
) -> Launches:
    """Returns the faster kind of launches on the device of the target, plain or dependent, with the times of both.

    Args:
        request: Gives device, lengths and batch sizes, and takes the choice as a line.
        longest: Most tokens that the model reads.
        floating: What is float while the times are taken: fp16 or fp32.
        passes: Yields what is compared.
        time: Takes the times; None: the GPU.
        record: Records a pass; None: as a CUDA graph.
    """
    from export.fused import launches
    from export.fused.graphs import record_on_gpu
    from export.fused.runner import DTYPES
    from export.fused.tuning import tuner, work_on_gpu

    device = torch.device(request.target.device)
    why = launches.refusal(device)
    if why is not None:
        chosen = launches.Launches(reason=f"dependent ones do not run: {why}")
    else:
        lengths = sorted({min(length, longest) for length in request.buckets} or {longest})
        shapes = [(rows, length) for rows in sorted(set(request.target.batch_sizes)) for length in lengths]
        with torch.inference_mode():
            compared = passes(device, DTYPES[floating], shapes, tuner(device), record_on_gpu if record is None else record)
            chosen = launches.fastest(compared, work_on_gpu if time is None else time)
    request.log(f"{request.engine}: launches: {chosen.line}")
    return chosen


def nodes_of(model: Path) -> dict[str, dict[str, str]]:
    """Returns the tensor names of the int8 layers of a graph, as a plan holds them (`export.fused.plan.Plan.nodes`)."""
    from export.parity.parity import quantized_gemms

    return {
        gemm.layer: {"input": gemm.input, "codes": gemm.codes, "biased" if gemm.bias.any() else "output": gemm.output}
        for gemm in quantized_gemms(Graph(model))
    }


def probed_tensors(plan: Plan | DecoderPlan, found: Mapping[str, Probe]) -> dict[str, Array]:
    """Returns inputs, codes and products of int8 layers by their ONNX names, given the probes by path."""
    known: dict[str, Array] = {}
    for layer, names in plan.nodes.items():
        probed, biased = found[layer], "output" not in names  # one node of the graph multiplies and adds the bias
        x, codes, y = probed.x, probed.codes, probed.y + plan.bias(layer) if biased else probed.y
        patches = getattr(plan, "patches", None)
        if patches is not None and layer == patches.projection.name:  # a convolution of the graph
            x, codes, y = patches.joined(x), patches.joined(codes), patches.laid_out(y)
        tensors_of = {names["input"]: x, names["codes"]: codes, names["biased" if biased else "output"]: y}
        known |= {tensor: values.cpu().numpy() for tensor, values in tensors_of.items()}
    return known


def open_engine(spec: EngineSpec) -> TorchKernels:
    """Opens a plan."""
    return TorchKernels(spec)


class TorchKernels:
    """An engine from a plan."""

    def __init__(self, spec: EngineSpec) -> None:
        from export.fused.runner import Runner

        why = absence(spec.device)
        if why is not None:
            raise InputError("target.engines", f"{spec.engine} given", why)
        torch.set_num_threads(spec.threads)
        lengths = Preprocessor.load(Path(spec.folder)).buckets
        self._runner = Runner(Path(spec.path), spec.device, spec.float_precision, spec.batch_sizes, lengths)

    def predict(self, features: Features) -> Logits:
        """Returns logits or vectors, float32 [n, C]."""
        return self._runner.predict(features)

    def probe(self, tensors: Sequence[str], features: Features) -> dict[str, Array]:
        """Returns inputs, codes and products of int8 layers by their ONNX names, [T, ...] of the tokens of all rows."""
        known = probed_tensors(self._runner.plan, self._runner.probe(features))
        return {name: known[name] for name in tensors}

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node, by the layers of the plan; the products of attention are float."""
        rest, layers = self._runner.float_precision, {layer.name: layer.is_int8 for layer in self._runner.plan.linears}
        precisions: dict[str, str] = {}
        for gemm in gemms:
            module, _, product = gemm.rpartition("/")
            if module in layers:
                precisions[gemm] = "int8" if layers[module] else rest
            elif product in ATTENTION_PRODUCTS:
                precisions[gemm] = rest
        return precisions

    def reported(self) -> dict[str, str]:
        """Returns how kernels are launched, where that was chosen by times."""
        return self._runner.plan.launches.reported

    def placement(self) -> Placement:
        """Returns the device of the weights and what runs the kernels there."""
        return {"device": self._runner.device.type, "provider": self._runner.provider, "float_precision": self._runner.float_precision}
