"""Loads tokenizers, and trains a byte-level BPE tokenizer on the train split.

Text is split into words by GPT-2's pattern, and each word starts as its UTF-8 bytes. The most frequent pair of adjacent tokens is merged
into a new token until there are `vocab_size` tokens (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, section 3.2; on bytes:
section 2.2 of the GPT-2 report). The 256 bytes are tokens themselves, so no text is out of vocabulary. Special tokens come first:

    <|endoftext|>   id 0: separates documents; for tasks with labels it also starts and ends a text and separates the texts of a pair; for
                    text-to-text it ends a text
    <|pad|>         id 1: padding, which is masked; text-generation blocks need none

Training is deterministic: equal texts give equal files. Not supported: other algorithms, normalization.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from foundation.artifacts.artifact import digest, write_json
from foundation.core.config import Config
from foundation.core.errors import InputError
from foundation.models.files import check_tokenizer, find
from foundation.models.inputs.tokenizer_file import from_class, names_of, settings_of, tokenizer_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
BYTES = 256
KEPT = ("padding_side", "truncation_side", "model_max_length", "clean_up_tokenization_spaces", "chat_template")
"""Keys of tokenizer_config.json that a loaded tokenizer takes as they are."""
PIECE = 2**20
"""Characters passed to the tokenizers library at a time, which needs a few hundred bytes per token."""


class TrainTokenizer(Config):
    """A tokenizer to train on the train split."""

    train: Literal["bpe"]
    """Algorithm; bpe: byte-level byte-pair encoding."""
    vocab_size: Annotated[int, Field(ge=BYTES + 2, le=1_000_000)] = 8192
    """Number of tokens: the 256 bytes, the special tokens, and the merged ones."""


@dataclass(frozen=True)
class TrainedTokenizer:
    """A trained tokenizer."""

    text: str
    """Contents of tokenizer.json."""
    pads: bool
    """Whether the tokenizer has a padding token."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return Tokenizer.from_str(self.text)

    @property
    def size(self) -> int:
        """Number of tokens."""
        count: int = self.tokenizer.get_vocab_size()
        return count

    @property
    def ids(self) -> dict[str, int]:
        """Ids of the special tokens, by their keys in a Transformers config."""
        return {"bos_token_id": 0, "eos_token_id": 0, **({"pad_token_id": 1} if self.pads else {})}

    @property
    def digest(self) -> str:
        """sha256 (hex) of the tokenizer."""
        return digest([self.text, self.pads])

    def write(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json in Transformers' format."""
        (folder / "tokenizer.json").write_text(self.text, encoding="utf-8")
        names = dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT) | ({"pad_token": PADDING} if self.pads else {})
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def train_bpe(texts: Iterable[str], vocab_size: int, pads: bool, starts: bool = True) -> TrainedTokenizer:
    """Trains a byte-level BPE tokenizer.

    Args:
        texts: The texts of the train split.
        vocab_size: Number of tokens.
        pads: Whether to add a padding token and mark the ends of texts.
        starts: With `pads`, whether to mark their starts too.

    Raises:
        InputError: The texts do not yield that many different tokens.
    """
    specials = [END_OF_TEXT, PADDING] if pads else [END_OF_TEXT]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise InputError("tokenizer.vocab_size", f"{vocab_size} given", f"the train split yields {found} tokens", "give at most that")
    if pads:
        start = f"{END_OF_TEXT} " if starts else ""
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start}$A {END_OF_TEXT}",
            pair=f"{start}$A {END_OF_TEXT} $B:1 {END_OF_TEXT}:1",
            special_tokens=[(END_OF_TEXT, 0)],
        )
    return TrainedTokenizer(tokenizer.to_str(pretty=True), pads)


def resolve_tokenizer(setting: str | TrainTokenizer | None, trained: TrainedTokenizer | None) -> str | TrainedTokenizer | None:
    """Returns the tokenizer to use: the Hub id or folder in the recipe, or the trained one if the recipe asks for training."""
    if isinstance(setting, TrainTokenizer):
        assert trained is not None, "the data is read, and the tokenizer trained, before anything else"
        return trained
    return setting


def pieces(text: str, size: int = PIECE) -> Iterable[str]:
    """Splits a text into pieces of about `size` characters that end with a line feed; a piece is longer if it has none."""
    start = 0
    while len(text) - start > size:
        cut = text.rfind("\n", start, start + size) + 1 or text.find("\n", start + size) + 1 or len(text)
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def load_tokenizer(tokenizer: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hub id or folder as a Transformers tokenizer, which encodes as tokenizer.json says.

    Its class is the generic one: the class that the folder names may build another tokenizer (`foundation.models.inputs.tokenizer_file`).
    Names of special tokens, chat template, sides and maximum length come from the folder.

    Raises:
        InputError: The tokenizer cannot be loaded, or is not a fast one.
    """
    from transformers import PreTrainedTokenizerFast

    folder = find(tokenizer, "tokenizer", weights=False)
    check_tokenizer(folder, "tokenizer")
    engine = tokenizer_file(folder).tokenizer()
    settings = {name: value for name, value in settings_of(folder).items() if name in KEPT and value is not None}
    if (template := folder / "chat_template.jinja").is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    loaded = PreTrainedTokenizerFast(tokenizer_object=engine, **settings)
    for name, tokens in names_of(folder, engine).items():  # set later: the constructor adds tokens to the vocabulary
        setattr(loaded, name, tokens)
    return loaded


def target_engine(tokenizer: str) -> Tokenizer:
    """Returns the tokenizer of the texts that an encoder-decoder writes: as `load_tokenizer`, with the special tokens of targets.

    Tokenizer classes such as mBART's and NLLB's put other language tokens around targets than around sources.

    Raises:
        InputError: See `load_tokenizer`.
    """
    folder = find(tokenizer, "tokenizer", weights=False)
    engine, made = tokenizer_file(folder).tokenizer(), from_class(folder)
    if hasattr(made, "_switch_to_target_mode"):
        made._switch_to_target_mode()
        engine.post_processor = made.backend_tokenizer.post_processor
    return engine
