"""Vocabulary: the rows of the embedding that the task's texts never use go, and the tokenizer is cut to fit exactly.

    kept   every token of the train rows, every special or added one, those that a config names, all single characters and bytes; of BPE
           also what those are merged from; where positions are counted from the pad id (RoBERTa) all up to it, so that it stays what it is
    id     new id = number of kept ids below the old one, so that order stays

Exact: a text whose old tokens are all kept gets the same tokens, renumbered. WordPiece takes the longest piece that fits, which is still
there and still the longest; BPE applies the same merges in the same order, since each one that applied leads to a kept token, and so was
kept; Unigram finds the same best path, all of whose pieces are left. The train rows are split by both tokenizers to prove it. A text with a
token that is gone is split into smaller pieces; how many tokens become unknown by that, or vanish because nothing says what is unknown, is
counted on the selection rows (`Cut.unknown`).

Cutting a vocabulary to a task's data: Abdaoui et al. 2020, https://arxiv.org/abs/2010.05609. Left out: text-generation, whose rows are
made of the ids themselves.
"""

from __future__ import annotations

import copy
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from compress.artifacts.artifact import write_json
from compress.core.errors import InputError
from compress.models.axes import axes_of
from compress.models.shapes import on_meta
from compress.standalone.preprocess import Preprocessor, Row

STALE = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json")
"""Files with the old ids; tokenizer.json holds everything that they do."""
KINDS = ("WordPiece", "BPE", "Unigram", "WordLevel")
BATCH = 1024


@dataclass(frozen=True)
class Cut:
    """A vocabulary that was cut."""

    kept: Sequence[int]
    """Old ids, ascending."""
    document: Mapping[str, Any]
    """The contents of the new tokenizer.json."""
    unknown: float
    """Share of the tokens of the selection rows of whose text something became unknown, or is left out."""
    changed: float
    """Share of the selection rows that are split into other tokens."""

    def figures(self) -> dict[str, Any]:
        """Returns it as JSON types, for the manifest."""
        return {"vocabulary": len(self.kept), "unknown": self.unknown, "changed_rows": self.changed}


def cut_vocabulary(folder: Path, config: Any, prepared: Preprocessor, train: Sequence[Row], selection: Sequence[Row], key: str) -> Cut:
    """Chooses the tokens to keep and cuts the tokenizer.

    Args:
        folder: The checkpoint; its tokenizer.json is read.
        config: Its Transformers config.
        prepared: Splits rows as the model gets them.
        train: Rows whose tokens are kept.
        selection: Rows that show what becomes of others.
        key: Key path of the stage, for messages.

    Raises:
        InputError: The tokenizer is of a kind that cannot be cut.
    """
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    kind = document["model"].get("type")
    if kind not in KINDS:
        raise InputError(f"{key}.granularity: vocabulary given; a tokenizer of type {kind} cannot be cut: leave it out")
    assert prepared.tokenizer is not None, "a text preprocessor has a tokenizer"
    old = ids_of(prepared.tokenizer, train)
    pad = prepared.pad_token_id
    used = {token for row in old for token in row} | token_ids(config) | set(range(pad + 1) if counts_from_pad(config, key) else [pad])
    kept = sorted(token for token in closure(document, used) if token < config.vocab_size)
    cut = cut_tokenizer(document, kept)
    tokenizer = Tokenizer.from_str(json.dumps(cut))
    tokenizer.no_padding()
    tokenizer.enable_truncation(prepared.max_length, strategy="longest_first")
    new_id = {token: number for number, token in enumerate(kept)}
    if ids_of(tokenizer, train) != [[new_id[token] for token in row] for row in old]:
        raise InputError(f"{key}.granularity: vocabulary given; this {kind} tokenizer cannot be cut exactly: leave it out")
    before, after = ids_of(prepared.tokenizer, selection), ids_of(tokenizer, selection)
    changed = sum(row != [new_id.get(token) for token in its] for row, its in zip(after, before, strict=True))
    tokenizer.no_truncation()  # smaller pieces: what is beyond the last one is not unknown
    lost = lost_tokens(prepared.tokenizer, tokenizer, selection)
    return Cut(kept, cut, lost / max(1, sum(map(len, before))), changed / max(1, len(after)))


def counts_from_pad(config: Any, key: str) -> bool:
    """Returns whether models of a config number the positions of a text from its pad id on: their embedding has a padding index, too.

    Args:
        config: A Transformers config.
        key: Key path of the stage, for messages.
    """
    model = on_meta(config)
    tokens = {weight.rpartition(".")[0] for weight, _ in axes_of(model, key).vocabulary}
    leaves = {name: module for name, module in model.named_modules() if not any(module.children())}
    return any(getattr(module, "padding_idx", None) is not None for name, module in leaves.items() if name not in tokens)


def lost_tokens(old: Tokenizer, new: Tokenizer, rows: Sequence[Any]) -> int:
    """Returns how many tokens of some texts, known before, hold text that is unknown now or that no token stands for any more.

    Args:
        old: The tokenizer that there was.
        new: The one that takes its place; cuts no text off.
        rows: Texts, or pairs of texts.
    """
    unknown_before, unknown_now, lost = _unknown(old), _unknown(new), 0
    for start in range(0, len(rows), BATCH):
        some = list(rows[start : start + BATCH])
        for row, before, now in zip(some, old.encode_batch(some), new.encode_batch(some), strict=True):
            texts = row if isinstance(row, tuple) else (row,)
            said = {place for place, token in _places(now) if token != unknown_now}
            gone = [
                any((text, place) not in said and _counts(texts[text][place]) for place in range(*span))
                for token, text, span in zip(before.ids, before.sequence_ids, before.offsets, strict=True)
                if text is not None and token != unknown_before
            ]
            lost += sum(gone)
    return lost


def _places(encoding: Any) -> Iterable[tuple[tuple[int, int], int]]:
    """Yields every place in a text, or a pair of texts, that a token stands for, and that token."""
    for token, text, span in zip(encoding.ids, encoding.sequence_ids, encoding.offsets, strict=True):
        if text is not None:
            yield from (((text, place), token) for place in range(*span))


def _counts(character: str) -> bool:
    """Whether a character is text: neither a space, nor a mark or control character, which a tokenizer may take off."""
    return not character.isspace() and unicodedata.category(character)[0] not in "MC"


def ids_of(tokenizer: Tokenizer, rows: Sequence[Any]) -> list[list[int]]:
    """Returns the tokens of some texts, or pairs of texts."""
    return [row.ids for start in range(0, len(rows), BATCH) for row in tokenizer.encode_batch_fast(list(rows[start : start + BATCH]))]


def token_ids(config: Any) -> set[int]:
    """Returns the tokens that a config names: padding, start, end, ..."""
    named = [value for name, value in config.to_dict().items() if name.endswith("_token_id")]
    return {token for value in named for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}


def with_vocabulary(config: Any, kept: Sequence[int]) -> Any:
    """Returns a copy of a config with that many tokens, and the ids that it names renumbered; those of no token stay."""
    changed, new_id = copy.deepcopy(config), {token: number for number, token in enumerate(kept)}
    for name, value in config.to_dict().items():
        if name.endswith("_token_id") and isinstance(value, int | list):
            new = [new_id.get(token, token) for token in value] if isinstance(value, list) else new_id.get(value, value)
            setattr(changed, name, new)
    if hasattr(changed, "vocab_size"):
        changed.vocab_size = len(kept)
    return changed


def closure(document: Mapping[str, Any], used: Iterable[int]) -> set[int]:
    """Returns what has to be kept so that some tokens stay what they are, and no text becomes unknown that was not.

    Args:
        document: The contents of tokenizer.json.
        used: The tokens.
    """
    model, tokens = document["model"], vocabulary(document)
    ids = {token: number for number, token in tokens.items()}
    kept = set(used) | {entry["id"] for entry in document["added_tokens"]} | set(_special_ids(document.get("post_processor")))
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    for token, number in ids.items():
        bare = token.removeprefix(prefix).removesuffix(suffix)
        if len(bare) == 1 or re.fullmatch(r"<0x[0-9A-F]{2}>", token) or token == model.get("unk_token"):
            kept.add(number)
    if model["type"] == "Unigram" and model.get("unk_id") is not None:
        kept.add(model["unk_id"])
    if model["type"] != "BPE":
        return kept
    made: dict[int, list[tuple[int, int]]] = {}
    for first, second in _merges(model):
        made.setdefault(ids[first + second.removeprefix(prefix)], []).append((ids[first], ids[second]))
    waiting = list(kept)
    while waiting:
        for pair in made.get(waiting.pop(), ()):
            waiting += [token for token in pair if token not in kept]
            kept.update(pair)
    return kept


def cut_tokenizer(document: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Returns the contents of the tokenizer.json of a smaller vocabulary.

    Args:
        document: Those of the large one.
        kept: Ids that `closure` returned, ascending; ids of no token are skipped.
    """
    changed, new_id = copy.deepcopy(dict(document)), {token: number for number, token in enumerate(kept)}
    model = changed["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in new_id]
        model["unk_id"] = new_id.get(model.get("unk_id"))
    else:
        model["vocab"] = {token: new_id[number] for token, number in model["vocab"].items() if number in new_id}
    if model["type"] == "BPE":
        prefix, vocab = model.get("continuing_subword_prefix") or "", model["vocab"]
        model["merges"] = [
            [first, second]
            for first, second in _merges(model)
            if first in vocab and second in vocab and first + second.removeprefix(prefix) in vocab
        ]
    changed["added_tokens"] = [{**entry, "id": new_id[entry["id"]]} for entry in changed["added_tokens"] if entry["id"] in new_id]
    if changed.get("padding"):
        changed["padding"]["pad_id"] = new_id[changed["padding"]["pad_id"]]
    _renumber(changed.get("post_processor"), new_id)
    return changed


def write_tokenizer(source: Path, cut: Cut, out: Path) -> None:
    """Writes the files of a tokenizer that was cut, and removes those that hold old ids.

    Args:
        source: Checkpoint with the tokenizer that was cut.
        cut: What came of it.
        out: Checkpoint that gets the new one.
    """
    for name in STALE:
        (out / name).unlink(missing_ok=True)
    write_json(out / "tokenizer.json", cut.document)
    file, new_id = source / "tokenizer_config.json", {token: number for number, token in enumerate(cut.kept)}
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(settings.get("added_tokens_decoder"), dict):
            added = {int(token): entry for token, entry in settings["added_tokens_decoder"].items()}
            settings["added_tokens_decoder"] = {str(new_id[token]): entry for token, entry in added.items() if token in new_id}
        write_json(out / "tokenizer_config.json", settings)


def vocabulary(document: Mapping[str, Any]) -> dict[int, str]:
    """Returns the tokens of the model of a tokenizer by id."""
    entries = document["model"]["vocab"]
    if isinstance(entries, Mapping):
        return {number: token for token, number in entries.items()}
    return {number: token for number, (token, _) in enumerate(entries)}


def _merges(model: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields the pairs that BPE merges; older files write them as one string."""
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        yield first, second


def _special_ids(post_processor: Any) -> Iterable[int]:
    """Yields the ids that a post-processor adds to a text."""
    for holder, place in _id_places(post_processor):
        yield from holder[place] if isinstance(holder[place], list) else [holder[place]]


def _renumber(post_processor: Any, new_id: Mapping[int, int]) -> None:
    for holder, place in _id_places(post_processor):
        old = holder[place]
        holder[place] = [new_id[token] for token in old] if isinstance(old, list) else new_id[old]


def _id_places(post_processor: Any) -> Iterable[tuple[Any, Any]]:
    """Yields where a post-processor holds ids: a list or map, and the place in it."""
    if not isinstance(post_processor, dict):
        return
    for part in post_processor.get("processors", []):
        yield from _id_places(part)
    for entry in (post_processor.get("special_tokens") or {}).values() if isinstance(post_processor.get("special_tokens"), dict) else ():
        yield entry, "ids"
    for name in ("sep", "cls"):
        if isinstance(post_processor.get(name), list):
            yield post_processor[name], 1


def _unknown(tokenizer: Tokenizer) -> int | None:
    """Returns the unknown token; None where there is none."""
    model = json.loads(tokenizer.to_str())["model"]
    unknown: int | None = model.get("unk_id") if model["type"] == "Unigram" else tokenizer.token_to_id(model.get("unk_token") or "")
    return unknown
