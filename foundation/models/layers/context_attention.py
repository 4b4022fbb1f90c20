"""Attention of a process that has its own tokens of every row: own queries, keys and values of all (context parallel).

    q, k, v    own tokens              [b, h, T, d], [b, h_kv, T, d]
    K, V       gathered                [b, h_kv, L, d]
    y          attention(q, K, V)      [b, T, h, d], with the rows of the mask that belong to own tokens

    dK, dV     of own queries, summed over processes and scattered: the gradients of k and v

Source: Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2. Keys and values are gathered as a whole, not sent around a ring: any mask
works then, and where heads are grouped they are small next to queries. Nothing as long as a row is kept for backward, which gathers keys
and values again and computes attention once more.

Transformers finds the function under the name `NAME`, as it finds its own, and so a function that makes masks, which are the masks of own
tokens. `within` says which tokens are a process's own.

Left out: of a causal mask half of the products are of no use, and are computed. Llama 3 gives each process two pieces of a row that balance
them, which pays once a kernel leaves masked products out.

Legend: b rows, h heads, h_kv heads of keys and values, L tokens, T tokens of a process, d channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import get_device_states, set_device_states

from foundation.models.layers.token_shares import Group

NAME = "sdpa_of_own_tokens"


@dataclass
class Sharing:
    """Tokens of the current pass, as attention needs them."""

    group: Group
    """The processes that share them."""
    length: int = 0
    """Tokens of a row; 0 before the first block."""
    calls: int = 0
    """How often attention was computed."""


_SHARING: ContextVar[Sharing | None] = ContextVar("sharing", default=None)


@contextmanager
def within(sharing: Sharing) -> Iterator[None]:
    """Within the block, masks and attention belong to own tokens."""
    token = _SHARING.set(sharing)
    try:
        yield
    finally:
        _SHARING.reset(token)


def register() -> None:
    """Makes both functions known to Transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_of_own_tokens)


def mask_of_own_tokens(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, **kwargs: object) -> Tensor | None:
    """Returns the rows of a mask for own tokens, bool `[b, 1, T, L]`: True where a query sees a key; None where every query sees every key.

    Arguments are as for `transformers.masking_utils.sdpa_mask`.

    Raises:
        ValueError: Keys are of other tokens than queries, as with a cache.
    """
    from transformers.masking_utils import sdpa_mask

    sharing = _SHARING.get()
    if sharing is None:
        whole: Tensor | None = sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, **kwargs)
        return whole
    if q_length != kv_length:
        raise ValueError(f"{q_length} queries see {kv_length} keys; processes share tokens of rows that are read at once")
    start, count, missing = _span(sharing.group, q_length)
    changed = {**kwargs, "allow_is_causal_skip": False}  # "causal" would be counted from the first own token
    found = sdpa_mask(batch_size, count, kv_length, q_offset=q_offset + start, **changed)
    return None if found is None else functional.pad(found, (0, 0, 0, missing), value=True)  # rows that fill up see something


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """Returns the attention output of own tokens, float `[b, T, h, d]`, and None in the place of weights.

    Args:
        module: The attention module.
        query: Own queries, float `[b, h, T, d]`.
        key: Own keys, float `[b, h_kv, T, d]`.
        value: Own values, float `[b, h_kv, T, d_v]`.
        attention_mask: The rows of own tokens `[b, 1, T, L]`, the rows of all tokens `[b, 1, L, L]`, or None. None is not a causal mask
            here.
        options: See `transformers.integrations.sdpa_attention.sdpa_attention_forward`.

    Raises:
        ValueError: No pass with shared tokens is running, or the module gives something with a gradient, such as a position bias.
    """
    sharing = _SHARING.get()
    if sharing is None:
        raise ValueError(f"a {type(module).__name__} attends outside of a model whose tokens are shared")
    sharing.calls += 1
    given = [attention_mask, *options.values()]
    if any(isinstance(each, Tensor) and each.requires_grad for each in given) or options.pop("position_bias", None) is not None:
        raise ValueError(f"a {type(module).__name__} adds learned numbers to the products of queries and keys")
    if attention_mask is not None and attention_mask.shape[-2] == sharing.length:
        attention_mask = _own_rows(attention_mask, sharing.group)
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    call = _Call(module, attention_mask, {**options, "is_causal": False}, sharing.group, sharing.length)
    found: Tensor = _Attended.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return found, None


@dataclass(frozen=True)
class _Call:
    """One call of attention."""

    module: nn.Module
    mask: Tensor | None
    options: Mapping[str, object]
    group: Group
    length: int

    @property
    def drops(self) -> bool:
        """Whether it draws random numbers."""
        return bool(self.options.get("dropout"))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Returns attention of own queries over all keys, `[b, T, h, d]`."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: Tensor = sdpa_attention_forward(self.module, query, keys, values, self.mask, **self.options)[0]
        return found

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all tokens, from own ones, by one message."""
        heads = key.shape[1]
        own_bTE = torch.cat([_rows(key), _rows(value)], dim=2)
        whole_bLE = self.group.gather(own_bTE, self.length)
        keys, values = torch.split(whole_bLE, [heads * key.shape[3], heads * value.shape[3]], dim=2)
        return _heads(keys, heads), _heads(values, heads)

    def scattered(self, of_keys: Tensor, of_values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of own keys and values, summed over all queries, by one message."""
        heads = of_keys.shape[1]
        own_bTE = self.group.reduce_scatter(torch.cat([_rows(of_keys), _rows(of_values)], dim=2))
        keys, values = torch.split(own_bTE, [heads * of_keys.shape[3], heads * of_values.shape[3]], dim=2)
        return _heads(keys, heads), _heads(values, heads)


class _Context(FunctionCtx):
    """Tensors that the forward pass stores for backward."""

    call: _Call
    drawn: Callable[[], AbstractContextManager[None]]
    saved_tensors: tuple[Tensor, ...]


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
        """Returns attention of own queries over the keys of all processes."""
        ctx.call, ctx.drawn = call, _Drawn(query) if call.drops else nullcontext
        ctx.save_for_backward(query, key, value)
        return call.attend(query, *call.gathered(key, value))

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Returns the gradients of own queries, keys and values."""
        query, key, value = ctx.saved_tensors
        leaves = [each.detach().requires_grad_() for each in (query, *ctx.call.gathered(key, value))]
        with torch.enable_grad(), ctx.drawn():
            again = ctx.call.attend(*leaves)
        of_query, of_keys, of_values = torch.autograd.grad(again, leaves, gradient)
        return of_query, *ctx.call.scattered(of_keys, of_values), None


class _Drawn:
    """The random state before a computation, for one that has to draw the same."""

    def __init__(self, like: Tensor) -> None:
        self.cpu, (self.devices, self.states) = torch.get_rng_state(), get_device_states(like)
        self.kind = like.device.type

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the block, the random numbers of that pass are drawn again; afterwards the state is as if nothing was drawn."""
        kind = self.kind if self.devices else "cuda"
        with torch.random.fork_rng(self.devices, device_type=kind):
            torch.set_rng_state(self.cpu)
            if self.devices:
                set_device_states(self.devices, self.states, device_type=kind)
            yield


def _span(group: Group, length: int) -> tuple[int, int, int]:
    """Returns the first row of a mask that is of an own token, how many there are, at least one, and how many are missing."""
    share = group.share(length)
    start = min(group.rank * share, length - 1)
    count = max(1, min(share, length - start))
    return start, count, share - count


def _own_rows(mask: Tensor, group: Group) -> Tensor:
    """Returns the rows of own tokens, `[b, h, T, L]`, of a mask `[b, h, L, L]`, bool or added."""
    start, count, missing = _span(group, mask.shape[-2])
    return functional.pad(mask[..., start : start + count, :], (0, 0, 0, missing), value=mask.dtype == torch.bool)


def _rows(heads_bhTd: Tensor) -> Tensor:
    """Returns `[b, T, h * d]`."""
    return heads_bhTd.transpose(1, 2).flatten(2)


def _heads(rows_bTE: Tensor, heads: int) -> Tensor:
    """Returns `[b, h, T, d]`."""
    return rows_bTE.view(*rows_bTE.shape[:2], heads, -1).transpose(1, 2)
