"""BLEU and chrF of answers against reference texts, by sacrebleu, and how sure a change of BLEU is.

    BLEU   geometric mean of the precisions of 1- to 4-grams times a penalty for short answers, over the whole corpus (Papineni et al.
           2002), tokenized by sacrebleu's 13a (Post 2018, 1804.08771)
    chrF   F2 score of character 6-grams (Popovic 2015)

Both are in 0..100. BLEU is a figure of a corpus, not a mean over texts. Its 95 % interval is therefore that of a paired bootstrap: the same
texts are drawn for both systems, and the n-gram counts of what was drawn are summed (Koehn 2004).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDERS = 4
"""Longest n-grams of BLEU."""
RESAMPLES = 1000
INTERVAL = (2.5, 97.5)
"""Percentiles of a 95 % interval."""
Counts = NDArray[np.int64]


def quality(texts: Sequence[str], references: Sequence[str], before: Sequence[str]) -> dict[str, Any]:
    """Compares texts with their references, and with what another system wrote for the same ones.

    Args:
        texts: Answers, one for each reference.
        references: What they should be.
        before: The answers of the other system.

    Returns:
        `n`, `bleu`, `chrf`, `bleu_before`, `chrf_before`, `bleu_change` (95 % interval of bleu - bleu_before: [low, high]).
    """
    if not len(texts) == len(references) == len(before) or not texts:
        raise ValueError(
            f"{len(texts)} texts, {len(before)} before and {len(references)} references; as many of each, at least 1, are compared"
        )
    after_nC, before_nC = counts(texts, references), counts(before, references)
    return {
        "n": len(texts),
        "bleu": round(bleu(after_nC), 4),
        "chrf": round(_chrf(texts, references), 4),
        "bleu_before": round(bleu(before_nC), 4),
        "chrf_before": round(_chrf(before, references), 4),
        "bleu_change": [round(value, 4) for value in _interval(before_nC, after_nC)],
    }


def counts(texts: Sequence[str], references: Sequence[str]) -> Counts:
    """Returns what BLEU sums over a corpus, int64 [n, 10]: n-grams that match, n-grams, length of the text, length of the reference."""
    from sacrebleu.metrics.bleu import BLEU  # takes a moment to import

    metric = BLEU()
    scores = (metric.corpus_score([text], [[reference]]) for text, reference in zip(texts, references, strict=True))
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores], np.int64)


def bleu(counts_nC: Counts) -> float:
    """Returns the BLEU of a corpus from the counts of its texts, 0..100."""
    from sacrebleu.metrics.bleu import BLEU

    *grams, length, reference = counts_nC.sum(axis=0).tolist()
    score = BLEU.compute_bleu(grams[:ORDERS], grams[ORDERS:], length, reference, smooth_method="exp")
    return float(score.score)


def _chrf(texts: Sequence[str], references: Sequence[str]) -> float:
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().corpus_score(list(texts), [list(references)]).score)


def _interval(before_nC: Counts, after_nC: Counts) -> tuple[float, float]:
    draw = np.random.default_rng(0)
    changes = []
    for _ in range(RESAMPLES):
        sample = draw.integers(0, len(after_nC), len(after_nC))
        changes.append(bleu(after_nC[sample]) - bleu(before_nC[sample]))
    low, high = np.percentile(changes, INTERVAL)
    return float(low), float(high)
