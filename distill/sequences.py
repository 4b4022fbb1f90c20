"""Sequence-level distillation (Kim and Rush 2016, https://arxiv.org/abs/1606.07947): the student learns what the teacher answers.

    target of a pair  <-  argmax over y of p_teacher(y | source), approximated by beam search

The teacher answers every source once, and its answers replace the targets of the train split. They are more regular than human texts, so
that a small student can follow them, and greedy decoding loses less against a search (section 4). Word-level losses (`soft_target`) are
then taken on the teacher's own sequences; with `loss: hard_target` the student learns the sequences alone, as in the paper.

Answers are written to the scratch folder of the stage in parts, each named by all that it depends on: a run that was stopped goes on behind
the last part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors.numpy import load_file, save_file
from torch import nn

from compress.artifacts.artifact import digest
from compress.core.config import Config
from compress.core.next_token import labels_of
from compress.core.progress import Progress
from compress.data.splits import Split
from compress.models.encoder_decoder import answered
from compress.standalone.preprocess import TokenPair

PART = 2048
"""Sources of a file."""
Ids = NDArray[np.int32]


class Sequences(Config):
    """Sequence-level distillation: the teacher's answers replace the targets of the train split."""

    beams: Annotated[int, Field(ge=1, le=64)] = 1
    """Beams of the teacher's search; 1: the most likely token each time. The paper takes 5."""


def with_answers(
    split: Split, teacher: nn.Module, settings: Sequences, max_length: int, scratch: Path, name: str, progress: Progress
) -> Split:
    """Returns the pairs of a split with the teacher's answers as targets.

    Args:
        split: Pairs of token ids.
        teacher: An encoder-decoder of Transformers in evaluation mode; its tokens are those of the pairs.
        settings: The search.
        max_length: Most tokens that the decoder reads; an answer has one less.
        scratch: Folder for the answers.
        name: What the teacher is, for the names of the files.
        progress: Shows a bar.
    """
    pairs = [row for row in split.rows if isinstance(row, TokenPair)]
    if len(pairs) != len(split.rows):
        raise ValueError("sequence-level distillation needs pairs of a source and a target")
    answers: list[Ids] = []
    with progress.bar("teacher's answers", len(pairs)) as advance:
        for start in range(0, len(pairs), PART):
            sources = [pair.source for pair in pairs[start : start + PART]]
            key = digest([name, settings.model_dump(mode="json"), max_length, [source.tolist() for source in sources]])
            path = scratch / f"sequences-{key[:16]}.safetensors"
            if not path.exists():
                found = answered(teacher, sources, settings.beams, max_length - 1)
                scratch.mkdir(parents=True, exist_ok=True)
                temporary = path.with_suffix(".tmp")
                lengths = np.array([len(answer) for answer in found], np.int64)
                save_file({"ids": np.concatenate(found), "lengths": lengths}, temporary)
                temporary.replace(path)
            stored = load_file(path)
            answers += np.split(stored["ids"], np.cumsum(stored["lengths"])[:-1])
            advance(len(sources))
    rows = [TokenPair(pair.source, answer) for pair, answer in zip(pairs, answers, strict=True)]
    return Split(list(rows), labels_of(rows, max_length - 1))
