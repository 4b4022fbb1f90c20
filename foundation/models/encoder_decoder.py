"""Answers of an encoder-decoder in torch, which depend only on the model and the search (`foundation.models.generation`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from foundation.models.forward import device_of
from foundation.models.generation import answer_tokens, generate
from foundation.models.library import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH_SIZE = 64
Ids = NDArray[np.int32]


def answered(model: PreTrainedModel, sources: Sequence[Ids], beams: int, tokens: int) -> list[Ids]:
    """Returns the answer to each source, int32 [length], with its end token unless it is cut at `tokens`.

    Args:
        model: An encoder-decoder of Transformers in evaluation mode.
        sources: Token ids, int32 [length] each.
        beams: Beams of the search.
        tokens: Most tokens of an answer.
    """
    device, answers = device_of(model), [np.zeros(0, np.int32)] * len(sources)
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    ends = answer_tokens(model).ends
    for start in range(0, len(order), BATCH_SIZE):
        chosen = order[start : start + BATCH_SIZE]
        lengths = torch.tensor([len(sources[index]) for index in chosen])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.zeros_like(mask)
        ids[mask.bool()] = torch.from_numpy(np.concatenate([sources[index] for index in chosen]).astype(np.int64))
        settings = {"max_new_tokens": tokens, "num_beams": beams}
        with torch.no_grad(), quiet():
            found = generate(model, ends, settings, input_ids=ids.to(device), attention_mask=mask.to(device))
        for index, row in zip(chosen, found[:, 1:].cpu().numpy().astype(np.int32), strict=True):
            stop = next((at + 1 for at, token in enumerate(row.tolist()) if token in ends), len(row))
            answers[index] = row[:stop]
    return answers
