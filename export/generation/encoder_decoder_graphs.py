"""An encoder-decoder as two OpenVINO graphs: one reads a source once, the other writes the target token by token.

Encoder, asked once for each source:

    input_ids       int64 [b, S]      the source
    attention_mask  int64 [b, S]      1 for tokens, 0 for padding
    cross.<layer>.key, .value         float32 [b, heads, S, head size]: what each layer of the decoder reads of the source

Decoder, asked for each token; its own keys and values are state of the infer request, empty after `reset_state`:

    input_ids       int64 [b, n]      the new tokens of the target
    attention_mask  int64 [b, S]      the mask of the source
    beam_idx        int32 [b]         the row of the state that each row continues: 0..b-1 unless beams are reordered or rows are done
    cross.<layer>.key, .value         what the encoder gave
    logits          float32 [b, n, V]

So the products of the source with the cross-attention's weights are computed once and not for every token. All rows of the state have
equally many tokens: they start together.

Left out: encoder-decoders whose cross-attention reads something else than one sequence of states.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import openvino
import torch
from openvino._offline_transformations import apply_make_stateful_transformation
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import MoEModelOutput

from export.generation.cached_graph import filled_layer, name_values, start_empty, traced
from export.graph.experts import make_exportable
from foundation.core.errors import InputError
from foundation.models.library import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENCODER_INPUTS = ("input_ids", "attention_mask")
DECODER_INPUTS = ("input_ids", "attention_mask", "beam_idx")
BATCH, SOURCE, PAST, NEW = 2, 5, 3, 2
"""Sizes of the traced example: none is 1, which a trace would take for an axis to broadcast."""


def encoder_decoder_graphs(model: PreTrainedModel) -> tuple[openvino.Model, openvino.Model]:
    """Returns the graphs of the encoder and of the decoder with its cache as state.

    Args:
        model: An encoder-decoder of Transformers, in eval mode and float32.

    Raises:
        InputError: Its decoder keeps something else than keys and values.
    """
    make_exportable(model)
    own, cross = _cache_shapes(model)
    with torch.inference_mode(), quiet(), _silenced():
        ids = torch.ones(BATCH, SOURCE, dtype=torch.int64)
        encoder = traced(_Encoder(model, len(cross) // 2), (ids, torch.ones_like(ids)))
        values = [torch.zeros(BATCH, heads, SOURCE, size) for heads, size in cross]
        past = [torch.zeros(BATCH, heads, PAST, size) for heads, size in own]
        example = (torch.ones(BATCH, NEW, dtype=torch.int64), torch.ones_like(ids), torch.arange(BATCH, dtype=torch.int32))
        decoder = traced(_Decoder(model, len(cross)), (*example, *values, *past))
    _finish_encoder(encoder, cross)
    _finish_decoder(decoder, cross, own)
    return encoder, decoder


def cross_names(layers: int) -> list[str]:
    """Returns the names of what a decoder of so many layers reads of the source."""
    return [f"cross.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


class _Encoder(nn.Module):
    """Reads sources; the decoder runs on one token, so that its layers compute the keys and values of the source."""

    def __init__(self, model: PreTrainedModel, layers: int) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Returns keys and values [b, heads, S, head size] of each layer of the decoder."""
        cache = EncoderDecoderCache(*(DynamicCache() for _ in range(2)))
        for one in (cache.self_attention_cache, cache.cross_attention_cache):
            one.layers = [_Taken() for _ in range(self.layers)]
        _first_token(self.model, input_ids, attention_mask, cache)
        return tuple(one for layer in cache.cross_attention_cache.layers for one in (layer.keys, layer.values))


def _first_token(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, cache: EncoderDecoderCache) -> None:
    """Reads sources, and runs the decoder on one token, which fills a cache.

    The encoder is called by itself: some models hand `use_cache` on to it, which refuses it (Switch Transformers, Transformers 5.23).
    """
    states = model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
    model(encoder_outputs=states, attention_mask=attention_mask, decoder_input_ids=input_ids[:, :1], past_key_values=cache, use_cache=True)


class _Taken(DynamicLayer):  # type: ignore[misc]
    """A layer that takes its first keys and values as they are; the usual one joins them to an empty tensor, which has no trace."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Keeps keys and values."""
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class _Decoder(nn.Module):
    """A decoder whose cache goes in and comes out as tensors."""

    def __init__(self, model: PreTrainedModel, cross: int) -> None:
        super().__init__()
        self.model, self.cross = model, cross

    def forward(self, input_ids: Tensor, attention_mask: Tensor, beam_idx: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """Returns logits [b, n, V], then keys and values [b, heads, p + n, head size] of each layer."""
        read, past = kept[: self.cross], [one.index_select(0, beam_idx) for one in kept[self.cross :]]
        cache = EncoderDecoderCache(_cache(past), _cache(read))
        logits = self.model(
            # the decoder reads only the length of the encoder's states: their keys and values are cached
            encoder_outputs=MoEModelOutput(last_hidden_state=attention_mask[..., None].float()),
            attention_mask=attention_mask,
            decoder_input_ids=input_ids,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits.float(), *(one for layer in cache.self_attention_cache.layers for one in (layer.keys, layer.values))


def _cache(values: Sequence[Tensor]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [filled_layer(*values[at : at + 2]) for at in range(0, len(values), 2)]
    return cache


def _cache_shapes(model: PreTrainedModel) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns heads and head size of the keys, then of the values, of each layer in turn: of the decoder's own, and of the source's."""
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    token = torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        _first_token(model, token, torch.ones_like(token), cache)
    own, cross = (list(_shapes(one)) for one in (cache.self_attention_cache, cache.cross_attention_cache))
    if not own or len(own) != len(cross):
        raise InputError(
            "model",
            "generation needs a decoder that keeps keys and values of itself and of the source in every layer",
            f"this {model.config.model_type} keeps {len(own) // 2} and {len(cross) // 2}",
        )
    return own, cross


def _shapes(cache: DynamicCache) -> Iterator[tuple[int, int]]:
    for layer in cache.layers:
        for one in (layer.keys, layer.values):
            yield one.shape[1], one.shape[3]


def _finish_encoder(graph: openvino.Model, cross: Sequence[tuple[int, int]]) -> None:
    name_values(graph.inputs, ENCODER_INPUTS)
    name_values(graph.outputs, cross_names(len(cross) // 2))
    _open_axes(graph.inputs)
    graph.validate_nodes_and_infer_types()


def _finish_decoder(graph: openvino.Model, cross: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]) -> None:
    names = [f"{layer}.{kind}" for layer in range(len(own) // 2) for kind in ("key", "value")]
    states = {f"past_key_values.{name}": f"present.{name}" for name in names}
    name_values(graph.inputs, (*DECODER_INPUTS, *cross_names(len(cross) // 2), *states))
    name_values(graph.outputs, ("logits", *states.values()))
    _open_axes(graph.inputs[: len(DECODER_INPUTS)])
    for value, (heads, size) in zip(graph.inputs[len(DECODER_INPUTS) :], (*cross, *own), strict=True):
        value.get_node().set_partial_shape(openvino.PartialShape([-1, heads, -1, size]))
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, states)
    start_empty(graph)


def _open_axes(values: Iterable[openvino.Output]) -> None:
    for value in values:
        value.get_node().set_partial_shape(openvino.PartialShape([-1] * len(value.partial_shape)))


@contextmanager
def _silenced() -> Iterator[None]:
    """Silences remarks on branches that the trace fixes: they ask whether a cache is filled, which is as in the example every time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting a tensor to a Python")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
