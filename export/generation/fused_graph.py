"""A decoder with its cache as an ONNX graph of the fused operators of ONNX Runtime; prefill and decoding are the same graph.

    layers      MatMulNBits (integer weights) or MatMul; GroupQueryAttention with rotary embeddings and the cache; QuickGelu for SiLU
    residuals   SkipSimplifiedLayerNormalization: x + y and its RMSNorm in one operator
    tables      int8 rows: GatherBlockQuantized looks up embeddings, MatMulNBits multiplies the head; tied ones are stored once

`foundation.standalone.onnx_decoder` lists inputs and outputs and runs it. A small decoder spends most of a token's time between operators:
SmolLM2 of 30 layers has 400 of them here and above 2,000 in a trace.

What MatMulNBits multiplies are the codes of the checkpoint, less their zero points. Its accuracy_level says by what:

    w4a16           1   the input in float
    w4a8-block      4   the input rounded to int8, with a scale for every `block` inputs, as many as share a weight scale
    w8a8-dynamic    4   the same; a row of weights has one scale, which is repeated for every block of `BLOCK` inputs

Level 4 holds for the head with int8 rows, too. At level 1 products of one row by 4 bits take several times as long
(AVX2), and ONNX Runtime has no kernel for codes of 8 bits: it makes all weights float again in every call, which is 20 times
slower. In w4a16 such a table is therefore kept as two of 4 bits, a code u = c + 128 = 16 h + l:

    s c = 16 s (h - 8) + s l        h, l in [0, 15]; zero points 8 and 0

and the head is the sum of two products of 4 bits, exact but for the order of additions. `export.parity.own_rounding` rounds in torch as
level 4 does.

Queries, keys and values are one product where their weights have one format, and so are gate and up: their input is rounded once.

Left out: static int8, whose scales MatMulNBits does not take, and FP8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from export.generation.decoder_parts import Layer, Parts, parts_of
from export.generation.on_grids import OnGrids
from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.schemes.int4 import LOW, Int4Scales, no_offsets
from foundation.schemes.int8 import DynamicScales
from foundation.schemes.scales import Scales
from foundation.schemes.table import facts_of
from foundation.schemes.tables import table_codes
from foundation.standalone.onnx_decoder import CACHE, CONTEXT, WRITTEN

BLOCK = 64
"""Inputs of an int8 layer whose activations share a scale."""
HALVES = ("high", "low")
"""Names of the halves of an int8 table, 4 bits each."""
TABLE_BLOCKS = (64, 32, 16)
"""The same for a head with int8 rows: the first that divides its width, as the look-up of embeddings asks."""
MIDDLE = {4: -LOW, 8: 128}
"""The zero point of symmetric codes of so many bits."""
OPSET, MICROSOFT = 21, "com.microsoft"
FUNCTIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "silu": ("QuickGelu", {"alpha": 1.0}),
    "gelu": ("Gelu", {}),
    "gelu_tanh": ("FastGelu", {}),
}
"""Operators of `decoder_parts.ACTIVATIONS`, and their attributes."""


def fused_graph(on_grids: OnGrids) -> onnx.ModelProto:
    """Returns the graph of a decoder, float or quantized.

    Raises:
        InputError: Its layers are not built like Llama's, or are quantized in a scheme or with offsets that MatMulNBits does not multiply.
    """
    others = sorted({type(scales).SCHEME for scales in on_grids.layers.values() if not isinstance(scales, Int4Scales | DynamicScales)})
    if others:
        allowed = "ONNX Runtime multiplies w4a16, w4a8-block and w8a8-dynamic in a decoder"
        raise InputError("quantize", f"{', '.join(others)} given", allowed)
    if any(isinstance(scales, Int4Scales) and scales.weight_offset is not None for scales in on_grids.layers.values()):
        raise no_offsets("MatMulNBits of ONNX Runtime")  # with real zero points it makes weights float in every call
    parts = parts_of(on_grids.model)
    writer = _Writer(parts, on_grids.layers, on_grids.tables)
    return writer.model()


def block_of(scales: Scales) -> int:
    """Returns the inputs of a layer that share a scale of activations in MatMulNBits."""
    return scales.group_size if isinstance(scales, Int4Scales) else BLOCK


def table_block(width: int) -> int:
    """Returns the inputs of a head with int8 rows whose activations share a scale.

    Raises:
        InputError: None of `TABLE_BLOCKS` divides the width.
    """
    found = next((block for block in TABLE_BLOCKS if width % block == 0), None)
    if found is None:
        raise InputError(
            "quantize.embeddings", "true given", f"ONNX Runtime reads int8 tables whose width is a multiple of {TABLE_BLOCKS[-1]}"
        )
    return found


class _Writer:
    """The graph as it grows."""

    def __init__(self, parts: Parts, layers: Mapping[str, Scales], tables: Mapping[str, Tensor]) -> None:
        self._parts, self._scales, self._tables = parts, layers, tables
        self._modules: Mapping[str, Any] = parts.modules
        self._rounds = any(facts_of(scales).activations != "float" for scales in layers.values())
        """Whether products round their inputs to int8."""
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def model(self) -> onnx.ModelProto:
        """Returns the whole."""
        parts = self._parts
        residual = self._embedded()
        read = self._op(
            "SimplifiedLayerNormalization",
            [residual, self._constant("norm.0", parts.layers[0].input_norm)],
            ["read.0"],
            epsilon=parts.epsilon,
            axis=-1,
            stash_type=1,
        )
        cosine, sine = self._constant("cosine", parts.cosine), self._constant("sine", parts.sine)
        for number, layer in enumerate(parts.layers):
            attended = self._product(self._attended(number, layer, read, cosine, sine), [layer.out])
            read, residual = self._added(attended, residual, layer.output_norm, f"{number}.attention")
            following = parts.layers[number + 1].input_norm if number + 1 < len(parts.layers) else parts.norm
            gate, up = self._gate_and_up(layer, read)
            gated = self._op("Mul", [self._activated(gate), up], [f"{layer.down}.in"])
            read, residual = self._added(self._product(gated, [layer.down]), residual, following, f"{number}.feed_forward")
        places = self._op("Reshape", [read, self._constant("places", np.array([-1, parts.norm.shape[0]]))], ["places.read"])
        self._head(self._op("Gather", [places, "kept"], ["asked"], axis=0))
        return self._whole()

    def _whole(self) -> onnx.ModelProto:
        parts, kind = self._parts, TensorProto.FLOAT
        shapes = {
            f"{number}.{side}": ["b", layer.key_heads, "room", parts.head_size]
            for number, layer in enumerate(parts.layers)
            for side in ("key", "value")
        }
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "n"]),
            helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, ["b"]),
            helper.make_tensor_value_info("total", TensorProto.INT32, []),
            helper.make_tensor_value_info("kept", TensorProto.INT64, ["k"]),
            *(helper.make_tensor_value_info(f"{CACHE}{name}", kind, shape) for name, shape in shapes.items()),
        ]
        outputs = [
            helper.make_tensor_value_info("logits", kind, ["k", self._modules[parts.head].weight.shape[0]]),
            *(helper.make_tensor_value_info(f"{WRITTEN}{name}", kind, shape) for name, shape in shapes.items()),
        ]
        graph = helper.make_graph(self._nodes, "decoder", inputs, outputs, list(self._constants.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="compress")
        helper.set_model_props(model, {CONTEXT: str(parts.context)})
        return model

    def _embedded(self) -> str:
        """Looks up the embeddings, and projects those in low rank."""
        projection = self._parts.projection
        if projection is None:
            return self._rows("embedded")
        return self._product(self._rows("narrow"), [projection], "embedded")

    def _rows(self, output: str) -> str:
        """Looks up the rows of the table of tokens."""
        name = self._parts.embeddings
        if name not in self._tables:
            return self._op("Gather", [self._constant(name, self._modules[name].weight), "input_ids"], [output])
        if self._rounds:
            return self._looked_up(name, self._table(name), output, 8)
        halves = [self._looked_up(name, table, f"{output}.{half}", 4) for half, table in zip(HALVES, self._halves(name), strict=True)]
        return self._op("Add", halves, [output])

    def _looked_up(self, name: str, table: Sequence[str], output: str, bits: int) -> str:
        """Looks up rows of a table: codes, scales and zero points, "" for the middle."""
        width = self._modules[name].weight.shape[1]
        codes, scale, *zero_point = table
        shape = self._constant(f"{name}.width.{bits}", np.array([-1, width * bits // 8]))
        rows = self._op("Reshape", [codes, shape], [f"{codes}.rows"])
        given: dict[str, Any] = {"bits": bits, "block_size": table_block(width), "gather_axis": 0, "quantize_axis": 1}
        return self._op("GatherBlockQuantized", [rows, "input_ids", scale, *filter(None, zero_point)], [output], MICROSOFT, **given)

    def _head(self, states: str) -> None:
        """Multiplies by the head."""
        parts, head = self._parts, self._modules[self._parts.head]
        table = parts.embeddings if parts.tied else parts.head
        bias = None if head.bias is None else self._constant(f"{parts.head}.bias", head.bias)
        if table in self._tables:
            self._table_product(states, table, bias or "")
            return
        if parts.head in self._scales:
            self._product(states, [parts.head], "logits")
            return
        product = "logits" if bias is None else "logits.product"
        self._op("FusedMatMul", [states, self._constant(table, head.weight)], [product], MICROSOFT, name=parts.head, transB=1)
        if bias is not None:
            self._op("Add", [product, bias], ["logits"])

    def _table_product(self, states: str, table: str, bias: str) -> None:
        """Multiplies by a head with int8 rows."""
        name = self._parts.head
        outputs, inputs = self._modules[name].weight.shape
        block = table_block(inputs)
        if self._rounds:
            self._of_blocks(states, [*self._table(table), "", "", bias], "logits", name, (outputs, inputs, block, 8))
            return
        biases, shape = ("", bias), (outputs, inputs, block, 4)
        halves = [
            self._of_blocks(states, [*found, "", added], f"logits.{half}", f"{name}/{half}", shape)
            for half, found, added in zip(HALVES, self._halves(table), biases, strict=True)
        ]
        self._op("Add", halves, ["logits"])

    def _attended(self, number: int, layer: Layer, read: str, cosine: str, sine: str) -> str:
        """Attention over the cache, to which keys and values of the new tokens are added."""
        parts, cache = self._parts, [f"{number}.key", f"{number}.value"]
        names = [layer.query, layer.key, layer.value]
        if layer.query_norm is None and len({self._format(name) for name in names}) == 1:
            given = [self._product(read, names), "", ""]
        else:
            query, key, value = (self._product(read, [name]) for name in names)
            given = [self._of_heads(query, layer.query_norm, layer.heads), self._of_heads(key, layer.key_norm, layer.key_heads), value]
        outputs = [f"{number}.attended", *(f"{WRITTEN}{name}" for name in cache)]
        return self._op(
            "GroupQueryAttention",
            [*given, *(f"{CACHE}{name}" for name in cache), "seqlens_k", "total", cosine, sine],
            outputs,
            MICROSOFT,
            name=layer.out.rpartition(".")[0],
            num_heads=layer.heads,
            kv_num_heads=layer.key_heads,
            scale=parts.scale,
            do_rotary=1,
            local_window_size=layer.window or -1,
        )

    def _gate_and_up(self, layer: Layer, read: str) -> tuple[str, str]:
        """Returns the products of gate and up: halves of one product where their weights have one format, whose input is rounded once."""
        if self._format(layer.gate) != self._format(layer.up):
            return self._product(read, [layer.gate]), self._product(read, [layer.up])
        halves = [f"{layer.gate}.half", f"{layer.up}.half"]
        self._op("Split", [self._product(read, [layer.gate, layer.up])], halves, axis=-1, num_outputs=2)
        return halves[0], halves[1]

    def _of_heads(self, value: str, norm: Tensor | None, heads: int) -> str:
        """Normalizes each head of queries or keys."""
        if norm is None:
            return value
        parted = self._op("Reshape", [value, self._constant(f"{heads}.heads", np.array([0, 0, heads, -1]))], [f"{value}.heads"])
        weight = self._constant(f"{value}.norm", norm)
        made = self._op(
            "SimplifiedLayerNormalization", [parted, weight], [f"{value}.normalized"], epsilon=self._parts.epsilon, axis=-1, stash_type=1
        )
        return self._op("Reshape", [made, self._constant("joined", np.array([0, 0, -1]))], [f"{value}.joined"])

    def _added(self, value: str, residual: str, norm: Tensor, name: str) -> tuple[str, str]:
        """Adds to the residual; returns its RMSNorm and the sum."""
        weight, outputs = self._constant(f"{name}.norm", norm), [f"{name}.read", "", "", f"{name}.sum"]
        read = self._op("SkipSimplifiedLayerNormalization", [value, residual, weight], outputs, MICROSOFT, epsilon=self._parts.epsilon)
        return read, outputs[-1]

    def _activated(self, value: str) -> str:
        function, attributes = FUNCTIONS[self._parts.activation]
        return self._op(function, [value], [f"{value}.activated"], MICROSOFT, **attributes)

    def _format(self, name: str) -> tuple[Any, ...]:
        """Returns the properties that layers must share to be one product."""
        scales, bias = self._scales.get(name), self._modules[name].bias is None
        if isinstance(scales, Int4Scales):
            return Int4Scales, scales.group_size, scales.symmetric, bias
        if isinstance(scales, DynamicScales):
            return DynamicScales, None if scales.input_smooth is None else scales.input_smooth.numpy().tobytes(), bias
        return None, bias

    def _product(self, value: str, names: Sequence[str], output: str | None = None) -> str:
        """Multiplies by the weights of linear layers of one format, one after another."""
        output, layers = output or f"{names[0]}.out", [self._modules[name] for name in names]
        biases = [layer.bias for layer in layers]
        bias = None if biases[0] is None else self._constant(f"{names[0]}.bias", torch.cat(biases))
        scales: Any = self._scales.get(names[0])
        node = "+".join(names)
        if scales is None:
            weight = self._constant(f"{names[0]}.weight", torch.cat([layer.weight for layer in layers]).T)
            product = output if bias is None else f"{names[0]}.product"
            self._op("MatMul", [value, weight], [product], name=node)
            return output if bias is None else self._op("Add", [product, bias], [output])
        if isinstance(scales, DynamicScales) and scales.input_smooth is not None:
            smooth = self._constant(f"{names[0]}.smooth", scales.input_smooth.reciprocal())
            value = self._op("Mul", [value, smooth], [f"{names[0]}.smoothed"])
        stored = [_stored(self._scales[name], layer.weight.detach().float()) for name, layer in zip(names, layers, strict=True)]
        bits, block, inputs = (4 if isinstance(scales, Int4Scales) else 8), block_of(scales), layers[0].weight.shape[1]
        tensors = [np.concatenate(kind) if kind[0] is not None else None for kind in zip(*stored, strict=True)]
        given = [
            "" if tensor is None else self._constant(f"{names[0]}.{kind}", tensor)
            for kind, tensor in zip(("codes", "scale", "zero_point"), tensors, strict=True)
        ]
        outputs = sum(layer.weight.shape[0] for layer in layers)
        return self._of_blocks(value, [*given, "", bias or ""], output, node, (outputs, inputs, block, bits))

    def _of_blocks(self, value: str, operands: Sequence[str], output: str, name: str, shape: tuple[int, int, int, int]) -> str:
        """Adds a MatMulNBits; `operands` are codes, scales, zero points, the order of inputs and the bias, "" for what there is not."""
        inputs = [value, *operands]
        while not inputs[-1]:
            inputs.pop()
        sizes: dict[str, Any] = dict(zip(("N", "K", "block_size", "bits"), shape, strict=True))
        return self._op("MatMulNBits", inputs, [output], MICROSOFT, name=name, accuracy_level=4 if self._rounds else 1, **sizes)

    def _table(self, name: str) -> tuple[str, str]:
        """Returns codes uint8 [V, blocks, block] and scales [V, blocks] of an int8 table; stored once."""
        if f"{name}.codes" not in self._constants:
            weight, scale_V = self._modules[name].weight.detach().float(), self._tables[name]
            codes, scale = _blocks_of_int8(table_codes(weight, scale_V), scale_V, table_block(weight.shape[1]))
            self._constant(f"{name}.codes", codes)
            self._constant(f"{name}.scale", scale)
        return f"{name}.codes", f"{name}.scale"

    def _halves(self, name: str) -> tuple[tuple[str, str, str], ...]:
        """Returns codes uint8 [V, blocks, block / 2], scales [V, blocks] and zero points, "" for 8, of both halves of an int8 table."""
        names = tuple((f"{name}.{half}.codes", f"{name}.{half}.scale") for half in HALVES)
        if names[0][0] not in self._constants:
            weight, scale_V = self._modules[name].weight.detach().float(), self._tables[name]
            codes, scale = _blocks_of_int8(table_codes(weight, scale_V), scale_V, table_block(weight.shape[1]))
            for (codes_name, scale_name), half, factor in zip(names, (codes >> 4, codes & 15), (16, 1), strict=True):
                self._constant(codes_name, half[..., 0::2] | (half[..., 1::2] << 4))
                self._constant(scale_name, scale * np.float32(factor))
            self._constant(f"{name}.low.zero_point", np.zeros((len(scale), -(-scale.shape[1] // 2)), np.uint8))
        (high, low) = names
        return (*high, ""), (*low, f"{name}.low.zero_point")

    def _constant(self, name: str, value: Tensor | Array) -> str:
        """Adds a constant unless it is there; returns its name."""
        if name not in self._constants:
            array = value.detach().float().numpy() if isinstance(value, Tensor) else value
            self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def _op(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", name: str = "", **attributes: Any) -> str:
        """Adds a node; returns its first output."""
        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=name or outputs[0], domain=domain, **attributes))
        return outputs[0]


def _stored(scales: Scales, weight_OI: Tensor) -> tuple[Array, Array, Array | None]:
    """Returns codes uint8 [O, blocks, bytes], scales float32 [O, blocks] and zero points uint8 [O, bytes] of a layer; None for symmetric
    ones."""
    codes_OI = scales.codes(weight_OI)
    if isinstance(scales, DynamicScales):
        return *_blocks_of_int8(codes_OI, scales.weight_scale, BLOCK), None
    assert isinstance(scales, Int4Scales), type(scales)
    group = scales.group_size
    zero_point = None if scales.weight_zero_point is None else _packed((scales.weight_zero_point - LOW).numpy(), 0)
    padding = (-codes_OI.shape[1]) % group
    codes = (codes_OI - LOW).numpy().astype(np.uint8)
    codes = np.pad(codes, ((0, 0), (0, padding)), constant_values=MIDDLE[4])
    return _packed(codes, 0).reshape(len(codes), -1, group // 2), scales.weight_scale.numpy(), zero_point


def _packed(codes: Array, filler: int) -> Array:
    """Packs two codes of 4 bits a byte along the last axis, the first in the low half."""
    even = np.pad(codes.astype(np.uint8), ((0, 0), (0, codes.shape[1] % 2)), constant_values=filler)
    packed: Array = even[:, 0::2] | (even[:, 1::2] << 4)
    return packed


def _blocks_of_int8(codes_OI: Tensor, scale_O: Tensor, block: int) -> tuple[Array, Array]:
    """Returns codes uint8 [O, blocks, block] and the scale of each block, float32 [O, blocks]."""
    outputs, inputs = codes_OI.shape
    codes = (codes_OI.to(torch.int16) + MIDDLE[8]).numpy().astype(np.uint8)
    codes = np.pad(codes, ((0, 0), (0, (-inputs) % block)), constant_values=MIDDLE[8])
    blocks = codes.reshape(outputs, -1, block)
    # codes around 128 leave the rounding of a difference; of zeros, whose scale is 1, it would be seen
    return blocks, np.where((blocks == MIDDLE[8]).all(axis=2), np.float32(0), scale_O.numpy()[:, None])


def save_fused(model: onnx.ModelProto, path: Path) -> None:
    """Writes a graph; its weights go into a file next to it."""
    onnx.save(model, str(path), save_as_external_data=True, location=f"{path.name}.data", size_threshold=1024)
