"""From log-probabilities of label words to probabilities of classes.

    s_w    = sum_t log p(token t of w | prompt, tokens before t)      or divided by the number of tokens
    z_c    = log mean_{w of c} exp(s_w)
    p_c    = softmax_c(z_c)

The sum is the probability that the model writes exactly this word. It falls with the number of tokens whatever the text is; that is an
offset of the class, which contextual and batch calibration remove. Dividing by the number of tokens (Brown et al. 2020,
https://arxiv.org/abs/2005.14165, section 2.4) removes it without calibration, but compares geometric means, which are no probabilities. The
mean over words (Hu et al. 2021, https://arxiv.org/abs/2108.02035) gives classes with more words no advantage.

A word of one class that begins a word of another (`pos` and `positive`, `not` and `not good`) is refused: the probability of the first
would contain the second.

Tensor names: n rows, W words, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import log_softmax, logsumexp

from foundation.core.arrays import Array
from foundation.core.errors import InputError, nearest


def listed_words(labels: Mapping[str, Sequence[str]], classes: Sequence[str]) -> tuple[list[str], Array]:
    """Returns all words in the order of the classes, and the class of each, int64 [W].

    Args:
        labels: Words of each class.
        classes: Class names by id.
    """
    words = [word for name in classes for word in labels[name]]
    return words, np.repeat(np.arange(len(classes)), [len(labels[name]) for name in classes])


def check_words(labels: Mapping[str, Sequence[str]], classes: Sequence[str], key: str) -> None:
    """Checks that the words fit the classes and exclude each other.

    Args:
        labels: Words of each class.
        classes: Class names of the data.
        key: Key path of the words, for messages.

    Raises:
        InputError: A class has no words, words have no class, or a word begins or repeats another.
    """
    unknown = [name for name in labels if name not in classes]
    if unknown:
        allowed = f"the classes of the data are {', '.join(classes)}{nearest(unknown[0], classes)}"
        raise InputError(key, f"{unknown[0]!r} given", allowed, "give words for these")
    missing = [name for name in classes if name not in labels]
    if missing:
        raise InputError(key, f"no words for the class {missing[0]!r}", "every class of the data needs one", "add them")
    pairs = [(name, word.strip()) for name in classes for word in labels[name]]
    if empty := [name for name, word in pairs if not word]:
        raise InputError(f"{key}.{empty[0]}", "a word of spaces given", "a word has letters")
    for number, (name, word) in enumerate(pairs):
        for other, longer in pairs[:number] + pairs[number + 1 :]:
            if name == other and word == longer:
                raise InputError(f"{key}.{name}", f"{word!r} given twice", remedy="give it once")
            if name != other and longer.startswith(word):
                what = f"is also of {other!r}" if word == longer else f"begins {longer!r} of {other!r}"
                raise InputError(f"{key}.{name}", f"{word!r} {what}", "its probability would count for both", "give another word")


def class_scores(scores_nW: Array, lengths_nW: Array, class_W: Array, length_normalized: bool) -> Array:
    """Returns the log-probability of each class relative to the others, float64 [n, C].

    Args:
        scores_nW: Sums of log-probabilities of the tokens of each word, float [n, W].
        lengths_nW: Number of tokens of each word, int [n, W].
        class_W: Class of each word, int64 [W], every class at least once.
        length_normalized: Whether to divide by the number of tokens.
    """
    scores_nW = scores_nW.astype(np.float64)
    if length_normalized:
        scores_nW = scores_nW / lengths_nW
    columns = [scores_nW[:, class_W == number] for number in range(int(class_W.max()) + 1)]
    z_nC = np.stack([logsumexp(each, axis=1) - np.log(each.shape[1]) for each in columns], axis=1)
    return np.asarray(log_softmax(z_nC, axis=1))
