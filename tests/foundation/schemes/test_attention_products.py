"""Batched integer products and attention in int8 against naive integers, and the attention of whole models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.schemes import int8
from foundation.schemes.attention_products import (
    IMPLEMENTATION,
    PROBABILITY_SCALE,
    Int8Attention,
    ProductScales,
    attend,
    attention_modules,
    int8_bmm,
    int8_product,
)
from foundation.schemes.sites import Sites, placed
from tests.foundation import tiny_transformers as tiny


def naive_bmm(a: Tensor, b: Tensor) -> np.ndarray:
    return np.einsum("...mk,...nk->...mn", a.numpy().astype(np.int64), b.numpy().astype(np.int64))


def random_codes(seed: int, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(0, 3), max_size=3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 40), st.integers(0, 99))
def test_products_of_batches_equal_naive_integers(batch: list[int], m: int, n: int, depth: int, seed: int) -> None:
    a, b = random_codes(seed, *batch, m, depth), random_codes(seed + 1, *batch, n, depth)
    product = int8_bmm(a, b)
    assert product.dtype == torch.int32
    assert np.array_equal(product.numpy(), naive_bmm(a, b))


@pytest.mark.parametrize("depth", [1, 1023, 1024, 1025, 2049, 40_000])
@pytest.mark.parametrize(("left", "right"), [(-128, 127), (-128, -128), (127, 127)])
def test_the_largest_products_never_round(depth: int, left: int, right: int) -> None:
    a, b = torch.full((2, 1, depth), left, dtype=torch.int8), torch.full((2, 3, depth), right, dtype=torch.int8)
    b[:, 1, 0] = 1  # an odd sum close to the largest one shows a lost last bit
    assert np.array_equal(int8_bmm(a, b).numpy(), naive_bmm(a, b))


def test_a_batch_of_one_pair_is_the_matmul_of_linear_layers() -> None:
    a, b = random_codes(0, 30, 70), random_codes(1, 20, 70)
    assert torch.equal(int8_bmm(a, b), int8.int8_matmul(a, b))


def test_transposed_codes_multiply_like_contiguous_ones() -> None:
    a, b = random_codes(0, 2, 5, 7).mT, random_codes(1, 2, 5, 3).mT
    assert np.array_equal(int8_bmm(a, b).numpy(), naive_bmm(a, b))


def naive_codes(x: Tensor, scale: float) -> np.ndarray:
    return np.clip(np.rint(x.numpy() / np.float32(scale)), -128, 127).astype(np.int64)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, scales: tuple[float, ...]) -> np.ndarray:
    """One row and head at a time: integers, the rescale, softmax in float64."""
    (batch, heads, length, _), groups = q.shape, q.shape[1] // k.shape[1]
    out = np.zeros((batch, length, heads, v.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            sums = naive_codes(q[b, h], scales[0]) @ naive_codes(k[b, h // groups], scales[1]).T
            scores = sums * (np.float32(scales[0]) * np.float32(scales[1])) * scaling
            if mask is not None:
                scores = scores + np.broadcast_to(mask.numpy(), (batch, heads, length, k.shape[2]))[b, h]
            p = np.exp(scores - scores.max(1, keepdims=True))
            p = torch.from_numpy((p / p.sum(1, keepdims=True)).astype(np.float32))
            out[b, :, h] = naive_codes(p, scales[2]) @ naive_codes(v[b, h // groups], scales[3]) * (scales[2] * scales[3])
    return out


def scales_of(*values: float) -> ProductScales:
    return ProductScales(*(torch.tensor(value) for value in values))


def attention(scales: tuple[float, ...]) -> Int8Attention:
    return Int8Attention("layer.0", scales_of(*scales[:2]), scales_of(*scales[2:]))


@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.tuples(st.integers(1, 6), st.integers(1, 9)),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 99),
)
def test_attention_equals_the_written_out_one(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], features: int, masked: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        2 * torch.randn(batch, count, length, features, generator=generator)
        for count, length in ((heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1]))
    )
    mask = None
    if masked:
        hidden = torch.rand(batch, 1, *lengths, generator=generator) < 0.4
        mask = torch.where(hidden, torch.finfo(torch.float32).min, 0.0)
    scales = (0.03, 0.02, PROBABILITY_SCALE, 0.03)  # the largest values saturate
    expected = naive_attention(q, k, v, mask, 0.3, scales)
    found = attention(scales)(q, k, v, mask, 0.3)
    assert found.shape == (batch, lengths[0], heads[0], features)
    # a probability on a rounding boundary may fall to either side: one step of P times the largest value
    off = np.abs(found.numpy() - expected)
    assert off.max() <= 1.01 * scales[2] * 127 * scales[3]
    assert np.mean(off > 1e-4) <= 0.05


def test_hidden_keys_have_no_weight_whatever_they_hold() -> None:
    q, k, v = (torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.zeros(2, 1, 1, 5)
    mask[..., 3:] = torch.finfo(torch.float32).min
    scales = (0.03, 0.03, PROBABILITY_SCALE, 0.03)
    answer = attention(scales)(q, k, v, mask, 0.5)
    k[:, :, 3:], v[:, :, 3:] = 1000.0, -1000.0
    assert torch.equal(attention(scales)(q, k, v, mask, 0.5), answer)


@given(st.integers(0, 999))
def test_finer_scales_come_closer(seed: int) -> None:
    a, b = (torch.rand(2, 5, 16, generator=torch.Generator().manual_seed(seed + i)) * 2 - 1 for i in range(2))
    exact = (a.double() @ b.double().mT).float()
    errors = [
        (int8_product("a", a, b, torch.tensor(1 / levels), torch.tensor(1 / levels)) - exact).abs().mean().item() for levels in (3, 15, 127)
    ]
    assert errors[0] > errors[1] > errors[2]
    bound = 16 * (0.5 / 127) * 2 + 16 * (0.5 / 127) ** 2
    assert errors[2] <= bound


def test_codes_saturate_at_both_ends() -> None:
    a, b = torch.tensor([[1000.0, -1000.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert int8_product("a", a, b, torch.tensor(1.0), torch.tensor(1.0)).tolist() == [[127.0, -128.0]]


def test_a_probability_of_one_keeps_its_value_exactly() -> None:
    q, k = torch.tensor([[[[100.0]]]]), torch.tensor([[[[100.0], [-100.0]]]])
    v = torch.tensor([[[[0.5], [0.25]]]])
    found = attention((1.0, 1.0, PROBABILITY_SCALE, 1 / 254))(q, k, v, None, 1.0)
    assert found.item() == pytest.approx(0.5, rel=1e-6)


def test_products_without_scales_stay_float() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(Int8Attention("a", None, None)(q, k, v, None, 0.3), expected)
    one = Int8Attention("a", scales_of(0.03, 0.03), None)(q, k, v, None, 0.3)
    both = attention((0.03, 0.03, PROBABILITY_SCALE, 0.03))(q, k, v, None, 0.3)
    assert 0 < (one - expected).abs().max() < (both - expected).abs().max() < 0.1


def test_the_type_of_the_query_is_kept() -> None:
    q, k, v = (torch.randn(1, 2, 3, 4).bfloat16() for _ in range(3))
    assert attention((0.03, 0.03, PROBABILITY_SCALE, 0.03))(q, k, v, None, 0.5).dtype == torch.bfloat16


@pytest.mark.parametrize(("tensor", "site"), [(0, "layer.0/qk"), (1, "layer.0/qk"), (2, "layer.0/pv")])
def test_what_has_no_code_is_refused_by_name(tensor: int, site: str) -> None:
    given = [torch.zeros(1, 1, 2, 3) for _ in range(3)]
    given[tensor][0, 0, 1, 2] = float("nan")
    with pytest.raises(InputError, match=f"{site}.*NaN or infinity"):
        attention((1.0, 1.0, PROBABILITY_SCALE, 1.0))(*given, None, 1.0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_calls_its_attention_through_the_registry(family: str) -> None:
    model, features = tiny.model(family), tiny.features(family)
    modules = attention_modules(model)
    assert len(modules) == 2
    calls: list[str] = []

    class Remembers(Int8Attention):
        def forward(self, *args: Any) -> Tensor:
            calls.append(self.name)
            return super().forward(*args)

    with torch.inference_mode():
        expected = model(**features).logits
        with placed(model, {name: Remembers(name, None, None) for name in modules}, {}):
            found = model(**features).logits
        after = model(**features).logits
    assert calls == list(modules)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(after, expected)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_model_multiplies_the_integers_of_its_attention(family: str) -> None:
    """Every product of the model, caught on its way, equals naive integers of the tensors it was given."""
    model, features = tiny.model(family), tiny.features(family)
    scales = {f"{name}/qk": scales_of(0.05, 0.04) for name in attention_modules(model)}
    scales |= {f"{name}/pv": scales_of(PROBABILITY_SCALE, 0.03) for name in attention_modules(model)}
    seen = []

    def catching(name: str, a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> Tensor:
        found = int8_product(name, a, b, left, right)
        sums = np.einsum("...mk,...nk->...mn", naive_codes(a, float(left)), naive_codes(b, float(right)))
        np.testing.assert_array_equal(found.numpy(), sums.astype(np.float32) * (np.float32(left) * np.float32(right)))
        seen.append(name)
        return found

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), placed(model, *Sites(scales).forms()):
        patch.setattr("foundation.schemes.attention_products.int8_product", catching)
        model(**features)
    assert seen == [name for module in attention_modules(model) for name in (f"{module}/qk", f"{module}/pv")]


def test_attention_without_a_child_is_that_of_before() -> None:
    model, features = tiny.model("bert"), tiny.features("bert")
    first = next(iter(attention_modules(model)))
    with torch.inference_mode():
        expected = model(**features).logits
        with placed(model, {first: Int8Attention(first, None, None)}, {}):
            assert model.config._attn_implementation == IMPLEMENTATION
            torch.testing.assert_close(model(**features).logits, expected)


def test_a_model_that_computes_attention_by_itself_has_no_modules() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    model = transformers.AutoModelForSequenceClassification.from_config(transformers.DebertaV2Config(**sizes))
    assert attention_modules(model) == {}


def test_grouped_queries_share_keys_and_values() -> None:
    q, k, v = (torch.randn(1, heads, 3, 4, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    whole = attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), None, 0.5, lambda _, a, b: a @ b.mT)
    assert torch.equal(attend(q, k, v, None, 0.5, lambda _, a, b: a @ b.mT), whole)
