"""Finds the parts of a ViT by structure, and proves them by computing: an image classifier in, a plan out.

    patches      the one convolution, outside the blocks, whose stride is its size
    token        the one parameter [1, 1, D] outside the blocks, which stands before the patches
    positions    the one parameter [1, 1 + patches, D] outside the blocks
    norms        before attention and before the feed-forward network of each block, and one behind the last block
    head         one linear layer, which reads the first token

A plan has the norm before a block behind the one before it (`plan`). Left out: positions that are interpolated, tokens of distillation
(DeiT), means over patches, scales of layers (BEiT), windows (Swin), a pooler.

Shape suffixes: b images, n tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from export.fused.blocks import TOLERANCE, BlockPaths, Otherwise, block_paths, floats, linear_of, sparse_or_dense
from export.fused.linears import FloatLinear, Int8Linear, Linear
from export.fused.plan import Head, Patches, Plan
from foundation.models.inputs.images import image_shape
from foundation.models.library import REFUSED, one_line
from foundation.schemes.int8 import LayerScales

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROOF_IMAGES = 2


@dataclass(frozen=True)
class ImagePaths:
    """The parts of a ViT, by the paths of its modules and parameters."""

    blocks: BlockPaths
    convolution: str
    edge: int
    token: Tensor
    """[1, 1, D]."""
    position: Tensor
    """[1, n, D]."""
    norm: str
    head: str

    def logits(self, pixels: Tensor) -> Tensor:
        """Returns the logits of images [b, C, H, W], written out, for the proof."""
        known: Any = self.blocks.modules
        patches = known[self.convolution](pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(pixels), -1, -1), patches], dim=1) + self.position
        found: Tensor = known[self.head](self.blocks.normalized(self.norm, self.blocks.through(x, pre_norm=True))[:, 0])
        return found


def image_plan(model: PreTrainedModel, scales: Mapping[str, Any], nodes: Mapping[str, Mapping[str, str]]) -> Plan:
    """Returns the plan of an image classifier in w8a8.

    Args:
        model: The float model, its weights on the grid where they are int8.
        scales: Scales of the layers in int8, by path.
        nodes: See `Plan.nodes`.

    Raises:
        Otherwise: The model is built otherwise, or computes otherwise.
        InputError: A layer is of another scheme.
    """
    channels, height, width = image_shape(model.config)
    paths = _read_paths(model, (height, width))
    _prove(model, paths, (channels, height, width))
    blocks, known = paths.blocks, paths.blocks.modules
    norm, planned = blocks.planned(paths.norm, True, scales)
    convolution: Any = known[paths.convolution]
    position = floats(paths.position)[0]
    return Plan(
        word=floats(paths.token)[0],
        kind=None,
        position=position,
        norm=norm,
        longest=len(position),
        activation=blocks.activation,
        blocks=planned,
        head=Head(((linear_of(paths.head, blocks.linears[paths.head], scales.get(paths.head)), "none"),)),
        nodes={name: nodes[name] for name in nodes},
        pre_norm=True,
        patches=Patches(_projection(paths.convolution, convolution, scales.get(paths.convolution)), channels, height, width, paths.edge),
    )


def _projection(name: str, convolution: nn.Conv2d, scales: Any) -> Linear:
    """Returns a convolution of patches as a linear layer over their pixels."""
    weight, bias = floats(convolution.weight), None if convolution.bias is None else floats(convolution.bias)
    if scales is None:
        return FloatLinear(name, weight.flatten(1).contiguous(), bias)
    if not isinstance(scales, LayerScales):
        raise Otherwise(f"{name} is quantized as {scales.SCHEME}; w8a8 is written")
    codes = scales.codes(weight).flatten(1).contiguous()
    return Int8Linear(name, sparse_or_dense(codes, scales.weight_scale, bias), float(scales.input_scale))


def _read_paths(model: PreTrainedModel, size: tuple[int, int]) -> ImagePaths:
    blocks = block_paths(model)
    convolutions = [name for name, module in blocks.modules.items() if isinstance(module, nn.Conv2d)]
    heads = blocks.outer(nn.Linear)
    if len(convolutions) != 1 or convolutions[0] not in blocks.outside:
        raise Otherwise(f"it has {len(convolutions)} convolutions; one of patches, before the blocks, is written")
    if len(heads) != 1:
        raise Otherwise(f"{len(heads)} linear layers stand outside its blocks; one, the head, is written")
    convolution: Any = blocks.modules[convolutions[0]]
    edge = int(convolution.kernel_size[0])
    whole = all(one == (edge, edge) for one in (convolution.kernel_size, convolution.stride)) and size[0] % edge == size[1] % edge == 0
    if not whole or convolution.groups != 1 or convolution.padding not in ((0, 0), "valid"):
        raise Otherwise("its patches overlap, are no squares, or do not fill an image")
    tokens = 1 + (size[0] // edge) * (size[1] // edge)
    own = [parameter for name in blocks.outside for parameter in blocks.modules[name].parameters(recurse=False)]
    free = sorted((parameter for parameter in own if parameter.ndim == 3), key=lambda parameter: parameter.shape[1])
    lengths = [parameter.shape[1] for parameter in free]
    if lengths != [1, tokens]:
        raise Otherwise(f"besides patches it has learned states of {lengths} tokens; 1 and {tokens} are written")
    token, position = free
    return ImagePaths(blocks, convolutions[0], edge, token, position, blocks.outer_norm(), heads[0])


def _prove(model: PreTrainedModel, paths: ImagePaths, shape: tuple[int, int, int]) -> None:
    """Raises Otherwise unless the parts give the logits of the model."""
    pixels = torch.randn(PROOF_IMAGES, *shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(pixel_values=pixels).logits
        try:
            found = paths.logits(pixels)
        except REFUSED as error:
            raise Otherwise(f"its layers do not fit behind each other ({one_line(error)})") from error
    if found.shape != expected.shape:
        raise Otherwise(f"its logits have the shape {list(expected.shape)}; {list(found.shape)} is ViT's shape")
    apart = float((found - expected).abs().max() / expected.abs().max())
    if not apart <= TOLERANCE:
        raise Otherwise(f"it has the modules of ViT and computes otherwise (logits {apart:.1%} apart)")
