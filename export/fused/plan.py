"""The plan of a fused int8 encoder: its tensors and numbers, checked once, and the one file that holds them.

    r = word[id] + kind[kind id] + position[position id]           of an image: its patches, projected, behind one learned token, + position
    r, h = next(r)
    in every block     r, h = next(r + out(attention(query(h), key(h), value(h))))
                       r, h = next(r + down(f(up(h))))                                    f: GELU, SiLU or none
    logits             the layers of the head, each with its own f, from h of the first token of a sequence

    next(x)            BERT (post-norm): h = LayerNorm(x), r = h;   ViT (pre-norm): h = LayerNorm(x), r = x

So both have one norm behind the embeddings and two in each block; the norm that ViT has before a block is behind the one before it.

A linear layer is float, int8, or int8 in blocks of which only those with a code other than 0 are stored. Layers have any number of outputs:
heads and neurons that pruning removed are not there.

The file (`files`) needs neither transformers nor the checkpoint; the entries of its layers are in `linears`.

Shape suffixes: I inputs, O outputs, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from export.fused.files import read_file, write_file
from export.fused.linears import Linear, document_of, linear_from, norm_to, share_of_integers, tensors_of_norm
from export.kernels.activation_codes import Activation
from export.kernels.norm import Norm

Kernel = Literal["packed", "varlen"]
"""Kernels of attention: ours over packed rows, and torch's."""
KIND = "encoder"
"""Of its file (`files`)."""
HeadActivation = Literal["none", "tanh", "relu", "gelu"]
LINEARS = ("query", "key", "value", "out", "up", "down")
NORMS = ("out_norm", "ffn_norm")
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
        return tuple(getattr(self, name) for name in LINEARS)


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
class Plan:
    """An encoder with its head."""

    word: Tensor
    """float32 [V, I]; so are the other two tables. Of a model of images the token before the patches, [1, I]."""
    kind: Tensor
    """A row of zeros for models without token types."""
    position: Tensor
    norm: Norm
    """Norm of the embeddings."""
    first_position: int
    """Position of the first token: 0, or what a model counts from."""
    activation: Activation
    """Between `up` and `down`."""
    blocks: tuple[Block, ...]
    head: tuple[tuple[Linear, HeadActivation], ...]
    """Layers from the first token to the logits."""
    nodes: Mapping[str, Mapping[str, str]]
    """Tensor names of an int8 layer in the ONNX graph of the same model, by path of the module: `input`, `codes`, and its product
    before the bias, `output`, or with it, `biased`."""
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

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return len(self.position) - self.first_position

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All layers in order."""
        first = () if self.patches is None else (self.patches.projection,)
        return (*first, *(linear for block in self.blocks for linear in block.linears), *(linear for linear, _ in self.head))

    def bias(self, name: str) -> Tensor:
        """Returns the bias of the layer of a path that has one, float32 [O]."""
        found = next(layer.tensors()["bias"] for layer in self.linears if layer.name == name)
        assert found is not None, f"{name} has no bias"
        return found

    @property
    def integer_share(self) -> float:
        """Share of the stored weights and tables that are codes; blocks that are not stored do not count."""
        return share_of_integers(self.linears, (self.word, self.kind, self.position))

    def to(self, device: torch.device) -> Plan:
        """Returns the plan on a device."""
        moved = {one.name: getattr(self, one.name) for one in fields(self)}
        moved |= {name: moved[name].to(device) for name in ("word", "kind", "position")}
        moved |= {"norm": norm_to(self.norm, device), "head": tuple((linear.to(device), after) for linear, after in self.head)}
        if self.relative is not None:
            moved["relative"] = self.relative.to(device)
        if self.patches is not None:
            moved["patches"] = replace(self.patches, projection=self.patches.projection.to(device))
        return Plan(**{**moved, "blocks": tuple(_block_to(block, device) for block in self.blocks)})


def write_plan(plan: Plan, path: Path) -> None:
    """Writes a plan to its file."""
    tensors: dict[str, Tensor] = {"word": plan.word, "kind": plan.kind, "position": plan.position, **tensors_of_norm("norm", plan.norm)}
    for number, block in enumerate(plan.blocks):
        tensors |= tensors_of_norm(f"{number}.out_norm", block.out_norm) | tensors_of_norm(f"{number}.ffn_norm", block.ffn_norm)
    if plan.relative is not None:
        tensors["relative"] = plan.relative
    for linear in plan.linears:
        tensors |= {f"{linear.name}.{key}": tensor for key, tensor in linear.tensors().items() if tensor is not None}
    document = {
        "eps": plan.norm.eps,
        "first_position": plan.first_position,
        "activation": plan.activation,
        "blocks": [_block_document(block) for block in plan.blocks],
        "head": [{**document_of(linear), "after": after} for linear, after in plan.head],
        "nodes": {name: dict(told) for name, told in plan.nodes.items()},
        "pre_norm": plan.pre_norm,
        "attention": plan.attention,
        "attention_ms": {length: dict(times) for length, times in plan.attention_ms.items()},
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

    def norm(name: str, eps: float) -> Norm:
        return Norm(tensors[f"{name}.gain"], tensors.get(f"{name}.bias"), eps)

    def blocks() -> Iterator[Block]:
        for number, told in enumerate(document["blocks"]):
            query, key, value, out, up, down = (linear_from(told["linears"][name], tensors) for name in LINEARS)
            first, second = (norm(f"{number}.{name}", told["eps"][name]) for name in NORMS)
            yield Block(query, key, value, out, up, down, told["head_dim"], told["scaling"], first, second)

    patches = document["patches"]
    return Plan(
        word=tensors["word"],
        kind=tensors["kind"],
        position=tensors["position"],
        norm=norm("norm", document["eps"]),
        first_position=document["first_position"],
        activation=document["activation"],
        blocks=tuple(blocks()),
        head=tuple((linear_from(told, tensors), told["after"]) for told in document["head"]),
        nodes=document["nodes"],
        pre_norm=document["pre_norm"],
        patches=None if patches is None else Patches(linear_from(patches, tensors), *(int(patches[key]) for key in SIDES)),
        relative=tensors.get("relative"),
        attention=document["attention"],
        attention_ms=document["attention_ms"],
    )


def _block_document(block: Block) -> dict[str, Any]:
    linears = {name: document_of(getattr(block, name)) for name in LINEARS}
    eps = {name: getattr(block, name).eps for name in NORMS}
    return {"linears": linears, "head_dim": block.head_dim, "scaling": block.scaling, "eps": eps}


def _patches_document(patches: Patches) -> dict[str, Any]:
    return {**document_of(patches.projection), **{key: getattr(patches, key) for key in SIDES}}


def _block_to(block: Block, device: torch.device) -> Block:
    query, key, value, out, up, down = (linear.to(device) for linear in block.linears)
    first, second = (norm_to(getattr(block, name), device) for name in NORMS)
    return Block(query, key, value, out, up, down, block.head_dim, block.scaling, first, second)
