"""The rows that a student learns from: a share of the train rows and extra text, or a corpus; and masked copies of all of them.

rows = [train rows, which have labels | extra text] or [corpus],  then `copies` times the same again, to be masked (`distill.masking`)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from compress.data.splits import Data, Split, hold_out
from compress.models.tokenizer import load_tokenizer
from distill.plain_text import PlainText, new_rows, packed, read_plain


def gather(
    data: Data, fraction: float, extra_text: PlainText | None, copies: int, key: str, log: Callable[[str], None]
) -> tuple[Split, int]:
    """Returns the rows to learn a task on, and how many of them, the first ones, have labels.

    Args:
        data: The data of the run.
        fraction: Share of the train rows.
        extra_text: Text without labels.
        copies: Copies of each row, to be masked.
        key: Key path of the stage, for messages.
        log: Where to tell what was left out.
    """
    split = chosen_rows(data.train, fraction)
    num_labelled = len(split)
    if extra_text is not None:
        plain = unlabelled(extra_text, data, split, f"{key}.extra_text", log)
        split = Split([*split.rows, *plain.rows], np.concatenate([split.labels, plain.labels]))
    return repeated(split, copies), num_labelled


def gather_corpus(
    data: Data, fraction: float, corpus: PlainText, packing: tuple[Path, int] | None, copies: int, key: str, log: Callable[[str], None]
) -> tuple[Split, int]:
    """Returns the rows of a corpus, and 0: none of them has a label.

    Args:
        data: The data of the run.
        fraction: Share of the rows, packed ones if they are.
        corpus: The text.
        packing: The checkpoint whose tokenizer counts, and the tokens of a row; None to take the lines as they are.
        copies: Copies of each row, to be masked.
        key: Key path of the stage, for messages.
        log: Where to tell what was left out.
    """
    plain = unlabelled(corpus, data, data.train.take([]), f"{key}.corpus", log)
    if packing is not None:
        folder, max_length = packing
        pieces = packed([str(row) for row in plain.rows], load_tokenizer(str(folder)), max_length)
        log(f"  {key}.corpus: packed to {len(pieces)} rows of at most {max_length} tokens")
        plain = Split(list(pieces), np.zeros(len(pieces), plain.labels.dtype))
    return repeated(chosen_rows(plain, fraction), copies), 0


def unlabelled(text: PlainText, data: Data, known: Split, key: str, log: Callable[[str], None]) -> Split:
    """Returns text without labels as rows with labels of 0; without evaluation and selection rows, and without the known ones."""
    rows, held_out, there = new_rows(read_plain(text, key, log), [*data.evaluation.rows, *data.selection.rows], known.rows)
    log(f"  {key}: {len(rows)} rows; left out: {held_out} of evaluation or selection, {there} there already")
    return Split(rows, np.zeros(len(rows), data.train.labels.dtype))


def repeated(split: Split, copies: int) -> Split:
    """Returns a split followed by copies of itself."""
    return split if not copies else Split(split.rows * (1 + copies), np.tile(split.labels, 1 + copies))


def chosen_rows(train: Split, fraction: float) -> Split:
    """Returns about that share of the rows, chosen by hash of their content: the same for every order, seed and machine."""
    return train if fraction == 1 else hold_out(train, fraction)[1]
