"""Embedding, LayerNorm and quantization: within the bounds of the norm, against torch and Transformers' BERT."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings

from benchmarks.gpu import references
from export.kernels.embedding import Lookup
from export.kernels.norm import Keep, Norm
from tests.export.kernels.calls import embed_quantize
from tests.export.kernels.rows_near_ties import check_rows, exact_and_bound

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]


def lookups(tokens: int, inputs: int, dtype: torch.dtype) -> list[Lookup]:
    return [(torch.randint(0, rows, (tokens,)), torch.randn(rows, inputs).to(dtype)) for rows in (50, 2, 17)]


def norm_of(inputs: int) -> Norm:
    return Norm(1 + torch.randn(inputs) * 0.3, torch.randn(inputs), 1e-12)


@given(
    st.integers(1, 7), st.sampled_from([1, 2, 33, 128, 129, 384, 769]), st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([None, 0.03]), st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=10)
def test_against_float64(interpreted: Interpreted, tokens: int, inputs: int, dtype: torch.dtype, scale: float | None, seed: int) -> None:
    torch.manual_seed(seed)
    tables, norm = lookups(tokens, inputs, dtype), norm_of(inputs)
    codes, scales, kept = interpreted(embed_quantize, *tables, norm, scale)
    exact, bound = exact_and_bound(references.summed(*tables), norm)
    assert ((kept.double() - exact).abs() <= bound + torch.finfo(dtype).eps * (exact.abs() + bound)).all()
    check_rows(codes, scales, exact, bound, given=scale is not None)


def test_against_the_embeddings_of_bert(interpreted: Interpreted) -> None:
    config = BertConfig(vocab_size=50, hidden_size=48, num_attention_heads=2, max_position_embeddings=16, hidden_dropout_prob=0.0)
    bert = BertEmbeddings(config).eval()
    ids, kinds = torch.randint(0, 50, (1, 9)), torch.randint(0, 2, (1, 9))
    with torch.no_grad():
        wanted = bert(input_ids=ids, token_type_ids=kinds)[0]
    position = (torch.arange(9), bert.position_embeddings.weight.data)
    norm = Norm(bert.LayerNorm.weight.data, bert.LayerNorm.bias.data, config.layer_norm_eps)
    tables = (ids[0], bert.word_embeddings.weight.data), (kinds[0], bert.token_type_embeddings.weight.data), position
    codes, _, kept = interpreted(embed_quantize, *tables, norm, 0.03)
    torch.testing.assert_close(kept, wanted, rtol=0, atol=2e-6)
    assert near_codes(codes, torch.round(wanted / 0.03))


@pytest.mark.parametrize("kept", ["sum", "norm"])
@pytest.mark.parametrize("places", [True, False])
def test_decoders_have_fewer_tables_and_keep_the_sum(interpreted: Interpreted, places: bool, kept: Keep) -> None:
    """GPT-2 has positions and LayerNorm, Llama words and RMSNorm."""
    torch.manual_seed(0)
    word, _, position = lookups(5, 70, torch.float32)
    norm = norm_of(70) if places else Norm(1 + torch.randn(70) * 0.3, None, 1e-5, centred=False)
    codes, scales, found = interpreted(embed_quantize, word, None, position if places else None, norm, None, kept)
    h = word[1][word[0]] + (position[1][position[0]] if places else 0)
    exact, bound = exact_and_bound(h, norm)
    check_rows(codes, scales, exact, bound, given=False)
    if kept == "sum":
        assert torch.equal(found, h)
    else:
        assert ((found.double() - exact).abs() <= bound + 2.0**-23 * (exact.abs() + bound)).all()


def test_the_reference_agrees(interpreted: Interpreted) -> None:
    tables, norm = lookups(40, 96, torch.float32), norm_of(96)
    for found, wanted in zip(interpreted(embed_quantize, *tables, norm, None), references.embedding(*tables, norm, None), strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-5, atol=1 if found.dtype == torch.int8 else 1e-5)


def near_codes(codes: Tensor, wanted: Tensor) -> bool:
    wrong = codes != wanted.clamp(-128, 127)
    return wrong.double().mean().item() < 0.01 and (codes - wanted.clamp(-128, 127)).abs().max().item() <= 1
