"""Attention over packed rows: within its bound of float64, sequences never see each other, and as torch computes it."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.gpu import references
from export.kernels.attention import Scores
from foundation.core.errors import InputError
from tests.export.kernels.calls import packed_attention

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 130]), min_size=1, max_size=3).filter(any)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def rows(
    lengths: list[int], heads: int, key_heads: int, dimension: int, *, int8: bool, spread: float = 1.0, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(lengths)
    q, k, v = (torch.randn(total, count, dimension) * spread for count in (heads, key_heads, key_heads))
    if int8:
        return (*((part * 60).round().clamp(-128, 127).to(torch.int8) for part in (q, k)), v.to(dtype))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check(found: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, scores: Scores, bias: Tensor | None = None) -> None:
    """Checks outputs by the bound that the docstring of the kernel states."""
    exact, shared, u = references.attention(q, k, v, start, scores, bias), q.shape[1] // k.shape[1], 2.0**-24
    of_p, of_out = (2.0**-20, u) if v.dtype == torch.float32 else (2.0**-10, 2.0**-11)
    assert found.dtype == v.dtype
    for begin, end in itertools.pairwise(start.tolist()):
        for head in range(q.shape[1] if end > begin else 0):
            queries, keys = q[begin:end, head].double(), k[begin:end, head // shared].double()
            if q.dtype == torch.int8:
                delta = 16 * u * (queries @ keys.T).abs().amax(dim=1, keepdim=True) * scores.factor
            else:
                delta = 2 * (q.shape[2] + 8) * u * (queries.abs() @ keys.abs().T).amax(dim=1, keepdim=True) * scores.factor
            delta = delta + (0.0 if bias is None else 4 * u * float(bias[head].abs().max()))
            largest = v[begin:end, head // shared].double().abs().amax(dim=0)
            wanted = exact[begin:end, head]
            bound = largest * (2 * delta + of_p + (end - begin) * u) + of_out * wanted.abs() + u
            assert ((found[begin:end, head].double() - wanted).abs() <= bound).all()


@pytest.mark.slow
@given(
    LENGTHS, st.sampled_from([(1, 1), (2, 2), (4, 2)]), st.sampled_from([1, 16, 32, 33, 64, 128]), st.booleans(), st.booleans(),
    st.sampled_from([0.1, 1.0, 4.0]), st.sampled_from([torch.float16, torch.float32]), st.sampled_from([None, False, True]),
    st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=10)
@example([130, 0, 65], (4, 2), 64, True, True, 1.0, torch.float16, True, 0)
@example([130, 0, 65], (4, 2), 33, False, True, 1.0, torch.float32, True, 0)
@example([1], (1, 1), 1, False, False, 1.0, torch.float16, None, 0)
def test_against_float64(
    interpreted: Interpreted, lengths: list[int], heads: tuple[int, int], dimension: int, int8: bool, causal: bool, spread: float,
    dtype: torch.dtype, lazy: bool | None, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    q, k, v = rows(lengths, *heads, dimension, int8=int8, spread=spread, dtype=dtype)
    scales = {"query_scale": 1 / 60, "key_scale": 0.02} if int8 else {}
    scores = Scores(dimension**-0.5, causal, **scales, lazy=lazy)
    check(interpreted(packed_attention, q, k, v, starts(lengths), scores), q, k, v, starts(lengths), scores)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("dtype", "int8", "lazy"), [(torch.float16, False, True), (torch.float32, False, None), (torch.float16, True, False)]
)
def test_a_bias_of_distances_is_added_to_the_scores(interpreted: Interpreted, dtype: torch.dtype, int8: bool, lazy: bool | None) -> None:
    torch.manual_seed(4)
    q, k, v = rows([130, 1, 65], 2, 1, 16, int8=int8, dtype=dtype)
    bias = torch.randn(2, 2 * 130 - 1) * 3
    scores = Scores(0.25, query_scale=1 / 60 if int8 else 1.0, key_scale=0.02 if int8 else 1.0, lazy=lazy)
    found = interpreted(packed_attention, q, k, v, starts([130, 1, 65]), scores, bias)
    check(found, q, k, v, starts([130, 1, 65]), scores, bias)
    longer = torch.nn.functional.pad(bias, (7, 7), value=1e4)  # of distances that no two rows have
    check(interpreted(packed_attention, q, k, v, starts([130, 1, 65]), scores, longer), q, k, v, starts([130, 1, 65]), scores, longer)


def test_as_t5_computes_it(interpreted: Interpreted) -> None:
    """No scaling of the scores, and buckets of distances."""
    config = transformers.T5Config(d_model=32, d_kv=16, num_heads=2, dropout_rate=0.0)
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    x = torch.randn(1, 140, 32)
    with torch.inference_mode():
        wanted = layer(x)[0]
        q, k, v = (part(x[0]).unflatten(1, (2, 16)) for part in (layer.q, layer.k, layer.v))
        bias = layer.compute_bias(140, 140)[0]
        every = torch.cat([bias[:, 1:, 0].flip(1), bias[:, 0]], dim=1).contiguous()
        found = interpreted(packed_attention, q, k, v, starts([140]), Scores(1.0), every)
        torch.testing.assert_close(layer.o(found.flatten(1)), wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_as_torch_computes_it(interpreted: Interpreted, causal: bool) -> None:
    q, k, v = rows([70], 2, 2, 32, int8=False)
    found = interpreted(packed_attention, q, k, v, starts([70]), Scores(32**-0.5, causal))
    wanted = torch.nn.functional.scaled_dot_product_attention(*(part.float().transpose(0, 1) for part in (q, k, v)), is_causal=causal)
    torch.testing.assert_close(found.float(), wanted.transpose(0, 1), rtol=2e-3, atol=2e-3)


def test_sequences_do_not_see_each_other(interpreted: Interpreted) -> None:
    q, k, v = rows([65, 3, 64], 1, 1, 16, int8=False)
    together = interpreted(packed_attention, q, k, v, starts([65, 3, 64]), Scores(0.25))
    v[:65] = 60000.0
    k[68:] = 100.0
    assert torch.equal(interpreted(packed_attention, q, k, v, starts([65, 3, 64]), Scores(0.25))[65:68], together[65:68])
    alone = interpreted(packed_attention, *(part[65:68].clone() for part in (q, k, v)), starts([3]), Scores(0.25))
    torch.testing.assert_close(alone, together[65:68], rtol=2.0**-10, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_codes_are_those_of_the_outputs(interpreted: Interpreted, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = rows([40, 9], 2, 1, 32, int8=False, dtype=dtype)
    found = interpreted(packed_attention, q, k, v, starts([40, 9]), Scores(0.2, out_scale=0.006))
    steps = references.attention(q, k, v, starts([40, 9]), Scores(0.2)) / torch.tensor(0.006).double()
    near = (steps - steps.floor() - 0.5).abs() < (1e-3 if dtype == torch.float32 else 0.2)
    assert found.dtype == torch.int8
    assert torch.equal(found.double()[~near], steps.round().clamp(-128, 127)[~near])
    assert found.min() == -128
    assert near.double().mean() < 0.5


def test_large_scores_do_not_overflow(interpreted: Interpreted) -> None:
    q = torch.full((3, 1, 16), 200.0).half()
    v = torch.arange(3).reshape(3, 1, 1).expand(3, 1, 16).half().contiguous()
    assert interpreted(packed_attention, q, q, v, starts([3]), Scores(1.0)).unique().tolist() == [1.0]
    sharp = q * torch.tensor([1.0, -1.0, 1.0]).reshape(3, 1, 1).half()
    assert interpreted(packed_attention, q, sharp.half(), v, starts([3]), Scores(1.0)).unique().tolist() == [1.0]  # the mean of 0 and 2
    assert not math.isnan(interpreted(packed_attention, -q, q, v, starts([3]), Scores(1.0, causal=True)).sum().item())


def growing(steps: float, tiles: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose largest product grows by so many powers of two from one tile of 64 keys to the next, with a factor of 1 / log2 e."""
    total, dimension = 64 * tiles, 16
    q, k = torch.zeros(total, 1, dimension), torch.randn(total, 1, dimension)
    q[:, :, 0], k[:, :, 0] = 1.0, torch.arange(total).div(64, rounding_mode="floor")[:, None] * steps
    return q.half(), k.half(), torch.randn(total, 1, dimension).half()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("steps", [0.0, 1.0, 7.5, 8.0, 8.5, 9.0, 40.0, 4000.0, -7.5, -4000.0])
def test_maxima_that_grow_in_every_tile(interpreted: Interpreted, steps: float, lazy: bool) -> None:
    torch.manual_seed(1)
    q, k, v = growing(steps)
    scores = Scores(math.log(2.0), lazy=lazy)
    check(interpreted(packed_attention, q, k, v, starts([192]), scores), q, k, v, starts([192]), scores)


@pytest.mark.parametrize("causal", [False, True])
def test_lazy_scaling_gives_the_same_outputs_as_scaling_in_every_tile(interpreted: Interpreted, causal: bool) -> None:
    torch.manual_seed(2)
    q, k, v = rows([190, 3], 2, 1, 32, int8=False)
    lazy, each = (interpreted(packed_attention, q, k, v, starts([190, 3]), Scores(0.3, causal, lazy=choice)) for choice in (True, False))
    assert not torch.equal(lazy, each)
    torch.testing.assert_close(lazy, each, rtol=2.0**-9, atol=2.0**-10)
    q, k, v = growing(8.5)  # every tile grows by more than the threshold: the same operations
    lazy, each = (interpreted(packed_attention, q, k, v, starts([192]), Scores(math.log(2.0), lazy=choice)) for choice in (True, False))
    assert torch.equal(lazy, each)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_row_without_a_finite_score_leaves_the_others_alone(interpreted: Interpreted, lazy: bool) -> None:
    q, k, v = rows([70], 1, 1, 16, int8=False)
    k = k.abs() + 0.5
    wanted = interpreted(packed_attention, q, k, v, starts([70]), Scores(0.25, lazy=lazy))
    q[3] = -math.inf
    found = interpreted(packed_attention, q, k, v, starts([70]), Scores(0.25, lazy=lazy))
    assert found[3].isnan().all()  # as the softmax of torch
    kept = torch.arange(70) != 3
    torch.testing.assert_close(found[kept], wanted[kept], rtol=2.0**-9, atol=2.0**-10)


def test_a_row_that_grows_scales_no_other_wrongly(interpreted: Interpreted) -> None:
    torch.manual_seed(3)
    q, k, v = growing(0.0)
    k[100], q[::2, :, 1], q[1::2, :, 1] = 0.0, 1.0, 0.0
    k[100, :, 1] = 300.0  # only every second row sees it
    scores = Scores(math.log(2.0), lazy=True)
    found = interpreted(packed_attention, q, k, v, starts([192]), scores)
    check(found, q, k, v, starts([192]), scores)
    torch.testing.assert_close(found[::2], v[100].expand_as(found[::2]), rtol=1e-3, atol=1e-3)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(InputError, match=r"scale of the output: .* given; a scale from"):
        Scores(1.0, out_scale=-1.0)
    for name in ("scaling", "query_scale", "key_scale"):
        with pytest.raises(InputError, match=f"{name.replace('_', ' ')}: .* given; a positive number"):
            Scores(**{"scaling": 1.0, name: 0.0})
