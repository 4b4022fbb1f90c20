"""Next-token prediction: reduces logits to two numbers per token, and computes perplexity and accuracy from those.

A row of this task is a block of token ids x_1 .. x_L (int32). A causal model gives logits z_t for the token after each position. From them
we keep the negative log-likelihood (nll) of the true token and the id of the most likely one:

    nll_t = log sum_v exp(z_t[v]) - z_t[x_{t+1}],   choice_t = argmax_v z_t[v]        t = 1 .. L - 1; ties take the lowest id

These answers are float32 [n, T, 2], two numbers per predicted token instead of V logits; T is the largest block length minus one. float32
holds ids exactly up to 2^24. The labels are the block itself shifted by one, int32 [n, T], with `IGNORED` past the end of a shorter block.

A row of an encoder-decoder is a pair: the decoder reads a start token before the target y_1 .. y_T, so that its logits z_t are those for
y_t, and the labels are the target itself. `targets` gives the tokens to predict of either kind of row.

    perplexity = exp(sum of all nll / number of predicted tokens)           accuracy = share of tokens with choice_t = x_{t+1}

Each block is predicted on its own, so its first tokens have little context. Not supported: a sliding window with a stride below the block
length, which would give every token a long context and multiply the number of forward passes.

This module needs numpy only, because the engine processes do not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from foundation.core.arrays import Array
from foundation.labels.answer import Answer, divergences
from foundation.labels.form import Figure, Labels
from foundation.standalone.preprocess import Preprocessor, TokenPair

IGNORED = -100
"""Label of a position without a target; torch's cross entropy ignores it by default."""
NO_CHOICE = -1
LARGEST_EXPONENT = 700.0
Block = NDArray[np.int32]


def targets(row: Block | TokenPair) -> Block:
    """Returns the tokens of a row that are to be predicted, int32 [T]."""
    return row.target if isinstance(row, TokenPair) else row[1:]


def labels_of(rows: Sequence[Block | TokenPair], width: int) -> Tokens:
    """Returns the labels of rows, int32 [n, width]: the tokens to predict, or `IGNORED` past the last one."""
    labels = np.full((len(rows), width), IGNORED, np.int32)
    for label, row in zip(labels, rows, strict=True):
        found = targets(row)
        label[: len(found)] = found
    return Tokens(labels)


def answers_of(rows: Sequence[Block | TokenPair], logits: Array, width: int) -> NDArray[np.float32]:
    """Reduces the logits of a batch to (nll, choice) pairs, float32 [b, width, 2]; positions without a target get (0, `NO_CHOICE`).

    Args:
        rows: The blocks or pairs of the batch.
        logits: float32 [b, L, V]; L is at least the longest row.
        width: T of the module docstring.
    """
    answers = np.zeros((len(rows), width, 2), np.float32)
    answers[..., 1] = NO_CHOICE
    powers_LV = np.empty(logits.shape[1:], logits.dtype)  # of one row after the other: they take as much memory as its logits
    for row, given, logits_LV in zip(answers, rows, logits, strict=True):
        target_T = targets(given)
        count = len(target_T)
        scores_TV, places_T = logits_LV[:count], np.arange(count)
        choice_T = scores_TV.argmax(axis=1)
        largest_T = scores_TV[places_T, choice_T]
        powers_TV = np.subtract(scores_TV, largest_T[:, None], out=powers_LV[:count])
        totals_T = np.exp(powers_TV, out=powers_TV).sum(axis=1)
        # The difference first: log(total) would lose its digits next to a large logit.
        row[:count, 0] = np.log(totals_T) + (largest_T - scores_TV[places_T, target_T])
        row[:count, 1] = choice_T
    return answers


def choices(answers: Array) -> NDArray[np.int64]:
    """Returns the most likely ids, int64 [n, T], from answers [n, T, 2]."""
    return answers[..., 1].astype(np.int64)


def block_sums(answers: Array, labels: Array) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns for each block the sum of its nll, float64 [n], and its number of predicted tokens, int64 [n]."""
    predicted = labels != IGNORED
    return np.where(predicted, answers[..., 0], 0.0).sum(axis=1, dtype=np.float64), predicted.sum(axis=1)


def mean_nll(sums: Array, tokens: Array) -> float:
    """Returns the mean nll per token, from the nll sums and token counts of blocks."""
    return float(sums.sum() / tokens.sum())


def perplexity_of(sums: Array, tokens: Array) -> float:
    """Returns the perplexity, from the nll sums and token counts of blocks."""
    return math.exp(min(mean_nll(sums, tokens), LARGEST_EXPONENT))  # JSON has no infinity: an overflow would end the run


def perplexity(answers: Array, labels: Array) -> float:
    """Returns the perplexity of answers [n, T, 2] for labels [n, T]."""
    return perplexity_of(*block_sums(answers, labels))


def accuracy(answers: Array, labels: Array) -> float:
    """Returns the share of predicted tokens whose most likely id is the label."""
    predicted = labels != IGNORED
    return float((choices(answers) == labels)[predicted].mean())


@dataclass(frozen=True, eq=False)
class Tokens(Labels):
    """Tokens to predict, int32 `[n, T]`."""

    DTYPE: ClassVar[type] = np.int32
    SHUFFLED: ClassVar[bool] = False  # answers hold the loss of the true token

    @property
    def predicted(self) -> Array:
        """Where there is a token to predict, bool `[n, T]`."""
        return np.asarray(self.array != IGNORED)

    def count(self) -> int:
        """The number of tokens."""
        return int(np.sum(self.predicted))

    def choices(self, answers: Array) -> tuple[Array, Array] | None:
        """The most likely and the true token."""
        return choices(answers)[self.predicted], self.array[self.predicted]

    def pseudo_labels(self, answers: Array) -> Tokens:
        """The predicted tokens."""
        return Tokens(np.where(self.predicted, choices(answers), IGNORED).astype(np.int32))

    def constants(self, answers: Array) -> Iterator[Array]:
        """The answers of the model that gives every token its share of all tokens."""
        tokens, which, counts = np.unique(self.array[self.predicted], return_inverse=True, return_counts=True)
        made = np.zeros_like(answers)
        made[self.predicted, 0] = -np.log(counts / counts.sum())[which]
        made[self.predicted, 1] = tokens[counts.argmax()]
        yield made


class TokenAnswer(Answer):
    """The token with the largest logit at each position."""

    FORM: ClassVar[type[Labels]] = Tokens
    FROM_HEAD: ClassVar[bool] = False
    PER_TOKEN: ClassVar[bool] = True
    LABELS: ClassVar[tuple[str, ...] | None] = ()
    DIFFERS: ClassVar[str] = "nll"
    FIGURES: ClassVar[Mapping[str, Figure]] = {"accuracy": accuracy}

    def compressed(self, preprocessor: Preprocessor, rows: Sequence[Any], logits: Array) -> Array:
        """Negative log-likelihood and choice of each token, `[b, T, 2]`."""
        return answers_of(rows, logits, preprocessor.max_length - 1)

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Other tokens; differences of the nll of the true ones."""
        before, after = choices(reference), choices(answers)
        predicted = before != NO_CHOICE
        return (before != after)[predicted], np.abs(answers[..., 0].astype(np.float64) - reference[..., 0])[predicted]

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean of KL(p || p') over the tokens of a row, in nats; logits are `[n, L, V]`."""
        apart = divergences(*(values.reshape(-1, values.shape[-1]) for values in (reference, logits)))
        if not len(reference):
            return apart
        apart = apart.reshape(len(reference), -1)
        counted = None if predicted is None else np.arange(apart.shape[1]) < predicted[:, None]
        return np.asarray(apart.mean(axis=1) if counted is None else apart.mean(axis=1, where=counted))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """The share of tokens predicted differently."""
        return float(np.mean(self.differences(reference, answers)[0]))
