"""What is kept of next-token logits, against naive sums and torch's cross entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from foundation.labels.next_token import IGNORED, NO_CHOICE, accuracy, answers_of, block_sums, choices, labels_of, perplexity
from foundation.labels.tasks import TASKS
from foundation.measure.answers import load_predictions, save_predictions
from foundation.measure.metrics import metrics

VOCABULARY, WIDTH = 7, 5


@st.composite
def predicted(draw: st.DrawFn) -> tuple[list[np.ndarray], np.ndarray]:
    """Blocks of 2 to 6 tokens, and logits for the longest of them, adversarially large ones among them."""
    lengths = draw(st.lists(st.integers(2, WIDTH + 1), min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    blocks = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]
    scale = draw(st.sampled_from([0.0, 1.0, 30.0, 3000.0]))
    logits = scale * random.standard_normal((len(blocks), max(lengths), VOCABULARY))
    return blocks, logits.astype(np.float32)


@given(predicted())
def test_answers_are_the_losses_of_torch_and_the_largest_logits(given_: tuple[list[np.ndarray], np.ndarray]) -> None:
    blocks, logits = given_
    answers, labels = answers_of(blocks, logits, WIDTH), labels_of(blocks, WIDTH)
    assert (answers.shape, answers.dtype) == ((len(blocks), WIDTH, 2), np.float32)
    for row, block in enumerate(blocks):
        for position in range(WIDTH):
            if position >= len(block) - 1:
                assert tuple(answers[row, position]) == (0, NO_CHOICE)
                assert labels.array[row, position] == IGNORED
                continue
            assert labels.array[row, position] == block[position + 1]
            scores, target = torch.from_numpy(logits[row, position])[None], torch.tensor([int(block[position + 1])])
            expected = float(functional.cross_entropy(scores.double(), target))
            assert answers[row, position, 0] == pytest.approx(expected, rel=1e-5, abs=1e-5)
            assert answers[row, position, 1] == int(logits[row, position].argmax())


def test_a_large_logit_costs_the_loss_no_digits() -> None:
    logits = (np.float32(2**14) + np.arange(VOCABULARY, dtype=np.float32) / 8)[None, None].repeat(2, axis=1)
    (answers,) = answers_of([np.array([0, 2], np.int32)], logits, 1)
    expected = float(functional.cross_entropy(torch.from_numpy(logits[0, :1]).double(), torch.tensor([2])))
    assert answers[0, 0] == pytest.approx(expected, rel=1e-6)


@given(predicted())
def test_figures_are_those_of_all_tokens_written_out(given_: tuple[list[np.ndarray], np.ndarray]) -> None:
    blocks, logits = given_
    answers, labels = answers_of(blocks, logits, WIDTH), labels_of(blocks, WIDTH)
    losses, hits = [], []
    for block, scores in zip(blocks, logits.astype(np.float64), strict=True):
        for position in range(len(block) - 1):
            row = scores[position] - scores[position].max()
            losses.append(math.log(np.exp(row).sum()) - row[block[position + 1]])
            hits.append(scores[position].argmax() == block[position + 1])
    assert labels.count() == len(losses)
    assert block_sums(answers, labels.array)[0].sum() == pytest.approx(sum(losses), rel=1e-5, abs=1e-4)
    assert perplexity(answers, labels.array) == pytest.approx(math.exp(min(sum(losses) / len(losses), 700)), rel=1e-3)
    assert accuracy(answers, labels.array) == pytest.approx(np.mean(hits))
    assert metrics("text-generation", answers, labels) == {
        "perplexity": perplexity(answers, labels.array),
        "accuracy": accuracy(answers, labels.array),
    }


def test_a_uniform_guess_has_the_perplexity_of_the_vocabulary() -> None:
    blocks = [np.arange(6, dtype=np.int32)]
    answers = answers_of(blocks, np.zeros((1, 6, VOCABULARY), np.float32), WIDTH)
    assert perplexity(answers, labels_of(blocks, WIDTH).array) == pytest.approx(7)


def test_a_hopeless_model_has_a_perplexity_that_json_can_hold() -> None:
    blocks = [np.array([0, 1], np.int32)]
    logits = np.float32([[[1e6, 0, 0, 0, 0, 0, 0], [0] * 7]])
    assert math.isfinite(perplexity(answers_of(blocks, logits, WIDTH), labels_of(blocks, WIDTH).array))


def test_padding_never_counts_as_a_difference() -> None:
    blocks = [np.array([1, 2, 3], np.int32), np.array([1, 2, 3, 4, 5, 6], np.int32)]
    random = np.random.default_rng(0)
    one, other = (answers_of(blocks, random.standard_normal((2, 6, VOCABULARY)).astype(np.float32), WIDTH) for _ in range(2))
    changed, distance = TASKS["text-generation"].answer.differences(one, other)
    assert changed.shape == distance.shape == (2 + 5,)
    assert changed.sum() == (choices(one) != choices(other)).sum()
    assert TASKS["text-generation"].answer.differences(one, one)[0].sum() == 0


def test_predictions_of_tokens_survive_the_file_in_few_bytes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    blocks = [np.arange(6, dtype=np.int32)] * 50
    answers, labels = answers_of(blocks, np.zeros((50, 6, VOCABULARY), np.float32), WIDTH), labels_of(blocks, WIDTH)
    save_predictions(tmp_path / "p.safetensors", answers, labels)
    read, again = load_predictions(tmp_path / "p.safetensors", "text-generation")
    np.testing.assert_array_equal(read, answers)
    np.testing.assert_array_equal(again.array, labels.array)
    assert again.array.dtype == np.int32
    assert (tmp_path / "p.safetensors").stat().st_size < 12 * labels.array.size + 300
