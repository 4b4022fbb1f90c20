"""Virtual tokens: rows of the embedding matrix that no text has, and that the tokenizer puts before every text.

    ids of a text        V ... V+k-1  [CLS] t_1 ... t_n [SEP]        V: size of the vocabulary before, k: virtual tokens
    post-processor       a special token `<|prompt|>` of k ids in front, or behind [CLS]; once for a pair of texts, with token type 0

So everything after training knows nothing of them: masks, positions, truncation to `data.max_length`, windows of engines and servers count
them as the special tokens that they are, an exported graph holds their embeddings in its embedding matrix, and other programs read the
tokenizer.json. The ids are of no token of the vocabulary, so that no text can contain them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import read_json
from foundation.core.errors import InputError
from foundation.models.files import SMALL_FILES, copy_files
from foundation.models.inputs.tokenizer_file import FILE, OLD_CLASS, SETTINGS, tokenizer_file

NAME = "<|prompt|>"
Part = dict[str, Any]


def with_virtual_tokens(source: Path, out: Path, first: int, count: int, *, behind: bool = False) -> None:
    """Writes the small files of a checkpoint with a tokenizer that puts virtual tokens before every text; no weights.

    Args:
        source: The checkpoint.
        out: Existing folder.
        first: Size of its embedding matrix.
        count: Number of virtual tokens.
        behind: Whether they stand behind the first special token, such as [CLS], instead of in front of it.

    Raises:
        InputError: It has virtual tokens already, `behind` is given and texts begin with no special token, or its tokenizer puts special
            tokens around texts in a way that is not known.
    """
    copy_files(source, out, tuple(file.name for pattern in (*SMALL_FILES, "README.md") for file in sorted(source.glob(pattern))))
    document: Part = json.loads(tokenizer_file(source).text)
    document["post_processor"] = prefixed(document.get("post_processor"), first, count, behind=behind)
    (out / FILE).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    settings = read_json(out / SETTINGS, "checkpoint") if (out / SETTINGS).is_file() else {}
    write_json(out / SETTINGS, {**settings, "tokenizer_class": OLD_CLASS})  # another class may build another post-processor
    config = read_json(out / "config.json", "checkpoint")
    write_json(out / "config.json", {**config, "vocab_size": first + count})


def prefixed(post: Part | None, first: int, count: int, *, behind: bool = False) -> Part:
    """Returns a post-processor of tokenizer.json that puts virtual tokens first.

    Args:
        post: The post-processor before; None for none.
        first: Id of the first virtual token.
        count: Number of virtual tokens.
        behind: Whether they stand behind the first special token.

    Raises:
        InputError: See `with_virtual_tokens`.
    """
    if post is not None and post["type"] == "Sequence":
        *before, last = post["processors"]
        return {**post, "processors": [*before, *_of_sequence(last, first, count, behind)]}
    template = _as_template(post)
    if template is None:
        assert post is not None
        return {"type": "Sequence", "processors": [post, prefixed(None, first, count, behind=behind)]}
    if NAME in template["special_tokens"]:
        raise InputError("prompt", "the model has virtual tokens already", "a prompt is learned once", "start from the model before")
    if behind and not all("SpecialToken" in template[side][0] for side in ("single", "pair")):
        raise InputError("prompt.place", "behind_first given", "texts of this tokenizer begin with no special token", "give front")
    token = {"SpecialToken": {"id": NAME, "type_id": 0}}
    special = {**template["special_tokens"], NAME: {"id": NAME, "ids": [*range(first, first + count)], "tokens": [NAME] * count}}
    sides = {side: [*template[side][: int(behind)], token, *template[side][int(behind) :]] for side in ("single", "pair")}
    return {**template, **sides, "special_tokens": special}


def _of_sequence(last: Part, first: int, count: int, behind: bool) -> list[Part]:
    """Returns what takes the place of the last processor of a sequence."""
    if _as_template(last) is None:
        return [last, prefixed(None, first, count, behind=behind)]
    return [prefixed(last, first, count, behind=behind)]


def _as_template(post: Part | None) -> Part | None:
    """Returns a post-processor as a template; None for one that adds no tokens.

    Raises:
        InputError: It adds tokens in a way that is not known.
    """
    kind = None if post is None else post["type"]
    if kind is None:
        return {"type": "TemplateProcessing", "single": [_text("A", 0)], "pair": [_text("A", 0), _text("B", 1)], "special_tokens": {}}
    assert post is not None
    if kind == "TemplateProcessing":
        return post
    if kind == "ByteLevel":  # only offsets
        return None
    if kind not in ("BertProcessing", "RobertaProcessing"):
        known = "TemplateProcessing, BertProcessing, RobertaProcessing and ByteLevel are known"
        raise InputError("prompt", f"the tokenizer ends with {kind}", known, "give a model with another tokenizer")
    (cls, cls_id), (sep, sep_id) = post["cls"], post["sep"]
    ids = {cls: cls_id, sep: sep_id}
    middle = [sep] if kind == "BertProcessing" else [sep, sep]
    second = 1 if kind == "BertProcessing" else 0
    single = [_token(cls, 0), _text("A", 0), _token(sep, 0)]
    pair = [_token(cls, 0), _text("A", 0), *[_token(name, 0) for name in middle], _text("B", second), _token(sep, second)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": _specials(ids)}


def _specials(ids: dict[str, int]) -> Part:
    return {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()}


def _token(name: str, type_id: int) -> Part:
    return {"SpecialToken": {"id": name, "type_id": type_id}}


def _text(name: str, type_id: int) -> Part:
    return {"Sequence": {"id": name, "type_id": type_id}}
