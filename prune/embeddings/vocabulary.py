"""Vocabulary: remove embedding rows of tokens that the task's texts never use, and cut the tokenizer to match exactly.

    kept   all tokens of the train rows, special and added tokens, tokens that the config names, all single characters and bytes; for BPE
           also the tokens that these are merged from; if positions count from the pad id (RoBERTa), all ids up to it, which fixes it
    id     new id = number of kept ids below the old one, which preserves the order

Exact: a text whose tokens are all kept is split into the same tokens, renumbered. WordPiece takes the longest matching piece, which is
still there and still the longest. BPE applies the same merges in the same order, since every merge it used leads to a kept token and was
kept. Unigram finds the same best path, since all of its pieces remain. To verify this, the train rows are tokenized by both tokenizers.
A text with a removed token is split into smaller pieces; the tokens that become unknown, or vanish in a tokenizer without an unknown
token, are counted on the selection rows (`CutVocabulary.unknown`).

Cutting a vocabulary to a task's data: Abdaoui et al. 2020, https://arxiv.org/abs/2010.05609. Not supported: text-generation, whose rows
consist of token ids.
"""

from __future__ import annotations

import copy
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict

from tokenizers import Encoding, Tokenizer

from foundation.artifacts.artifact import write_json
from foundation.core.errors import InputError
from foundation.core.json_value import Json
from foundation.models.architecture.axes import axes_of
from foundation.models.architecture.shapes import on_meta
from foundation.standalone.preprocess import Preprocessor, Row

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STALE = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json")
"""Files with the old ids; tokenizer.json holds the same information."""
KINDS = ("WordPiece", "BPE", "Unigram", "WordLevel")
BATCH = 1024


class Model(TypedDict, total=False):
    """The model of a tokenizer, as far as it is read here."""

    type: Required[str]
    vocab: Required[dict[str, int] | list[tuple[str, float]]]
    """Ids of tokens; of Unigram the tokens and their scores."""
    merges: Sequence[str | Sequence[str]]
    """Pairs of BPE; older files write them as one string."""
    unk_token: str | None
    unk_id: int | None
    continuing_subword_prefix: str | None
    end_of_word_suffix: str | None


class AddedToken(TypedDict):
    """A token besides those of the model."""

    id: int


class Padding(TypedDict):
    """How rows are padded."""

    pad_id: int


class Document(TypedDict, total=False):
    """The contents of tokenizer.json, as far as they are read here."""

    model: Required[Model]
    added_tokens: Required[list[AddedToken]]
    padding: Padding | None
    post_processor: Json


@dataclass(frozen=True)
class CutVocabulary:
    """A cut vocabulary and its tokenizer."""

    kept: Sequence[int]
    """Old ids, ascending."""
    document: Document
    """Contents of the new tokenizer.json."""
    unknown: float
    """Share of the tokens of the selection rows whose text becomes unknown or is dropped, in whole or in part."""
    changed: float
    """Share of the selection rows that are split into different tokens."""

    def figures(self) -> dict[str, object]:
        """Returns the figures for the manifest, JSON types."""
        return {"vocabulary": len(self.kept), "unknown": self.unknown, "changed_rows": self.changed}


def cut_vocabulary(
    folder: Path, config: PreTrainedConfig, prepared: Preprocessor, train: Sequence[Row], selection: Sequence[Row], key: str
) -> CutVocabulary:
    """Chooses the tokens to keep and cuts the tokenizer.

    Args:
        folder: The checkpoint; only its tokenizer.json is read.
        config: Its Transformers config.
        prepared: The model's preprocessor, whose tokenizer is cut.
        train: Rows whose tokens are kept.
        selection: Rows to measure lost tokens on.
        key: Key path of the stage, for messages.

    Raises:
        InputError: This kind of tokenizer cannot be cut.
    """
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    kind = document["model"].get("type")
    if kind not in KINDS:
        raise InputError(f"{key}.granularity", "vocabulary given", f"a tokenizer of type {kind} cannot be cut", "leave it out")
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
        raise InputError(f"{key}.granularity", "vocabulary given", f"this {kind} tokenizer cannot be cut exactly", "leave it out")
    before, after = ids_of(prepared.tokenizer, selection), ids_of(tokenizer, selection)
    changed = sum(row != [new_id.get(token) for token in its] for row, its in zip(after, before, strict=True))
    tokenizer.no_truncation()  # rows become longer in smaller pieces: text beyond the maximum length does not count as lost
    lost = lost_tokens(prepared.tokenizer, tokenizer, [row for row in selection if isinstance(row, str | tuple)])
    return CutVocabulary(kept, cut, lost / max(1, sum(map(len, before))), changed / max(1, len(after)))


def counts_from_pad(config: PreTrainedConfig, key: str) -> bool:
    """Returns whether a model numbers positions from its pad id on; its position embedding then has a padding index, too.

    Args:
        config: A Transformers config.
        key: Key path of the stage, for messages.
    """
    model = on_meta(config)
    tokens = {weight.rpartition(".")[0] for weight, _ in axes_of(model, key).vocabulary}
    leaves = {name: module for name, module in model.named_modules() if not any(module.children())}
    return any(getattr(module, "padding_idx", None) is not None for name, module in leaves.items() if name not in tokens)


def lost_tokens(old: Tokenizer, new: Tokenizer, rows: Sequence[str | tuple[str, str]]) -> int:
    """Counts the tokens of some texts that were known and now contain text that is unknown or dropped.

    Args:
        old: The tokenizer before the cut.
        new: The tokenizer after the cut, without truncation.
        rows: Texts, or pairs of texts.
    """
    unknown_before, unknown_after, lost = _unknown(old), _unknown(new), 0
    for start in range(0, len(rows), BATCH):
        some = list(rows[start : start + BATCH])
        for row, before, after in zip(some, old.encode_batch(some), new.encode_batch(some), strict=True):
            texts = row if isinstance(row, tuple) else (row,)
            covered = {place for place, token in _places(after) if token != unknown_after}
            gone = [
                any((text, place) not in covered and _counts(texts[text][place]) for place in range(*span))
                for token, text, span in zip(before.ids, before.sequence_ids, before.offsets, strict=True)
                if text is not None and token != unknown_before
            ]
            lost += sum(gone)
    return lost


def _places(encoding: Encoding) -> Iterable[tuple[tuple[int, int], int]]:
    """Yields every character position that a token covers, as (text of the pair, position), with the token."""
    for token, text, span in zip(encoding.ids, encoding.sequence_ids, encoding.offsets, strict=True):
        if text is not None:
            yield from (((text, place), token) for place in range(*span))


def _counts(character: str) -> bool:
    """Returns whether a character counts as text: not a space, mark or control character, which a tokenizer may strip."""
    return not character.isspace() and unicodedata.category(character)[0] not in "MC"


def ids_of(tokenizer: Tokenizer, rows: Sequence[Row]) -> list[list[int]]:
    """Returns the token ids of texts, or of pairs of texts."""
    return [row.ids for start in range(0, len(rows), BATCH) for row in tokenizer.encode_batch_fast(list(rows[start : start + BATCH]))]


def token_ids(config: PreTrainedConfig) -> set[int]:
    """Returns the token ids that a config names: padding, start, end, ..."""
    named = [value for name, value in config.to_dict().items() if name.endswith("_token_id")]
    return {token for value in named for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}


def with_vocabulary(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """Returns a copy of a config with the smaller vocabulary and the token ids that it names renumbered; ids of no token stay."""
    changed, new_id = copy.deepcopy(config), {token: number for number, token in enumerate(kept)}
    for name, value in config.to_dict().items():
        if name.endswith("_token_id") and isinstance(value, int | list):
            new = [new_id.get(token, token) for token in value] if isinstance(value, list) else new_id.get(value, value)
            setattr(changed, name, new)
    if hasattr(changed, "vocab_size"):
        changed.vocab_size = len(kept)
    return changed


def closure(document: Document, used: Iterable[int]) -> set[int]:
    """Returns the tokens to keep so that the used tokens remain reachable, and no text becomes unknown that could be spelled out before.

    Args:
        document: Contents of tokenizer.json.
        used: Ids of the used tokens.
    """
    model, tokens = document["model"], vocabulary(document)
    ids = {token: number for number, token in tokens.items()}
    kept = set(used) | {entry["id"] for entry in document["added_tokens"]} | set(_special_ids(document.get("post_processor")))
    prefix, suffix = _text(model.get("continuing_subword_prefix")), _text(model.get("end_of_word_suffix"))
    for token, number in ids.items():
        bare = token.removeprefix(prefix).removesuffix(suffix)
        if len(bare) == 1 or re.fullmatch(r"<0x[0-9A-F]{2}>", token) or token == model.get("unk_token"):
            kept.add(number)
    if model["type"] == "Unigram" and (unknown := model.get("unk_id")) is not None:
        kept.add(unknown)
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


def cut_tokenizer(document: Document, kept: Sequence[int]) -> Document:
    """Returns the contents of tokenizer.json for the smaller vocabulary.

    Args:
        document: Contents of tokenizer.json for the large vocabulary.
        kept: Ids that `closure` returned, ascending; ids of no token are skipped.
    """
    changed, new_id = copy.deepcopy(document), {token: number for number, token in enumerate(kept)}
    model, old = changed["model"], changed["model"]["vocab"]
    if isinstance(old, list):  # Unigram
        unknown = model.get("unk_id")
        model["vocab"] = [entry for number, entry in enumerate(old) if number in new_id]
        model["unk_id"] = None if unknown is None else new_id.get(unknown)
    else:
        model["vocab"] = {token: new_id[number] for token, number in old.items() if number in new_id}
    if model["type"] == "BPE":
        prefix, vocab = _text(model.get("continuing_subword_prefix")), model["vocab"]
        model["merges"] = [
            [first, second]
            for first, second in _merges(model)
            if first in vocab and second in vocab and first + second.removeprefix(prefix) in vocab
        ]
    changed["added_tokens"] = [{**entry, "id": new_id[entry["id"]]} for entry in changed["added_tokens"] if entry["id"] in new_id]
    if padding := changed.get("padding"):
        padding["pad_id"] = new_id[padding["pad_id"]]
    _renumber(changed.get("post_processor"), new_id)
    return changed


def write_tokenizer(source: Path, cut: CutVocabulary, out: Path) -> None:
    """Writes the files of a cut tokenizer, and removes those that hold old ids.

    Args:
        source: Checkpoint with the old tokenizer.
        cut: The cut vocabulary.
        out: Checkpoint to write the new tokenizer to.
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


def vocabulary(document: Document) -> dict[int, str]:
    """Returns the tokens of a tokenizer's model by id."""
    entries = document["model"]["vocab"]
    if isinstance(entries, dict):
        return {number: token for token, number in entries.items()}
    return {number: token for number, (token, _) in enumerate(entries)}


def _merges(model: Model) -> Iterable[tuple[str, str]]:
    """Yields the pairs that BPE merges; older files write them as one string."""
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        yield first, second


def _special_ids(post_processor: Any) -> Iterable[int]:
    """Yields the token ids that a post-processor adds to a text."""
    for holder, place in _id_places(post_processor):
        yield from holder[place] if isinstance(holder[place], list) else [holder[place]]


def _renumber(post_processor: Any, new_id: Mapping[int, int]) -> None:
    for holder, place in _id_places(post_processor):
        old = holder[place]
        holder[place] = [new_id[token] for token in old] if isinstance(old, list) else new_id[old]


def _id_places(post_processor: Any) -> Iterable[tuple[Any, Any]]:
    """Yields the places where a post-processor holds ids, as (list or map, index or key)."""
    if not isinstance(post_processor, dict):
        return
    for part in post_processor.get("processors", []):
        yield from _id_places(part)
    special = post_processor.get("special_tokens")
    for entry in special.values() if isinstance(special, dict) else ():
        yield entry, "ids"
    for name in ("sep", "cls"):
        if isinstance(post_processor.get(name), list):
            yield post_processor[name], 1


def _unknown(tokenizer: Tokenizer) -> int | None:
    """Returns the id of the unknown token, or None."""
    model: Model = json.loads(tokenizer.to_str())["model"]
    unknown: int | None = model.get("unk_id") if model["type"] == "Unigram" else tokenizer.token_to_id(_text(model.get("unk_token")))
    return unknown


def _text(value: str | None) -> str:
    """Returns a setting of a tokenizer, which may be null."""
    return "" if value is None else value
