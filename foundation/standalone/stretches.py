"""The stretches that an answer is generated in. Needs nothing; it is copied to servers.

    prompt ---> first stretch ---> `again` tokens: the whole text is read once more ---> second stretch

Most answers have one stretch. For models whose keys in the cache hold up to a length only, Transformers reads the text again there
(`export.generation.rereading`). The length is in `positions.json` next to the model; models without the file need it nowhere.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE, KEY = "positions.json", "read_again_at"


def read_again_at(folder: Path) -> int | None:
    """Returns the number of tokens at which a text is read again; None if there is none.

    Args:
        folder: Holds the model.
    """
    file = folder / FILE
    return int(json.loads(file.read_text(encoding="utf-8"))[KEY]) if file.is_file() else None


def stretches(prompt: int, most: int, again: int | None) -> tuple[int, ...]:
    """Returns the most tokens of each stretch of an answer.

    Args:
        prompt: Tokens of the prompt.
        most: Most tokens of the answer, at least 1.
        again: Tokens at which the text is read again; None: nowhere.
    """
    first = 0 if again is None else again - prompt
    return (first, most - first) if 0 < first < most else (most,)
