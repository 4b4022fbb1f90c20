from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.data.splits import Split
from foundation.labels import candidates
from foundation.labels.classes import ClassIds
from foundation.models.architecture.blocks import between_blocks, blocks_of
from foundation.models.architecture.origin import Origin
from foundation.models.architecture.structure import Structure
from foundation.stage.context import Context
from foundation.training.distillation.distilled import Distilled
from foundation.training.losses.table import losses_of
from foundation.training.train import Batch
from prune.choices import Recover
from prune.recovery import RecoveryObjective, check_hidden, hidden_loss, part_of
from prune.surgery import KeptUnits, shrink
from tests.problems import raises_problem

KEY = "stages.prune"


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_hidden_states_are_compared_on_the_channels_that_are_left(layers: int, tokens: int, seed: int, padded: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.randn(2, tokens, 2, generator=generator) for _ in range(layers)]
    theirs = [torch.randn(2, tokens, 5, generator=generator) for _ in range(layers)]
    mask = torch.ones(2, tokens)
    mask[1, max(1, tokens - 1) :] = 0 if padded else 1
    found = hidden_loss(ours, theirs, (1, 4), mask)
    for row in range(2):
        counted = [token for token in range(tokens) if mask[row, token]]
        squares = [
            sum(float(ours[layer][row, token, number] - theirs[layer][row, token, channel]) ** 2 for number, channel in enumerate((1, 4)))
            / 2
            for layer in range(layers)
            for token in counted
        ]
        assert float(found[row]) == pytest.approx(sum(squares) / len(squares), rel=1e-4, abs=1e-6)
    if not padded:
        torch.testing.assert_close(hidden_loss(ours, theirs, (1, 4), None), found)


def test_an_origin_is_followed_through_iterations() -> None:
    first = Origin.whole(6, 8).after([0, 2, 3, 5], [1, 2, 4, 7], [None, (0, 3), (1, 2), None])
    assert first == Origin((0, 2, 3, 5), (1, 2, 4, 7), (None, (0, 3), (1, 2), None))
    assert first.after([1, 3], [0, 3], [(1,), (2, 4)]) == Origin((2, 5), (1, 7), ((3,), (2, 4)))
    assert first.after([2], [0], [None]) == Origin((3,), (1,), ((1, 2),))


def test_a_model_that_lost_nothing_has_nothing_to_learn(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model, features = make_model("bert"), make_features("bert")
    structure = Structure.of(model, KEY)
    kept = replace(KeptUnits.everything(structure.sizes), hidden=range(0, 16, 2))
    batch = Batch(features, torch.tensor([0, 1, 0]), np.arange(3), 0, 1)
    answers = Distilled(make_model("bert"), losses_of("text-classification"), 3, 2, 2.0, 1.0)
    same = RecoveryObjective(answers, Origin.whole(3, 16), 2.0)(model, batch)
    assert float(same["hidden"].detach().abs().max()) < 1e-10
    assert float(same["teacher"].detach().abs().max()) < 1e-6
    narrow = shrink(model, structure, kept, KEY)
    lost = RecoveryObjective(answers, Origin.whole(3, 16).after(range(3), kept.hidden, [None] * 3), 2.0)(narrow, batch)
    halved = RecoveryObjective(answers, Origin.whole(3, 16).after(range(3), kept.hidden, [None] * 3), 1.0)(narrow, batch)
    assert float(lost["hidden"].detach().min()) > 0
    torch.testing.assert_close(lost["hidden"], 2 * halved["hidden"])
    lost["hidden"].sum().backward()
    assert narrow.bert.encoder.layer[0].intermediate.dense.weight.grad is not None  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in answers.teacher[0].parameters())


def test_hidden_states_take_a_teacher_of_the_same_shape(make_model: Callable[..., Any]) -> None:
    config, other = make_model("bert").config, make_model("bert", num_hidden_layers=2).config
    check_hidden(Recover(), config, other, KEY)
    check_hidden(Recover(hidden_weight=1.0), config, config, KEY)
    for settings, teacher in ((Recover(hidden_weight=1.0), other), (Recover(hidden_weight=1.0, distill=False), config)):
        with raises_problem("stages.prune.hidden_weight", "1", "distill: true", "3 layers"):
            check_hidden(settings, config, teacher, KEY)


@pytest.mark.parametrize(
    ("epochs", "iterations", "batch"), [(1, 4, 3), (1, 3, 5), (0.5, 2, 6), (2, 4, 12), (3, 4, 7), (0.1, 2, 50)], ids=str
)
def test_iterations_go_through_the_train_split_one_after_the_other(
    epochs: float, iterations: int, batch: int, make_context: Callable[..., Context]
) -> None:
    context = make_context()
    rows = [str(number) for number in range(48)]
    context = replace(context, data=replace(context.data, train=Split(list(rows), ClassIds(np.arange(48)))))
    parts = [part_of(context, epochs, number, iterations, batch) for number in range(1, iterations + 1)]
    seen = [row for one, _ in parts for row in one.data.train.rows]
    assert [row for one, _ in parts for row in one.data.train.labels.array.tolist()] == [int(row) for row in seen]
    steps = math.ceil(epochs / iterations * math.ceil(48 / batch))
    assert all(passes == 1 and len(one.data.train) == min(48, steps * batch) for one, passes in parts)
    for start in range(0, len(seen), 48):
        piece = seen[start : start + 48]
        assert len(set(piece)) == len(piece)
    assert len(seen) >= min(48, epochs * 48)
    again = part_of(context, epochs, iterations, iterations, batch)[0]
    assert again.data.train.rows == parts[-1][0].data.train.rows
    assert len({one.seed for one, _ in parts}) == iterations


@pytest.mark.parametrize("seed", range(6))
def test_iterations_draw_whole_lists_of_candidates(seed: int, make_context: Callable[..., Context]) -> None:
    """Of three lists orders follow each other quickly, and a list that ends one order and starts the next stays two lists."""
    sizes, context = (3, 1, 2), replace(make_context(), seed=seed)
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    labels = candidates.labels_of(numbers, [1] * len(numbers), [[1]] * len(sizes))
    context = replace(context, data=replace(context.data, train=Split([str(row) for row in range(len(numbers))], labels)))
    parts = [part_of(context, 2, number, 3, 3)[0].data.train for number in range(1, 4)]
    assert [len(part.runs) for part in parts] == [2, 2, 2]
    for part in parts:
        assert part.labels.array[:, 1].tolist() == [float(run) for run, size in enumerate(part.runs) for _ in range(size)]
        for end, size in zip(np.cumsum(part.runs), part.runs, strict=True):
            assert [int(row) for row in part.rows[end - size : end]] == [row for row, owner in enumerate(numbers) if sizes[owner] == size]


def test_whole_passes_have_all_rows(make_context: Callable[..., Context]) -> None:
    context = make_context()
    for epochs, iterations in ((0.5, 1), (4, 3)):
        part, passes = part_of(context, epochs, 1, iterations, 8)
        assert part.data.train is context.data.train
        assert (passes, part.seed) == (epochs / iterations, context.seed)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_states_between_blocks_are_those_that_transformers_gives(
    kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model, features = make_model(kind), make_features(kind)
    with torch.no_grad():
        expected = model(**features, output_hidden_states=True).hidden_states
        blocks = list(blocks_of(model, "key").values())
        with between_blocks(blocks) as found:
            model(**features)
        with between_blocks(blocks) as again:
            pass
    assert len(found) == len(expected) == 4
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert again == []


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_model_without_the_last_blocks_has_nothing_to_learn_from_the_states_before(
    kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model, features = make_model(kind), make_features(kind)
    structure = Structure.of(model, KEY)
    labels = torch.tensor([0, 1, 0]) if kind == "bert" else features["input_ids"].roll(-1, dims=1)[:, :-1].int()
    batch = Batch(features, labels, np.arange(3), 0, 1)
    answers = Distilled(make_model(kind), losses_of("text-classification" if kind == "bert" else "text-generation"), 3, 0, 2.0, 0.9)
    for layers in ((0, 1), (0,), (0, 1, 2)):
        small = shrink(model, structure, replace(KeptUnits.everything(structure.sizes), layers=layers), KEY)
        parts = RecoveryObjective(
            answers, Origin.whole(3, structure.sizes.hidden).after(layers, range(structure.sizes.hidden), [None] * len(layers)), 1.0
        )(small, batch)
        assert float(parts["hidden"].detach().abs().max()) == 0
