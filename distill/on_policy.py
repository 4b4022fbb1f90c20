"""On-policy distillation: the student is corrected on what it writes itself (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649).

A student that learns only from fixed texts never sees its own mistakes, and at inference every later token follows from them. Algorithm 1
of the paper: with probability `share` a step takes answers that the student samples, instead of the data's,

    y ~ p_student(. | x)        no gradient flows through the sampling
    loss = D(p_teacher || p_student)(y | x)        the losses of the stage, over the tokens of y

and the teacher says at every token what it would have written next. x is the source of a pair, or the first part of a block of text. Labels
do not count in such a step: nobody wrote the true continuation of y.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from foundation.core.config import Config
from foundation.labels.next_token import IGNORED
from foundation.models.library import quiet

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from foundation.training.train import Batch


class OnPolicy(Config):
    """On-policy distillation: part of the steps learn on answers that the student samples."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Probability that a step takes the student's answers instead of the data's."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Settings of the sampling."""
    prompt: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """text-generation: the share of a block that is given; the student writes the rest."""


def prompt_length(share: float, length: int) -> int:
    """Returns the number of tokens of a block that serve as the prompt: at least one, and at least one is left to generate."""
    return min(max(1, round(share * length)), length - 1)


@dataclass(frozen=True)
class Sampling:
    """Replaces the answers of a batch by the student's."""

    settings: OnPolicy
    seed: int
    """Seed of the steps and of the samples."""

    def __call__(self, model: nn.Module, batch: Batch) -> Batch | None:
        """Returns the batch with answers that the student sampled, and labels for these; None where the step takes the data.

        Args:
            model: The student; left in the mode that it is in.
            batch: Blocks or pairs.
        """
        import torch

        from foundation.models.forward import modes_kept

        if np.random.default_rng([self.seed, batch.step]).random() >= self.settings.share:
            return None
        devices = [batch.labels.device] if batch.labels.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad(), quiet(), modes_kept(model):
            torch.manual_seed(int(np.random.default_rng([self.seed, batch.step, int(batch.indices[0])]).integers(2**31)))
            model.eval()
            return self._pairs(model, batch) if "decoder_input_ids" in batch.features else self._blocks(model, batch)

    def _blocks(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Returns blocks whose first part is given and whose rest the student wrote."""
        import torch

        from foundation.models.generation import generate

        ids_bL = batch.features["input_ids"]
        length = ids_bL.shape[1]
        given = prompt_length(self.settings.prompt, length)
        prompt_bP = ids_bL[:, :given]
        # the end token ends a text, not a block: another text follows it
        written_bL = generate(model, (), self._whole(length - given), input_ids=prompt_bP, attention_mask=torch.ones_like(prompt_bP))
        labels_bT = torch.full_like(batch.labels, IGNORED)
        labels_bT[:, given - 1 : length - 1] = written_bL[:, given:].to(labels_bT.dtype)
        return replace(batch, features={**batch.features, "input_ids": written_bL}, labels=labels_bT)

    def _pairs(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Returns pairs whose targets the student wrote, each up to its end token."""
        import torch

        from foundation.models.generation import answer_tokens, generate

        features, width = batch.features, batch.labels.shape[1]
        ends, read = answer_tokens(model).ends, {name: features[name] for name in ("input_ids", "attention_mask")}
        found_bT = generate(model, ends, self._whole(width), **read)
        start_b1, written_bT = found_bT[:, :1], found_bT[:, 1:]
        ended_bT = torch.isin(written_bT, torch.tensor(ends, dtype=written_bT.dtype, device=written_bT.device)).int()
        behind_bT = (ended_bT.cumsum(dim=1) - ended_bT) > 0
        labels_bT = torch.full_like(batch.labels, IGNORED)
        labels_bT[:, : written_bT.shape[1]] = written_bT.masked_fill(behind_bT, IGNORED).to(labels_bT.dtype)
        read_bT = torch.cat([start_b1, written_bT.masked_fill(behind_bT, 0)], dim=1)
        return replace(batch, features={**features, "decoder_input_ids": read_bT}, labels=labels_bT)

    def _whole(self, tokens: int) -> dict[str, int | float | bool]:
        """Returns the settings that sample from the whole distribution."""
        return {"max_new_tokens": tokens, "do_sample": True, "temperature": self.settings.temperature}
