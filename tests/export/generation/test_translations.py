"""BLEU and chrF: those of sacrebleu for the whole corpus, with an interval of the change that is paired."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from export.generation.translations import bleu, counts, quality

WORDS = ["ein", "Mann", "fährt", "das", "Rad", ".", "und", "Hund", "grün"]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=1, max_size=6)


@given(TEXTS, st.randoms(use_true_random=False))
def test_the_sum_of_counts_gives_the_bleu_of_the_corpus(texts: list[str], random: object) -> None:
    references = [" ".join(word for word in text.split() if random.random() < 0.7) or "ein" for text in texts]  # type: ignore[attr-defined]
    assert bleu(counts(texts, references)) == pytest.approx(sacrebleu.corpus_bleu(texts, [references]).score, abs=1e-9)


def sentences(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, 9)) for _ in range(count)]


def test_figures_are_those_of_sacrebleu_and_equal_systems_do_not_differ() -> None:
    references = sentences(40)
    worse = [text if row % 3 else text[: len(text) // 2] for row, text in enumerate(references)]
    found = quality(worse, references, references)
    assert found.bleu == pytest.approx(sacrebleu.corpus_bleu(worse, [references]).score, abs=1e-4)
    assert found.chrf == pytest.approx(sacrebleu.corpus_chrf(worse, [references]).score, abs=1e-4)
    assert (found.bleu_before, found.chrf_before, found.n) == (100.0, 100.0, 40)
    low, high = found.bleu_change
    assert low < found.bleu - 100 < high < 0
    assert quality(worse, references, worse).bleu_change == (0.0, 0.0)  # the same rows are drawn for both


@pytest.mark.parametrize(("texts", "before"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_systems_answer_the_same_rows(texts: list[str], before: list[str]) -> None:
    with pytest.raises(ValueError, match="as many of each"):
        quality(texts, ["a"], before)


def test_bleu_of_short_texts_moves_and_garbage_loses() -> None:
    references = ["rot", "ein Hund", "das Rad .", "grün"] * 10
    garbage = ["und", "Mann fährt", "und Mann fährt Mann Mann", "und"] * 10
    found = quality(garbage, references, references)
    assert (found.bleu_before, found.bleu_order) == (100.0, 3)
    assert found.bleu < 20
    assert found.bleu_chance < 30
    assert quality(references, references, references).bleu == 100
    # a single long reference gives n-grams that the other system never wrote: they count for neither
    assert quality(garbage, [*references[:-1], "ein Mann fährt das Rad ."], references).bleu_before > 80


def test_answers_that_do_not_depend_on_their_source_are_the_floor_of_bleu() -> None:
    references = sentences(40)
    assert quality(references, references, references).bleu_chance < 30
    same = [references[0]] * 39 + [references[1]]
    assert quality(same, same, same).bleu_chance > 95


def test_the_change_of_bleu_draws_texts_of_one_source_together() -> None:
    references = sentences(60)
    worse = [text if row % 20 < 10 else "und" for row, text in enumerate(references)]
    apart, whole = (quality(worse, references, references, groups) for groups in (None, np.arange(60) // 5))
    assert (apart.groups, whole.groups) == (60, 12)
    assert apart.bleu == whole.bleu
    assert np.diff(whole.bleu_change) > 1.3 * np.diff(apart.bleu_change)
    assert quality(worse, references, references, np.arange(60) // 20).bleu_change is None
