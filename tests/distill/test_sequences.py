"""Sequence-level distillation: targets are the teacher's answers, found once, whatever stops the run in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.artifacts.artifact import Artifact
from compress.core.errors import InputError
from compress.core.next_token import labels_of
from compress.core.progress import ConsoleProgress
from compress.core.target import Target
from compress.data.splits import Data, Split
from compress.models.checkpoint import load
from compress.models.encoder_decoder import encoder_decoder_settings
from compress.stage.context import Context
from compress.standalone.preprocess import TokenPair
from distill import sequences
from distill.distill import Distill
from distill.injected import Injected
from distill.sequences import Sequences, with_answers
from tests.compress import tiny_gpt
from tests.export.generation.tiny_encoder_decoders import EOS, checkpoint, sources

LENGTH = 16
PROGRESS = ConsoleProgress("silent")


def split(count: int, seed: int = 0) -> Split:
    lengths = tuple(1 + number % 9 for number in range(count))
    rows = [TokenPair(source, np.array([7, EOS], np.int32)) for source in sources(lengths, seed)]
    return Split(list(rows), labels_of(rows, LENGTH - 1))


@pytest.mark.parametrize("beams", [1, 3])
def test_targets_are_what_the_teacher_answers_to_each_source_alone(beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "PART", 5)
    teacher: Any = load(checkpoint("bart"))
    given = split(12)
    found = with_answers(given, teacher, Sequences(beams=beams), LENGTH, tmp_path, "bart", PROGRESS)
    for before, after in zip(given.rows, found.rows, strict=True):
        assert isinstance(before, TokenPair)
        assert isinstance(after, TokenPair)
        assert after.source.tolist() == before.source.tolist()
        ids = torch.from_numpy(before.source.astype(np.int64))[None]
        limits = {"max_new_tokens": LENGTH - 1, "do_sample": False, "num_beams": beams, "repetition_penalty": 1.0, "pad_token_id": 0}
        with torch.inference_mode():
            (row,) = teacher.generate(ids, attention_mask=torch.ones_like(ids), **limits, **encoder_decoder_settings())[:, 1:].tolist()
        expected = row[: row.index(EOS) + 1] if EOS in row else row
        assert after.target.tolist() == expected
    np.testing.assert_array_equal(found.labels, labels_of(found.rows, LENGTH - 1))  # type: ignore[arg-type]


def test_answers_that_are_there_are_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "PART", 4)
    asked: list[int] = []

    def answer(teacher: object, given: Any, beams: int, tokens: int) -> list[np.ndarray]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(len(given))
        return [source[:1] for source in given]

    monkeypatch.setattr(sequences, "answered", answer)
    teacher, given = torch.nn.Linear(1, 1), split(11)
    with pytest.raises(KeyboardInterrupt):
        with_answers(given, teacher, Sequences(), LENGTH, tmp_path, "a", PROGRESS)
    asked.pop()
    found = with_answers(given, teacher, Sequences(), LENGTH, tmp_path, "a", PROGRESS)
    assert asked == [4, 3]  # the first two parts were there
    assert [row.target.tolist() for row in found.rows] == [row.source[:1].tolist() for row in given.rows]  # type: ignore[union-attr]
    asked.clear()
    with pytest.raises(KeyboardInterrupt):  # another search, another teacher: other answers
        with_answers(given, teacher, Sequences(beams=2), LENGTH, tmp_path, "a", PROGRESS)
    assert asked == [4, 4]


def test_a_student_learns_the_answers_of_its_teacher(tmp_path: Path) -> None:
    data = Data(split(60), split(10, 1), split(10, 2), ())
    teacher = Artifact(checkpoint("t5"), {"id": "baseline", "digest": "t5", "stage": "model"})
    context = Context(
        "text-to-text", data, LENGTH, Target(sequence_lengths=(LENGTH,)), 0, PROGRESS, tmp_path / "scratch", losses=Injected()
    )
    context = Context(**{**vars(context), "teachers": (teacher,), "checkpoints": {"baseline": teacher}})
    settings = {"student": {"config": {"num_layers": 1, "num_decoder_layers": 1}}, "loss": "hard_target", "sequences": {"beams": 1}}
    (tmp_path / "out").mkdir()
    figures = Distill(**settings, epochs=3, learning_rate=1e-2, batch_size=8).run(teacher, context, tmp_path / "out")  # type: ignore[arg-type]
    losses = [entry["loss"] for entry in figures["losses"]]
    assert losses[-1] < losses[0]
    assert load(tmp_path / "out").config.num_layers == 1  # type: ignore[union-attr]
    assert list((tmp_path / "scratch").glob("sequences-*.safetensors"))


def test_sequences_need_a_source(tmp_path: Path) -> None:
    context = Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(), 0, PROGRESS, tmp_path)
    stage = Distill(student={"layers": 1}, loss="soft_target", sequences={"beams": 2})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"stages.distill.sequences: given for text-generation; it is for text-to-text: leave it out"):
        stage.check(load(tiny_gpt.checkpoint()).config, None, context)
