"""Texts that are read from frames: against `Wav2Vec2CTCTokenizer` of Transformers, a loop over frames, and jiwer on the texts
themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.labels import transcripts
from foundation.labels.transcripts import ABSENT, NEAR_TIE, K, Part, TranscriptAnswer
from foundation.measure.metrics import metrics
from foundation.models.heads.transcriber import write_vocabulary
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import RESPONSES, transcript
from tests.tiny_sounds import RATE, encoded

LABELS = ("<pad>", "<unk>", "|", "a", "b", "c", "<s>", "\u00e9")
TASK, ANSWER = "speech-recognition", TranscriptAnswer()
FRAMES = st.lists(st.integers(0, len(LABELS) - 1), max_size=30)
TEXTS = st.lists(st.text("abc\u00e9", min_size=1, max_size=4), min_size=1, max_size=4).map(" ".join)


def logits_of(best: list[int], seed: int = 0) -> np.ndarray:
    """Returns logits float32 [F, V] whose largest ones are given."""
    made = np.random.default_rng(seed).normal(size=(len(best), len(LABELS))).astype(np.float32)
    made[np.arange(len(best)), best] = 9
    return made


def greedy(best: list[int]) -> str:
    """Reads frames one by one."""
    text, before = "", None
    for token in best:
        if token != before and token != 0:
            text += " " if LABELS[token] == "|" else LABELS[token]
        before = token
    return text.strip()


def prepared(buckets: tuple[int, ...] = (16, 32), masked: bool = True, labels: tuple[str, ...] = LABELS) -> Preprocessor:
    """Returns a preprocessor of sounds of at most 32 samples, two a frame."""
    sound = {"kind": "waveform", "sampling_rate": RATE, "do_normalize": False, "least": 2, "strides": [[2, 2]]}
    names = ("input_values", "attention_mask") if masked else ("input_values",)
    return Preprocessor("audio", names, labels, TASK, buckets[-1], buckets, response="transcript", sound=sound)


def sound(samples: int) -> bytes:
    return encoded(np.zeros(samples, np.float32))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import Wav2Vec2CTCTokenizer

    folder = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(folder, LABELS)
    found = Wav2Vec2CTCTokenizer.from_pretrained(folder)
    assert len(found) == len(LABELS)
    assert found.pad_token_id == 0
    return found


@given(best=FRAMES)
def test_a_text_is_read_as_transformers_reads_it(tokenizer: Any, best: list[int]) -> None:
    assert transcript(logits_of(best), LABELS) == greedy(best) == tokenizer.decode(best)


def test_logits_that_are_no_numbers_are_told() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        transcript(np.full((2, len(LABELS)), np.nan, np.float32), LABELS)


def test_a_response_reads_the_frames_that_count() -> None:
    whole = np.stack([logits_of([3, 3, 0, 3]), logits_of([4, 2, 5, 5])])
    made = RESPONSES["transcript"].of(whole, LABELS, [4, 1])
    assert made["TRANSCRIPT"].tolist() == [[b"aa"], [b"b"]]
    assert made["LOGITS"] is whole


@given(best=FRAMES.filter(len))
def test_what_is_kept_gives_the_same_text_and_the_largest_logits(best: list[int]) -> None:
    best = best[:16]
    logits = np.pad(logits_of(best), ((0, 16 - len(best)), (0, 0)))[None]
    kept = ANSWER.compressed(prepared(), [sound(2 * len(best))], logits)
    assert kept.shape == (1, 16, Part.WIDTH)
    assert transcripts.shown(transcripts.texts_of(kept)[0], LABELS) == greedy(best)
    assert (kept[0, len(best) :, Part.CHARACTER] == ABSENT).all()
    for row, values in zip(kept[0], logits[0, : len(best)], strict=False):
        order = np.argsort(-values)[:K]
        assert row[Part.IDS].tolist() == order.tolist()
        assert row[Part.LOGITS].tolist() == values[order].tolist()
        assert row[Part.TOTAL] == pytest.approx(np.log(np.exp(values.astype(np.float64)).sum()), rel=1e-5)


def test_frames_that_count_are_those_of_the_sound_or_of_its_bucket() -> None:
    rows = [sound(samples) for samples in (1, 9, 16, 17, 40)]
    assert prepared().sounds.frames(rows) == [1, 4, 8, 8, 16]
    assert prepared(masked=False).sounds.frames(rows) == [8, 8, 8, 16, 16]
    for row, made in zip(rows, prepared().sounds.prepared(rows), strict=True):
        assert prepared().sounds.steps.samples(row, 32) == len(made)


@given(seconds=st.integers(1, 300), rate=st.sampled_from([1000, 8000, 11025, 44100]), form=st.sampled_from(["WAV", "FLAC"]))
def test_the_header_tells_the_samples(seconds: int, rate: int, form: str) -> None:
    row = encoded(np.random.default_rng(seconds).uniform(-1, 1, seconds).astype(np.float32), rate, form)
    steps = prepared().sounds.steps
    assert steps.samples(row) == len(steps(row))


@given(pairs=st.lists(st.tuples(TEXTS, FRAMES), min_size=1, max_size=5))
def test_figures_are_those_of_jiwer_on_the_texts(pairs: list[tuple[str, list[int]]]) -> None:
    true, best = [text for text, _ in pairs], [frames[:16] or [0] for _, frames in pairs]
    logits = np.stack([np.pad(logits_of(one), ((0, 16 - len(one)), (0, 0))) for one in best])
    answers = ANSWER.compressed(prepared(), [sound(2 * len(one)) for one in best], logits)
    labels = transcripts.labels_of(true, LABELS)
    assert labels.texts == true
    plain = [greedy(one).replace("<unk>", "1").replace("<s>", "2") for one in best]  # tokens of several characters count as one
    found = metrics(TASK, answers, labels)
    assert found == pytest.approx({"wer": jiwer.wer(true, plain), "cer": jiwer.cer(true, plain)})


def test_characters_that_the_vocabulary_lacks_are_not_learned_and_count_as_wrong() -> None:
    labels = transcripts.labels_of(["a\u00fcb"], LABELS)
    assert labels.array[0, 1, 1:].tolist() == [3, 1, 4]
    assert transcripts.labels_of(["a\u00fcb"], ("<pad>", "|", "a", "b")).array[0].tolist() == [[3, 97, 252, 98], [0, 2, 3, -1]]
    answers = ANSWER.compressed(prepared(), [sound(6)], logits_of([3, 1, 4])[None])
    assert metrics(TASK, answers, labels) == {"wer": 1.0, "cer": pytest.approx(1 / 3)}


def test_without_a_true_word_any_is_wrong() -> None:
    assert transcripts.rate(transcripts.errors(["", ""], ["", "a"]), 0) == 1
    assert transcripts.rate(transcripts.errors([""], [""]), 0) == 0


@pytest.mark.parametrize(("less", "changed"), [(0.0, False), (0.9, False), (1.1, True), (50.0, True)])
def test_a_token_that_is_almost_as_good_is_no_other_text(less: float, changed: bool) -> None:
    before = logits_of([3, 0, 4, 0])
    spread = np.std(ANSWER.compressed(prepared(), [sound(8)], before[None])[0, :4, Part.LOGITS])
    before[2, 5] = 9 - less * NEAR_TIE * spread
    after = before.copy()
    after[2, 4], after[2, 5] = 8.999, 9.0
    one, other = (ANSWER.compressed(prepared(), [sound(8)], of[None]) for of in (before, after))
    assert transcripts.texts_of(one) != transcripts.texts_of(other)
    assert TranscriptAnswer().differences(one, other)[0].tolist() == [changed]


def test_distances_are_those_of_whole_distributions_where_few_tokens_matter() -> None:
    random = np.random.default_rng(1)
    before = np.full((3, 8, len(LABELS)), -30.0, np.float32)
    before[..., :3] = random.normal(size=(3, 8, 3))
    after = before + random.normal(size=before.shape).astype(np.float32) * (before > -20)
    rows = [sound(size) for size in (16, 10, 6)]
    one, other = (ANSWER.compressed(prepared(), rows, of) for of in (before, after))
    log_p, log_q = (of - np.log(np.exp(of.astype(np.float64)).sum(-1, keepdims=True)) for of in (before, after))
    apart = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    expected = [apart[row, :frames].mean() for row, frames in enumerate((8, 5, 3))]
    assert TranscriptAnswer().distances(one, other) == pytest.approx(expected, rel=1e-3)


@given(best=FRAMES)
def test_texts_of_a_model_become_labels_that_it_agrees_with(best: list[int]) -> None:
    best = best[:16] or [0]
    answers = ANSWER.compressed(prepared(), [sound(2 * len(best))], np.pad(logits_of(best), ((0, 16 - len(best)), (0, 0)))[None])
    made = transcripts.labels_of(["ab"], LABELS).pseudo_labels(answers)
    assert made.array[0, 1, 0] == 0
    assert metrics(TASK, answers, made)["wer"] == 0
    text = [token for token in made.array[0, 1, 1:].tolist() if token >= 0]
    assert "".join(" " if LABELS[token] == "|" else LABELS[token] for token in text) == greedy(best)


def test_a_nan_stays_one(tmp_path: Path) -> None:
    kept = ANSWER.compressed(prepared(), [sound(4)], np.full((1, 8, len(LABELS)), np.nan, np.float32))
    assert np.isnan(kept).all()
