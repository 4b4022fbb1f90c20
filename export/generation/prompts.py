"""Prompts for engines that generate (starts of blocks, whole sources or questions), and torch's greedy answers to compare with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.cache_utils import DynamicCache

from export.choices import Generation
from export.generation.missing_keys import missing_keys
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
BATCH_SIZE = 32
MOST_PADDING = 1024
"""Tokens that may fill up the prompts of a batch: to read them takes torch less time than to write the answers of another batch."""
LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Rotary embeddings whose angles depend on the length of the longest text of a batch."""
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


def greedy(model: nn.Module, prompts: Prompts, advance: Callable[[int], None] | None = None) -> Tokens:
    """Returns the most likely tokens, one after the other, int32 [n, T].

    The continuation of a block extends past end tokens. An answer to a source or a question ends with one; `ENDED` follows it.

    Args:
        model: A language model of Transformers in eval mode, float or quantized.
        prompts: The prompts.
        advance: Called with the number of tokens that were chosen.
    """
    if prompts.references:
        with dequantized_once(model):
            return filled(answered(model, prompts.rows, 1, prompts.tokens), prompts.tokens)
    answers = np.full((len(prompts.rows), prompts.tokens), ENDED, np.int32)
    ends = answer_tokens(model).ends if prompts.ends else ()
    with torch.inference_mode(), dequantized_once(model):
        for chosen in _batches(prompts.rows, MOST_PADDING if takes_padding(model) else 0):
            found = _continued(model, [prompts.rows[index] for index in chosen], prompts.tokens, ends, advance)
            answers[chosen, : found.shape[1]] = found
    return answers


def takes_padding(model: PreTrainedModel) -> bool:
    """Whether tokens before a prompt that the attention mask hides leave the answer of a decoder unchanged.

    That takes positions and a mask as inputs, nothing but keys and values to remember, and positions that do not depend on the longest text
    of a batch, as those of LongRoPE and of the dynamic NTK scaling do.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    takes_both = inspect.signature(model.forward).parameters.keys() >= {"attention_mask", "position_ids"}
    return takes_both and not kinds & LENGTH_DEPENDENT and missing_keys(config, type(model)) is None


def _batches(rows: Sequence[Tokens], most_padding: int) -> Iterator[list[int]]:
    """Yields the indices of prompts that are answered together, ordered by length.

    Args:
        rows: The prompts, int32 [P] each.
        most_padding: Tokens that may fill up the shorter ones of a batch; 0: all of them are of equal length.
    """
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        padding = sum(len(rows[index]) - len(rows[other]) for other in batch)
        if len(batch) == BATCH_SIZE or padding > most_padding:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _continued(
    model: PreTrainedModel, rows: Sequence[Tokens], tokens: int, ends: Sequence[int], advance: Callable[[int], None] | None
) -> Tokens:
    """Continues prompts; `ENDED` after an end token. A text is reread at the length at which Transformers rereads it.

    Shorter prompts are filled up before their first token, which takes a mask; prompts of equal length take none.
    """
    again, device = read_again_at(model), device_of(model)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    new, more = _filled_up(rows, device)
    whole, chosen = new, list[torch.Tensor]()
    cache = DynamicCache(config=model.config)
    over = torch.zeros_like(new[:, :1], dtype=torch.bool)
    while len(chosen) < tokens and not over.all():
        if chosen and whole.shape[1] == again:
            new, cache = whole, DynamicCache(config=model.config)
        logits = model(input_ids=new, past_key_values=cache, use_cache=True, **last, **more).logits
        new = logits[:, -1:].argmax(dim=-1)
        whole = torch.cat([whole, new], dim=1)
        chosen.append(new.masked_fill(over, ENDED))
        over |= torch.isin(new, torch.tensor(ends, dtype=new.dtype, device=new.device))
        if more:
            more = {
                "attention_mask": nn.functional.pad(more["attention_mask"], (0, 1), value=1),
                "position_ids": more["position_ids"][:, -1:] + 1,
            }
        if advance is not None:
            advance(len(rows))
    if advance is not None and len(chosen) < tokens:  # all have ended
        advance(len(rows) * (tokens - len(chosen)))
    return torch.cat(chosen, dim=1).cpu().numpy().astype(np.int32)


def _filled_up(rows: Sequence[Tokens], device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns prompts as one tensor, int64 [b, P], and the mask and the positions where some of them are shorter, int64 [b, P]."""
    longest = max(map(len, rows))
    ids_bP = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask_bP = torch.zeros_like(ids_bP)
    for ids_P, seen_P, row in zip(ids_bP, mask_bP, rows, strict=True):
        ids_P[longest - len(row) :], seen_P[longest - len(row) :] = torch.from_numpy(row.astype(np.int64)), 1
    ids_bP, mask_bP = ids_bP.to(device), mask_bP.to(device)
    if bool(mask_bP.all()):
        return ids_bP, {}
    return ids_bP, {"attention_mask": mask_bP, "position_ids": (mask_bP.cumsum(dim=1) - 1).clamp(min=0)}
