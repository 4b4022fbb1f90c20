"""The student's training rows: train rows plus extra text, or a corpus; followed by masked copies.

rows = [train rows (labelled) | extra text] or [corpus],  then `copies` repetitions of all of them, to be masked
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from distill.plain_text import PlainText, new_rows, packed, read_plain
from foundation.data.splits import Data, Split, chosen_rows
from foundation.models.inputs.tokenizer import load_tokenizer
from foundation.training.distillation.assembly import count_labelled


def gather(
    data: Data, fraction: float, extra_text: PlainText | None, copies: int, key: str, log: Callable[[str], None]
) -> tuple[Split, int]:
    """Returns the training rows for a task, and how many of them have labels: these come first. None has if the train rows have none.

    Args:
        data: The data of the run.
        fraction: Share of the train rows to use.
        extra_text: Unlabelled text.
        copies: Masked copies of each row.
        key: Key path of the stage, for error messages.
        log: Receives a line about excluded rows.
    """
    split = chosen_rows(data.train, fraction)
    num_labelled = count_labelled(split)
    if extra_text is not None:
        plain = unlabelled(extra_text, data, split, f"{key}.extra_text", log)
        split = Split([*split.rows, *plain.rows], split.labels.joined(plain.labels))
    return repeated(split, copies), num_labelled


def gather_corpus(
    data: Data, fraction: float, corpus: PlainText, packing: tuple[Path, int] | None, copies: int, key: str, log: Callable[[str], None]
) -> tuple[Split, int]:
    """Returns the rows of a corpus, and 0 as the number of labelled rows.

    Args:
        data: The data of the run.
        fraction: Share of the rows to use, after packing.
        corpus: The text.
        packing: The checkpoint with the tokenizer and the number of tokens per row; None to use each line as a row.
        copies: Masked copies of each row.
        key: Key path of the stage, for error messages.
        log: Receives a line about excluded rows.
    """
    plain = unlabelled(corpus, data, data.train.take([]), f"{key}.corpus", log)
    if packing is not None:
        folder, max_length = packing
        pieces = packed([str(row) for row in plain.rows], load_tokenizer(str(folder)), max_length)
        log(f"  {key}.corpus: packed into {len(pieces)} rows of at most {max_length} tokens")
        plain = Split(list(pieces), plain.labels.blank(len(pieces)))
    return repeated(chosen_rows(plain, fraction), copies), 0


def unlabelled(text: PlainText, data: Data, known: Split, key: str, log: Callable[[str], None]) -> Split:
    """Returns unlabelled text as rows with label 0, excluding evaluation, selection and already known rows."""
    rows, held_out, duplicates = new_rows(read_plain(text, key, log), data.never_trained, known.rows)
    log(f"  {key}: {len(rows)} rows; excluded: {held_out} in the evaluation or selection split, {duplicates} duplicates")
    return Split(rows, data.train.labels.blank(len(rows)))


def repeated(split: Split, copies: int) -> Split:
    """Returns a split followed by copies of itself."""
    return split if not copies else Split(split.rows * (1 + copies), split.labels[np.tile(np.arange(len(split)), 1 + copies)])
