"""Models that read the text that is spoken from frames: stock classes with a CTC head, such as Wav2Vec2ForCTC, and their vocabularies.

    logits_BFV of padding are PADDING_LOGIT, and 0 for the blank: it is certain there, and adds nothing to a text

A vocabulary is a tuple of tokens by id. The blank, the token for unknown characters and the one between words are called `<pad>`, `<unk>`
and `|`, whatever the files of a model call them, so that the names are enough to read logits. Checkpoints get a
vocab.json and a tokenizer_config.json with these names, which `Wav2Vec2CTCTokenizer` of Transformers reads.

Not supported: vocabularies for several languages in one file, words or phonemes as tokens, language models besides the head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import read_json
from foundation.core.errors import InputError
from foundation.core.shown import shown
from foundation.models.heads.reader import PADDING_LOGIT
from foundation.models.library import in_place_of
from foundation.standalone.response import BLANK, DELIMITER, UNKNOWN

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENIZER = "Wav2Vec2CTCTokenizer"
VOCABULARY, ADDED, SETTINGS, CONFIG = "vocab.json", "added_tokens.json", "tokenizer_config.json", "config.json"
DEFAULT_SIZE = 32
"""Outputs of a head whose config does not say, as in Transformers, which leaves out what is its default."""
ROLES = {"pad_token": BLANK, "unk_token": UNKNOWN, "word_delimiter_token": DELIMITER}
"""Keys of tokenizer_config.json, with what we call these tokens: the defaults of Transformers, too."""


@functools.cache
def transcriber_class(stock: Any) -> Any:
    """Returns a subclass of a stock class whose logits predict the blank at padding; it keeps name and weights.

    It has to be a class because Transformers calls the constructor itself when it loads weights.
    """

    class Transcriber(stock):  # type: ignore[misc]
        def forward(self, input_values: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
            found = super().forward(input_values=input_values, attention_mask=attention_mask, **kwargs)
            if attention_mask is not None:
                frames_B = self._get_feat_extract_output_lengths(attention_mask.sum(dim=-1))
                place_F = torch.arange(found.logits.shape[1], device=found.logits.device)
                token_V = torch.arange(found.logits.shape[2], device=found.logits.device)
                certain_V = (token_V != self.config.pad_token_id).to(found.logits.dtype) * PADDING_LOGIT
                found.logits = torch.where((place_F < frames_B[:, None])[..., None], found.logits, certain_V)
            return found

    return in_place_of(stock, Transcriber)


def strides_of(config: PreTrainedConfig) -> list[list[int]]:
    """Returns kernel and stride of each step from samples to frames, the steps of an adapter after the encoder too."""
    adapter = [[1, config.adapter_stride]] * config.num_adapter_layers if getattr(config, "add_adapter", False) else []
    return [[*pair] for pair in zip(config.conv_kernel, config.conv_stride, strict=True)] + adapter


def vocabulary_of_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the vocabulary of all characters of some texts, in the order of Unicode."""
    return (BLANK, UNKNOWN, DELIMITER, *sorted(set().union(*map(set, texts)) - {" "}))


def vocabulary_of(folder: Path, key: str) -> tuple[str, ...]:
    """Returns the vocabulary of a model folder.

    Args:
        folder: With vocab.json, and tokenizer_config.json and added_tokens.json if there are any.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: A file cannot be read, or belongs to another kind of tokenizer; the message says what is allowed.
    """
    settings = read_json(folder / SETTINGS, key) if (folder / SETTINGS).exists() else {}
    kind = settings.get("tokenizer_class", TOKENIZER)
    if kind != TOKENIZER:
        raise InputError(key, f"{folder / SETTINGS}: tokenizer_class {shown(kind)} given", f"{TOKENIZER} is allowed")
    size = read_json(folder / CONFIG, key).get("vocab_size", DEFAULT_SIZE)
    tokens = {number: token for number, token in _tokens(folder, settings, key) if not isinstance(size, int) or number < size}
    names = [tokens.get(number) for number in range(len(tokens))]
    if not names or None in names or len(set(names)) < len(names):
        raise InputError(
            key, f"{folder / VOCABULARY}: {len(names)} tokens need the ids 0 to {len(names) - 1}, each once", remedy="save it again"
        )
    for role, ours in ROLES.items():
        theirs = settings.get(role, ours)
        theirs = theirs.get("content") if isinstance(theirs, dict) else theirs
        if theirs != ours and theirs in names and ours in names:
            raise InputError(
                key, f"{folder / SETTINGS}: {role} {shown(theirs)} given, and the vocabulary has {ours} too", remedy="rename one"
            )
        names = [ours if name == theirs else name for name in names]
    missing = [token for token in (BLANK, DELIMITER) if token not in names]
    if missing:
        raise InputError(
            key, f"{folder / VOCABULARY}: no token {missing[0]}", remedy=f"name it in {SETTINGS}: pad_token, word_delimiter_token"
        )
    if settings.get("do_lower_case"):
        names = [str(name).lower() if len(str(name)) == 1 else name for name in names]
    return tuple(map(str, names))


def _tokens(folder: Path, settings: dict[str, Any], key: str) -> Iterator[tuple[int, str]]:
    files = [read_json(folder / VOCABULARY, key)]
    files += [read_json(folder / ADDED, key)] if (folder / ADDED).exists() else []
    for found in files:
        for token, number in found.items():
            if isinstance(number, bool) or not isinstance(number, int):
                raise InputError(key, f"{folder}: {shown(token)}: {shown(number)} given as the id of a token", "one vocabulary is allowed")
            yield number, token
    decoder = settings.get("added_tokens_decoder")
    for number, told in decoder.items() if isinstance(decoder, dict) else ():
        if str(number).isdigit() and isinstance(told, dict) and isinstance(told.get("content"), str):
            yield int(number), told["content"]


def write_vocabulary(out: Path, labels: tuple[str, ...]) -> None:
    """Writes vocab.json and tokenizer_config.json of a checkpoint."""
    write_json(out / VOCABULARY, {name: token for token, name in enumerate(labels)})
    ends = {role: token if token in labels else None for role, token in (("bos_token", "<s>"), ("eos_token", "</s>"))}
    settings = {"tokenizer_class": TOKENIZER, **ROLES, **ends, "do_lower_case": False, "clean_up_tokenization_spaces": False}
    write_json(out / SETTINGS, settings)
