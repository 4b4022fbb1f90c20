"""Writes texts with a decoder and its cache of pages: prompts are read together, then every step adds a token to each text.

    steps     on a GPU a step is recorded as a CUDA graph for each power of two of texts, and filled up to it with texts of nobody

Texts come and go as they like (continuous batching): a text that is dropped gives its pages back, and the others keep theirs.

Shape suffixes: B texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export.fused.decoder.cache import SLOTS, Cache, New, Text
from export.fused.decoder.forward import Decoder
from export.fused.graphs import Record, Recording
from export.fused.rows import Rows
from export.kernels.launch import power_of_two

Logits = NDArray[np.float32]


class Steps:
    """Steps of a decoder, recorded by the number of texts.

    Args:
        decoder: The decoder.
        cache: Keys and values.
        record: Records a pass; None: steps run kernel by kernel.
    """

    def __init__(self, decoder: Decoder, cache: Cache, record: Record | None) -> None:
        self._decoder, self._cache, self._record = decoder, cache, record
        self._recorded: dict[int, tuple[New, Recording]] = {}

    def __call__(self, new: New) -> Tensor:
        """Returns the logits behind one new token of each text, float32 `[B, V]`, on the device, until the next call.

        Args:
            new: The tokens, on the CPU.
        """
        count, device = len(new.word), self._decoder.device
        if self._record is None:
            return self._decoder.step(new.to(device), self._cache)
        size = power_of_two(count)
        given = new.filled(size)
        if size not in self._recorded:
            kept = given.to(device)
            self._recorded[size] = kept, self._record(lambda: self._decoder.step(kept, self._cache))
        inputs, recording = self._recorded[size]
        for name, tensor in given.tensors.items():
            getattr(inputs, name).copy_(tensor, non_blocking=True)
        return recording.replay()[:count]

    def recording(self, count: int) -> Recording:
        """Returns the recording that the last step of so many texts has run; only where steps are recorded."""
        return self._recorded[power_of_two(count)][1]


class Texts:
    """Texts that are written together.

    Args:
        decoder: The decoder.
        tokens: Tokens that all texts together have room for.
        record: Records a step; None: steps run kernel by kernel.
        slots: Tokens of a page.
        order: See `Cache`.
        longest: See `Cache`.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokens: int,
        record: Record | None = None,
        slots: int = SLOTS,
        order: Sequence[int] | None = None,
        longest: int | None = None,
    ) -> None:
        self._decoder = decoder
        self.cache = Cache(decoder.plan, decoder.device, decoder.dtype, tokens, slots, order, longest)
        self._steps = Steps(decoder, self.cache, record)
        self._texts: list[Text] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [text.length for text in self._texts]

    def read(self, prompts: Sequence[Sequence[int] | NDArray[np.integer]]) -> Logits:
        """Adds texts after the others; returns the logits of the next token of each, float32 [m, V].

        Args:
            prompts: Token ids, at least one each.

        Raises:
            InputError: A text is too long, or there is no room for all.
        """
        texts, ids = [Text() for _ in prompts], [[int(token) for token in prompt] for prompt in prompts]
        with torch.inference_mode():
            new = self.cache.extended(texts, ids)
            start = torch.tensor([0, *np.cumsum([len(one) for one in ids])], dtype=torch.int32)
            rows = Rows(new.word, torch.zeros_like(new.word), new.position, start, start[:-1].long())
            logits: Logits = self._decoder.read(rows.to(self._decoder.device), new.to(self._decoder.device), self.cache).cpu().numpy()
        self._texts += texts
        return logits

    def step(self, tokens: Sequence[int] | NDArray[np.integer]) -> Logits:
        """Appends one token to each text; returns the logits of the next ones, float32 [B, V].

        Raises:
            InputError: A text is too long, or there is no room for all.
        """
        with torch.inference_mode():
            new = self.cache.extended(self._texts, [[int(token)] for token in tokens])
            logits: Logits = self._steps(new).cpu().numpy().copy()
        return logits

    @property
    def recording(self) -> Recording:
        """The recording that the last step has run; only where steps are recorded. Another run of it writes the same to the cache."""
        return self._steps.recording(len(self._texts))

    def keep(self, order: Sequence[int]) -> None:
        """Keeps the texts with these numbers, in this order, and drops the others; each number once."""
        kept = [self._texts[number] for number in order]
        for number in set(range(len(self._texts))) - set(order):
            self.cache.drop(self._texts[number])
        self._texts = kept

    def clear(self) -> None:
        """Drops every text, also those that an error has stopped halfway; recordings stay."""
        self._texts = []
        self.cache.clear()


def greedy(texts: Texts, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Returns the most likely tokens behind each prompt, as many of each; the texts stay in the cache without their last token."""
    answers: list[list[int]] = [[] for _ in prompts]
    logits = texts.read(prompts)
    for number in range(tokens):
        chosen = logits.argmax(axis=1).tolist()
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)
        if number + 1 < tokens:
            logits = texts.step(chosen)
    return answers
