"""Runs a plan on the kernels: rows in, logits out. On a GPU, or in the interpreter of the Triton language.

    embedding + LayerNorm + quantize
    query, key, value         one int8 GEMM, split by head; or three, where a layer is float, in blocks, or has a scale of its own
    attention + quantize      over packed rows
    out                       int8 GEMM
    residual + LayerNorm + quantize
    up                        int8 GEMM + bias + activation + quantize
    down                      int8 GEMM
    residual + LayerNorm + quantize
    head                      float, as a rule: torch

An image begins with its patches: an int8 GEMM, or a product of torch; then the positions are added, and LayerNorm + quantize follow. In a
pre-norm model (`plan`) the norms keep the sum for the next residual.

What follows a + is part of the same kernel. A layer that stayed float is a product of torch, and what it reads or writes is not
quantized; an input with a smoothing vector is divided and quantized by itself. Float tensors have one type: float32, where the codes are
as in `foundation.schemes.int8` but for values at a rounding boundary, or float16, which is not held to that.

Nothing here reads the device back, so that all of it can be recorded as a CUDA graph. The tiles of attention depend only on the plan and
tiles of a GEMM change no bit: the states of a token have the same bits whatever is packed next to it, as long as no layer in a block is
float. Those layers and the head are torch's, which may add up in an order that depends on the number of rows.

Shape suffixes: T tokens, I inputs, O outputs, H heads, D dimension of a head, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from export.fused.plan import Block, FloatLinear, HeadActivation, Int8Linear, Linear, Patches, Plan
from export.fused.rows import Limits, Rows
from export.kernels import attention, block_sparse, embedding, gemm, norm, qkv, quantize
from export.kernels.activation_codes import Activation
from export.kernels.attention import Scores
from export.kernels.block_sparse import SparseWeight
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.gemm import Tile
from export.kernels.norm import Norm

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu,
}  # fmt: skip
Tiles = Callable[[Tensor, Int8Weight, Output], Tile | None]
"""Chooses the tile of a GEMM from its codes, weight and output; None for the one by the number of rows."""


@dataclass(frozen=True)
class States:
    """Hidden states between kernels: float, codes, or both."""

    floats: Tensor | None
    """[T, I] in the float type; None where only codes are read."""
    codes: Tensor | None = None
    """int8 [T, I]."""
    scale: float | None = None
    """Scale of the codes."""

    @property
    def float_states(self) -> Tensor:
        """The float states, where there must be some."""
        assert self.floats is not None, "these states are codes alone"
        return self.floats


@dataclass(frozen=True)
class Probe:
    """Input, codes and product of an int8 layer."""

    x: Tensor
    """Its float input, float32 [T, I]."""
    codes: Tensor
    """int8 [T, I]."""
    y: Tensor
    """Its product before the bias, float32 [T, O]."""


class Encoder:
    """A plan on a device.

    Args:
        plan: What is computed.
        device: Where.
        dtype: Type of what is float between the layers: float32 or float16.
        tiles: Chooses the tiles of dense GEMMs; None for those by the number of rows.
    """

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype = torch.float32, tiles: Tiles | None = None) -> None:
        self.plan, self.device, self.dtype, self._tiles = plan.to(device), device, dtype, tiles
        self._tables = [table.to(dtype) for table in (self.plan.word, self.plan.kind, self.plan.position)]
        self._merged = [merged(block, dtype) for block in self.plan.blocks]
        self._probes: dict[str, Probe] | None = None

    @property
    def limits(self) -> Limits:
        """Bounds of the ids in rows."""
        return Limits(len(self.plan.word), len(self.plan.kind), self.plan.longest, self.plan.first_position)

    def forward(self, rows: Rows) -> Tensor:
        """Returns the logits of every sequence, float32 `[B, C]`, on the device of the rows."""
        return self.head(self.first_states(rows))

    def head(self, x_BI: Tensor) -> Tensor:
        """Returns the logits of states, float32 `[B, C]`."""
        for layer, after in self.plan.head:
            x_BI = self._headed(layer, after, x_BI)
        return x_BI

    def first_states(self, rows: Rows) -> Tensor:
        """Returns the states of the first token of every sequence after the last block, float32 `[B, I]`."""
        states, residual = self._embedded(rows) if self.plan.patches is None else self._patched(self.plan.patches, rows)
        for number, block in enumerate(self.plan.blocks):
            attended = self._linear(block.out, self._attended(number, states, rows)).float_states
            states, residual = self._normalized(attended, residual, block.out_norm, (block.up,))
            grown = self._linear(block.up, states, self.plan.activation, block.down)
            shrunk = self._linear(block.down, grown).float_states
            states, residual = self._normalized(shrunk, residual, block.ffn_norm, self._readers(number + 1))
        return states.float_states.index_select(0, rows.first).float()

    def _readers(self, number: int) -> tuple[Linear, ...]:
        """Returns the layers that read the states before a block; none behind the last, where the head reads."""
        return self.plan.blocks[number].linears[:3] if number < len(self.plan.blocks) else ()

    def probe(self, rows: Rows) -> tuple[Tensor, dict[str, Probe]]:
        """Returns the logits, and by path what every int8 layer read and multiplied.

        The codes come from the fused kernels; a float input that they do not write is written by the same kernel, run once more.
        """
        self._probes = {}
        try:
            return self.forward(rows), self._probes
        finally:
            self._probes = None

    def _embedded(self, rows: Rows) -> tuple[States, Tensor]:
        """Returns the embeddings of text, as states and as a residual."""
        (word, kind, position), scale = self._tables, scale_read_by(self._readers(0))
        float_states = word.new_empty(len(rows.word), word.shape[1])
        codes = None if scale is None else torch.empty_like(float_states, dtype=torch.int8)
        lookups = (rows.word, word), (rows.kind, kind), (rows.position, position)
        embedding.launch(lookups, self.plan.norm, codes, 1.0 if scale is None else scale, float_states).run()
        return States(float_states, codes, scale), float_states

    def _patched(self, patches: Patches, rows: Rows) -> tuple[States, Tensor]:
        """Returns the embeddings of images, as states and as a residual."""
        assert rows.pixels is not None, "these rows are text"
        (token, _, position), projection = self._tables, patches.projection
        x = patches.of(rows.pixels)
        y = self._linear(projection, States(x.to(self.dtype) if isinstance(projection, FloatLinear) else x)).float_states
        y = y.view(len(rows.pixels), -1, y.shape[1])
        x = (torch.cat([token.expand(len(y), 1, -1), y], dim=1) + position).flatten(0, 1)
        return self._normalized(x, None, self.plan.norm, self._readers(0))

    def _normalized(self, x_TI: Tensor, residual_TI: Tensor | None, layer: Norm, readers: Sequence[Linear]) -> tuple[States, Tensor]:
        """Returns the norm of a sum for the layers that read it, and what the next sum adds: the norm, or in a pre-norm model the sum."""
        scale, kept = scale_read_by(readers), torch.empty_like(x_TI)
        codes = None if scale is None else torch.empty_like(x_TI, dtype=torch.int8)
        given = 1.0 if scale is None else scale
        norm.launch(x_TI, residual_TI, layer, codes, given, kept, "sum" if self.plan.pre_norm else "norm").run()
        if not self.plan.pre_norm:
            return States(kept, codes, scale), kept
        if scale is not None and self._probes is None and all(scale_of(reader) == scale for reader in readers):
            return States(None, codes, scale), kept
        float_states = torch.empty_like(x_TI)  # something reads floats: the head, a float layer, one with another scale
        norm.launch(kept, None, layer, None, 1.0, float_states, "norm").run()
        return States(float_states, codes, scale), kept

    def _attended(self, number: int, states: States, rows: Rows) -> States:
        """Returns the outputs of attention [T, H D], as codes where `out` reads codes."""
        block, scale = self.plan.blocks[number], scale_of(self.plan.blocks[number].out)
        parts = self._projected(number, states)
        found = self._attention(block, parts, rows, scale)
        if scale is None:
            return States(found)
        return States(None if self._probes is None else self._attention(block, parts, rows, None), found, scale)

    def _attention(self, block: Block, parts: tuple[Tensor, Tensor, Tensor], rows: Rows, scale: float | None) -> Tensor:
        query_THD = parts[0]
        make = torch.zeros if rows.is_filled else torch.empty  # tokens of no sequence are not written
        out_THD = make(query_THD.shape, dtype=self.dtype if scale is None else torch.int8, device=query_THD.device)
        lengths = [self.plan.longest] * rows.sequences  # not the rows' own: the tiles have to be the same for all
        attention.launch(parts, rows.start, lengths, Scores(block.scaling, out_scale=scale), out_THD).run()
        return out_THD.flatten(1)

    def _projected(self, number: int, states: States) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, [T, H, D] each."""
        block, together = self.plan.blocks[number], self._merged[number]
        layers = block.query, block.key, block.value
        if together is None:
            query, key, value = (_by_head(self._linear(layer, states).float_states, block.head_dim) for layer in layers)
            return query, key, value
        weight, heads = together
        assert isinstance(block.query, Int8Linear), "merged layers are int8"
        codes_TI = self._codes(block.query, states)
        query, key, value = (
            torch.empty(len(codes_TI), count, heads.dimension, dtype=dtype, device=codes_TI.device) for count, dtype in heads.types()
        )
        qkv.launch(codes_TI, block.query.input_scale, weight, heads, None, (query, key, value)).run()
        for layer in layers:
            self._note(layer, states, codes_TI)
        return query, key, value

    def _linear(self, layer: Linear, states: States, activation: Activation = "none", reader: Linear | None = None) -> States:
        """Returns the outputs of a layer; as codes where it is int8 and the layer that reads them can read codes."""
        if isinstance(layer, FloatLinear):
            bias = None if layer.bias is None else layer.bias.to(self.dtype)
            return States(ACTIVATIONS[activation](F.linear(states.float_states, layer.weight.to(self.dtype), bias)))
        codes, scale = self._codes(layer, states), None if reader is None else scale_of(reader)
        self._note(layer, states, codes)
        output = Output(activation, self.dtype, scale)
        found = self._product(layer, codes, output)
        if scale is None:
            return States(found)
        return States(None if self._probes is None else self._product(layer, codes, replace(output, scale=None)), found, scale)

    def _headed(self, layer: Linear, after: HeadActivation, x_BI: Tensor) -> Tensor:
        if isinstance(layer, FloatLinear):
            return ACTIVATIONS[after](F.linear(x_BI, layer.weight, layer.bias))
        states = States(x_BI.contiguous())
        codes = self._codes(layer, states)
        self._note(layer, states, codes)
        return ACTIVATIONS[after](self._product(layer, codes, Output(dtype=torch.float32)))

    def _codes(self, layer: Int8Linear, states: States) -> Tensor:
        """Returns the codes that a layer reads: those that there are, or new ones."""
        if states.codes is not None and states.scale == scale_of(layer):
            return states.codes
        x = _divided(states.float_states, layer.smooth)
        codes = torch.empty_like(x, dtype=torch.int8)
        quantize.tensor_launch(x, layer.input_scale, codes).run()
        return codes

    def _product(self, layer: Int8Linear, codes_TI: Tensor, output: Output) -> Tensor:
        weight = layer.weight
        out_TO = torch.empty(len(codes_TI), layer.outputs, dtype=output.stored, device=codes_TI.device)
        if isinstance(weight, SparseWeight):
            block_sparse.launch(codes_TI, layer.input_scale, weight, output, out_TO).run()
        else:
            tile = None if self._tiles is None else self._tiles(codes_TI, weight, output)
            gemm.launch(codes_TI, layer.input_scale, weight, output, out_TO, tile).run()
        return out_TO

    def _note(self, layer: Linear, states: States, codes: Tensor) -> None:
        """Stores the input and product of a layer while probes are requested."""
        if self._probes is not None and isinstance(layer, Int8Linear):
            plain = replace(layer, weight=replace(layer.weight, bias=None))
            y = self._product(plain, codes, Output(dtype=torch.float32))
            self._probes[layer.name] = Probe(_divided(states.float_states, layer.smooth).float(), codes, y)


def scale_of(layer: Linear) -> float | None:
    """Returns the scale of the codes that a layer can read from the kernel before it; None where it reads floats."""
    return layer.input_scale if isinstance(layer, Int8Linear) and layer.smooth is None else None


def merged(block: Block, dtype: torch.dtype) -> tuple[Int8Weight, qkv.Heads] | None:
    """Returns the one GEMM of queries, keys and values, and how it is split; None where it has to be three."""
    weights, scales, biases = [], set(), []
    for layer in (block.query, block.key, block.value):
        if not isinstance(layer, Int8Linear) or not isinstance(layer.weight, Int8Weight) or layer.smooth is not None:
            return None
        weights.append(layer.weight)
        scales.add(layer.input_scale)
        biases.append(torch.zeros_like(layer.weight.scale) if layer.weight.bias is None else layer.weight.bias)
    if len(scales) > 1 or block.head_dim not in qkv.DIMENSIONS:
        return None
    codes, scale = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scale"))
    return Int8Weight(codes, scale, torch.cat(biases)), qkv.Heads(block.heads, block.key_heads, block.head_dim, dtype=dtype)


def scale_read_by(layers: Sequence[Linear]) -> float | None:
    """Returns the scale of the codes that layers read: the first one; None where all read floats."""
    return next((scale for scale in map(scale_of, layers) if scale is not None), None)


def _by_head(x_TI: Tensor, head_dim: int) -> Tensor:
    return x_TI.view(len(x_TI), -1, head_dim)


def _divided(x: Tensor, smooth_I: Tensor | None) -> Tensor:
    return x if smooth_I is None else (x.float() * smooth_I.reciprocal())  # as `foundation.schemes.int8` does it
