"""A decoder as an OpenVINO graph with a cache of keys and values; prefill and decoding are the same graph.

    input_ids       int64 [b, n]      the new tokens
    attention_mask  int64 [b, p + n]  1 for tokens, 0 for padding; p tokens are in the cache already
    position_ids    int64 [b, n]      positions of the new tokens, not counting padding
    beam_idx        int32 [b]         the row of the cache that each row continues: 0..b-1 unless beams are reordered
    logits          float32 [b, n, V]

Keys and values are state of the infer request ([b, heads, p, head size] for each layer) and empty after `reset_state`. The model is traced
with caches that are filled by hand: updating an empty cache takes another branch than updating a filled one. All layers keep all tokens;
a sliding window is a matter of the attention mask.

The graph gives the logits of every position, which whole blocks are scored with. Where an answer is asked, the pipelines of OpenVINO GenAI
cut what the head reads to the last position; they look for its product right before the output, or after the soft cap of Gemma 2.

Left out: encoder-decoders (`export.generation.encoder_decoder_graphs`), recurrent states (Mamba, RWKV), caches with sizes of their own
(DeepSeek's compressed keys).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import openvino
import torch
from openvino import opset15 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from export.generation.missing_keys import missing_keys
from export.graph.experts import make_exportable
from foundation.core.errors import InputError
from foundation.models.library import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
BATCH, PAST, NEW = 2, 3, 2
"""Sizes of the traced example: none is 1, which a trace would take for an axis to broadcast."""


def cached_graph(model: PreTrainedModel) -> openvino.Model:
    """Returns a decoder with its cache as state.

    Args:
        model: A causal language model of Transformers, in eval mode and float32; its experts stay in the form that can be traced.

    Raises:
        InputError: It keeps something else than keys and values.
    """
    make_exportable(model)
    shapes = _cache_shapes(model)
    names = [f"{layer}.{kind}" for layer in range(len(shapes) // 2) for kind in ("key", "value")]
    states = {f"past_key_values.{name}": f"present.{name}" for name in names}
    past = [torch.zeros(BATCH, heads, PAST, size) for heads, size in shapes]
    example = {
        "input_ids": torch.ones(BATCH, NEW, dtype=torch.int64),
        "attention_mask": torch.ones(BATCH, PAST + NEW, dtype=torch.int64),
        "position_ids": torch.arange(PAST, PAST + NEW).repeat(BATCH, 1),
        "beam_idx": torch.arange(BATCH, dtype=torch.int32),
    }
    with torch.inference_mode(), quiet(), warnings.catch_warnings():
        # the branches that the trace fixes ask whether the cache is filled and a mask given: both always are, here as later
        warnings.filterwarnings("ignore", "Converting a tensor to a Python boolean")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # the trace looks at every attribute of the model
        graph = traced(_Decoder(model), (*example.values(), *past))
    name_values(graph.inputs, (*INPUTS, *states))
    name_values(graph.outputs, ("logits", *states.values()))
    for value in graph.inputs[: len(INPUTS)]:
        value.get_node().set_partial_shape(openvino.PartialShape([-1] * len(value.partial_shape)))
    for value, (heads, size) in zip(graph.inputs[len(INPUTS) :], shapes, strict=True):
        value.get_node().set_partial_shape(openvino.PartialShape([-1, heads, -1, size]))
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, states)
    start_empty(graph)
    return graph


class _Decoder(nn.Module):
    """A decoder whose cache goes in and comes out as tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, beam_idx: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns logits [b, n, V], then keys and values [b, heads, p + n, head size] of each layer."""
        cache = DynamicCache()
        cache.layers = [filled_layer(*(one.index_select(0, beam_idx) for one in past[at : at + 2])) for at in range(0, len(past), 2)]
        known = {"position_ids": position_ids} if _takes_positions(self.model) else {}
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **known).logits
        return logits.float(), *(one for layer in cache.layers for one in (layer.keys, layer.values))


def traced(model: nn.Module, example: tuple[Tensor, ...]) -> openvino.Model:
    """Returns the graph that OpenVINO makes of the operations a model runs for an example.

    It is traced once. By default torch would trace it again and compare both, which is almost half of the time; whether the graph answers
    as the model does is measured on rows after each export.
    """
    return openvino.convert_model(TorchScriptPythonDecoder(model, example_input=example, trace_kwargs={"check_trace": False}))


def _takes_positions(model: nn.Module) -> bool:
    """Whether the forward pass of a model reads `position_ids`; ALiBi derives distances from the attention mask."""
    return "position_ids" in inspect.signature(model.forward).parameters


def filled_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    """Returns the cache of a layer that holds keys and values [b, heads, p, head size]."""
    layer = DynamicLayer()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    return layer


def _cache_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Returns heads and head size of the keys, then of the values, of each layer in turn, from one token that the model reads."""
    missing = missing_keys(model.config, type(model))
    if missing is not None:
        raise InputError("model", "generation needs a decoder that keeps keys and values of every layer", missing)
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
    if not cache.layers or any(not layer.is_initialized or layer.keys.dim() != 4 for layer in cache.layers):
        raise InputError(
            "model",
            "generation needs a decoder that keeps keys and values of every layer",
            f"this {model.config.model_type} does not fill the cache of Transformers",
        )
    return [(one.shape[1], one.shape[3]) for layer in cache.layers for one in (layer.keys, layer.values)]


def name_values(values: Sequence[openvino.Output], names: Sequence[str]) -> None:
    """Names inputs or outputs, which the trace lists in the order of the traced `forward`."""
    for value, name in zip(values, names, strict=True):
        value.get_tensor().set_names({name})


def start_empty(graph: openvino.Model) -> None:
    """Lets every state start with no tokens for as many rows as `input_ids` has."""
    zero = ops.constant(0, dtype=np.int64)
    batch = ops.gather(ops.shape_of(graph.input("input_ids"), output_type="i64"), ops.constant([0], dtype=np.int64), zero)
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, size = node.get_output_partial_shape(0)
            axes = heads.get_length(), 0, size.get_length()
            parts: list[openvino.Node] = [batch, *(ops.constant([axis], dtype=np.int64) for axis in axes)]
            node.set_arguments([ops.broadcast(ops.constant(0.0, dtype=np.float32), ops.concat(parts, axis=0))])
    graph.validate_nodes_and_infer_types()
