"""Attention products Q K^T and P V in true int8.

Each product multiplies the codes of two activations, with one static scale per tensor:

    q_A = clamp(rint(A / s_A), -128, 127)                int8 [..., M, K]        `<module>/qk`   A = Q, B = K
    q_B = clamp(rint(B / s_B), -128, 127)                int8 [..., N, K]        `<module>/pv`   A = P, B = V^T
    A B^T ~ float32(q_A @ q_B^T) * (s_A * s_B)           accumulated in int32, exactly

    O = P V,   P = softmax(Q K^T * scaling + mask)       scaling, mask and softmax in float32

Q is quantized before it is multiplied by `scaling`, because the first MatMul of the plain ("eager") attention, from which the ONNX graph is
traced, comes before the scaling. The scale of P is the constant 1/127: when a head attends to a single token, that probability is 1 and is
the only value of its row that matters, and a calibrated scale might clip exactly that value. The cost: probabilities below 1/254 become 0.

Transformers calls attention through a registry, by the name in `config._attn_implementation`. `use` sets that name to `IMPLEMENTATION`. Its
function delegates to the child `int8_attention` of the calling module, or to sdpa if there is none. This works for every architecture that
uses the registry, and for no other.

Not supported: int8 key-value caches; attention variants beyond the formula above (soft caps, sinks), which `quantize.products` rejects.

Shape suffixes: M, N rows, K summed dimension, B batch, H heads, S tokens, D head dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, EXACT_CHUNK, check_finite, quantize

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IMPLEMENTATION = "compress_int8"
"""Name of the int8 attention in Transformers' registry."""
ATTENTION = "int8_attention"
"""Name of the child module that computes int8 attention."""
PROBABILITY_SCALE = 1 / ACTIVATION_HIGH
Kind = Literal["qk", "pv"]
Multiply = Callable[[Kind, Tensor, Tensor], Tensor]
"""Returns A B^T, float32 [..., M, N], for A [..., M, K] and B [..., N, K]."""


@dataclass(frozen=True)
class ProductScales:
    """The scales of one product A B^T, float32 [] each."""

    left: Tensor
    """Scale of A: queries or probabilities."""
    right: Tensor
    """Scale of B: keys or values."""


def int8_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b^T` in exact integers, int32 [..., M, N]. K must be below 2^17, so that int32 cannot overflow.

    torch has no batched int8 matrix product (`torch._int_mm` takes a single pair), so the codes are multiplied as float32 in chunks of
    1024 along K, which is exact for the reason given in `foundation.schemes.int8.int8_matmul`.

    Args:
        a: int8 [..., M, K].
        b: int8 [..., N, K], with the same leading dimensions.
    """
    total = torch.zeros(*a.shape[:-1], b.shape[-2], dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[-1], EXACT_CHUNK):
        part = slice(start, start + EXACT_CHUNK)
        total += (a[..., part].float() @ b[..., part].float().mT).to(torch.int32)
    return total


def int8_product(name: str, a: Tensor, b: Tensor, left_scale: Tensor, right_scale: Tensor) -> Tensor:
    """Quantizes A and B, multiplies their codes, and returns the rescaled A B^T, float32 [..., M, N].

    Args:
        name: Name of the site, for messages.
        a: float32 [..., M, K].
        b: float32 [..., N, K].
        left_scale: float32 [].
        right_scale: float32 [].

    Raises:
        InputError: A value is NaN or infinite; the message names the site.
    """
    check_finite(name, a)
    check_finite(name, b)
    codes_a, codes_b = (quantize(x, scale, ACTIVATION_LOW, ACTIVATION_HIGH) for x, scale in ((a, left_scale), (b, right_scale)))
    return int8_bmm(codes_a, codes_b).float() * (left_scale * right_scale)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, multiply: Multiply) -> Tensor:
    """Returns softmax(Q K^T * scaling + mask) V as [B, S, H, D], in the dtype of the query; computed in float32.

    Args:
        query: [B, H, S, D].
        key: [B, key heads, key tokens, D]; the number of key heads divides H, and key heads are repeated (grouped-query attention).
        value: [B, key heads, key tokens, value head dimension].
        mask: Added to the scores: float, broadcastable to [B, H, S, key tokens]; None for no mask.
        scaling: Factor of the scores.
        multiply: Computes both products.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = multiply("qk", query.float(), key.float()) * scaling
    if mask is not None:
        scores = scores + mask.float()
    mixed = multiply("pv", torch.softmax(scores, dim=-1), value.float().mT)
    return mixed.transpose(1, 2).contiguous().to(query.dtype)


class Int8Attention(nn.Module):
    """Attention in which each of the two products is computed in int8 if it has scales, and in float otherwise.

    Args:
        name: Path of the attention module, for messages.
        qk: Scales of queries and keys; None computes Q K^T in float.
        pv: Scales of probabilities and values; None computes P V in float.
    """

    def __init__(self, name: str, qk: ProductScales | None, pv: ProductScales | None) -> None:
        super().__init__()
        self.name = name
        for kind, scales in (("qk", qk), ("pv", pv)):  # not persistent: stock Transformers can load the saved model
            self.register_buffer(f"{kind}_left", None if scales is None else scales.left, persistent=False)
            self.register_buffer(f"{kind}_right", None if scales is None else scales.right, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Returns the output [B, S, H, D]; see `attend`.

        Raises:
            InputError: An operand of an int8 product holds NaN or infinity.
        """
        return attend(query, key, value, mask, scaling, self._multiply)

    def _multiply(self, kind: Kind, a: Tensor, b: Tensor) -> Tensor:
        left, right = self._buffers[f"{kind}_left"], self._buffers[f"{kind}_right"]
        if left is None or right is None:
            return a @ b.mT
        return int8_product(f"{self.name}/{kind}", a, b, left, right)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules whose code gets its attention function from the Transformers registry, by name."""
    kinds = {kind for kind in {type(module) for module in model.modules()} if _uses_registry(kind)}
    return {name: module for name, module in model.named_modules() if type(module) in kinds}


def _uses_registry(kind: type[nn.Module]) -> bool:
    functions = (inspect.unwrap(value) for base in kind.__mro__ for value in vars(base).values() if inspect.isfunction(value))
    return any({"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= set(function.__code__.co_names) for function in functions)


def use(model: nn.Module) -> None:
    """Makes a model call the attention of this file; its masks have the eager format (float, added to the scores)."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
    for config in configs(model):
        config._attn_implementation = IMPLEMENTATION


def configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Returns the distinct Transformers configs of a model and its submodules."""
    found = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), "_attn_implementation")]
    return list({id(config): config for config in found}.values())


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The function in Transformers' registry: delegates to the module's int8 child, or to sdpa."""
    inside = module._modules.get(ATTENTION)
    if inside is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output: Tensor = plain(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)[0]
    else:
        output = inside(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return output, None
