"""Sizes of the splits of a run: rows, truncated rows and the longest row; `data.json` of the run.

The report is made from the run folder alone, which holds no data set. The file is written when a run finishes, and taken over as long as
data, tokenizer and length are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foundation.artifacts import artifact
from foundation.artifacts.chain import DATA
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor, Row

SCHEMA = 1
CHUNK = 1000
"""Rows that are tokenized at once."""


def write_sizes(folder: Path, checkpoint: Path, context: Context) -> None:
    """Writes `data.json`.

    Args:
        folder: The run folder.
        checkpoint: The baseline, with its tokenizer.
        context: The context of the run.
    """
    prepared = context.preprocessor(checkpoint)
    tokenizer = None if prepared.tokenizer is None else artifact.digest(prepared.tokenizer.to_str())
    settings = [prepared.modality, prepared.prompt, prepared.max_length, prepared.aggregate, tokenizer]
    key = artifact.digest({"data": context.data.digest, "judge": context.data.judge, "read": settings})
    if _known(folder / DATA) != key:
        artifact.write_json(folder / DATA, {"schema": SCHEMA, "key": key, "splits": sizes(prepared, context)})


def _known(path: Path) -> str | None:
    """Returns the key of what was written before; None if nothing of this form was."""
    try:
        return str(artifact.read_json(path)["key"]) if path.is_file() else None
    except (artifact.DamagedArtifact, KeyError, TypeError):  # written again now
        return None


def sizes(prepared: Preprocessor, context: Context) -> list[dict[str, object]]:
    """Returns for each split its name, `rows`, and `longest` (tokens) and `truncated` (rows); both None where rows have no tokens, are
    windows or blocks that fit, or were cut before. Evaluation rows that must stay unseen are only counted."""
    data = context.data
    seen = {"train": data.train.rows, "selection": data.selection.rows, "evaluation": data.evaluation.rows if data.hidden is None else []}
    counts = {name: len(rows) for name, rows in seen.items()}
    if data.hidden is not None:
        counts["evaluation"] = len(data.hidden)
    text = prepared.towers.get("text", prepared)
    found: list[dict[str, object]] = []
    for name, rows in seen.items():
        counted = _lengths_shown(text, rows, context) if reads_texts(text) else []
        longest = max(counted, default=None)
        cut = None if longest is None or text.aggregate else sum(length > text.max_length for length in counted)
        found.append({"split": name, "rows": counts[name], "longest": longest, "truncated": cut})
    return found


def reads_texts(prepared: Preprocessor) -> bool:
    """Whether a model reads texts that its tokenizer may have to cut: no images, sounds, blocks, or questions with windows."""
    return prepared.tokenizer is not None and not prepared.generates and not prepared.finds_spans


def _lengths_shown(prepared: Preprocessor, rows: Sequence[Row], context: Context) -> list[int]:
    """Returns the lengths of those rows that are texts, with a bar."""
    texts = [row for row in rows if isinstance(row, str | tuple)]
    with context.progress.bar("lengths of rows", len(texts)) as advance:
        return lengths(prepared, texts, advance)


def lengths(prepared: Preprocessor, rows: Sequence[Row], advance: Callable[[int], object] = lambda _: None) -> list[int]:
    """Returns the tokens of each text or pair of texts, special ones included, before anything is cut.

    Args:
        prepared: A preprocessor with a tokenizer.
        rows: Texts, or pairs of texts.
        advance: Called with the number of texts after each chunk.
    """
    from tokenizers import Tokenizer

    texts: list[Any] = [prepared.prompt + row if isinstance(row, str) else row for row in rows]
    assert prepared.tokenizer is not None, "a text preprocessor has a tokenizer"
    whole = Tokenizer.from_str(prepared.tokenizer.to_str())  # the other one is shared, and set to truncate
    whole.no_truncation()
    counts: list[int] = []
    for start in range(0, len(texts), CHUNK):
        part = texts[start : start + CHUNK]
        counts += [len(row.ids) for row in whole.encode_batch_fast(part)]
        advance(len(part))
    return counts
