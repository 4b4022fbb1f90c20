"""Codes of vectors against integer arithmetic written out."""

from __future__ import annotations

import numpy as np
import pytest

from compress.report.stored_vectors import bytes_of, codes, scale_of
from foundation.labels import relevance
from foundation.labels.vectors import labels_of
from tests.tiny_embedding import vectors

LABELS = relevance.labels_of(2, 8, [(0, 0, 1)])


def test_int8_codes_are_rounded_saturated_and_off_by_half_a_step_at_most() -> None:
    texts = vectors(10, 16)
    scale = scale_of(texts, LABELS)
    assert scale == pytest.approx(max(abs(float(number)) for number in texts[2:].flatten()) / 127)
    found = codes(texts, "int8", scale)
    expected = [[max(-127, min(127, round(float(number) / scale))) for number in row] for row in texts]
    assert np.abs(found - expected).max() <= 1  # the quotient in float32 may lie on the other side of a half
    assert np.mean(found != expected) < 0.02
    assert np.abs(found[2:] * scale - texts[2:]).max() <= 0.5 * scale * 1.001
    assert codes(100 * texts, "int8", scale).max() == 127
    assert codes(-100 * texts, "int8", scale).min() == -127
    assert codes(np.array([[0.5, 1.5, 2.5]], np.float32), "int8", 1.0).tolist() == [[0, 2, 2]]


def test_the_scale_is_that_of_the_documents_and_of_all_texts_where_there_are_none() -> None:
    texts = vectors(10, 16)
    texts[0, 0] = 50.0  # a query
    assert scale_of(texts, LABELS) < 10 / 127
    assert scale_of(texts, labels_of(np.zeros(5))) == pytest.approx(50 / 127)
    assert scale_of(np.zeros((10, 16), np.float32), LABELS) == 1.0


def test_integer_products_rank_as_the_codes_do() -> None:
    texts = vectors(60, 32)
    found = codes(texts, "int8", scale_of(texts, labels_of(np.zeros(30))))
    integers = found.astype(np.int8).astype(np.int32)
    products = (integers[:5] @ integers[5:].T) / np.linalg.norm(integers[5:].astype(np.float64), axis=1)
    assert relevance.nearest(found[:5], found[5:], 10).tolist() == np.argsort(-products, axis=1, kind="stable")[:, :10].tolist()


def test_bits_rank_by_how_many_are_equal() -> None:
    texts = vectors(60, 32)
    found = codes(texts, "binary", 1.0)
    bits = np.packbits(texts > 0, axis=1)
    apart = np.bitwise_count(bits[:5, None] ^ bits[None, 5:]).sum(axis=2)
    order = relevance.nearest(found[:5], found[5:], 55)
    for query, places in enumerate(order):
        assert apart[query][places].tolist() == sorted(apart[query].tolist())
    assert codes(np.zeros((1, 2), np.float32), "binary", 1.0).tolist() == [[-1, -1]]


def test_bytes_of_a_vector() -> None:
    assert [bytes_of(width, form) for width, form in ((384, "int8"), (384, "binary"), (9, "binary"))] == [384, 48, 2]  # type: ignore[arg-type]
