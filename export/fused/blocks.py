"""The parts of the blocks of an encoder, found by structure, and its layers as a plan has them: for models of text and of images.

    attention      traced (`foundation.models.architecture.attention`): query, key, value, output, heads, scaling
    up and down    the two other linear layers of a block; of three the first two are gate and up
    norms          its two norms, in the order in which the model has them: LayerNorm, or a gain and an epsilon alone (RMSNorm)

Neither names nor this list prove anything: the callers compute with the parts, and refuse a model whose logits are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from export.fused.layers import ACTIVATIONS
from export.fused.linears import FloatLinear, Int4Linear, Int8FloatLinear, Int8Linear, Linear
from export.fused.plan import Block
from export.kernels import block_sparse
from export.kernels.activation_codes import Activation
from export.kernels.block_sparse import SIDES, Packed, SparseWeight, index
from export.kernels.epilogue import Int8Weight
from export.kernels.norm import Norm
from export.kernels.w4a16 import Int4Weight
from foundation.core.errors import InputError
from foundation.models.architecture.attention import Attention, Attentions, find_attentions
from foundation.models.architecture.blocks import blocks_of
from foundation.schemes.int4 import Int4Scales, no_offsets, pack
from foundation.schemes.int8 import LayerScales
from foundation.schemes.int8_weights import WeightScales

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "model"
LOW_RANK = "its embeddings are in low rank, and the kernels look up whole rows"
TOLERANCE = 1e-3
"""Largest difference of logits, as a share of the largest: sums in another order reach about 1e-5."""
MOST_LEFT = 0.5
"""Share of blocks with a code other than 0 up to which a layer is stored and multiplied in blocks."""
SPELLINGS: Mapping[str, Activation] = {
    "gelu": "gelu", "silu": "silu", "swish": "silu", "relu": "relu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip
ACTIVATION_KEYS = ("hidden_act", "activation", "activation_function", "dense_act_fn")
"""Keys of a config, by one of which a model names its activation."""


class Otherwise(Exception):
    """A model is built otherwise; the message says where."""


@dataclass(frozen=True)
class BlockPaths:
    """The parts of the blocks, by the paths of their modules."""

    modules: Mapping[str, nn.Module]
    """All modules of the model."""
    outside: tuple[str, ...]
    """Modules that belong to no block."""
    activation: Activation
    attentions: tuple[Attention, ...]
    feed_forward: tuple[tuple[str, ...], ...]
    """Products of each block: up and down, or gate, up and down."""
    norms: tuple[tuple[str, str], ...]
    """Norms of each block."""

    def __iter__(self) -> Iterator[tuple[Attention, tuple[str, ...], tuple[str, str]]]:
        """Yields attention, products and norms of each block."""
        return zip(self.attentions, self.feed_forward, self.norms, strict=True)

    @property
    def gates(self) -> tuple[BlockPaths, ...]:
        """The parts with either of two layers as gate; itself where there is none."""
        if all(len(names) == 2 for names in self.feed_forward):
            return (self,)
        swapped = tuple((*names[:-1][::-1], names[-1]) for names in self.feed_forward)
        return self, replace(self, feed_forward=swapped)

    def outer(self, kind: type[nn.Module]) -> list[str]:
        """Returns the modules of a kind outside the blocks."""
        return [name for name in self.outside if isinstance(self.modules[name], kind)]

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """All linear layers of the model."""
        return {name: module for name, module in self.modules.items() if isinstance(module, nn.Linear)}

    def outer_norm(self) -> str:
        """Returns the norm outside the blocks.

        Raises:
            Otherwise: There is another number of them.
        """
        names = [name for name in self.outside if is_norm(self.modules[name])]
        if len(names) != 1:
            raise Otherwise(f"{len(names)} norms stand outside its blocks")
        return names[0]

    def through(self, x: Tensor, pre_norm: bool, bias_Hnn: Tensor | float = 0.0) -> Tensor:
        """Returns states [b, n, D] behind the last block, written out; norms stand before the layers, or behind them.

        Args:
            x: The states before the first block.
            pre_norm: Whether they stand before.
            bias_Hnn: Added to the scores of attention.
        """
        for attention, layers, (first, second) in self:
            if pre_norm:
                x = self._attended(attention, self.normalized(first, x), bias_Hnn) + x
                x = self._fed(layers, self.normalized(second, x)) + x
            else:
                x = self.normalized(first, self._attended(attention, x, bias_Hnn) + x)
                x = self.normalized(second, self._fed(layers, x) + x)
        return x

    def normalized(self, name: str, x: Tensor) -> Tensor:
        """Returns the norm of states, as a plan has it."""
        norm = norm_of(self.modules[name])
        if norm.centred:
            return F.layer_norm(x, norm.gain.shape, norm.gain, norm.bias, norm.eps)
        return x * (x.square().mean(dim=-1, keepdim=True) + norm.eps).rsqrt() * norm.gain

    def _attended(self, attention: Attention, x: Tensor, bias_Hnn: Tensor | float) -> Tensor:
        known: Any = self.modules
        query, key, value = (
            known[layer](x).unflatten(2, (-1, attention.head_dim)).transpose(1, 2) for layer, _ in attention.parts.values()
        )
        scores = (query @ key.transpose(2, 3) * attention.scaling + bias_Hnn).softmax(dim=-1)
        found: Tensor = known[attention.output]((scores @ value).transpose(1, 2).flatten(2))
        return found

    def _fed(self, layers: tuple[str, ...], x: Tensor) -> Tensor:
        known: Any = self.modules
        first, *second, down = layers
        opened = ACTIVATIONS[self.activation](known[first](x))
        found: Tensor = known[down](opened * known[second[0]](x) if second else opened)
        return found

    def planned(self, outer: str, pre_norm: bool, scales: Mapping[str, Any]) -> tuple[Norm, tuple[Block, ...]]:
        """Returns the norm behind the embeddings and the blocks, as a plan has them.

        Args:
            outer: The norm outside the blocks: behind the embeddings, or with `pre_norm` behind the last block.
            pre_norm: Whether norms stand before the layers; in a plan each of them is behind what comes before it.
            scales: Of the layers in int8.
        """
        embedded, norms = outer, list(self.norms)
        if pre_norm:
            following = [*(first for first, _ in self.norms[1:]), outer]
            embedded, norms = self.norms[0][0], [(second, after) for (_, second), after in zip(self.norms, following, strict=True)]
        blocks = tuple(self._block(number, behind, scales) for number, behind in enumerate(norms))
        return norm_of(self.modules[embedded]), blocks

    def _block(self, number: int, norms: tuple[str, str], scales: Mapping[str, Any]) -> Block:
        attention, known = self.attentions[number], self.linears
        *gate, up, down = self.feed_forward[number]
        names = {part: layer for part, (layer, _) in attention.parts.items()}
        names |= {"out": attention.output, **({"gate": gate[0]} if gate else {}), "up": up, "down": down}
        layers: dict[str, Any] = {part: linear_of(name, known[name], scales.get(name)) for part, name in names.items()}
        first, second = (norm_of(self.modules[name]) for name in norms)
        return Block(**layers, head_dim=attention.head_dim, scaling=attention.scaling, out_norm=first, ffn_norm=second)


def stack_of(model: PreTrainedModel) -> tuple[dict[str, nn.Module], Attentions]:
    """Returns the blocks of a model with one stack by path, and their attentions.

    Raises:
        Otherwise: There are none, or they read an encoder.
    """
    try:
        blocks, attentions = blocks_of(model, KEY), find_attentions(model, KEY)
    except InputError as error:
        raise Otherwise("; ".join(str(problem).removeprefix(f"{KEY}: ") for problem in error.problems)) from error
    if attentions.cross:
        raise Otherwise("it reads an encoder")
    return blocks, attentions


def block_paths(model: PreTrainedModel) -> BlockPaths:
    """Reads the parts of the blocks off the structure.

    Raises:
        Otherwise: There are other parts.
    """
    blocks, attentions = stack_of(model)
    inside, feed_forward, norms = tuple(f"{name}." for name in blocks), [], []
    for number, (name, block) in enumerate(blocks.items()):
        attention = attentions.own[number]
        _check_attention(attention)
        used = {attention.output, *(layer for layer, _ in attention.parts.values())}
        layers = tuple(layer for layer in linears_in(block, name) if layer not in used)
        if len(layers) not in (2, 3):
            raise Otherwise(f"a block has {len(layers)} linear layers next to its attention, where BERT has 2 and a gated network has 3")
        feed_forward.append(layers)
        norms.append(two_norms(block, name, "BERT"))
    modules, own = dict(model.named_modules()), tuple(attentions.own[number] for number in range(len(blocks)))
    outside = tuple(name for name in modules if not name.startswith(inside))
    return BlockPaths(modules, outside, activation_of(model), own, tuple(feed_forward), tuple(norms))


def activation_of(model: PreTrainedModel) -> Activation:
    """Returns the activation that the config of a model names.

    Raises:
        Otherwise: It is not written.
    """
    act = next((str(getattr(model.config, name)) for name in ACTIVATION_KEYS if getattr(model.config, name, None)), "None")
    if act not in SPELLINGS:
        raise Otherwise(f"its activation is {act}; {', '.join(sorted(set(SPELLINGS.values())))} are written")
    return SPELLINGS[act]


def _check_attention(attention: Attention) -> None:
    if attention.transformed or attention.interleaved:
        raise Otherwise("its queries, keys or values are changed before attention")
    if len({layer for layer, _ in attention.parts.values()}) < len(attention.parts):
        raise Otherwise("one layer makes its queries, keys and values")


def linears_in(block: nn.Module, prefix: str) -> list[str]:
    """Returns the paths of the linear layers of a block."""
    return [f"{prefix}.{name}" for name, module in block.named_modules() if isinstance(module, nn.Linear)]


def two_norms(block: nn.Module, prefix: str, example: str) -> tuple[str, str]:
    """Returns the paths of the two norms of a block.

    Raises:
        Otherwise: There is another number of them.
    """
    names = [f"{prefix}.{name}" for name, module in block.named_modules() if is_norm(module)]
    if len(names) != 2:
        raise Otherwise(f"a block has {len(names)} norms, where {example} has 2")
    return names[0], names[1]


def is_norm(module: Any) -> bool:
    """Whether a module is a LayerNorm, or has a gain and an epsilon alone, as an RMSNorm."""
    if isinstance(module, nn.LayerNorm):
        return True
    own = dict(module.named_parameters())
    return own.keys() == {"weight"} and own["weight"].ndim == 1 and _epsilon(module) is not None and not list(module.children())


def _epsilon(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def norm_of(module: Any) -> Norm:
    """Returns a norm (`is_norm`) as a plan has it."""
    centred, eps = isinstance(module, nn.LayerNorm), _epsilon(module)
    assert eps is not None, "a norm has an epsilon"
    bias = module.bias if centred else None
    return Norm(floats(module.weight), None if bias is None else floats(bias), eps, centred)


def sparse_or_dense(codes_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Int8Weight | SparseWeight:
    """Returns a weight in blocks where at most `MOST_LEFT` of them have a code other than 0; in small ones where these save much."""
    packed = {side: block_sparse.pack(codes_OI, side) for side in sorted(SIDES, reverse=True)}
    left = {side: float(one.left().float().mean()) for side, one in packed.items()}
    large, small = packed
    side = large if left[large] <= MOST_LEFT and left[large] <= 1.25 * left[small] else small
    return _sparse(packed[side], scale_O, bias_O) if left[side] <= MOST_LEFT else Int8Weight(codes_OI, scale_O, bias_O)


def _sparse(packed: Packed, scale_O: Tensor, bias_O: Tensor | None) -> SparseWeight:
    return SparseWeight(packed, index(packed), scale_O, bias_O)


def linear_of(name: str, module: nn.Linear, scales: Any, schemes: tuple[Any, ...] = (LayerScales,)) -> Linear:
    """Returns a layer of the plan.

    Args:
        name: Path of the module.
        module: The float layer, its weights on the grid where it is int8.
        scales: Its scales; None for a layer that stayed float.
        schemes: Classes of scales that are written.

    Raises:
        InputError: The layer is of another scheme.
    """
    bias = None if module.bias is None else floats(module.bias)
    if scales is None:
        return FloatLinear(name, floats(module.weight), bias)
    if type(scales) not in schemes:  # a scheme may be made of another one: w4a8-block of w4a16
        written = " and ".join(scheme.SCHEME for scheme in schemes)
        raise InputError(KEY, f"{name} is quantized as {scales.SCHEME}", f"the fused kernels run {written}")
    if isinstance(scales, WeightScales):
        return Int8FloatLinear(name, Int8Weight(scales.codes(floats(module.weight)), scales.weight_scale, bias))
    if isinstance(scales, Int4Scales):
        if scales.weight_offset is not None:
            raise no_offsets("torch_kernels_decoder")
        codes = pack(scales.codes(floats(module.weight)))
        groups = scales.group_size, scales.weight_scale.contiguous(), scales.weight_zero_point
        return Int4Linear(name, Int4Weight(codes.contiguous(), module.in_features, *groups, bias))
    weight = sparse_or_dense(scales.codes(floats(module.weight)), scales.weight_scale, bias)
    return Int8Linear(name, weight, float(scales.input_scale) if isinstance(scales, LayerScales) else None, scales.input_smooth)


def floats(parameter: Tensor) -> Tensor:
    """Returns a parameter as a plan stores it."""
    return parameter.detach().float().contiguous()
