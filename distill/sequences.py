"""Sequence-level distillation (Kim and Rush 2016, https://arxiv.org/abs/1606.07947): the student learns what the teacher answers.

    target of a pair         <-  argmax over y of p_teacher(y | source), approximated by beam search
    rest of a block of text  <-  the same, with the start of the block as source and a y as long as the rest

The teacher answers every source once, and its answers replace the targets of the train split. They are more regular than human texts, so
that a small student can follow them, and greedy decoding loses less against a search (section 4). Word-level losses (`soft_target`) are
then taken on the teacher's own sequences; with `loss: hard_target` the student learns only the sequences, as in the paper.

The paper is about pairs. Of a block of text only what the teacher wrote counts in the losses, and an end token there ends a text, not the
block. Answers are written to the scratch folder of the stage in parts, each named by all that it depends on: a run that was stopped goes
on after the last part. Left out: human texts in between, for which another stage can follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors.numpy import load_file, save_file

from distill.on_policy import prompt_length
from foundation.artifacts.artifact import digest
from foundation.core.config import Config
from foundation.core.progress import Progress
from foundation.data.splits import Split
from foundation.labels.next_token import IGNORED, labels_of
from foundation.models.library import quiet
from foundation.standalone.preprocess import TokenPair

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

PART = 2048
"""Sources of a file."""
Ids = NDArray[np.int32]


class Sequences(Config):
    """Sequence-level distillation: the teacher's answers replace the targets of the train split."""

    LATER: ClassVar[tuple[str, ...]] = ("prompt",)

    beams: Annotated[int, Field(ge=1, le=64)] = 1
    """Beams of the teacher's search; 1: the most likely token each time. The paper takes 5."""
    prompt: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """text-generation: the share of a block that is given; the teacher writes the rest, and the student learns only the rest."""


def with_answers(
    split: Split, teacher: nn.Module, settings: Sequences, max_length: int, scratch: Path, name: str, progress: Progress
) -> Split:
    """Returns the pairs or blocks of a split with the teacher's answers as targets.

    Args:
        split: Pairs, or blocks of text, as token ids.
        teacher: A model of Transformers in evaluation mode, for pairs an encoder-decoder; it shares the tokens of the rows.
        settings: The search.
        max_length: Most tokens that the decoder reads; the answer to a source has one less.
        scratch: Folder for the answers.
        name: What the teacher is, for the names of the files.
        progress: Shows a bar.
    """
    from foundation.models.encoder_decoder import answered

    pairs = [row for row in split.rows if isinstance(row, TokenPair)]
    blocks = [row for row in split.rows if isinstance(row, np.ndarray)]
    if len(split.rows) not in (len(pairs), len(blocks)):
        raise ValueError("sequence-level distillation needs pairs of a source and a target, or blocks of text")
    sources, lengths = [pair.source for pair in pairs], list[int]()
    if blocks:
        sources = [block[: prompt_length(settings.prompt, len(block))] for block in blocks]
        lengths = [len(block) - len(source) for block, source in zip(blocks, sources, strict=True)]
    answers: list[Ids] = []
    with progress.bar("teacher's answers", len(sources)) as advance:
        for start in range(0, len(sources), PART):
            asked, wanted = sources[start : start + PART], lengths[start : start + PART]
            about = [name, settings.model_dump(mode="json"), max_length, [source.tolist() for source in asked]]
            path = scratch / f"sequences-{digest([*about, wanted] if blocks else about)[:16]}.safetensors"
            if not path.exists():
                if blocks:
                    found = continued(teacher, asked, settings.beams, wanted)
                else:
                    found = answered(teacher, asked, settings.beams, max_length - 1)
                _save(found, path)
            stored = load_file(path)
            answers += np.split(stored["ids"], np.cumsum(stored["lengths"])[:-1])
            advance(len(asked))
    if not blocks:
        answered_pairs = [TokenPair(source, answer) for source, answer in zip(sources, answers, strict=True)]
        return Split(list(answered_pairs), labels_of(answered_pairs, max_length - 1))
    texts = [np.concatenate(both) for both in zip(sources, answers, strict=True)]
    labels = labels_of(texts, split.labels.array.shape[1])
    for label, source in zip(labels.array, sources, strict=True):
        label[: len(source) - 1] = IGNORED
    return Split(list(texts), labels)


def continued(model: PreTrainedModel, sources: Sequence[Ids], beams: int, lengths: Sequence[int]) -> list[Ids]:
    """Returns the continuation of each source, int32 [length]; an end token does not end it.

    Args:
        model: A decoder of Transformers in evaluation mode.
        sources: Token ids, int32 [at least 1] each.
        beams: Beams of the search.
        lengths: Tokens of each continuation.
    """
    import torch

    from foundation.models.encoder_decoder import BATCH_SIZE
    from foundation.models.forward import device_of
    from foundation.models.generation import generate

    device, answers = device_of(model), [np.zeros(0, np.int32)] * len(sources)
    alike: dict[tuple[int, int], list[int]] = {}  # no padding, so that a continuation does not depend on the other sources
    for index, (source, length) in enumerate(zip(sources, lengths, strict=True)):
        alike.setdefault((len(source), length), []).append(index)
    for (given, length), indices in alike.items():
        for start in range(0, len(indices), BATCH_SIZE):
            chosen = indices[start : start + BATCH_SIZE]
            ids = torch.from_numpy(np.stack([sources[index] for index in chosen]).astype(np.int64)).to(device)
            settings = {"max_new_tokens": length, "num_beams": beams}
            with torch.no_grad(), quiet():
                found = generate(model, (), settings, input_ids=ids, attention_mask=torch.ones_like(ids))
            for index, row in zip(chosen, found[:, given:].cpu().numpy().astype(np.int32), strict=True):
                answers[index] = row
    return answers


def _save(answers: Sequence[Ids], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    lengths = np.array([len(answer) for answer in answers], np.int64)
    save_file({"ids": np.concatenate(answers), "lengths": lengths}, temporary)
    temporary.replace(path)
