"""Prompts for engines that generate (starts of blocks, whole sources or questions), and torch's greedy answers to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.cache_utils import DynamicCache

from export.choices import Generation
from export.generation.questions import prompts_of
from export.generation.rereading import read_again_at
from foundation.core.errors import InputError
from foundation.measure.tokens import ENDED, filled
from foundation.models.encoder_decoder import answered
from foundation.models.folder import Checkpoint
from foundation.models.forward import device_of
from foundation.models.generation import answer_tokens
from foundation.schemes.weight_only import dequantized_once
from foundation.standalone.preprocess import Row, TokenPair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT_TOKENS = 32
"""Tokens of a prompt: a quarter of a usual block."""
PART_TOKENS = 256
"""Tokens of a prompt that continuous batching reads in one step."""
MOST_LONG = 2048
"""Tokens of the longest prompt: torch has to answer it too."""
BEYOND = 44
"""Tokens by which a long prompt exceeds the length of one step, or of a switch."""
LONG_PROMPTS = 4
"""Number of long prompts: enough that an engine does not fail all of them by chance."""
BATCH_SIZE = 16
Tokens = NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True)
class Prompts:
    """Prompts, and how long the answers may be."""

    rows: tuple[Tokens, ...]
    """Token ids, int32 [P] each: starts of blocks of equal length, whole sources, or questions."""
    tokens: int
    """T, most tokens of an answer."""
    references: tuple[Tokens, ...] = ()
    """For sources the targets, int32 [length] each."""
    questions: bool = False
    """Whether they are questions."""
    long: tuple[int, ...] = ()
    """Indices of prompts that are too long to be read in one step."""

    @classmethod
    def of_rows(cls, rows: Sequence[Row], settings: Generation, max_length: int) -> Prompts:
        """Takes the starts of evenly spaced blocks, or the sources of evenly spaced pairs.

        Args:
            rows: Blocks of token ids, int32 [L] each, or pairs.
            settings: How many, and how long the answers may be.
            max_length: Most tokens that the model reads.

        Raises:
            InputError: No block is long enough.
        """
        pairs = _spread([row for row in rows if isinstance(row, TokenPair)], settings.prompts)
        if pairs:
            tokens = min(settings.tokens, max_length - 1)
            return cls(tuple(pair.source for pair in pairs), tokens, tuple(pair.target for pair in pairs))
        length = min(PROMPT_TOKENS, max_length // 2)
        long = [row[:length].astype(np.int32) for row in rows if isinstance(row, np.ndarray) and len(row) >= length]
        if not long or length < 1:
            raise InputError("data", f"no evaluation block of at least {length} tokens to take prompts from", remedy="give longer texts")
        return cls(tuple(_spread(long, settings.prompts)), min(settings.tokens, max_length - length))

    @classmethod
    def of_questions(cls, questions: Sequence[str], settings: Generation, checkpoint: Checkpoint, longest: int | None) -> Prompts:
        """Takes evenly spaced questions.

        Args:
            questions: The texts.
            settings: How many, and how long the answers may be.
            checkpoint: Folder with the tokenizer.
            longest: Most tokens that the model reads; None: any number.

        Raises:
            InputError: See `prompts_of`.
        """
        chosen = tuple(_spread(questions, settings.prompts))
        return cls(tuple(prompts_of(checkpoint, chosen, settings.tokens, longest)), settings.tokens, questions=True)

    def mixed(self, rows: Sequence[Row], longest: int | None, switch: int | None) -> Prompts:
        """Returns prompts of several lengths in place of starts of blocks: shorter ones, and long ones between them.

        Prompts that are read at once differ in length, and a long one is read in parts. With equal lengths an engine could mix up texts
        unnoticed.

        Args:
            rows: Blocks of token ids, int32 [L] each.
            longest: Most tokens that the model reads; None: any number.
            switch: Text length (tokens) from which on the model uses other position embeddings; None: there is no such length.
        """
        short = [row[: max(1, len(row) * (4 - place % 4) // 4)] for place, row in enumerate(self.rows)]
        text = np.concatenate([row for row in rows if isinstance(row, np.ndarray)]).astype(np.int32)
        most = min(MOST_LONG, len(text), (longest or MOST_LONG + self.tokens) - self.tokens)
        wanted = [size for length in (PART_TOKENS, switch or 0) if length and (size := length + BEYOND) <= most]
        sizes = [wanted[place % len(wanted)] - place for place in range(LONG_PROMPTS)] if wanted else []
        starts = np.linspace(0, len(text) - max(sizes, default=0), LONG_PROMPTS).astype(int)
        long = [text[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return Prompts((*short[:1], *long, *short[1:]), self.tokens, long=tuple(range(1, 1 + len(long))))

    @property
    def ends(self) -> bool:
        """Whether an end token ends an answer; the continuation of a block extends to its last token."""
        return self.questions or bool(self.references)


def _spread(rows: Sequence[T], count: int) -> list[T]:
    """Returns up to `count` evenly spaced rows."""
    return [rows[index] for index in np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64))]


def greedy(model: nn.Module, prompts: Prompts) -> Tokens:
    """Returns the most likely tokens, one after the other, int32 [n, T].

    The continuation of a block extends past end tokens. An answer to a source or a question ends with one; `ENDED` follows it.

    Args:
        model: A language model of Transformers in eval mode, float or quantized.
        prompts: The prompts.
    """
    if prompts.references:
        with dequantized_once(model):
            return filled(answered(model, prompts.rows, 1, prompts.tokens), prompts.tokens)
    answers = np.full((len(prompts.rows), prompts.tokens), ENDED, np.int32)
    ends = answer_tokens(model).ends if prompts.ends else ()
    with torch.inference_mode(), dequantized_once(model):
        for chosen in _batches(prompts.rows):
            found = _continued(model, [prompts.rows[index] for index in chosen], prompts.tokens, ends)
            answers[chosen, : found.shape[1]] = found
    return answers


def _batches(rows: Sequence[Tokens]) -> Iterator[list[int]]:
    """Yields the indices of prompts of equal length, at most `BATCH_SIZE` at once: padding would change the prompt."""
    for length in sorted({len(row) for row in rows}):
        alike = [index for index, row in enumerate(rows) if len(row) == length]
        yield from (alike[start : start + BATCH_SIZE] for start in range(0, len(alike), BATCH_SIZE))


def _continued(model: PreTrainedModel, rows: Sequence[Tokens], tokens: int, ends: Sequence[int]) -> Tokens:
    """Continues prompts of equal length until all have ended; `ENDED` after an end token. A text is reread at the length at which
    Transformers rereads it."""
    again = read_again_at(model)
    new = whole = torch.from_numpy(np.stack(rows).astype(np.int64)).to(device_of(model))
    chosen: list[torch.Tensor] = []
    cache = DynamicCache(config=model.config)
    over = torch.zeros_like(new[:, :1], dtype=torch.bool)
    while len(chosen) < tokens and not over.all():
        if chosen and whole.shape[1] == again:
            new, cache = whole, DynamicCache(config=model.config)
        logits = model(input_ids=new, past_key_values=cache, use_cache=True).logits
        new = logits[:, -1:].argmax(dim=-1)
        whole = torch.cat([whole, new], dim=1)
        chosen.append(new.masked_fill(over, ENDED))
        over |= torch.isin(new, torch.tensor(ends, dtype=new.dtype, device=new.device))
    return torch.cat(chosen, dim=1).cpu().numpy().astype(np.int32)
