"""Two language models with the same tokens, or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foundation.models.inputs.vocabulary import other_tokens


def checkpoint(folder: Path, vocabulary: dict[str, int], size: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": size, "architectures": ["GPT2LMHeadModel"]}))
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return folder


@pytest.mark.parametrize(
    ("vocabulary", "size", "line"),
    [
        ({"a": 0, "b": 1}, 4, None),
        ({"a": 0, "b": 1}, 5, "5 tokens instead of 4"),
        ({"a": 1, "b": 0}, 4, "2 tokens with other ids, such as 'a'"),
        ({"a": 0, "c": 1}, 4, "2 tokens with other ids, such as 'b'"),
    ],
)
def test_ids_mean_the_same_or_a_line_says_which_do_not(tmp_path: Path, vocabulary: dict[str, int], size: int, line: str | None) -> None:
    one = checkpoint(tmp_path / "one", {"a": 0, "b": 1}, 4)
    assert other_tokens(one, checkpoint(tmp_path / "other", vocabulary, size)) == line
