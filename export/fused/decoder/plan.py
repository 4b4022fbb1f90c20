"""The plan of a decoder on the fused kernels: its tensors and numbers, and the one file that holds them.

    r = word[id] + position[position]                             without the table of positions: word[id]
    in every block     r += out(attention(query(h), key(h), value(h)))        h = norm(r), causal; rotary positions where there is no table
                       r += down(f(up(h)))                                    h = norm(r); f: the tanh form of GELU, GELU or SiLU
                         or down(f(gate(h)) * up(h))
    logits             head(norm(r)) of every token; a tied head multiplies by the table of words

Norms are LayerNorm (GPT-2) or RMSNorm (Llama). Queries, keys and values come from three layers or from one, whose outputs are those of the
queries, then of the keys, then of the values. Query heads may share heads of keys and values.

Shape suffixes: I inputs, V rows of a table, L tokens, D dimension of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.fused.files import Document, read_file, write_file
from export.fused.launches import Launches
from export.fused.linears import (
    FloatLinear,
    Linear,
    document_of,
    document_of_norm,
    linear_from,
    norm_from,
    norm_to,
    share_of_integers,
    tensors_of_norm,
)
from export.kernels.activation_codes import Activation
from export.kernels.norm import Norm

KIND = "decoder"
"""Of its file (`files`)."""
ENDS = ("out", "gate", "up", "down")
NORMS = ("attention_norm", "ffn_norm")
NUMBERS = ("heads", "key_heads", "head_dim", "scaling")


@dataclass(frozen=True)
class Table:
    """The embeddings of words: float, or int8 rows with a scale each (`foundation.schemes.tables`)."""

    rows: Tensor
    """float32 or int8 [V, I]."""
    scale: Tensor | None = None
    """float32 [V]; None for float rows."""

    def of(self, dtype: torch.dtype) -> Table:
        """Returns the table with float rows in a type; int8 rows stay."""
        return self if self.scale is not None else Table(self.rows.to(dtype))


@dataclass(frozen=True)
class DecoderBlock:
    """One layer of the decoder."""

    projections: tuple[Linear, ...]
    """Queries, keys and values: three layers, or one with the outputs of all."""
    out: Linear
    gate: Linear | None
    """The layer whose outputs go through f; None for a feed-forward network of two layers, where those of `up` do."""
    up: Linear
    down: Linear
    heads: int
    key_heads: int
    head_dim: int
    scaling: float
    """Factor of the attention scores."""
    attention_norm: Norm
    ffn_norm: Norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its layers, in order."""
        return (*self.projections, self.out, *(() if self.gate is None else (self.gate,)), self.up, self.down)

    @property
    def readers(self) -> tuple[Linear, ...]:
        """The layers that read the second norm."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


@dataclass(frozen=True)
class DecoderPlan:
    """A decoder with its head."""

    word: Table
    position: Tensor | None
    """Table of positions, float32 [L, I]; None for rotary positions."""
    rotary: tuple[Tensor, Tensor] | None
    """Cosines and sines of rotary positions, float32 [L, D / 2] each; None for a table."""
    activation: Activation
    """f."""
    blocks: tuple[DecoderBlock, ...]
    norm: Norm
    """The norm before the head."""
    head: Linear | None
    """None for a head that multiplies by the table of words."""
    head_name: str
    """Path of the head's module."""
    nodes: Mapping[str, Mapping[str, str]]
    """Tensor names of an int8 layer in the ONNX graph, as `export.fused.plan.Plan.nodes`."""
    launches: Launches = field(default_factory=Launches)
    """How its kernels are launched."""

    @property
    def longest(self) -> int:
        """Most tokens of a text."""
        places = self.position if self.rotary is None else self.rotary[0]
        assert places is not None, "a decoder has a table of positions, or rotary ones"
        return len(places)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All layers in order, without a tied head."""
        return (*(linear for block in self.blocks for linear in block.linears), *(() if self.head is None else (self.head,)))

    def bias(self, name: str) -> Tensor:
        """Returns the bias of the layer of a path that has one, float32 [O]."""
        found = next(layer.tensors()["bias"] for layer in self.linears if layer.name == name)
        assert found is not None, f"{name} has no bias"
        return found

    @property
    def integer_share(self) -> float:
        """Share of the stored weights and tables that are codes."""
        return share_of_integers(self.linears, [self.word.rows, *([] if self.position is None else [self.position])])

    def reads(self, float_bytes: int) -> dict[str, int]:
        """Returns `weight_bytes` and `cache_bytes_per_token`: what is read for each token, as `export.generation.reads` counts it.

        Args:
            float_bytes: Bytes of what is float: weights, a tied head, keys and values.
        """
        tables = [] if self.head is not None else [self.word.rows, self.word.scale]
        stored = [*(tensor for layer in self.linears for tensor in layer.tensors().values()), *tables]
        floats = [layer.weight for layer in self.linears if isinstance(layer, FloatLinear)]
        floats += [] if self.head is not None or self.word.scale is not None else [self.word.rows]
        rest = sum(tensor.nbytes for tensor in stored if tensor is not None and not any(tensor is one for one in floats))
        kept = sum(2 * block.key_heads * block.head_dim for block in self.blocks)
        return {"weight_bytes": rest + float_bytes * sum(one.numel() for one in floats), "cache_bytes_per_token": float_bytes * kept}

    def to(self, device: torch.device) -> DecoderPlan:
        """Returns the plan on a device."""
        return replace(
            self,
            word=Table(self.word.rows.to(device), None if self.word.scale is None else self.word.scale.to(device)),
            position=None if self.position is None else self.position.to(device),
            rotary=None if self.rotary is None else (self.rotary[0].to(device), self.rotary[1].to(device)),
            blocks=tuple(_block_to(block, device) for block in self.blocks),
            norm=norm_to(self.norm, device),
            head=None if self.head is None else self.head.to(device),
        )


def write_decoder(plan: DecoderPlan, path: Path) -> None:
    """Writes a plan to its file."""
    tensors = {"word": plan.word.rows, **tensors_of_norm("norm", plan.norm)}
    optional = {"word_scale": plan.word.scale, "position": plan.position}
    optional |= dict(zip(("cos", "sin"), plan.rotary or (None, None), strict=True))
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    for number, block in enumerate(plan.blocks):
        for name in NORMS:
            tensors |= tensors_of_norm(f"{number}.{name}", getattr(block, name))
    for linear in plan.linears:
        tensors |= {f"{linear.name}.{key}": tensor for key, tensor in linear.tensors().items() if tensor is not None}
    document = {
        "norm": document_of_norm(plan.norm),
        "activation": plan.activation,
        "blocks": [_block_document(block) for block in plan.blocks],
        "head": None if plan.head is None else document_of(plan.head),
        "head_name": plan.head_name,
        "nodes": {name: dict(told) for name, told in plan.nodes.items()},
        "launches": plan.launches.document,
    }
    write_file(path, KIND, document, tensors)


def read_decoder(path: Path) -> DecoderPlan:
    """Returns the plan of a file.

    Raises:
        InputError: The file is missing, damaged, or of another format.
    """
    return read_file(path, {KIND: decoder_from})


def decoder_from(document: Document, tensors: Mapping[str, Tensor]) -> DecoderPlan:
    """Returns the plan of the JSON and the tensors of a file."""
    head = document["head"]
    return DecoderPlan(
        word=Table(tensors["word"], tensors.get("word_scale")),
        position=tensors.get("position"),
        rotary=(tensors["cos"], tensors["sin"]) if "cos" in tensors else None,
        activation=document["activation"],
        blocks=tuple(_blocks(document["blocks"], tensors)),
        norm=norm_from("norm", document["norm"], tensors),
        head=None if head is None else linear_from(head, tensors),
        head_name=document["head_name"],
        nodes=document["nodes"],
        launches=Launches(**document.get("launches", {})),  # plans of before have none
    )


def _blocks(documents: list[Document], tensors: Mapping[str, Tensor]) -> Iterator[DecoderBlock]:
    for number, told in enumerate(documents):
        out, gate, up, down = (None if told[name] is None else linear_from(told[name], tensors) for name in ENDS)
        first, second = (norm_from(f"{number}.{name}", told[name], tensors) for name in NORMS)
        if out is None or up is None or down is None:
            raise ValueError(f"block {number} lacks a layer")
        projections = tuple(linear_from(one, tensors) for one in told["projections"])
        numbers = {name: told[name] for name in NUMBERS}
        yield DecoderBlock(projections, out, gate, up, down, **numbers, attention_norm=first, ffn_norm=second)


def _block_document(block: DecoderBlock) -> dict[str, Any]:
    ends = {name: getattr(block, name) for name in ENDS}
    return {
        "projections": [document_of(layer) for layer in block.projections],
        **{name: None if layer is None else document_of(layer) for name, layer in ends.items()},
        **{name: getattr(block, name) for name in NUMBERS},
        **{name: document_of_norm(getattr(block, name)) for name in NORMS},
    }


def _block_to(block: DecoderBlock, device: torch.device) -> DecoderBlock:
    return replace(
        block,
        projections=tuple(layer.to(device) for layer in block.projections),
        out=block.out.to(device),
        gate=None if block.gate is None else block.gate.to(device),
        up=block.up.to(device),
        down=block.down.to(device),
        attention_norm=norm_to(block.attention_norm, device),
        ffn_norm=norm_to(block.ffn_norm, device),
    )
