"""Sequence-level distillation: targets are the teacher's answers, found once, whatever stops the run in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from distill import sequences
from distill.distill import Distill
from distill.sequences import Sequences, with_answers
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.next_token import IGNORED, labels_of
from foundation.models.checkpoint import load
from foundation.stage.context import Context
from foundation.standalone.preprocess import TokenPair
from tests.export.generation.tiny_encoder_decoders import EOS, checkpoint, sources
from tests.foundation import tiny_gpt

pytestmark = pytest.mark.whole

LENGTH = 16
PROGRESS = ConsoleProgress("silent")


def split(count: int, seed: int = 0) -> Split:
    lengths = tuple(1 + number % 9 for number in range(count))
    rows = [TokenPair(source, np.array([7, EOS], np.int32)) for source in sources(lengths, seed)]
    return Split(list(rows), labels_of(rows, LENGTH - 1))


@pytest.mark.first(1)
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
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())  # its own has as many layers as the encoder
            (row,) = teacher.generate(ids, attention_mask=torch.ones_like(ids), **limits, use_cache=True, past_key_values=cache)[
                :, 1:
            ].tolist()
        expected = row[: row.index(EOS) + 1] if EOS in row else row
        assert after.target.tolist() == expected
    np.testing.assert_array_equal(found.labels.array, labels_of(found.rows, LENGTH - 1).array)  # type: ignore[arg-type]


def test_settings_of_the_teacher_do_not_change_its_answers(tmp_path: Path) -> None:
    plain: Any = load(checkpoint("bart"))
    own: Any = load(checkpoint("bart"))
    tokens = {name: getattr(plain.generation_config, name) for name in ("eos_token_id", "decoder_start_token_id", "bos_token_id")}
    limits = {"suppress_tokens": list(range(20, 90)), "length_penalty": 9.0, "early_stopping": True, "repetition_penalty": 5.0}
    own.generation_config = GenerationConfig(**tokens, **limits, no_repeat_ngram_size=1, min_new_tokens=9)
    first, second = (
        with_answers(split(6), teacher, Sequences(beams=2), LENGTH, tmp_path, name, PROGRESS)
        for name, teacher in (("a", plain), ("b", own))
    )
    for one, other in zip(first.rows, second.rows, strict=True):
        assert isinstance(one, TokenPair)
        assert isinstance(other, TokenPair)
        assert one.target.tolist() == other.target.tolist()


def test_answers_that_are_there_are_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "PART", 4)
    asked: list[int] = []

    def answer(teacher: object, given: Any, beams: int, tokens: int) -> list[np.ndarray]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(len(given))
        return [source[:1] for source in given]

    monkeypatch.setattr("foundation.models.encoder_decoder.answered", answer)
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
    context = Context("text-to-text", data, LENGTH, Target(sequence_lengths=(LENGTH,)), 0, PROGRESS, tmp_path / "scratch")
    context = Context(**{**vars(context), "teachers": (teacher,), "checkpoints": {"baseline": teacher}})
    settings = {"student": {"config": {"num_layers": 1, "num_decoder_layers": 1}}, "loss": "hard_target", "sequences": {"beams": 1}}
    (tmp_path / "out").mkdir()
    figures = Distill(**settings, epochs=3, learning_rate=1e-2, batch_size=8).run(teacher, context, tmp_path / "out")  # type: ignore[arg-type]
    losses = [entry["loss"] for entry in figures["losses"]]
    assert losses[-1] < losses[0]
    assert load(tmp_path / "out").config.num_layers == 1  # type: ignore[union-attr]
    assert list((tmp_path / "scratch").glob("sequences-*.safetensors"))


def naive_search(model: Any, source: np.ndarray, beams: int, tokens: int) -> list[int]:
    """Written out: the `beams` likeliest continuations after every token, from the logits of the whole text, and of these the likeliest."""
    kept: list[tuple[float, list[int]]] = [(0.0, [int(token) for token in source])]
    for _ in range(tokens):
        longer = []
        for score, text in kept:
            with torch.no_grad():
                chances = torch.log_softmax(model(torch.tensor([text])).logits[0, -1].double(), dim=-1)
            longer += [(score + float(chance), [*text, token]) for token, chance in enumerate(chances)]
        kept = sorted(longer, reverse=True)[:beams]
    return kept[0][1][len(source) :]


@pytest.mark.parametrize(("kind", "beams"), [("gpt2", 1), ("gpt2", 3), ("mistral", 1)])
def test_the_rest_of_a_block_is_what_the_teacher_goes_on_with(
    kind: str, beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "PART", 3)
    teacher: Any = load(tiny_gpt.checkpoint(kind))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # likelier tokens: no ties
    given = tiny_gpt.data().train.take(range(5))
    found = with_answers(given, teacher, Sequences(beams=beams, prompt=0.6), tiny_gpt.LENGTH, tmp_path, kind, PROGRESS)
    start = 10  # of 16 tokens, rounded
    for before, after, label in zip(given.rows, found.rows, found.labels.array, strict=True):
        assert isinstance(before, np.ndarray)
        assert isinstance(after, np.ndarray)
        assert after.dtype == np.int32
        assert after.tolist() == [*before[:start].tolist(), *naive_search(teacher, before[:start], beams, tiny_gpt.LENGTH - start)]
        assert label.tolist() == [IGNORED] * (start - 1) + after[start:].tolist()
    assert len(list(tmp_path.glob("sequences-*.safetensors"))) == 2


def test_an_end_token_does_not_end_a_block_and_lengths_may_differ(tmp_path: Path) -> None:
    teacher: Any = load(tiny_gpt.checkpoint())
    blocks = [row[:length] for row, length in zip(tiny_gpt.data().train.rows, (16, 2, 7, 16), strict=False)]
    given = Split(list(blocks), labels_of(blocks, tiny_gpt.LENGTH - 1))
    first = with_answers(given, teacher, Sequences(), tiny_gpt.LENGTH, tmp_path / "a", "a", PROGRESS)
    written = int(first.rows[0][8])
    teacher.generation_config.eos_token_id = teacher.config.eos_token_id = written  # it writes it first of all
    teacher.generation_config.repetition_penalty = 5.0  # a setting of the teacher for chats
    again = with_answers(given, teacher, Sequences(), tiny_gpt.LENGTH, tmp_path / "b", "a", PROGRESS)
    assert [row.tolist() for row in again.rows] == [row.tolist() for row in first.rows]  # type: ignore[union-attr]
    assert [len(row) for row in again.rows] == [16, 2, 7, 16]  # type: ignore[arg-type]
    assert [int((label != IGNORED).sum()) for label in again.labels.array] == [8, 1, 3, 8]


def test_continuations_that_are_there_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "PART", 4)
    asked: list[int] = []

    def go_on(teacher: object, given: Any, beams: int, lengths: Any) -> list[np.ndarray]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(len(given))
        return [np.full(length, source[0], np.int32) for source, length in zip(given, lengths, strict=True)]

    monkeypatch.setattr(sequences, "continued", go_on)
    teacher, given = torch.nn.Linear(1, 1), tiny_gpt.data().train.take(range(11))
    with pytest.raises(KeyboardInterrupt):
        with_answers(given, teacher, Sequences(), tiny_gpt.LENGTH, tmp_path, "a", PROGRESS)
    asked.pop()
    found = with_answers(given, teacher, Sequences(), tiny_gpt.LENGTH, tmp_path, "a", PROGRESS)
    assert asked == [4, 3]  # the first two parts were there
    assert [row[8:].tolist() for row in found.rows] == [[row[0]] * 8 for row in given.rows]  # type: ignore[index, misc]
    asked.clear()
    with pytest.raises(KeyboardInterrupt):  # other starts, other answers
        with_answers(given, teacher, Sequences(prompt=0.25), tiny_gpt.LENGTH, tmp_path, "a", PROGRESS)
    assert asked == [4, 4]


def test_a_decoder_learns_how_its_teacher_goes_on(tmp_path: Path) -> None:
    teacher = Artifact(tiny_gpt.checkpoint(), {"id": "baseline", "digest": "gpt2", "stage": "model"})
    data = tiny_gpt.data()
    data = replace(data, train=data.train.take(range(64)), selection=data.selection.take(range(8)))
    context = Context("text-generation", data, tiny_gpt.LENGTH, Target(sequence_lengths=(8,)), 0, PROGRESS, tmp_path / "scratch")
    context = replace(context, teachers=(teacher,), checkpoints={"baseline": teacher})
    settings = {"student": {"layers": 1}, "loss": "hard_target", "sequences": {"beams": 1}, "keep": "last"}
    stage = Distill(**settings, epochs=4, learning_rate=1e-2, batch_size=8)  # type: ignore[arg-type]
    stage.check(load(teacher.path).config, load(teacher.path).config, context)
    (tmp_path / "out").mkdir()
    figures = stage.run(teacher, context, tmp_path / "out")
    losses = [entry["loss"] for entry in figures["losses"]]
    assert losses[-1] < 0.5 * losses[0]  # what a teacher writes is far more regular than the text
    taught, student = (
        with_answers(data.train, load(folder), Sequences(), tiny_gpt.LENGTH, tmp_path / name, name, PROGRESS)
        for name, folder in {"teacher": teacher.path, "student": tmp_path / "out"}.items()
    )
    same = np.mean([np.mean(one[8:] == other[8:]) for one, other in zip(taught.rows, student.rows, strict=True)])  # type: ignore[index]
    assert same > 0.5


def test_only_tasks_whose_answers_are_tokens_have_sequences(tmp_path: Path) -> None:
    for task, settings, message in (
        ("text-classification", {"beams": 2}, "sequences: given for text-classification; it is for text-generation or text-to-text: leave"),
        ("text-to-text", {"prompt": 0.5}, "sequences.prompt: 0.5 given; the sources of text-to-text are given whole: leave it out"),
    ):
        context = Context(task, tiny_gpt.data(), tiny_gpt.LENGTH, Target(), 0, PROGRESS, tmp_path)  # type: ignore[arg-type]
        stage = Distill(student={"layers": 1}, loss="soft_target", sequences=settings)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=rf"stages.distill.{message}"):
            stage.check(load(tiny_gpt.checkpoint()).config, None, context)


def test_runs_on_pairs_keep_their_cache_keys() -> None:
    assert Sequences(beams=2).model_dump(mode="json") == {"beams": 2}
    assert Sequences(prompt=0.2).model_dump(mode="json") == {"beams": 1, "prompt": 0.2}
