"""A tokenizer that the recipe trains: byte-level BPE, on the train split alone.

Text is cut into words by GPT-2's pattern, a word starts as its UTF-8 bytes, and the pair of neighbours that occurs most often is merged
into a new token until there are `vocab_size` of them (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, section 3.2; on bytes,
section 2.2 of the GPT-2 report). 256 tokens are the bytes themselves, so no text is unknown. Special tokens come first:

    <|endoftext|>   id 0: stands between documents; for the tasks with labels also at both ends of a text and between those of a pair
    <|pad|>         id 1, for the tasks with labels: padding, which those mask; blocks of text-generation need none

Training is deterministic: equal texts give equal files. Left out: other algorithms, and normalization.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from compress.artifacts.artifact import digest, write_json
from compress.core.config import Config
from compress.core.errors import InputError
from compress.models.files import check_tokenizer, find
from compress.models.library import REFUSED, one_line, quiet

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
BYTES = 256
PIECE = 2**20
"""Characters that are given to the tokenizers library at once: it keeps some hundred bytes for each token."""


class TrainTokenizer(Config):
    """A tokenizer that is trained on the train split."""

    train: Literal["bpe"]
    """bpe: merge the most frequent pairs of bytes, and of what they became."""
    vocab_size: Annotated[int, Field(ge=BYTES + 2, le=1_000_000)] = 8192
    """Number of tokens: the 256 bytes, the special ones, and what was merged."""


@dataclass(frozen=True)
class TrainedTokenizer:
    """What training gave."""

    text: str
    """The contents of tokenizer.json."""
    pads: bool
    """Whether it has a padding token."""

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
        """Ids of the special tokens by the names that a Transformers config has for them."""
        return {"bos_token_id": 0, "eos_token_id": 0, **({"pad_token_id": 1} if self.pads else {})}

    @property
    def digest(self) -> str:
        """sha256 (hex) of what `write` writes."""
        return digest([self.text, self.pads])

    def write(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as Transformers reads them."""
        (folder / "tokenizer.json").write_text(self.text, encoding="utf-8")
        names = dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT) | ({"pad_token": PADDING} if self.pads else {})
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def train_bpe(texts: Iterable[str], vocab_size: int, pads: bool) -> TrainedTokenizer:
    """Trains a byte-level BPE.

    Args:
        texts: The texts of the train split.
        vocab_size: Number of tokens.
        pads: For rows that are padded and marked at their ends (tasks with labels), not for blocks.

    Raises:
        InputError: The texts do not hold that many different tokens.
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
        raise InputError(f"tokenizer.vocab_size: {vocab_size} given; the train split holds {found} different tokens: give at most that")
    if pads:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END_OF_TEXT} $A {END_OF_TEXT}",
            pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B:1 {END_OF_TEXT}:1",
            special_tokens=[(END_OF_TEXT, 0)],
        )
    return TrainedTokenizer(tokenizer.to_str(pretty=True), pads)


def settled(given: str | TrainTokenizer | None, trained: TrainedTokenizer | None) -> str | TrainedTokenizer | None:
    """Returns the tokenizer that a recipe means: the Hub id or folder that it gives, or what was trained where it asks for that."""
    if isinstance(given, TrainTokenizer):
        assert trained is not None, "the data is read, and the tokenizer trained, before anything else"
        return trained
    return given


def pieces(text: str, size: int = PIECE) -> Iterable[str]:
    """Yields a text in pieces of about `size` characters that end with a line feed; one longer where there is none."""
    start = 0
    while len(text) - start > size:
        cut = text.rfind("\n", start, start + size) + 1 or text.find("\n", start + size) + 1 or len(text)
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def load_tokenizer(tokenizer: str) -> Any:
    """Returns the fast tokenizer of Transformers that a Hub id or folder holds.

    Raises:
        InputError: There is none that can be loaded.
    """
    from transformers import AutoTokenizer

    folder = find(tokenizer, "tokenizer", weights=False)
    check_tokenizer(folder, "tokenizer")
    try:
        with quiet():
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ImportError, *REFUSED) as error:
        raise InputError(f"tokenizer: {folder} is no tokenizer ({one_line(error)}); a folder with tokenizer.json is allowed") from error
    if not loaded.is_fast:
        raise InputError(f"tokenizer: {folder} has no fast form; a folder with tokenizer.json is allowed")
    return loaded
