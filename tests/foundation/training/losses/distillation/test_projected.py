"""Vectors through a projection: the directions against numpy's singular vectors, the loss written out, and whole trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.pipeline import Outcome, run
from compress.recipe import check
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.measure.answers import load_predictions
from foundation.training.losses.distillation.directions import Directions, directions
from foundation.training.losses.distillation.projected import distance
from tests import tiny_embedding

pytestmark = pytest.mark.whole

PROJECTIONS = ("pca", "learned")


@given(st.integers(3, 20), st.integers(2, 6), st.integers(0, 999), st.data())
def test_directions_are_the_singular_vectors(rows: int, width: int, seed: int, data: st.DataObject) -> None:
    vectors = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    count = data.draw(st.integers(1, min(rows - 1, width)))
    found = directions(torch.from_numpy(vectors), count).numpy()
    np.testing.assert_allclose(found @ found.T, np.eye(count), atol=1e-4)
    _, sizes, right = np.linalg.svd(vectors.astype(np.float64) - vectors.astype(np.float64).mean(axis=0), full_matrices=False)
    kept = np.linalg.norm((vectors - vectors.mean(axis=0)) @ found.T) ** 2
    assert kept == pytest.approx(float((sizes[:count] ** 2).sum()), rel=1e-3)  # no other directions hold more
    clear = [place for place in range(count) if place + 1 == len(sizes) or sizes[place] > 1.05 * sizes[place + 1]]
    for place in clear:
        if place == 0 or sizes[place - 1] > 1.05 * sizes[place]:
            assert abs(float(found[place] @ right[place])) == pytest.approx(1, abs=1e-2)
    assert (found[np.arange(count), np.abs(found).argmax(axis=1)] > 0).all()


def test_the_distance_is_two_minus_two_cosines() -> None:
    one, other = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]]), torch.tensor([[6.0, 8.0], [0.0, 2.0], [1.0, 0.0]])
    assert distance(one, other).tolist() == pytest.approx([0.0, 2.0, 1.0])


def test_directions_are_computed_once_and_saved() -> None:
    module = Directions(2, 3)
    assert not module.fitted
    module.fit(torch.randn(9, 3))
    again = Directions(2, 3)
    again.load_state_dict(module.state_dict())
    vectors = torch.randn(4, 3)
    torch.testing.assert_close(again(vectors), module(vectors))
    assert again.fitted
    assert not list(module.parameters())


def recipe(folder: Path, *stages: dict[str, Any]) -> Any:
    model, data = tiny_embedding.folder(folder / "source", 1), tiny_embedding.pairs(folder / "data")
    return check({**tiny_embedding.recipe("tiny", model, data), "stages": [{"distill": stage} for stage in stages]})


def test_a_refusal_names_what_to_give(tmp_path: Path) -> None:
    same = {"student": {"layers": 1}, "loss": "projected"}
    with pytest.raises(InputError, match=r"projected given; .* student have 32 .* teacher's 32: give soft"):
        run(recipe(tmp_path, same), tmp_path / "run", progress=ConsoleProgress("silent"))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run with a student for each projection."""
    folder = tmp_path_factory.mktemp("students")
    student = {"input": "baseline", "student": {"hidden": 16}, "epochs": 20, "learning_rate": 5e-3, "hard_weight": 0}
    stages = [{"id": name, **student, "losses": [{"name": "projected", "projection": name}]} for name in PROJECTIONS]
    return run(recipe(folder, *stages), folder / "run", progress=ConsoleProgress("silent"))


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_narrower_student_finds_the_neighbours_of_its_teacher(projection: str, outcome: Outcome) -> None:
    (teacher, labels), (student, _) = (
        load_predictions(next(outcome.folder.glob(f"stages/evaluate-{name}-*/torch.safetensors")), "sentence-embedding")
        for name in ("baseline", projection)
    )
    assert (teacher.shape[1], student.shape[1]) == (32, 16)
    [variant] = [variant for variant in outcome.report["variants"] if variant["id"] == projection]
    assert next(iter(variant["metrics"]["torch"].values())) != 0
    if projection == "pca":  # what the other directions hold no student of this width can tell
        teacher = teacher @ np.linalg.svd(teacher - teacher.mean(axis=0))[2][:16].T
    unit = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (teacher, student)]
    above = np.triu_indices(len(labels), 1)
    before, after = ((vectors @ vectors.T)[above] for vectors in unit)
    assert np.corrcoef(before, after)[0, 1] > 0.65  # 0.46 to 0.49 before the training
