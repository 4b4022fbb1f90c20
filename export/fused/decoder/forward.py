"""Runs the plan of a decoder on the kernels: whole texts without padding, or new tokens of texts whose keys and values are in a cache.

    embedding (+ positions) + norm + quantize
    query, key, value         one int8 GEMM, split by head, turned by rotary positions; or torch's products, where a layer is none of it
    attention + quantize      causal, over packed rows: tiles of keys behind the last query of a tile are not read;
                              or of new tokens to the pages of the cache, to which the GEMM has written their keys and values
    out                       int8 GEMM
    residual + norm + quantize
    up + f + quantize         int8 GEMM; with a gate one kernel for both products, f and their product
    down                      int8 GEMM
    residual + norm + quantize
    head                      torch; a GEMM of int8 rows and floats; or an int8 GEMM

The last layers of texts and of new tokens are the same kernels. Everything that `export.fused.forward` says about float layers, smoothing,
float types and bits is true here too: the states of a token have the same bits whatever is packed or written next to it, on any pages.
Attention adds up in another order with a cache than without one, so that these two are equal only within the bound of the kernels.

Shape suffixes: T tokens, N new tokens, B texts, I inputs, V vocabulary, H heads, K heads of keys and values, D dimension of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from export.fused.decoder.cache import Cache, New
from export.fused.decoder.plan import DecoderBlock, DecoderPlan
from export.fused.layers import Layers, Probe, States, Tiles, codes_like, one_scale, scale_read_by, stacked
from export.fused.linears import Int8FloatLinear, Int8Linear
from export.fused.rows import Limits, Rows
from export.kernels import attention, embedding, paged_attention, qkv, w8a16
from export.kernels.attention import Scores
from export.kernels.epilogue import Int8Weight
from export.kernels.qkv import Heads, Rotary

Parts = tuple[Tensor, Tensor, Tensor]
"""Queries [T, H, D], keys and values [T, K, D]."""
Attend = Callable[[int, States, Rotary | None], States]
"""Number of a block, states and rotary positions to what its output layer reads, [T, H D]."""


class Decoder(Layers):
    """A plan on a device.

    Args:
        plan: What is computed.
        device: Where.
        dtype: Type of what is float between the layers: float32 or float16.
        tiles: Chooses the tiles of dense GEMMs; None for those by the number of rows.
    """

    def __init__(self, plan: DecoderPlan, device: torch.device, dtype: torch.dtype = torch.float32, tiles: Tiles | None = None) -> None:
        super().__init__(dtype, tiles, plan.launches.on(device))
        self.plan, self.device = plan.to(device), device
        self._word = self.plan.word.of(dtype)
        self._tied = None if self._word.scale is None else Int8FloatLinear(plan.head_name, Int8Weight(self._word.rows, self._word.scale))
        self._position = None if self.plan.position is None else self.plan.position.to(dtype)
        self._merged = [merged(block, dtype) for block in self.plan.blocks]

    @property
    def limits(self) -> Limits:
        """Bounds of the ids in rows."""
        return Limits(len(self._word.rows), 1, self.plan.longest, 0)

    def forward(self, rows: Rows) -> Tensor:
        """Returns the logits of every token, float32 `[T, V]`, on the device of the rows."""
        return self.head(self.states(rows))

    def probe(self, rows: Rows) -> tuple[Tensor, dict[str, Probe]]:
        """Returns the logits, and by path what every int8 layer read and multiplied; see `export.fused.forward.Encoder.probe`."""
        self._probes = {}
        try:
            return self.forward(rows), self._probes
        finally:
            self._probes = None

    def states(self, rows: Rows) -> Tensor:
        """Returns what the head reads, `[T, I]`."""
        return self._through(rows.word, rows.position, lambda number, states, rotary: self._attended(number, states, rotary, rows))

    def read(self, rows: Rows, new: New, cache: Cache) -> Tensor:
        """Reads new texts, and keeps their keys and values; returns the logits of the last token of each, float32 `[B, V]`.

        Args:
            rows: The texts, on the device.
            new: The same tokens, as the cache has made room for them, on the device.
            cache: Keys and values.
        """

        def attend(number: int, states: States, rotary: Rotary | None) -> States:
            return self._attended(number, states, rotary, rows, (new.slots, cache))

        states = self._through(rows.word, rows.position, attend)
        return self.head(states.index_select(0, rows.start[1:].long() - 1))

    def step(self, new: New, cache: Cache) -> Tensor:
        """Reads new tokens of texts in a cache, and keeps their keys and values; returns the logits behind each, float32 `[N, V]`."""

        def attend(number: int, states: States, rotary: Rotary | None) -> States:
            return self._continued(number, states, rotary, new, cache)

        return self.head(self._through(new.word, new.position, attend))

    def head(self, x_TI: Tensor) -> Tensor:
        """Returns the logits of states, float32 `[T, V]`."""
        head = self.plan.head or self._tied
        if head is None:
            return F.linear(x_TI, self._word.rows).float()
        if isinstance(head, Int8Linear):
            return self._in_float32(head, States(x_TI))
        if isinstance(head, Int8FloatLinear):
            logits_TV = torch.empty(len(x_TI), head.outputs, device=x_TI.device)
            self._run(w8a16.launch(x_TI, head.weight, logits_TV))
            return logits_TV
        return self._linear(head, States(x_TI)).float_states.float()

    def _through(self, word: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Returns the states behind the last norm."""
        states, residual = self._embedded(word, position)
        rotary = None if self.plan.rotary is None else Rotary(*(part.index_select(0, position) for part in self.plan.rotary))
        for number, block in enumerate(self.plan.blocks):
            attended = self._linear(block.out, attend(number, states, rotary)).float_states
            states, residual = self._normalized(attended, residual, block.ffn_norm, block.readers, "sum")
            shrunk = self._linear(block.down, self._fed(block, self.plan.activation, states)).float_states
            following = self.plan.blocks[number + 1] if number + 1 < len(self.plan.blocks) else None
            layer = self.plan.norm if following is None else following.attention_norm
            states, residual = self._normalized(shrunk, residual, layer, () if following is None else following.projections, "sum")
        return states.float_states

    def _embedded(self, word: Tensor, position: Tensor) -> tuple[States, Tensor]:
        """Returns the embeddings, normalized for the first block, and their sum."""
        first = self.plan.blocks[0]
        residual = torch.empty(len(word), self._word.rows.shape[1], dtype=self.dtype, device=word.device)
        codes, scale = codes_like(residual, scale_read_by(first.projections))
        lookups = (word, self._word.rows), None, None if self._position is None else (position, self._position)
        given = 1.0 if scale is None else scale
        self._run(embedding.launch(lookups, first.attention_norm, codes, given, residual, "sum", self._word.scale))
        return self._read(residual, first.attention_norm, first.projections, codes, scale), residual

    def _attended(self, number: int, states: States, rotary: Rotary | None, rows: Rows, kept: tuple[Tensor, Cache] | None = None) -> States:
        """Returns the outputs of attention within texts, which keep their keys and values where there is a cache."""
        block = self.plan.blocks[number]
        parts = self._projected(number, states, rotary)
        if kept is not None:
            slots, cache = kept
            for memory, part in zip(cache.rows(number), parts[1:], strict=True):
                memory.index_copy_(0, slots, part)
        lengths = [self.plan.longest] * rows.sequences  # not the rows' own: the tiles have to be the same for all

        def attend(scale: float | None) -> Tensor:
            make = torch.zeros if rows.is_filled else torch.empty  # tokens of no sequence are not written
            out_THD = make(parts[0].shape, dtype=self.dtype if scale is None else torch.int8, device=parts[0].device)
            scores = Scores(block.scaling, causal=True, out_scale=scale)
            self._run(attention.launch(parts, rows.start, lengths, scores, out_THD))
            return out_THD.flatten(1)

        return self._coded(attend, one_scale(block.out))

    def _continued(self, number: int, states: States, rotary: Rotary | None, new: New, cache: Cache) -> States:
        """Returns the outputs of attention of new tokens to the pages of their texts."""
        block, (keys, values) = self.plan.blocks[number], cache.rows(number)
        together = self._merged[number]
        if together is not None:
            query, _, _ = self._split(block.projections, together, states, rotary, (keys, values, new.slots))
        else:
            query, key, value = self._projected(number, states, rotary)
            keys.index_copy_(0, new.slots, key)
            values.index_copy_(0, new.slots, value)

        def attend(scale: float | None) -> Tensor:
            out_NHD = torch.empty_like(query, dtype=self.dtype if scale is None else torch.int8)
            for launch in paged_attention.launches(query, cache.pages(number, new), block.scaling, out_NHD, scale):
                self._run(launch)
            return out_NHD.flatten(1)

        return self._coded(attend, one_scale(block.out))

    def _projected(self, number: int, states: States, rotary: Rotary | None) -> Parts:
        """Returns queries, keys and values."""
        block, together = self.plan.blocks[number], self._merged[number]
        if together is not None:
            return self._split(block.projections, together, states, rotary)
        made = torch.cat([self._linear(layer, states).float_states for layer in block.projections], dim=1)
        counts = [block.heads, block.key_heads, block.key_heads]
        query, key, value = (part.contiguous() for part in torch.split(made.view(len(made), -1, block.head_dim), counts, dim=1))
        return turned(query, rotary), turned(key, rotary), value


def merged(block: DecoderBlock, dtype: torch.dtype) -> tuple[Int8Weight, Heads] | None:
    """Returns the one GEMM of queries, keys and values, and how it is split; None where it is none, or heads have another size."""
    weight = stacked(block.projections)
    if weight is None or block.head_dim not in qkv.DIMENSIONS:
        return None
    return weight, Heads(block.heads, block.key_heads, block.head_dim, dtype=dtype)


def turned(x_THD: Tensor, rotary: Rotary | None) -> Tensor:
    """Returns queries or keys, turned by their positions, as `export.kernels.qkv` does."""
    if rotary is None:
        return x_THD
    first, second = x_THD.float().chunk(2, dim=2)
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2).to(x_THD.dtype)
