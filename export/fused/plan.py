"""The plan of a fused int8 encoder: its tensors and numbers, checked once, and the one file that holds them.

    r = word[id] + kind[kind id] + position[position id]           kinds and positions where a model has them;
                                                                   of an image: its patches, projected, behind one learned token, + position
    r, h = next(r)
    in every block     r, h = next(r + out(attention(query(h), key(h), value(h))))
                       r, h = next(r + down(f(up(h))))             f: GELU, its tanh form, SiLU, ReLU or none
                         or   next(r + down(f(gate(h)) * up(h)))
    v = pool(h)        of the tokens of a sequence: the first, the last, or a mean
    logits             the layers of the head, each with its own f, from v; of them the first numbers, with the length 1 (`Head`)

    next(x)            BERT (post-norm): h = norm(x), r = h;   ViT, T5 (pre-norm): h = norm(x), r = x

So all have one norm behind the embeddings and two in each block; the norm that ViT has before a block is behind the one before it. Norms
are LayerNorm or RMSNorm.

A linear layer is float, int8, or int8 in blocks of which only those with a code other than 0 are stored. Layers have any number of outputs:
heads and neurons that pruning removed are not there.

The file (`files`) needs neither transformers nor the checkpoint; the entries of its layers are in `linears`.

Shape suffixes: I inputs, O outputs, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from export.fused.files import read_file, write_file
from export.fused.launches import Launches
from export.fused.linears import (
    Linear,
    document_of,
    document_of_norm,
    linear_from,
    moved,
    norm_from,
    norm_to,
    share_of_integers,
    tensors_of_norm,
)
from export.kernels.activation_codes import Activation
from export.kernels.norm import Norm

Kernel = Literal["packed", "varlen"]
"""Kernels of attention: ours over packed rows, and torch's."""
KIND = "encoder"
"""Of its file (`files`)."""
HeadActivation = Literal["none", "tanh", "relu", "gelu"]
Pooling = Literal["first", "last", "mean", "weighted"]
"""Which states of a sequence the head reads: one token's, the mean, or the mean with weights 1, 2, 3, ..."""
LINEARS = ("query", "key", "value", "out", "gate", "up", "down")
"""Layers of a block in order; there may be no gate."""
NORMS = ("out_norm", "ffn_norm")
NUMBERS = ("longest", "first_position", "activation", "pre_norm", "attention")
"""What the JSON says of a plan as it is."""
HEAD = ("pooling", "dimensions", "normalize")
"""What it says of a head as it is."""
TABLES = ("word", "kind", "position")
SIDES = ("channels", "height", "width", "edge")
"""Numbers of `Patches`."""


@dataclass(frozen=True)
class Block:
    """One layer of the encoder."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    up: Linear
    down: Linear
    head_dim: int
    scaling: float
    """Factor of the attention scores."""
    out_norm: Norm
    ffn_norm: Norm
    gate: Linear | None = None
    """The layer whose outputs go through f and multiply the outputs of `up`; None for a feed-forward network of two layers."""

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return self.query.outputs // self.head_dim

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.key.outputs // self.head_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its layers, in the order of `LINEARS`."""
        return tuple(layer for name in LINEARS if (layer := getattr(self, name)) is not None)

    @property
    def projections(self) -> tuple[Linear, Linear, Linear]:
        """The layers that read the states before the block."""
        return self.query, self.key, self.value

    @property
    def readers(self) -> tuple[Linear, ...]:
        """The layers that read the norm behind attention."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


@dataclass(frozen=True)
class Patches:
    """How an image becomes tokens: squares without overlap, row by row, each projected to a vector."""

    projection: Linear
    """[I, C edge^2]: a convolution whose stride is its size."""
    channels: int
    height: int
    width: int
    edge: int
    """Pixels of a side; it divides height and width."""

    @property
    def grid(self) -> tuple[int, int]:
        """Patches from top to bottom and from left to right."""
        return self.height // self.edge, self.width // self.edge

    def of(self, pixels_nCHW: Tensor) -> Tensor:
        """Returns the patches of images, [n h w, C edge^2]."""
        rows, columns = self.grid
        split = pixels_nCHW.reshape(-1, self.channels, rows, self.edge, columns, self.edge)
        return split.permute(0, 2, 4, 1, 3, 5).reshape(-1, self.channels * self.edge**2)

    def joined(self, patches_TI: Tensor) -> Tensor:
        """Returns the images of patches, [n, C, H, W]: the inverse of `of`."""
        rows, columns = self.grid
        split = patches_TI.reshape(-1, rows, columns, self.channels, self.edge, self.edge)
        return split.permute(0, 3, 1, 4, 2, 5).reshape(-1, self.channels, self.height, self.width)

    def laid_out(self, y_TO: Tensor) -> Tensor:
        """Returns the projections of patches as a convolution has them, [n, O, h, w]."""
        return y_TO.reshape(-1, *self.grid, y_TO.shape[1]).permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Head:
    """From the states of a sequence to its logits, or to its vector."""

    layers: tuple[tuple[Linear, HeadActivation], ...]
    pooling: Pooling = "first"
    dimensions: int | None = None
    """How many numbers of the last layer's output stay, the first ones; None: all."""
    normalize: bool = False
    """Whether what stays gets the length 1."""


@dataclass(frozen=True)
class Plan:
    """An encoder with its head."""

    word: Tensor
    """float32 [V, I]; so are the other two tables. Of a model of images the token before the patches, [1, I]."""
    kind: Tensor | None
    """Table of token types."""
    position: Tensor | None
    norm: Norm
    """Norm of the embeddings."""
    longest: int
    """Most tokens of a sequence."""
    activation: Activation
    """f of the feed-forward networks."""
    blocks: tuple[Block, ...]
    head: Head
    nodes: Mapping[str, Mapping[str, str]]
    """Tensor names of an int8 layer in the ONNX graph of the same model, by path of the module: `input`, `codes`, and its product
    before the bias, `output`, or with it, `biased`."""
    first_position: int = 0
    """Position of the first token: 0, or what a model counts from."""
    pre_norm: bool = False
    """Whether the residual is the sum that a norm reads, as in ViT, or what it returns, as in BERT."""
    patches: Patches | None = None
    """For models of images."""
    relative: Tensor | None = None
    """float32 [H, 2 N - 1] for sequences of up to N tokens: added to the scores of keys r - (N - 1) tokens behind their row, in all
    blocks. None for models without relative positions."""
    attention: Kernel = "packed"
    """What computes attention where the float part is float16: our kernel, or torch's (`library_attention`). In float32 it is ours."""
    attention_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Times of both on the GPU of the build, in milliseconds by tokens of a row; empty where they were not compared."""
    launches: Launches = field(default_factory=Launches)
    """How its kernels are launched."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All layers in order."""
        first = () if self.patches is None else (self.patches.projection,)
        return (*first, *(linear for block in self.blocks for linear in block.linears), *(linear for linear, _ in self.head.layers))

    @property
    def tables(self) -> dict[str, Tensor]:
        """The tables of the embeddings that there are, by name."""
        return {name: table for name in TABLES if (table := getattr(self, name)) is not None}

    def bias(self, name: str) -> Tensor:
        """Returns the bias of the layer of a path that has one, float32 [O]."""
        found = next(layer.tensors()["bias"] for layer in self.linears if layer.name == name)
        assert found is not None, f"{name} has no bias"
        return found

    @property
    def integer_share(self) -> float:
        """Share of the stored weights and tables that are codes; blocks that are not stored do not count."""
        return share_of_integers(self.linears, self.tables.values())

    def to(self, device: torch.device) -> Plan:
        """Returns the plan on a device."""
        tables: dict[str, Any] = {name: table.to(device) for name, table in self.tables.items()}
        return replace(
            self,
            **tables,
            norm=norm_to(self.norm, device),
            blocks=tuple(_block_to(block, device) for block in self.blocks),
            head=replace(self.head, layers=tuple((linear.to(device), after) for linear, after in self.head.layers)),
            relative=moved(self.relative, device),
            patches=None if self.patches is None else replace(self.patches, projection=self.patches.projection.to(device)),
        )


def write_plan(plan: Plan, path: Path) -> None:
    """Writes a plan to its file."""
    tensors: dict[str, Tensor] = {**plan.tables, **tensors_of_norm("norm", plan.norm)}
    for number, block in enumerate(plan.blocks):
        for name in NORMS:
            tensors |= tensors_of_norm(f"{number}.{name}", getattr(block, name))
    if plan.relative is not None:
        tensors["relative"] = plan.relative
    for linear in plan.linears:
        tensors |= {f"{linear.name}.{key}": tensor for key, tensor in linear.tensors().items() if tensor is not None}
    document = {
        "norm": document_of_norm(plan.norm),
        **{name: getattr(plan, name) for name in NUMBERS},
        "blocks": [_block_document(block) for block in plan.blocks],
        "head": _head_document(plan.head),
        "nodes": {name: dict(node) for name, node in plan.nodes.items()},
        "attention_ms": {length: dict(times) for length, times in plan.attention_ms.items()},
        "launches": plan.launches.document,
        "patches": None if plan.patches is None else _patches_document(plan.patches),
    }
    write_file(path, KIND, document, tensors)


def read_plan(path: Path) -> Plan:
    """Returns the plan of a file.

    Raises:
        InputError: The file is missing, damaged, or of another format.
    """
    return read_file(path, {KIND: plan_from})


def plan_from(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Plan:
    """Returns the plan of the JSON and the tensors of a file."""
    patches, head = document["patches"], document["head"]
    layers = tuple((linear_from(entry, tensors), entry["after"]) for entry in head["layers"])
    return Plan(
        word=tensors["word"],
        kind=tensors.get("kind"),
        position=tensors.get("position"),
        norm=norm_from("norm", document["norm"], tensors),
        **{name: document[name] for name in NUMBERS},
        blocks=tuple(_block_from(number, block, tensors) for number, block in enumerate(document["blocks"])),
        head=Head(layers, **{name: head[name] for name in HEAD}),
        nodes=document["nodes"],
        patches=None if patches is None else Patches(linear_from(patches, tensors), *(int(patches[key]) for key in SIDES)),
        relative=tensors.get("relative"),
        attention_ms=document["attention_ms"],
        launches=Launches(**document.get("launches", {})),  # plans of before have none
    )


def _block_from(number: int, block: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Block:
    parts: dict[str, Any] = {name: linear_from(entry, tensors) for name, entry in block["linears"].items()}
    parts |= {name: norm_from(f"{number}.{name}", block[name], tensors) for name in NORMS}
    return Block(**parts, head_dim=block["head_dim"], scaling=block["scaling"])


def _block_document(block: Block) -> dict[str, Any]:
    layers = {name: getattr(block, name) for name in LINEARS}
    return {
        "linears": {name: document_of(layer) for name, layer in layers.items() if layer is not None},
        "head_dim": block.head_dim,
        "scaling": block.scaling,
        **{name: document_of_norm(getattr(block, name)) for name in NORMS},
    }


def _head_document(head: Head) -> dict[str, Any]:
    layers = [{**document_of(linear), "after": after} for linear, after in head.layers]
    return {"layers": layers, **{name: getattr(head, name) for name in HEAD}}


def _patches_document(patches: Patches) -> dict[str, Any]:
    return {**document_of(patches.projection), **{key: getattr(patches, key) for key in SIDES}}


def _block_to(block: Block, device: torch.device) -> Block:
    layers = {name: getattr(block, name) for name in LINEARS}
    parts: dict[str, Any] = {name: layer.to(device) for name, layer in layers.items() if layer is not None}
    parts |= {name: norm_to(getattr(block, name), device) for name in NORMS}
    return replace(block, **parts)
