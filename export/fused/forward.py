"""Runs a plan on the kernels: rows in, logits out. On a GPU, or in the interpreter of the Triton language.

    embedding + LayerNorm + quantize
    query, key, value         one int8 GEMM, split by head; or three, where a layer is float, in blocks, or has a scale of its own
    attention + quantize      over packed rows; or torch's kernel and quantize (`library_attention`)
    out                       int8 GEMM
    residual + LayerNorm + quantize
    up                        int8 GEMM + bias + activation + quantize; with a gate one kernel for both products, f and their product
    down                      int8 GEMM
    residual + LayerNorm + quantize
    pooling                   the states of a token of each sequence, or their mean
    head                      float, as a rule: torch

An image begins with its patches: an int8 GEMM, or a product of torch; then the positions are added, and LayerNorm + quantize follow. In a
pre-norm model (`plan`) the norms keep the sum for the next residual. A norm is a LayerNorm or an RMSNorm.

What follows a + is part of the same kernel. A layer that stayed float is a product of torch, and what it reads or writes is not
quantized; an input with a smoothing vector is divided and quantized by itself. Float tensors have one type: float32, where the codes are
as in `foundation.schemes.int8` but for values at a rounding boundary, or float16, which is not held to that.

Nothing here reads the device back, so that all of it can be recorded as a CUDA graph. The tiles of attention depend only on the plan and
tiles of a GEMM change no bit: the states of a token have the same bits whatever is packed next to it, as long as no layer in a block is
float. Those layers and the head are torch's, which may add up in an order that depends on the number of rows.

Shape suffixes: T tokens, I inputs, O outputs, H heads, D dimension of a head, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from export.fused import library_attention
from export.fused.layers import ACTIVATIONS, Layers, Probe, States, Tiles, codes_like, one_scale, scale_read_by, stacked
from export.fused.linears import FloatLinear, Int8Linear, Linear
from export.fused.plan import Block, HeadActivation, Patches, Plan
from export.fused.rows import Limits, Rows
from export.kernels import attention, embedding, qkv, quantize
from export.kernels import pooling as pooling_kernel
from export.kernels.attention import Scores
from export.kernels.epilogue import Int8Weight
from export.kernels.norm import Keep
from foundation.core.errors import InputError

SMALLEST_NORM = 1e-12
"""Least length that a vector is divided by."""


class Encoder(Layers):
    """A plan on a device.

    Args:
        plan: What is computed.
        device: Where.
        dtype: Type of what is float between the layers: float32 or float16.
        tiles: Chooses the tiles of dense GEMMs; None for those by the number of rows.

    Raises:
        InputError: The plan has attention by torch's kernel, which cannot run on this device.
    """

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype = torch.float32, tiles: Tiles | None = None) -> None:
        super().__init__(dtype, tiles, plan.launches.on(device))
        self.plan, self.device = plan.to(device), device
        self._keep: Keep = "sum" if plan.pre_norm else "norm"
        self._tables = {name: table.to(dtype) for name, table in self.plan.tables.items()}
        self._merged = [merged(block, dtype) for block in self.plan.blocks]
        self._blanks: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._by_library = plan.attention == "varlen" and dtype == torch.float16
        why = library_attention.refusal(plan, device, dtype) if self._by_library else None
        if why is not None:
            raise InputError(
                "plan", f"its attention is torch's kernel, which cannot run here: {why}", remedy="export again on this machine"
            )

    @property
    def limits(self) -> Limits:
        """Bounds of the ids in rows."""
        kinds = 1 if self.plan.kind is None else len(self.plan.kind)
        return Limits(len(self.plan.word), kinds, self.plan.longest, self.plan.first_position)

    def forward(self, rows: Rows) -> Tensor:
        """Returns the logits or the vector of every sequence, float32 `[B, C]`, on the device of the rows."""
        return self.head(self.pooled(rows))

    def head(self, x_BI: Tensor) -> Tensor:
        """Returns the logits or vectors of pooled states, float32 `[B, C]`."""
        head = self.plan.head
        for layer, after in head.layers:
            x_BI = self._headed(layer, after, x_BI)
        x_BI = x_BI[:, : head.dimensions]
        return F.normalize(x_BI, dim=1, eps=SMALLEST_NORM) if head.normalize else x_BI

    def pooled(self, rows: Rows) -> Tensor:
        """Returns what the head reads of every sequence, float32 `[B, I]`."""
        states_TI, pooling = self.states(rows), self.plan.head.pooling
        if pooling == "first":
            return states_TI.index_select(0, rows.first).float()
        if pooling == "last":
            return states_TI.index_select(0, (rows.start[1:] - 1).clamp(min=0)).float()
        pooled_BI = torch.empty(rows.sequences, states_TI.shape[1], device=states_TI.device)
        self._run(pooling_kernel.launch(states_TI, rows.start, pooling, pooled_BI))
        return pooled_BI

    def states(self, rows: Rows) -> Tensor:
        """Returns the states of all tokens behind the last norm, `[T, I]`."""
        self._blanks.clear()
        states, residual = self._embedded(rows) if self.plan.patches is None else self._patched(self.plan.patches, rows)
        for number, block in enumerate(self.plan.blocks):
            attended = self._linear(block.out, self._attended(number, states, rows)).float_states
            states, residual = self._normalized(attended, residual, block.out_norm, block.readers, self._keep)
            shrunk = self._linear(block.down, self._fed(block, self.plan.activation, states)).float_states
            states, residual = self._normalized(shrunk, residual, block.ffn_norm, self._readers(number + 1), self._keep)
        self._blanks.clear()
        return states.float_states

    def _readers(self, number: int) -> tuple[Linear, ...]:
        """Returns the layers that read the states before a block; none behind the last, where the head reads."""
        return self.plan.blocks[number].projections if number < len(self.plan.blocks) else ()

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
        tables, readers = self._tables, self._readers(0)
        kept = tables["word"].new_empty(len(rows.word), tables["word"].shape[1])
        codes, scale = codes_like(kept, scale_read_by(readers))
        ids = {"kind": rows.kind, "position": rows.position}
        kind, position = ((ids[name], tables[name]) if name in tables else None for name in ids)
        lookups = (rows.word, tables["word"]), kind, position
        self._run(embedding.launch(lookups, self.plan.norm, codes, 1.0 if scale is None else scale, kept, self._keep))
        if self._keep == "norm":
            return States(kept, codes, scale), kept
        return self._read(kept, self.plan.norm, readers, codes, scale), kept

    def _patched(self, patches: Patches, rows: Rows) -> tuple[States, Tensor]:
        """Returns the embeddings of images, as states and as a residual."""
        assert rows.pixels is not None, "these rows are text"
        token, position, projection = self._tables["word"], self._tables["position"], patches.projection
        x = patches.of(rows.pixels)
        y = self._linear(projection, States(x.to(self.dtype) if isinstance(projection, FloatLinear) else x)).float_states
        y = y.view(len(rows.pixels), -1, y.shape[1])
        x = (torch.cat([token.expand(len(y), 1, -1), y], dim=1) + position).flatten(0, 1)
        return self._normalized(x, None, self.plan.norm, self._readers(0), self._keep)

    def _attended(self, number: int, states: States, rows: Rows) -> States:
        """Returns the outputs of attention [T, H D], as codes where `out` reads codes."""
        block, parts = self.plan.blocks[number], self._projected(number, states)
        return self._coded(lambda scale: self._attention(block, parts, rows, scale), one_scale(block.out))

    def _attention(self, block: Block, parts: tuple[Tensor, Tensor, Tensor], rows: Rows, scale: float | None) -> Tensor:
        if self._by_library:
            attended = library_attention.attend(parts, rows.start, self.plan.longest, block.scaling)
            if scale is None:
                return attended.flatten(1)
            codes = torch.empty_like(attended, dtype=torch.int8)
            self._run(quantize.tensor_launch(attended, scale, codes))
            return codes.flatten(1)
        query_THD, dtype = parts[0], self.dtype if scale is None else torch.int8
        out_THD = self._blank(query_THD, dtype) if rows.is_filled else torch.empty(query_THD.shape, dtype=dtype, device=query_THD.device)
        lengths = [self.plan.longest] * rows.sequences  # not the rows' own: the tiles have to be the same for all
        self._run(attention.launch(parts, rows.start, lengths, Scores(block.scaling, out_scale=scale), out_THD, self.plan.relative))
        return out_THD.flatten(1)

    def _blank(self, query_THD: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns what attention of filled rows writes to, zero for tokens of no sequence, which it does not write: one tensor for all
        layers of a pass, so that it is filled once. Probes keep the outputs of every layer."""
        key = query_THD.shape, dtype
        if key not in self._blanks or self._probes is not None:
            self._blanks[key] = torch.zeros(query_THD.shape, dtype=dtype, device=query_THD.device)
        return self._blanks[key]

    def _projected(self, number: int, states: States) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, [T, H, D] each."""
        block, together = self.plan.blocks[number], self._merged[number]
        layers = block.projections
        if together is None:
            query, key, value = (_by_head(self._linear(layer, states).float_states, block.head_dim) for layer in layers)
            return query, key, value
        return self._split(layers, together, states)

    def _headed(self, layer: Linear, after: HeadActivation, x_BI: Tensor) -> Tensor:
        if isinstance(layer, FloatLinear):
            return ACTIVATIONS[after](F.linear(x_BI, layer.weight, layer.bias))
        assert isinstance(layer, Int8Linear), "an encoder's layers are float or int8"
        states = States(x_BI.contiguous())
        return ACTIVATIONS[after](self._in_float32(layer, states))


def merged(block: Block, dtype: torch.dtype) -> tuple[Int8Weight, qkv.Heads] | None:
    """Returns the one GEMM of queries, keys and values, and how it is split; None where it has to be three."""
    weight = stacked(block.projections)
    if weight is None or block.head_dim not in qkv.DIMENSIONS:
        return None
    return weight, qkv.Heads(block.heads, block.key_heads, block.head_dim, dtype=dtype)


def _by_head(x_TI: Tensor, head_dim: int) -> Tensor:
    return x_TI.view(len(x_TI), -1, head_dim)
