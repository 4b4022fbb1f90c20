"""Next-token prediction: what is kept of the logits of a block of tokens, and the figures that follow from it.

A row of this task is a block of token ids x_1 .. x_L (int32). A causal model gives logits z_t for the token behind each position; kept are

    nll_t = log sum_v exp(z_t[v]) - z_t[x_{t+1}],   choice_t = argmax_v z_t[v]        t = 1 .. L - 1; ties take the lowest id

so two numbers for each predicted token instead of V logits: answers float32 [n, T, 2], T the largest block less one. Ids are exact in
float32 up to 2^24. The targets are the block itself, moved by one: labels int32 [n, T], `IGNORED` behind the end of a shorter block.

    perplexity = exp(sum of all nll / number of predicted tokens)           accuracy = share of tokens with choice_t = x_{t+1}

Blocks are predicted one by one, without what stands before them: the first tokens of a block have little to go by. Left out: a window that
slides by less than a block, which gives every token a long past and costs as many passes more.

Numpy alone: the processes that engines run in have no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""Label of a position that has nothing to predict; what torch's cross entropy leaves out."""
NO_CHOICE = -1
LARGEST_EXPONENT = 700.0
Array = NDArray[Any]
Block = NDArray[np.int32]


def labels_of(blocks: Sequence[Block], width: int) -> NDArray[np.int32]:
    """Returns the targets of some blocks, int32 [n, width]: the token behind each position, `IGNORED` where there is none."""
    labels = np.full((len(blocks), width), IGNORED, np.int32)
    for row, block in zip(labels, blocks, strict=True):
        row[: len(block) - 1] = block[1:]
    return labels


def answers_of(blocks: Sequence[Block], logits: Array, width: int) -> NDArray[np.float32]:
    """Returns what is kept of the logits of a batch, float32 [b, width, 2]; 0 and `NO_CHOICE` where there is nothing to predict.

    Args:
        blocks: The blocks of the batch.
        logits: float32 [b, L, V], L at least the longest of them.
        width: T.
    """
    answers = np.zeros((len(blocks), width, 2), np.float32)
    answers[..., 1] = NO_CHOICE
    for row, block, logits_LV in zip(answers, blocks, logits, strict=True):  # one by one: the exponentials need as much memory again
        count = len(block) - 1
        scores_TV = logits_LV[:count]
        largest_T = scores_TV.max(axis=1)
        totals_T = np.exp(scores_TV - largest_T[:, None]).sum(axis=1)
        row[:count, 0] = np.log(totals_T) + largest_T - scores_TV[np.arange(count), block[1:]]
        row[:count, 1] = scores_TV.argmax(axis=1)
    return answers


def choices(answers: Array) -> NDArray[np.int64]:
    """Returns the ids that were held most likely, int64 [n, T], of answers [n, T, 2]."""
    return answers[..., 1].astype(np.int64)


def block_sums(answers: Array, labels: Array) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns the sum of the nll of each block, float64 [n], and the number of its predicted tokens, int64 [n]."""
    predicted = labels != IGNORED
    return np.where(predicted, answers[..., 0], 0.0).sum(axis=1, dtype=np.float64), predicted.sum(axis=1)


def mean_nll(sums: Array, tokens: Array) -> float:
    """Returns the mean nll of a token, from the sums and numbers of tokens of some blocks."""
    return float(sums.sum() / tokens.sum())


def perplexity_of(sums: Array, tokens: Array) -> float:
    """Returns the perplexity, from the sums and numbers of tokens of some blocks."""
    return math.exp(min(mean_nll(sums, tokens), LARGEST_EXPONENT))  # a figure that no JSON could hold would end the run


def perplexity(answers: Array, labels: Array) -> float:
    """Returns the perplexity of answers [n, T, 2] to labels [n, T]."""
    return perplexity_of(*block_sums(answers, labels))


def accuracy(answers: Array, labels: Array) -> float:
    """Returns the share of predicted tokens that were held most likely."""
    predicted = labels != IGNORED
    return float((choices(answers) == labels)[predicted].mean())
