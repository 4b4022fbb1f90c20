"""Models that are hard to quantize: a few channels of what linear layers read are made large, and the weights that read them small.

Written out for the two families that tests use, so that nothing that is tested is needed to make them. Both keep the float function.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.models.checkpoint import load, save

FACTOR, CHANNELS = 50.0, (1, 7, 12, 30)


def factors(width: int) -> Tensor:
    factor = torch.ones(width)
    factor[list(CHANNELS)] = FACTOR
    return factor


def scale_output(module: nn.Module, factor_C: Tensor) -> None:
    for parameter in module.parameters():
        parameter.data *= factor_C[:, None] if parameter.dim() == 2 else factor_C


def planted_vit(source: Path, out: Path) -> Path:
    """Writes a ViT with large channels at the output of both norms of every layer; nothing but linear layers reads those."""
    model = load(source)
    for layer in model.vit.layers:
        attention, factor = layer.attention, factors(model.config.hidden_size)
        for norm, readers in (
            (layer.layernorm_before, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (layer.layernorm_after, [layer.mlp.fc1]),
        ):
            scale_output(norm, factor)
            for reader in readers:
                reader.weight.data /= factor
    out.mkdir()
    save(model, source, out, "with outliers")
    return out


def planted_values_bert(source: Path, out: Path) -> Path:
    """Writes a BERT with large channels of the values; nothing but the layer after attention reads those."""
    model = load(source)
    for layer in model.bert.encoder.layer:
        factor = factors(model.config.hidden_size)
        scale_output(layer.attention.self.value, factor)
        layer.attention.output.dense.weight.data /= factor
    out.mkdir()
    save(model, source, out, "with outliers")
    return out


def planted_stream(model: Any, channels: Sequence[int], factor: float) -> None:
    """Makes channels of the residual stream of a Llama large, in place: all that writes them; what reads them takes it off again.

    The norms divide by the length of a state, which these channels now decide, so that the function is another one.
    """
    factor_C = torch.ones(model.config.hidden_size)
    factor_C[list(channels)] = factor
    model.model.embed_tokens.weight.data *= factor_C
    model.lm_head.weight.data /= factor_C
    for layer in model.model.layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            scale_output(writer, factor_C)
        for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            reader.weight.data /= factor_C


def planted_post_norm_bert(source: Path, out: Path) -> Path:
    """Writes a BERT with large channels at the output of every norm: an offset, which the biases of all that reads it take off again.

    A norm after the sum is read by linear layers and by the next sum: there the bias of the layer that is added takes it off. The offset
    is 50 times what the channel reaches at three standard deviations, |beta| + 3 |gamma|: as large as a factor of 50 would make it.
    """
    model = load(source)
    norms = [model.bert.embeddings.LayerNorm]
    readers, added = [], []
    for layer in model.bert.encoder.layer:
        attention = layer.attention
        norms += [attention.output.LayerNorm, layer.output.LayerNorm]
        readers += [[attention.self.query, attention.self.key, attention.self.value], [layer.intermediate.dense]]
        added += [attention.output.dense, layer.output.dense]
    channels = torch.zeros(model.config.hidden_size, dtype=torch.bool)
    channels[list(CHANNELS)] = True
    for norm, layers, last in zip(norms, [*readers, [model.bert.pooler.dense]], [*added, None], strict=True):
        offset = (FACTOR * (norm.bias.detach().abs() + 3 * norm.weight.detach().abs())).where(channels, 0.0)
        norm.bias.data += offset
        for reader in layers:
            reader.bias.data -= reader.weight.data @ offset
        if last is not None:
            last.bias.data -= offset
    out.mkdir()
    save(model, source, out, "with outliers")
    return out
