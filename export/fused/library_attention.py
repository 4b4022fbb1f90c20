"""Attention of torch's flash kernel over packed rows, `torch.nn.attention.varlen`, where it is faster than ours.

    packed    our kernel (`export.kernels.attention`): one launch, which writes the codes
    varlen    torch's kernel in float16, then our kernel that quantizes

Which of the two a plan takes is measured where the plan is built (`fastest`): for each length of the target, as many rows as the target's
largest batch, attention of one block with its codes. One kernel runs at all lengths, the one with the smaller sum, so that the bits of a
token do not depend on the rows next to it; torch is told not to split keys (`num_splits`), for the same reason.

As torch 2.13 has it, varlen_attn(query [T, H, D], key, value, cu_seq_q int32 [B + 1], cu_seq_k, max_q, max_k, *, scale, enable_gqa,
num_splits, ...) returns [T, H, D], and does not write rows of no sequence. Older releases lack some of the keywords: without `scale` it is
not used, and `num_splits` is left out where it does not exist.

Left out: float32, biases of distances, heads whose dimension is no multiple of 8, codes of queries and keys.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from export.fused.layers import one_scale
from export.fused.plan import Block, Kernel, Plan
from export.kernels import attention, quantize
from export.kernels.attention import Scores

MODULE = "torch.nn.attention.varlen"
LEAST = (8, 0)
"""Compute capability that torch's flash kernel needs."""
Work = Callable[[], object]
Time = Callable[[Work], float]
"""Returns how long some work takes, in milliseconds."""


def attend(parts: tuple[Tensor, Tensor, Tensor], start_B: Tensor, longest: int, scaling: float) -> Tensor:
    """Returns attention by torch's kernel, [T, H, D] in the type of the queries.

    Args:
        parts: Queries [T, H, D], keys and values [T, K, D], float16; K divides H.
        start_B: int32 [B + 1]: where sequences begin; the last one ends at its last number.
        longest: Most rows of a sequence.
        scaling: Factor of the scores.
    """
    varlen_attn = importlib.import_module(MODULE).varlen_attn  # not in every torch that runs our kernels
    query, key, value = parts
    known = inspect.signature(varlen_attn).parameters
    asked: dict[str, Any] = {"scale": scaling, "num_splits": 1, "enable_gqa": query.shape[1] != key.shape[1]}
    given = {name: setting for name, setting in asked.items() if name in known}
    attended: Tensor = varlen_attn(query, key, value, start_B, start_B, longest, longest, **given)
    return attended


def refusal(plan: Plan, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns in one line why torch's kernel cannot run the attention of a plan; None where it can."""
    if importlib.util.find_spec(MODULE) is None:
        return f"torch {torch.__version__} has no {MODULE}"
    varlen_attn = importlib.import_module(MODULE).varlen_attn
    if "scale" not in inspect.signature(varlen_attn).parameters:
        return f"varlen_attn of torch {torch.__version__} takes no factor of the scores"
    if dtype != torch.float16:
        return f"it multiplies float16 and bfloat16, and this plan runs in {str(dtype).removeprefix('torch.')}"
    if plan.relative is not None:
        return "it adds no relative positions to the scores"
    wrong = sorted({block.head_dim for block in plan.blocks if block.head_dim % 8})
    if wrong:
        return f"heads have {wrong[0]} dimensions; multiples of 8 are allowed"
    if device.type != "cuda":
        return f"it runs on NVIDIA GPUs, and the device is {device.type}"
    if torch.cuda.get_device_capability(device) < LEAST:
        return "it needs compute capability 8.0 or later"
    return None


def fastest(plan: Plan, device: torch.device, lengths: Sequence[int], rows: int, time: Time) -> tuple[Kernel, dict[str, dict[str, float]]]:
    """Returns the kernel with the smaller sum of times, and the times of both in milliseconds, by length.

    Args:
        plan: A plan that torch's kernel can run (`refusal`).
        device: Where.
        lengths: Tokens of a row.
        rows: Rows of a batch.
        time: Takes the times.
    """
    found: dict[str, dict[str, float]] = {}
    for length in lengths:
        works = _works(plan, plan.blocks[0], device, length, rows)
        found[str(length)] = {name: round(time(work), 5) for name, work in works.items()}
    ours, theirs = (sum(times[name] for times in found.values()) for name in ("packed", "varlen"))
    return ("varlen" if theirs < ours else "packed"), found


def _works(plan: Plan, block: Block, device: torch.device, length: int, rows: int) -> Mapping[Kernel, Work]:
    """Returns attention of one block by both kernels, for rows of one length."""
    scale, heads = one_scale(block.out), (block.heads, block.key_heads, block.key_heads)
    query, key, value = (torch.randn(rows * length, count, block.head_dim, device=device).half() for count in heads)
    start = torch.arange(rows + 1, dtype=torch.int32, device=device) * length
    out = torch.empty_like(query, dtype=torch.float16 if scale is None else torch.int8)
    ours = attention.launch((query, key, value), start, [plan.longest] * rows, Scores(block.scaling, out_scale=scale), out)

    def theirs() -> object:
        attended = attend((query, key, value), start, plan.longest, block.scaling)
        if scale is None:
            return attended
        quantize.tensor_launch(attended, scale, out).run()
        return out

    return {"packed": ours.run, "varlen": theirs}
