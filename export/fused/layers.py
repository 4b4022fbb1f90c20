"""Runs the linear layers and norms of a plan on the kernels: what encoders and decoders share.

A layer that stayed float is a product of torch, and what it reads or writes is not quantized; one whose weights alone are integers (w8a16,
w4a16) multiplies floats. An input with a smoothing vector is divided and quantized by itself. Codes have one scale (w8a8), or one for each
token (w8a8-dynamic): a norm writes both kinds, and a GEMM with its activation writes codes with one scale; else the output is float, and
quantized by a kernel of its own.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from export.fused.linears import FloatLinear, Int4Linear, Int8FloatLinear, Int8Linear, Linear
from export.kernels import block_sparse, gated, gemm, norm, qkv, quantize, w4a16, w8a16
from export.kernels.activation_codes import Activation
from export.kernels.block_sparse import SparseWeight
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.gemm import Tile
from export.kernels.launch import Launch
from export.kernels.norm import Keep, Norm
from export.kernels.qkv import Heads, Rotary

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip
Tiles = Callable[[Tensor, Int8Weight, Output], Tile | None]
"""Chooses the tile of a GEMM from its codes, weight and output; None for the one by the number of rows."""
TOKEN: Final = "token"
Scale = float | Literal["token"]
"""Scale of the codes that a layer reads: one number, or `TOKEN`: each token has its own."""


@dataclass(frozen=True)
class States:
    """Hidden states between kernels: float, codes, or both."""

    floats: Tensor | None
    """[T, I] in the float type; None where only codes are read."""
    codes: Tensor | None = None
    """int8 [T, I]."""
    scale: float | Tensor | None = None
    """Scale of the codes: one number, or float32 [T, 1]."""

    @property
    def float_states(self) -> Tensor:
        """The float states, where there must be some."""
        assert self.floats is not None, "these states are codes alone"
        return self.floats

    def codes_for(self, wanted: Scale | None) -> tuple[Tensor, float | Tensor] | None:
        """Returns codes and scale, if they are what a layer can read (`scale_of`); None if not."""
        if self.codes is None or self.scale is None:
            return None
        fits = wanted == TOKEN if isinstance(self.scale, Tensor) else self.scale == wanted
        return (self.codes, self.scale) if fits else None


@dataclass(frozen=True)
class Probe:
    """Input, codes and product of an int8 layer."""

    x: Tensor
    """Its float input, float32 [T, I]."""
    codes: Tensor
    """int8 [T, I]."""
    y: Tensor
    """Its product before the bias, float32 [T, O]."""


class FeedForward(Protocol):
    """The layers of a feed-forward network."""

    @property
    def gate(self) -> Linear | None:
        """The layer whose outputs go through f and multiply the outputs of `up`; None for a network of two layers."""

    @property
    def up(self) -> Linear:
        """The other layer that reads the states."""

    @property
    def down(self) -> Linear:
        """The last layer."""


class Layers:
    """Runs layers.

    Args:
        dtype: Type of what is float between them: float32 or float16.
        tiles: Chooses the tiles of dense GEMMs; None for those by the number of rows.
        dependent: Whether kernels start before the kernel before them is complete (`export.kernels.dependent_launch`).
    """

    def __init__(self, dtype: torch.dtype, tiles: Tiles | None, dependent: bool) -> None:
        self.dtype, self._tiles, self.dependent = dtype, tiles, dependent
        self._probes: dict[str, Probe] | None = None

    def _run(self, launch: Launch) -> None:
        """Launches a kernel of a pass."""
        replace(launch, dependent=self.dependent).run()

    def _linear(self, layer: Linear, states: States, activation: Activation = "none", reader: Linear | None = None) -> States:
        """Returns the outputs of a layer; as codes where it is int8 and the layer that reads them reads codes of one scale."""
        if isinstance(layer, FloatLinear):
            bias = None if layer.bias is None else layer.bias.to(self.dtype)
            return States(ACTIVATIONS[activation](F.linear(states.float_states, layer.weight.to(self.dtype), bias)))
        if isinstance(layer, Int4Linear | Int8FloatLinear):
            x = states.float_states
            out_TO = x.new_empty(len(x), layer.outputs)
            if isinstance(layer, Int4Linear):
                self._run(w4a16.launch(x, layer.weight, out_TO, activation))
            else:
                self._run(w8a16.launch(x, layer.weight, out_TO, activation))
            return States(out_TO)
        codes, given = self._codes(layer, states)
        self._note(layer, states, codes, given)
        return self._coded(lambda scale: self._product(layer, codes, given, Output(activation, self.dtype, scale)), one_scale(reader))

    def _fed(self, block: FeedForward, activation: Activation, states: States) -> States:
        """Returns what the last layer of a feed-forward network reads."""
        gate, up = block.gate, block.up
        if gate is None:
            return self._linear(up, states, activation, block.down)
        weights = gated_weights(gate, up)
        if weights is None:
            opened = ACTIVATIONS[activation](self._linear(gate, states).float_states)
            return States(opened * self._linear(up, states).float_states)
        assert isinstance(gate, Int8Linear), "gated weights are int8"
        codes, given = self._codes(gate, states)
        for layer in (gate, up):
            self._note(layer, states, codes, given)

        def product(scale: float | None) -> Tensor:
            output = Output(activation, self.dtype, scale)
            out = torch.empty(len(codes), gate.outputs, dtype=output.stored, device=codes.device)
            self._run(gated.launch(codes, given, *weights, output, out))
            return out

        return self._coded(product, one_scale(block.down))

    def _coded(self, compute: Callable[[float | None], Tensor], scale: float | None) -> States:
        """Returns what a kernel computes: floats, or codes of a scale, with the floats while probes are requested."""
        found = compute(scale)
        if scale is None:
            return States(found)
        return States(None if self._probes is None else compute(None), found, scale)

    def _codes(self, layer: Int8Linear, states: States) -> tuple[Tensor, float | Tensor]:
        """Returns the codes that a layer reads, and their scale: those that there are, or new ones."""
        found = states.codes_for(scale_of(layer))
        if found is not None:
            return found
        x = divided(states.float_states, layer.smooth)
        codes = torch.empty_like(x, dtype=torch.int8)
        if layer.input_scale is None:
            scales = torch.empty(len(x), 1, device=x.device)
            self._run(quantize.token_launch(x, codes, scales))
            return codes, scales
        self._run(quantize.tensor_launch(x, layer.input_scale, codes))
        return codes, layer.input_scale

    def _product(self, layer: Int8Linear, codes_TI: Tensor, scale: float | Tensor, output: Output) -> Tensor:
        """Returns the outputs of an int8 layer, given its codes and their scale."""
        weight = layer.weight
        out_TO = torch.empty(len(codes_TI), layer.outputs, dtype=output.stored, device=codes_TI.device)
        if isinstance(weight, SparseWeight):
            self._run(block_sparse.launch(codes_TI, scale, weight, output, out_TO))
        else:
            tile = None if self._tiles is None else self._tiles(codes_TI, weight, output)
            self._run(gemm.launch(codes_TI, scale, weight, output, out_TO, tile))
        return out_TO

    def _in_float32(self, layer: Int8Linear, states: States) -> Tensor:
        """Returns the outputs of an int8 layer that no kernel reads, float32 [T, O]."""
        codes, scale = self._codes(layer, states)
        self._note(layer, states, codes, scale)
        return self._product(layer, codes, scale, Output(dtype=torch.float32))

    def _split(
        self,
        layers: Sequence[Linear],
        together: tuple[Int8Weight, Heads],
        states: States,
        rotary: Rotary | None = None,
        memory: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [T, H, D], keys and values [T, K, D] of layers that are one GEMM (`stacked`).

        Args:
            layers: The layers.
            together: Their weights as one, and how it is split.
            states: What they read.
            rotary: Turns queries and keys.
            memory: Keys and values [S, K, D] to write to, and the row of each token, int64 [T]; None: new ones.
        """
        (weight, heads), first = together, layers[0]
        assert isinstance(first, Int8Linear), "layers that are one GEMM are int8"
        codes_TI, scale = self._codes(first, states)

        def made(part: int) -> Tensor:
            count, dtype = heads.types()[part]
            return torch.empty(len(codes_TI), count, heads.dimension, dtype=dtype, device=codes_TI.device)

        query, slots = made(0), None
        if memory is None:
            key, value = made(1), made(2)
        else:
            key, value, slots = memory
        self._run(qkv.launch(codes_TI, scale, weight, heads, rotary, (query, key, value), slots))
        for layer in layers:
            self._note(layer, states, codes_TI, scale)
        return query, key, value

    def _note(self, layer: Linear, states: States, codes: Tensor, scale: float | Tensor) -> None:
        """Stores the input and product of a layer while probes are requested."""
        if self._probes is not None and isinstance(layer, Int8Linear):
            plain = replace(layer, weight=replace(layer.weight, bias=None))
            y = self._product(plain, codes, scale, Output(dtype=torch.float32))
            self._probes[layer.name] = Probe(divided(states.float_states, layer.smooth).float(), codes, y)

    def _normalized(
        self, x_TI: Tensor, residual_TI: Tensor | None, layer: Norm, readers: Sequence[Linear], keep: Keep
    ) -> tuple[States, Tensor]:
        """Returns the norm of a sum for the layers that read it, and what the next sum adds: the norm, or the sum (pre-norm)."""
        wanted, kept = scale_read_by(readers), torch.empty_like(x_TI)
        codes, scale = codes_like(x_TI, wanted)
        self._run(norm.launch(x_TI, residual_TI, layer, codes, 1.0 if scale is None else scale, kept, keep))
        if keep == "norm":
            return States(kept, codes, scale), kept
        return self._read(kept, layer, readers, codes, scale), kept

    def _read(self, sum_TI: Tensor, layer: Norm, readers: Sequence[Linear], codes: Tensor | None, scale: float | Tensor | None) -> States:
        """Returns the norm of a sum as its readers need it, given its codes; the floats are computed once more where one reads them."""
        states = States(None, codes, scale)
        if codes is not None and self._probes is None and all(states.codes_for(scale_of(reader)) for reader in readers):
            return states
        floats = torch.empty_like(sum_TI)  # something reads them: the head, a float layer, one with another scale
        self._run(norm.launch(sum_TI, None, layer, None, 1.0, floats, "norm"))
        return States(floats, codes, scale)


def codes_like(x_TI: Tensor, wanted: Scale | None) -> tuple[Tensor | None, float | Tensor | None]:
    """Returns what a kernel writes codes to, and their scale or where it writes theirs; None twice where no codes are wanted."""
    if wanted is None:
        return None, None
    scale = torch.empty(len(x_TI), 1, device=x_TI.device) if wanted == TOKEN else wanted
    return torch.empty_like(x_TI, dtype=torch.int8), scale


def scale_of(layer: Linear) -> Scale | None:
    """Returns the scale of the codes that a layer can read from the kernel before it; None where it reads floats."""
    if not isinstance(layer, Int8Linear) or layer.smooth is not None:
        return None
    return TOKEN if layer.input_scale is None else layer.input_scale


def one_scale(layer: Linear | None) -> float | None:
    """Returns the one scale of the codes that a layer can read; None where it reads floats, or tokens have scales of their own."""
    scale = None if layer is None else scale_of(layer)
    return scale if isinstance(scale, float) else None


def scale_read_by(layers: Sequence[Linear]) -> Scale | None:
    """Returns the scale of the codes that layers read: the first one; None where all read floats."""
    return next((scale for scale in map(scale_of, layers) if scale is not None), None)


def stacked(layers: Sequence[Linear]) -> Int8Weight | None:
    """Returns the weights of layers that read the same codes as one, with a bias; None where they do not, or are no dense int8."""
    weights, biases = [], []
    for layer in layers:
        alike = isinstance(layer, Int8Linear) and (len(layers) == 1 or scale_of(layer) == scale_of(layers[0]) is not None)
        if not alike or not isinstance(layer, Int8Linear) or not isinstance(layer.weight, Int8Weight):
            return None
        weights.append(layer.weight)
        biases.append(torch.zeros_like(layer.weight.scale) if layer.weight.bias is None else layer.weight.bias)
    codes, scale = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scale"))
    return Int8Weight(codes, scale, torch.cat(biases))


def gated_weights(gate: Linear, up: Linear) -> tuple[Int8Weight, Int8Weight] | None:
    """Returns the weights of gate and up for one kernel; None unless both are dense int8, of the same codes, and alike in having a bias."""
    weights = [layer.weight for layer in (gate, up) if isinstance(layer, Int8Linear) and isinstance(layer.weight, Int8Weight)]
    if len(weights) < 2 or scale_of(gate) is None or scale_of(gate) != scale_of(up):
        return None
    return (weights[0], weights[1]) if (weights[0].bias is None) == (weights[1].bias is None) else None


def divided(x: Tensor, smooth_I: Tensor | None) -> Tensor:
    """Returns an input divided by a smoothing vector, if there is one, as `foundation.schemes.int8` divides."""
    return x if smooth_I is None else (x.float() * smooth_I.reciprocal())
