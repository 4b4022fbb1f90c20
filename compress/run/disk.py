"""Predicts the disk space of each step from the model shapes: the disk column of `compress plan`, and the size of candidates of a search.

Weights dominate: 4 bytes each in float, 1 byte in int8, 2 in tables of embeddings next to a float part in bf16. Graphs, tokenizer and
predictions are estimated. TensorRT engines are not counted, because their size is only known after the build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from compress.run.choose_buckets import Buckets
from compress.run.implicit import Evaluate, Latency
from export.builds import computes_bf16, ends, floating_of, has_half_graphs, reads_graph
from foundation.core.engines import ENGINES
from foundation.labels.tasks import Task
from foundation.models.architecture.shapes import auto_class
from foundation.models.forward import linears, uses_of_weights
from foundation.models.heads.embedding import width_of
from foundation.models.heads.towers import width_of as width_of_towers
from foundation.models.inputs.sounds import frames_of
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import quiet, sizes_config, with_class
from foundation.models.meta import on_meta_device
from foundation.models.tied import untie_noted
from foundation.schemes.scales import Layer
from foundation.schemes.table import SCHEMES
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from quantize.convolutions import block_prefixes, convolutions
from quantize.ptq import choose_layers
from quantize.quantize import Quantize

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLOAT_BYTES, HALF_BYTES = 4, 2
GRAPH_BYTES_PER_LAYER = 70_000  # an OpenVINO graph of one encoder layer, as XML
TOKENIZER_BYTES_PER_TOKEN = 23  # one entry of tokenizer.json


@dataclass(frozen=True)
class Sizes:
    """The sizes behind the files of one model."""

    parameters: int
    int8_parameters: int
    """Number of weights that become int8; 0 without a quantize stage."""
    table_parameters: int
    """Number of weights in tables that are only looked up by row."""
    layers: int
    tokenizer_bytes: int
    prediction_bytes: int
    """Size of one file of logits and labels of the evaluation split."""

    @property
    def float_bytes(self) -> int:
        """Size of all weights in float."""
        return FLOAT_BYTES * self.parameters

    @property
    def int8_bytes(self) -> int:
        """Size of all weights after quantization."""
        return FLOAT_BYTES * (self.parameters - self.int8_parameters) + self.int8_parameters

    @property
    def halved_bytes(self) -> int:
        """Bytes that bf16 tables save."""
        return (FLOAT_BYTES - HALF_BYTES) * self.table_parameters


@dataclass(frozen=True)
class Variant:
    """A model that the run will make."""

    config: PreTrainedConfig
    """The Transformers config of the model."""
    stages: tuple[Stage, ...]
    """The stages that lead to it, from the baseline on; its own stage is last."""

    @property
    def quantizer(self) -> Quantize | None:
        """Its quantize stage; None for a float model."""
        own = self.stages[-1]
        return own if isinstance(own, Quantize) else None


def predicted_bytes(step: Stage, config: PreTrainedConfig, variants: Mapping[str, Variant], context: Context) -> int:
    """Returns the predicted size in bytes of the artifact of a step.

    Args:
        step: The step.
        config: Transformers config of the model after this step.
        variants: The variants so far by id, in order.
        context: Data, task and target.
    """
    if isinstance(step, Latency | Buckets):
        return 0
    if step.PRODUCES == "cascade":  # predictions of the original and of each tier
        return 4 * _sizes(config, context, None).prediction_bytes
    if step.PRODUCES in ("engine", "model_repository"):
        of_build = _served_bytes if step.PRODUCES == "model_repository" else partial(_build_bytes, context=context)
        return sum(
            of_build(precision, _sizes(variant.config, context, variant.quantizer))
            for precision, variant in default_builds(variants, context)
        )
    sizes = _sizes(config, context, None)
    return sizes.prediction_bytes if isinstance(step, Evaluate) else sizes.float_bytes + sizes.tokenizer_bytes


def scratch_bytes(step: Stage, config: PreTrainedConfig, context: Context) -> int:
    """Returns the predicted size in bytes of what a step writes and removes before it ends; the arguments are as above."""
    if not isinstance(step, Quantize) or step.rotation == "none":
        return 0
    from quantize.streaming import scratch_bytes as of_quantize

    return of_quantize(step, config, context, parameters_of(config, context.task, None)[0])


def weight_bytes(variant: Variant, context: Context) -> int:
    """Returns the size in bytes of the weights of a model as an engine loads them, at least: 1 byte where they become int8, 2 in tables of
    embeddings that an engine has in bf16, else 4."""
    sizes = _sizes(variant.config, context, variant.quantizer if variant.stages else None)
    return sizes.int8_bytes - sizes.halved_bytes * _stores_bf16_tables(context)


def _sizes(config: PreTrainedConfig, context: Context, quantizer: Quantize | None) -> Sizes:
    parameters, int8_parameters, table_parameters = parameters_of(config, context.task, quantizer)
    labels, facts, outputs = context.data.evaluation.labels, context.facts, max(1, len(context.data.labels))
    if facts.embeds:
        outputs = width_of_towers(config) if facts.two_towers else width_of(config)
    numbers = facts.answer.numbers(outputs, frames_of(config, context.max_length) if facts.transcribes else context.max_length)
    return Sizes(
        parameters=parameters,
        int8_parameters=int8_parameters,
        table_parameters=table_parameters,
        layers=getattr(sizes_config(config), "num_hidden_layers", 12),
        tokenizer_bytes=TOKENIZER_BYTES_PER_TOKEN * getattr(config, "text_config", config).vocab_size if facts.reads_text else 0,
        prediction_bytes=labels.array.size * (8 + 4)
        if facts.generates
        else 4 * numbers * len(labels) + max(8 * len(labels), labels.array.nbytes),
    )


def parameters_of(config: PreTrainedConfig, task: Task, quantizer: Quantize | None) -> tuple[int, int, int]:
    """Returns the number of parameters, and how many of them become int8 and are in tables of embeddings, counted on the meta device."""
    with on_meta_device(), quiet():
        model = auto_class(task, config).from_config(with_class(config, task))
        untie_noted(model)
        model = with_linears(model)
    int8 = _int8_layers(model, quantizer) if quantizer else []
    uses = uses_of_weights(model)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding) and uses[id(module.weight)] == 1]
    counted = ([*model.parameters()], [layer.weight for layer in int8], tables)
    whole, integers, rows = (sum(weight.numel() for weight in weights) for weights in counted)
    return whole, integers, rows


def _int8_layers(model: nn.Module, quantizer: Quantize) -> list[Layer]:
    """Returns the layers that become int8: an estimate, as which convolutions do is seen only when the model runs."""
    found, others, blocks = linears(model), convolutions(model), block_prefixes(model)
    linear = any(name.startswith(blocks) for name in found)
    floating = linear or quantizer.convolutions is False or SCHEMES[quantizer.scheme].convolutions is None
    kept = dict.fromkeys(others, "not counted") if floating else {}
    layers: dict[str, Layer] = {**found, **others}
    return list(choose_layers(model, layers, quantizer.exclude, "exclude", kept)[0].values())


def default_builds(variants: Mapping[str, Variant], context: Context) -> list[tuple[str, Variant]]:
    """Returns the default builds of export as (precision, variant), in the order of `export.builds.planned`."""
    made = {name: [str(stage.id) for stage in variant.stages] for name, variant in variants.items()}
    floating = {name: floating_of(line, lambda other: variants[other].quantizer is None) for name, line in made.items()}
    names = ends(made, floating)
    builds = [("fp32" if variants[name].quantizer is None else "int8", variants[name]) for name in names]
    last = variants[floating[names[-1]]]
    return builds + [("bf16", last)] * computes_bf16(context) + [("fp16", last)] * has_half_graphs(context)


def _build_bytes(precision: str, sizes: Sizes, context: Context) -> int:
    halves = _stores_bf16_tables(context)
    if precision == "bf16":  # else it uses the files of fp32
        return (sizes.float_bytes - sizes.halved_bytes) * halves + sizes.tokenizer_bytes + 2 * sizes.prediction_bytes
    if precision == "fp16":  # a half graph twice, with attention as nodes and without
        return sizes.float_bytes + sizes.tokenizer_bytes + 2 * sizes.prediction_bytes
    weights = sizes.int8_bytes if precision == "int8" else sizes.float_bytes
    kind = "int8" if precision == "int8" else "float"
    engines = [ENGINES[engine] for engine in context.target.engines]
    copies = reads_graph(context) + sum(kind in engine.stores for engine in engines)  # model.onnx, openvino.bin, model_uint8.onnx, ...
    copies += (2 * has_half_graphs(context) + halves) if precision == "int8" else 0
    graph = sizes.layers * GRAPH_BYTES_PER_LAYER * sum("float" in engine.stores for engine in engines)
    return copies * weights + graph + sizes.tokenizer_bytes + 3 * sizes.prediction_bytes


def _stores_bf16_tables(context: Context) -> bool:
    """Whether networks are written whose tables of embeddings are in bf16."""
    return context.facts.reads_text and not context.facts.generates and computes_bf16(context)


def _served_bytes(precision: str, sizes: Sizes) -> int:
    weights = sizes.int8_bytes if precision == "int8" else sizes.float_bytes
    return weights + sizes.layers * GRAPH_BYTES_PER_LAYER + sizes.tokenizer_bytes + sizes.prediction_bytes
