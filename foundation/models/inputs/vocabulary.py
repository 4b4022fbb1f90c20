"""Whether two language models speak of tokens by the same ids, so that one can propose tokens to the other."""

from __future__ import annotations

from pathlib import Path

from foundation.models.folder import Checkpoint
from foundation.models.inputs.tokenizer_file import tokenizer_file


def other_tokens(one: Path, other: Path) -> str | None:
    """Returns in one line how the tokens of a second checkpoint differ; None where every id means the same in both."""
    sizes = [int(Checkpoint(folder).config.get_text_config().vocab_size) for folder in (one, other)]
    if sizes[0] != sizes[1]:
        return f"{sizes[1]} tokens instead of {sizes[0]}"
    first, second = (tokenizer_file(folder).tokenizer().get_vocab(with_added_tokens=True) for folder in (one, other))
    differing = sorted(word for word in first.keys() | second.keys() if first.get(word) != second.get(word))
    return f"{len(differing)} tokens with other ids, such as {differing[0]!r}" if differing else None
