"""BLEU and chrF of answers against reference texts, by sacrebleu, and how sure a change of BLEU is.

    BLEU   geometric mean of the precisions of 1- to 4-grams times a penalty for short answers, over the whole corpus (Papineni et al.
           2002), tokenized by sacrebleu's 13a (Post 2018, 1804.08771)
    chrF   F2 score of character 6-grams (Popovic 2015)

Both are in 0..100. BLEU is a figure of a corpus, not a mean over texts. Its 95 % interval therefore comes from a paired bootstrap: the same
texts are drawn for both systems, and the n-gram counts of what was drawn are summed (Koehn 2004). Texts with one source are drawn together
(`foundation.core.resampling`).

Texts of fewer than four words have no 4-gram, and their BLEU is 0 whatever they say. The longest n-grams that count, for both systems, are
therefore the longest ones, up to 4, that both the references and the other system's answers have: `bleu_order`. It is 4 wherever one of
them is a sentence.

What BLEU says of answers that do not depend on their source (the other system's answers in another order, or the most frequent reference
everywhere) is its floor, `bleu_chance`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foundation.artifacts.figures import Quality
from foundation.core.arrays import Array
from foundation.core.resampling import Groups, each_alone, interval

ORDERS = 4
"""Longest n-grams of BLEU."""
RESAMPLES, SHUFFLES = 1000, 3
Counts = NDArray[np.int64]


def quality(texts: Sequence[str], references: Sequence[str], before: Sequence[str], groups: Array | None = None) -> Quality:
    """Compares texts with their references, and with what another system wrote for the same ones.

    Args:
        texts: Answers, one for each reference.
        references: What they should be.
        before: The answers of the other system.
        groups: Number of the group of each, int `[n]`: the texts of one source form a group; None: each is one of its own.

    Returns:
        The quality; `bleu_change` is the interval of bleu - bleu_before, None where there are too few groups.
    """
    if not len(texts) == len(references) == len(before) or not texts:
        raise ValueError(
            f"{len(texts)} texts, {len(before)} before and {len(references)} references; as many of each, at least 1, are compared"
        )
    after_nC, before_nC, own_nC = counts(texts, references), counts(before, references), counts(references, references)
    order = _order(before_nC, own_nC)
    drawn = each_alone(len(texts)) if groups is None else Groups(groups)
    low, high = interval(lambda rows: bleu(after_nC[rows], order) - bleu(before_nC[rows], order), drawn, resamples=RESAMPLES)
    return Quality(
        n=len(texts),
        bleu=round(bleu(after_nC, order), 4),
        chrf=round(_chrf(texts, references), 4),
        bleu_before=round(bleu(before_nC, order), 4),
        chrf_before=round(_chrf(before, references), 4),
        bleu_change=None if low is None or high is None else (round(low, 4), round(high, 4)),
        bleu_order=order,
        bleu_chance=round(_chance(before, references, order), 4),
        groups=len(drawn),
    )


def _order(*counts_nC: Counts) -> int:
    """Returns the length of the longest n-grams that all of these have, at least 1."""
    totals = [of[:, ORDERS : 2 * ORDERS].sum(axis=0) for of in counts_nC]
    longest = [int(np.flatnonzero(of).max(initial=0)) + 1 for of in totals]
    return min(longest)


def _chance(texts: Sequence[str], references: Sequence[str], order: int) -> float:
    """Returns the BLEU of answers that do not depend on their source: the mean over a few orders of these, or one reference everywhere."""
    draw = np.random.default_rng(0)
    shuffled = [bleu(counts([texts[row] for row in draw.permutation(len(texts))], references), order) for _ in range(SHUFFLES)]
    often = Counter(references).most_common(1)[0][0]
    return max(float(np.mean(shuffled)), bleu(counts([often] * len(references), references), order))


def counts(texts: Sequence[str], references: Sequence[str]) -> Counts:
    """Returns the counts that BLEU sums over a corpus, int64 [n, 10]: n-grams that match, n-grams, length of the text, length of the
    reference."""
    from sacrebleu.metrics.bleu import BLEU  # takes a moment to import

    metric = BLEU()
    scores = (metric.corpus_score([text], [[reference]]) for text, reference in zip(texts, references, strict=True))
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores], np.int64)


def bleu(counts_nC: Counts, order: int = ORDERS) -> float:
    """Returns the BLEU of a corpus from the counts of its texts, 0..100, with n-grams up to this length."""
    from sacrebleu.metrics.bleu import BLEU

    *grams, length, reference = counts_nC.sum(axis=0).tolist()
    found, whole = grams[:order], grams[ORDERS : ORDERS + order]
    score = BLEU.compute_bleu(found, whole, length, reference, smooth_method="exp", max_ngram_order=order)
    return float(score.score)


def _chrf(texts: Sequence[str], references: Sequence[str]) -> float:
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().corpus_score(list(texts), [list(references)]).score)
