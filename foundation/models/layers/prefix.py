"""Learned keys and values that an attention reads before those of its tokens: prefix tuning, P-tuning v2.

    O = softmax(Q [P_K; K]^T * scaling + [0, mask]) [P_V; V]        P_K, P_V [k, E], the same for every row: E = key heads x head dimension

Prefix tuning: Li and Liang 2021, https://arxiv.org/abs/2101.00190. P-tuning v2: Liu et al. 2021, https://arxiv.org/abs/2110.07602.

The rows of P are what the layers of keys and values might give for k tokens more, rotary positions applied. Queries do not attend from
them, and no other layer sees them; tokens keep their positions. peft passes them as a cache of past keys and values, which moves the
positions of a text by k and which many encoders do not take.

Models of Transformers ask a registry for the function of their attention, by the name in `config._attn_implementation`. Here the registry
is taught to hand out a function that puts the prefix of the calling module in front, and then calls the one that was asked for. So plain
and int8 attention, tracing for ONNX and training read it, whatever name is set, and nobody can lose it by setting another. Modules
without a prefix get the plain function.

Not supported: models with attention code of their own; attention functions that are not in `READ_BY`, which raise an error.

Shape suffixes: b rows, H key heads, L tokens, k vectors of the prefix, d head dimension, E = H d.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from foundation.schemes.attention_products import IMPLEMENTATION, attention_modules

PREFIX = "prefix"
"""Name of the child of an attention module that holds its prefix."""
TRACING = "tracing"
"""Name of the attention function that finds layers (`foundation.models.architecture.attention`): it sees what layers give, no prefix."""
READ_BY = ("eager", "sdpa", IMPLEMENTATION)
"""Names of the attention functions that read keys and values as they are given."""
BIAS = "position_bias"
"""Setting of an attention function: what is added to scores by distance (T5)."""
Function = Callable[..., tuple[Tensor, Any]]
"""A function of attention: module, query, key, value, mask and settings -> output, and weights or None."""


class Prefix(nn.Module):
    """Learned keys and values of one attention.

    Args:
        count: k.
        width: E.
        like: Tensor with the device and the number format of the model; None: torch's defaults.
    """

    def __init__(self, count: int, width: int, like: Tensor | None = None) -> None:
        super().__init__()
        given: dict[str, Any] = {} if like is None else {"device": like.device, "dtype": like.dtype}
        self.key = nn.Parameter(torch.zeros(count, width, **given))
        self.value = nn.Parameter(torch.zeros(count, width, **given))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns keys and values, float `[k, E]` each."""
        return self.key, self.value

    def take(self, key: Tensor, value: Tensor) -> None:
        """Takes the values of keys and values, float `[k, E]` each."""
        with torch.no_grad():
            self.key.copy_(key)
            self.value.copy_(value)


def put_prefix(model: nn.Module, name: str, count: int, width: int) -> Prefix:
    """Gives an attention module a prefix of zeros, in place, and returns it.

    Args:
        model: The model.
        name: Path of the module.
        count: k.
        width: E.
    """
    teach()
    module = model.get_submodule(name)
    made = Prefix(count, width, next(module.parameters(), None))
    module.add_module(PREFIX, made)
    return made


def names_of(model: nn.Module, name: str) -> dict[Literal["key", "value"], str]:
    """Returns the names of the learned keys and values of an attention module, `[k, E]` each; none without a prefix."""
    prefix = model.get_submodule(name)._modules.get(PREFIX) if name else None
    return {} if prefix is None else {"key": f"{name}.{PREFIX}.key", "value": f"{name}.{PREFIX}.value"}


def can_read(model: nn.Module, names: Collection[str]) -> bool:
    """Whether attention modules of these names get their function from the registry."""
    return set(names) <= attention_modules(model).keys()


def teach() -> None:
    """Makes the registry of Transformers hand out functions that read prefixes, in this process; once."""
    from transformers import AttentionInterface

    registry: Any = AttentionInterface
    plain = registry.get_interface
    if getattr(plain, "reads_prefixes", False):
        return

    @functools.wraps(plain)
    def get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
        found: Function = plain(self, attn_implementation, default)
        return found if attn_implementation == TRACING else functools.partial(_attend, found, attn_implementation)

    get_interface.reads_prefixes = True  # type: ignore[attr-defined]
    registry.get_interface = get_interface


def _attend(
    function: Function,
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, Any]:
    """Calls a function of attention with the prefix of a module in front of keys and values, `[b, H, L, d]` each.

    Raises:
        ValueError: The function does not read a prefix.
    """
    prefix = module._modules.get(PREFIX)
    if prefix is None:
        return function(module, query, key, value, attention_mask, **settings)
    if name not in READ_BY:
        raise ValueError(f"{type(module).__name__} has a learned prefix, which the attention function {name} does not read")
    learned = prefix()
    keys, values = (torch.cat([_by_head(own, tokens), tokens], dim=2) for own, tokens in zip(learned, (key, value), strict=True))
    mask = _causal(module, query, key, settings) if attention_mask is None and name == "sdpa" else attention_mask
    if settings.get(BIAS) is not None:
        settings[BIAS] = _widened(settings[BIAS], len(learned[0]))
    return function(module, query, keys, values, _widened(mask, len(learned[0])), **settings)


def _widened(mask: Tensor | None, count: int) -> Tensor | None:
    """Returns a mask for a prefix and tokens, `[..., k + L]`: True, or 0 that is added to scores, as every query reads the prefix."""
    return None if mask is None else functional.pad(mask, (count, 0), value=mask.dtype == torch.bool)


def _by_head(learned_kE: Tensor, like_bHLd: Tensor) -> Tensor:
    """Returns learned vectors for every row, `[b, H, k, d]`."""
    rows, heads, _, width = like_bHLd.shape
    return learned_kE.to(like_bHLd.dtype).view(-1, heads, width).transpose(0, 1).expand(rows, -1, -1, -1)


def _causal(module: nn.Module, query: Tensor, key: Tensor, settings: Mapping[str, Any]) -> Tensor | None:
    """Returns the mask that sdpa would make itself without one, bool `[L, L]`: with a prefix it would count from the wrong corner."""
    given = settings.get("is_causal")
    causal = getattr(module, "is_causal", True) if given is None else given
    if not causal or query.shape[2] == 1:
        return None
    return torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
