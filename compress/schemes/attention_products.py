"""The products of attention, Q K^T and P V, in true int8.

Each multiplies the codes of two activations, with one static scale for each tensor:

    q_A = clamp(rint(A / s_A), -128, 127)                int8 [..., M, K]        `<module>/qk`   A = Q, B = K
    q_B = clamp(rint(B / s_B), -128, 127)                int8 [..., N, K]        `<module>/pv`   A = P, B = V^T
    A B^T ~ float32(q_A @ q_B^T) * (s_A * s_B)           accumulated in int32, exactly

    O = P V,   P = softmax(Q K^T * scaling + mask)       scaling, mask and softmax in float32

Q is quantized as the model hands it over, before `scaling`: there stands the first MatMul of the plain ("eager") attention that the ONNX
graph is traced from. The scale of P is the constant 1/127: a head that looks at one token gives it a probability of 1, the only value of
its row that counts, and a scale from calibration may clip just that. What it costs: probabilities below 1/254 become 0.

Transformers calls attention through a registry, by the name in `config._attn_implementation`. `use` sets that name to `IMPLEMENTATION`,
whose function hands the call to the child `int8_attention` of the calling module, and to sdpa where there is none. So this works for
every architecture that asks the registry, and for no other.

Left out: int8 key-value caches; attention that is more than the formula above (soft caps, sinks), which `quantize.products` refuses.

Tensor names carry their shapes: M, N rows, K what is summed over, B batch, H heads, S tokens, D features of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, EXACT_CHUNK, check_finite, quantize

IMPLEMENTATION = "compress_int8"
"""Name of the attention in Transformers' registry."""
ATTENTION = "int8_attention"
"""Name of the child of an attention module that computes it."""
PROBABILITY_SCALE = 1 / ACTIVATION_HIGH
Kind = Literal["qk", "pv"]
Multiply = Callable[[Kind, Tensor, Tensor], Tensor]
"""Returns A B^T, float32 [..., M, N], for A [..., M, K] and B [..., N, K]."""


@dataclass(frozen=True)
class ProductScales:
    """The scales of one product A B^T, float32 [] each."""

    left: Tensor
    """Of A: queries, or probabilities."""
    right: Tensor
    """Of B: keys, or values."""


def int8_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b^T` in exact integers, int32 [..., M, N]; for K below 2^17, where int32 itself ends.

    torch multiplies no batches of int8 matrices (`torch._int_mm` takes one pair), so the codes are multiplied as float32 in chunks of
    1024 along K, which is exact for the reason given in `compress.schemes.int8.int8_matmul`.

    Args:
        a: int8 [..., M, K].
        b: int8 [..., N, K], of the same leading dimensions.
    """
    total = torch.zeros(*a.shape[:-1], b.shape[-2], dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[-1], EXACT_CHUNK):
        part = slice(start, start + EXACT_CHUNK)
        total += (a[..., part].float() @ b[..., part].float().mT).to(torch.int32)
    return total


def int8_product(name: str, a: Tensor, b: Tensor, left_scale: Tensor, right_scale: Tensor) -> Tensor:
    """Returns A B^T by its codes, float32 [..., M, N].

    Args:
        name: Of the site, for messages.
        a: float32 [..., M, K].
        b: float32 [..., N, K].
        left_scale: float32 [].
        right_scale: float32 [].

    Raises:
        InputError: A value is NaN or infinite; names the site.
    """
    check_finite(name, a)
    check_finite(name, b)
    codes_a, codes_b = (quantize(x, scale, ACTIVATION_LOW, ACTIVATION_HIGH) for x, scale in ((a, left_scale), (b, right_scale)))
    return int8_bmm(codes_a, codes_b).float() * (left_scale * right_scale)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, multiply: Multiply) -> Tensor:
    """Returns softmax(Q K^T * scaling + mask) V as [B, S, H, D], in the type of the query; computed in float32.

    Args:
        query: [B, H, S, D].
        key: [B, H or a divisor of it, S of the keys, D]; fewer heads are repeated (grouped queries).
        value: [B, heads of the keys, S of the keys, D of the values].
        mask: Is added to the scores: float, of a shape that broadcasts with [B, H, S, S of the keys]; None for nothing.
        scaling: Of the scores.
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
    """Attention of whose two products those with scales multiply integers.

    Args:
        name: Path of the attention module, for messages.
        qk: Scales of queries and keys; None for a product in float.
        pv: Scales of probabilities and values; None for a product in float.
    """

    def __init__(self, name: str, qk: ProductScales | None, pv: ProductScales | None) -> None:
        super().__init__()
        self.name = name
        for kind, scales in (("qk", qk), ("pv", pv)):  # not persistent: a saved model stays one of stock Transformers
            self.register_buffer(f"{kind}_left", None if scales is None else scales.left, persistent=False)
            self.register_buffer(f"{kind}_right", None if scales is None else scales.right, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Returns the output [B, S, H, D]; see `attend`.

        Raises:
            InputError: What a product in int8 multiplies holds NaN or infinity.
        """
        return attend(query, key, value, mask, scaling, self._multiply)

    def _multiply(self, kind: Kind, a: Tensor, b: Tensor) -> Tensor:
        left, right = self._buffers[f"{kind}_left"], self._buffers[f"{kind}_right"]
        if left is None or right is None:
            return a @ b.mT
        return int8_product(f"{self.name}/{kind}", a, b, left, right)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that call attention through the registry of Transformers, by name: those whose code asks it for a function."""
    kinds = {kind for kind in {type(module) for module in model.modules()} if _asks_registry(kind)}
    return {name: module for name, module in model.named_modules() if type(module) in kinds}


def _asks_registry(kind: type[nn.Module]) -> bool:
    functions = (inspect.unwrap(value) for base in kind.__mro__ for value in vars(base).values() if inspect.isfunction(value))
    return any({"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= set(function.__code__.co_names) for function in functions)


def use(model: nn.Module) -> None:
    """Lets a model call the attention of this module; masks are made for it as for eager: float, to be added."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
    for config in configs(model):
        config._attn_implementation = IMPLEMENTATION


def configs(model: nn.Module) -> list[Any]:
    """Returns the distinct Transformers configs of a model and its modules."""
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hands a call of Transformers to the child of the module, in the form that Transformers asks for."""
    inside = module._modules.get(ATTENTION)
    if inside is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output: Tensor = plain(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)[0]
    else:
        output = inside(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return output, None
