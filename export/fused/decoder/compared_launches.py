"""Steps of a decoder, recorded with plain and with dependent launches: what `export.fused.launches.fastest` times.

    answers    logits of `BATCHES` batches of prompts and of `STEPS` steps behind each, before and after the times are taken: the first
               batch has prompts of the whole length, the others of any
    times      of a recorded step, behind prompts of the whole length

Shape suffixes: m texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from export.fused.decoder.cache import SLOTS
from export.fused.decoder.forward import Decoder
from export.fused.decoder.plan import DecoderPlan
from export.fused.decoder.texts import Texts
from export.fused.graphs import Record
from export.fused.launches import KINDS, Launches, Work, differing
from export.fused.layers import Tiles
from export.kernels.launch import cdiv

BATCHES, STEPS = 5, 4


class ComparedSteps:
    """Steps of so many texts.

    Args:
        decoders: A decoder for each kind of launches.
        count: Texts.
        length: Tokens of the longest prompt.
        record: Records a step.
    """

    def __init__(self, decoders: Mapping[str, Decoder], count: int, length: int, record: Record) -> None:
        self.shape, self._count, self._length = f"a step of {count} behind {length}", count, length
        self._words, longest = decoders["plain"].limits.words, length + STEPS
        tokens = count * cdiv(longest, SLOTS) * SLOTS
        self._texts = {kind: Texts(decoder, tokens, record, longest=longest) for kind, decoder in decoders.items()}

    def differs(self) -> str | None:
        """Returns which answers differ, in words; None where all bits are equal. The texts of the first batch stay."""
        for number in reversed(range(BATCHES)):
            difference = differing(*(self._answers(self._texts[kind], number) for kind in KINDS))
            if difference is not None:
                return difference
        return None

    def works(self) -> Mapping[str, Work]:
        """Returns what runs the recording of the last step of each kind."""
        return {kind: texts.recording.replay for kind, texts in self._texts.items()}

    def _answers(self, texts: Texts, number: int) -> Tensor:
        """Returns the logits behind the prompts of a batch and behind each step, float32 [1 + STEPS, m, V]."""
        random = np.random.default_rng(number)
        lengths = random.integers(1, self._length + 1, self._count) if number else [self._length] * self._count
        prompts = [random.integers(0, self._words, length) for length in lengths]
        tokens = random.integers(0, self._words, (STEPS, self._count))
        texts.clear()
        return torch.from_numpy(np.stack([texts.read(prompts), *(texts.step(row) for row in tokens)]))


def passes(
    plan: DecoderPlan, device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int]], tiles: Tiles | None, record: Record
) -> Iterator[ComparedSteps]:
    """Yields the steps of each shape; prompts leave room for the steps.

    Args:
        plan: A decoder.
        device: Where.
        dtype: Type of what is float between the layers.
        shapes: Texts and tokens of a prompt.
        tiles: Chooses the tiles of dense GEMMs.
        record: Records a step.
    """
    plan = plan.to(device)
    decoders = {kind: Decoder(replace(plan, launches=Launches(kind == "dependent")), device, dtype, tiles) for kind in KINDS}
    for count, length in shapes:
        yield ComparedSteps(decoders, count, max(1, min(length, plan.longest - STEPS)), record)
