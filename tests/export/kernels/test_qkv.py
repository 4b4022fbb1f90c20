"""int8 QKV projection: every bit is torch's, with and without rotary positions, and feeds the attention kernel."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.gpu import references
from export.kernels.attention import Scores
from export.kernels.epilogue import Int8Weight
from export.kernels.qkv import Heads, Rotary
from foundation.core.errors import InputError
from tests.export.kernels.calls import int8_qkv, packed_attention

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]


def codes(*shape: int) -> Tensor:
    return torch.randint(-160, 161, shape).clamp(-128, 127).to(torch.int8)


def weight_of(heads: Heads, inputs: int, bias: bool = True) -> Int8Weight:
    scale = torch.rand(heads.outputs) * 1e-3 + 1e-5
    return Int8Weight(codes(heads.outputs, inputs), scale, torch.randn(heads.outputs) if bias else None)


def rotary_of(rows: int, dimension: int) -> Rotary:
    angle = torch.rand(rows, dimension // 2) * 100
    return Rotary(angle.cos(), angle.sin())


@given(
    st.sampled_from([1, 2, 16, 17, 65]), st.sampled_from([1, 31, 128, 129, 256]), st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([32, 64]), st.booleans(), st.booleans(), st.sampled_from([None, 0.01]),
    st.sampled_from([torch.float16, torch.float32]), st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=7)
@example(17, 129, (4, 2), 128, True, True, 0.01, torch.float32, 0)
@example(1, 1, (1, 1), 256, False, False, None, torch.float16, 0)
@example(17, 40, (4, 2), 96, True, True, 0.01, torch.float32, 0)
@example(3, 40, (2, 2), 20, True, False, None, torch.float32, 0)
def test_every_bit_is_torchs(
    interpreted: Interpreted, rows: int, inputs: int, counts: tuple[int, int], dimension: int, turned: bool, dynamic: bool,
    out_scale: float | None, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    heads = Heads(*counts, dimension, out_scale, None if out_scale is None else out_scale * 2, dtype)
    x, weight, rotary = codes(rows, inputs), weight_of(heads, inputs, turned), rotary_of(rows, dimension) if turned else None
    scale = torch.rand(rows, 1) * 0.1 + 1e-4 if dynamic else 0.03
    found, wanted = interpreted(int8_qkv, x, scale, weight, heads, rotary), references.qkv(x, scale, weight, heads, rotary)
    for part, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(part, want, rtol=0, atol=0)


def test_rotation_is_that_of_llama(interpreted: Interpreted) -> None:
    heads = Heads(4, 2, 32)
    x, weight, rotary = codes(9, 64), weight_of(heads, 64), rotary_of(9, 32)
    plain, turned = (interpreted(int8_qkv, x, 0.03, weight, heads, angles) for angles in (None, rotary))
    cos, sin = (torch.cat([part, part], dim=1)[None] for part in (rotary.cos, rotary.sin))
    wanted = apply_rotary_pos_emb(*(part.float().transpose(0, 1)[None] for part in plain[:2]), cos, sin)
    for part, want in zip(turned, wanted, strict=False):
        torch.testing.assert_close(part.float(), want[0].transpose(0, 1), rtol=2e-3, atol=2e-3)
    assert torch.equal(turned[2], plain[2])


def test_ends_saturate_and_ties_go_to_even(interpreted: Interpreted) -> None:
    heads = Heads(1, 1, 32, query_scale=2.0, key_scale=2.0)
    weight = Int8Weight(torch.ones(96, 1, dtype=torch.int8), torch.ones(96))
    x = torch.tensor([[1], [3], [127], [-128]], dtype=torch.int8)
    q, k, v = interpreted(int8_qkv, x, 4.0, weight, heads, None)
    assert q[:, 0, 0].tolist() == k[:, 0, 31].tolist() == [2, 6, 127, -128]
    assert interpreted(int8_qkv, x, 1.0, weight, heads, None)[0][:, 0, 5].tolist() == [0, 2, 64, -64]
    assert v[:, 0, 31].tolist() == [4, 12, 508, -512]


@pytest.mark.parametrize("dimension", [32, 96])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(interpreted: Interpreted, dimension: int) -> None:
    heads, slots = Heads(4, 2, dimension, dtype=torch.float32), torch.tensor([40, 3, 17, 0, 29])
    x, weight, rotary = codes(5, 64), weight_of(heads, 64), rotary_of(5, dimension)
    q, k, v = interpreted(int8_qkv, x, 0.03, weight, heads, rotary, slots, 41)
    plain = interpreted(int8_qkv, x, 0.03, weight, heads, rotary)
    assert torch.equal(q, plain[0])
    free = [slot for slot in range(41) if slot not in slots.tolist()]
    for memory, part in ((k, plain[1]), (v, plain[2])):
        assert torch.equal(memory[slots], part)
        assert not memory[free].any()


def test_codes_feed_the_attention_kernel(interpreted: Interpreted) -> None:
    heads = Heads(2, 1, 32, query_scale=0.05, key_scale=0.04)
    x, weight, rotary = codes(20, 64), weight_of(heads, 64), rotary_of(20, 32)
    q, k, v = interpreted(int8_qkv, x, 0.01, weight, heads, rotary)
    start, scores = torch.tensor([0, 13, 20], dtype=torch.int32), Scores(32**-0.5, True, 0.05, 0.04)
    found = interpreted(packed_attention, q, k, v, start, scores)
    exact = references.qkv(x, 0.01, weight, replace(heads, query_scale=None, key_scale=None), rotary)
    for begin, end in ((0, 13), (13, 20)):
        parts = [part[begin:end].float().transpose(0, 1) for part in exact]
        parts[1:] = [part.expand(2, -1, -1) for part in parts[1:]]
        wanted = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(found[begin:end].float(), wanted, rtol=0, atol=0.1)  # what codes of 8 bits cost


def test_wrong_input_is_refused() -> None:
    for dimension in (0, 33, 258):
        with pytest.raises(InputError, match=f"dimension: {dimension} given; an even number from 2 to 256"):
            Heads(2, 1, dimension)
    with pytest.raises(InputError, match=r"query scale: .* given; a scale from"):
        Heads(2, 1, 32, query_scale=0.0)
    with pytest.raises(InputError, match=r"key scale: .* given; a scale from"):
        Heads(2, 1, 32, key_scale=-1.0)
